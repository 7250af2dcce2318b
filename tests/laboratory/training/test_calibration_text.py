"""Calibration text: of every kind a share, of every file as much, and many short pieces where few tokens must do."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_engine.errors import ConfigError
from laboratory.training.calibration_text import CalibrationText, gather_plain
from tests.tiny_folder import tiny_tokenizer


def test_installed_text_is_short_pieces_of_many_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "prose": [letter * 5000 for letter in "abcdefghijklmnop"],
        "code": [letter * 5000 for letter in "stuvwxyz"],
    }
    monkeypatch.setattr("laboratory.evaluation.haystack.calibration_texts", lambda kind: tuple(texts[kind]))
    found = gather_plain(tiny_tokenizer(), tokens=4000, files=(), seed=0)
    counts = found.tokens()
    assert counts["tool calls"] >= 400 and counts["languages"] >= 400
    for kind in ("prose", "code"):
        assert len(found.kinds[kind]) >= 6
        assert max(map(len, found.kinds[kind])) <= 256
        assert len({tuple(set(ids)) for ids in found.kinds[kind]}) == len(found.kinds[kind])
    assert sum(counts.values()) >= 4000


def test_files_give_as_much_each_from_their_middle_and_more_where_one_is_short(tmp_path: Path) -> None:
    sizes = {"a": 300, "b": 9000, "c": 9000}
    for letter, size in sizes.items():
        (tmp_path / letter).write_text(letter * (size // 2) + "!" + letter * (size // 2), encoding="utf-8")
    found = gather_plain(tiny_tokenizer(), tokens=6000, files=[tmp_path / letter for letter in "bac"], seed=0)
    lengths = [len(ids) for ids in found.kinds["files"]]
    assert lengths[0] == 301 and abs(lengths[1] - lengths[2]) <= 1
    assert sum(found.tokens().values()) >= 6000
    mark = tiny_tokenizer().encode("!")[0]
    assert all(mark in ids for ids in found.kinds["files"])


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="bad"):
        gather_plain(tiny_tokenizer(), tokens=100, files=[tmp_path / "bad"], seed=0)


def test_too_little_text_says_how_much_is_needed() -> None:
    found = CalibrationText({"files": [[1, 2, 3]]})
    with pytest.raises(ConfigError, match="3 tokens"):
        found.sequences(100, 64)
