"""Calibration text: of every kind a share, of every file as much."""

from __future__ import annotations

from pathlib import Path

from laboratory.training.calibration_text import gather_plain
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
