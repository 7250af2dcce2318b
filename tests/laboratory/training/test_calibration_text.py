"""Calibration text: of every kind a share, of every file as much."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_engine.errors import ConfigError
from laboratory.training.calibration_text import CalibrationText, gather_plain
from tests.tiny_folder import tiny_tokenizer


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


def test_files_that_give_less_than_their_share_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "long").write_text("word " * 2000, encoding="utf-8")
    gather_plain(tiny_tokenizer(), tokens=1000, files=[tmp_path / "long"], seed=0)
    assert not caplog.records
    (tmp_path / "short").write_text("word", encoding="utf-8")
    found = gather_plain(tiny_tokenizer(), tokens=1000, files=[tmp_path / "short"], seed=0)
    (line,) = caplog.messages
    assert f"the files have {found.tokens()['files']} of " in line


def test_too_little_text_says_how_much_is_needed() -> None:
    found = CalibrationText({"files": [[1, 2, 3]]})
    with pytest.raises(ConfigError, match="3 tokens"):
        found.sequences(100, 64)
