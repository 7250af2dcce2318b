"""Weights that are written to while they are in use are noticed; copies of them are not harmed."""

from __future__ import annotations

import logging
import mmap
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from inference_engine.models.mapped import MappedWeights, let_go

pytestmark = pytest.mark.hostile

WEIGHTS = "model.safetensors"


@contextmanager
def mapped(path: Path) -> Iterator[None]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        yield


def overwrite(path: Path) -> None:
    """A byte in place, at a time of its own."""
    with path.open("r+b") as file:
        file.write(b"\x01")
    later = path.stat().st_mtime_ns + 1_000_000
    os.utime(path, ns=(later, later))


def test_a_file_whose_pages_are_in_use_is_noticed_when_it_is_written_to(folder: Path) -> None:
    with MappedWeights(folder / WEIGHTS) as weights, mapped(folder / WEIGHTS):
        assert weights.spoiled() is None
        overwrite(folder / WEIGHTS)
        assert weights.spoiled() == "model.safetensors was written to"


def test_a_file_that_takes_the_place_of_the_one_in_use_changes_nothing(folder: Path, tmp_path: Path) -> None:
    with MappedWeights(folder / WEIGHTS) as weights, mapped(folder / WEIGHTS):
        other = Path(shutil.copy(folder / WEIGHTS, tmp_path / "other"))
        overwrite(other)
        other.replace(folder / WEIGHTS)
        assert weights.spoiled() is None


def test_a_file_that_was_copied_into_memory_may_change_which_is_logged_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with MappedWeights(folder / WEIGHTS) as weights, caplog.at_level(logging.WARNING):
        overwrite(folder / WEIGHTS)
        assert weights.spoiled() is None
        assert weights.spoiled() is None
    assert [record.getMessage().partition(" while")[0] for record in caplog.records] == [
        "model.safetensors was written to"
    ]


def resident(path: Path) -> int:
    """Bytes of a mapped file that are in this process's memory."""
    found = 0
    is_own = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_own = words[-1] == str(path)
        elif is_own and words[0] == "Rss:":
            found += int(words[1]) * 1024
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no list of the pages of a process")
def test_pages_that_were_read_leave_memory_and_come_back_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    numbers = np.random.default_rng(0).integers(0, 256, 2**22, np.uint8)
    numbers.tofile(path)
    whole = np.asarray(np.memmap(path, np.uint8, "r"))
    middle = whole[100 : 2**21 + 100]
    assert np.array_equal(whole, numbers)
    before = resident(path)
    assert before == 2**22

    let_go(middle)

    assert 2**21 - 2 * mmap.PAGESIZE <= before - resident(path) <= 2**21, "those of the view, and of no neighbour"
    assert np.array_equal(whole, numbers)


@pytest.mark.parametrize("mode", ["own", "c", "r+"])
def test_memory_that_is_not_a_files_alone_is_left_as_it_is(tmp_path: Path, mode: Literal["own", "c", "r+"]) -> None:
    path = tmp_path / "weights"
    np.zeros(2**16, np.uint8).tofile(path)
    data = np.zeros(2**16, np.uint8) if mode == "own" else np.memmap(path, np.uint8, mode)
    data[:] = 7
    let_go(data)
    let_go(data[5:])
    assert (data == 7).all()
