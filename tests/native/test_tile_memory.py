"""Memory for packed weights: parts that no other part reaches into, in huge pages where the system has them."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_engine.backends.native.tile_memory import TileMemory

HUGE = 2 * 2**20


def test_parts_begin_at_cache_lines_and_do_not_overlap() -> None:
    memory = TileMemory()
    parts = [memory.take(count) for count in (1, 64, 544, 0, 40 * HUGE + 3, 100, 15 * HUGE, 3 * HUGE)]
    for number, part in enumerate(parts):
        assert not part.any()
        part[:] = number + 1
    for number, part in enumerate(parts):
        assert (part == number + 1).all()
        assert not len(part) or part.ctypes.data % 64 == 0


@pytest.mark.skipif(
    sys.platform != "linux" or not Path("/sys/kernel/mm/transparent_hugepage").is_dir(),
    reason="only Linux says what a process has asked for, and not every kernel has such pages",
)
def test_huge_pages_are_asked_for_and_what_was_not_written_to_takes_no_memory() -> None:
    part = TileMemory().take(4 * HUGE)
    part[:1] = 1
    # The line of the mapping says what was asked for, not how much is there: the kernel may show neighbours as one.
    lines = Path("/proc/self/smaps").read_text(encoding="ascii").splitlines()
    inside, flags = False, None
    for line in lines:
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            begin, end = (int(number, 16) for number in name.split("-"))
            inside = begin <= part.ctypes.data < end
        elif inside and name == "VmFlags:":
            flags = rest.split()
    assert flags is not None
    assert "hg" in flags
    present = _present_pages(part)
    assert present[0]
    assert present.sum() * mmap.PAGESIZE <= HUGE


def _present_pages(part: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Whether each page of `part` is in memory (proc_pid_pagemap(5): eight bytes a page, bit 63 says so)."""
    first, count = part.ctypes.data // mmap.PAGESIZE, len(part) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * count), np.uint64)
    assert len(entries) == count
    return (entries >> np.uint64(63)).astype(bool)
