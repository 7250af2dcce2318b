"""Rows of an arena and slots of a lane as runs, so that no table of them has to be sent to the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from inference_engine.kv.layout import Positions


def evenly_apart(starts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """`starts` in ascending order as runs: the first of each, how far apart they are, and how many."""
    starts = sorted(starts)
    first = 0
    while first < len(starts):
        end = first + 1
        apart = starts[end] - starts[first] if end < len(starts) else 0
        while end < len(starts) and starts[end] - starts[end - 1] == apart:
            end += 1
        yield starts[first], apart, end - first
        first = end


def neighbours(slots: Positions) -> Iterator[tuple[int, int]]:
    """`slots` as runs of neighbours: the first of each, and the slot behind its last."""
    breaks = (np.flatnonzero(np.diff(slots) != 1) + 1).tolist()
    for first, end in zip((0, *breaks), (*breaks, len(slots)), strict=True):
        if end > first:
            yield int(slots[first]), int(slots[end - 1]) + 1
