"""Rows of an arena and slots of a lane as runs, so that no table of them has to be sent to the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from inference_engine.kv.layout import Positions


def evenly_apart(starts: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """`starts` as runs that ascend evenly: which of them, and how far apart they are (0 for a lone one)."""
    first = 0
    while first < len(starts):
        end = first + 1
        apart = max(0, starts[end] - starts[first]) if end < len(starts) else 0
        while apart and end < len(starts) and starts[end] - starts[end - 1] == apart:
            end += 1
        yield slice(first, end), apart if end - first > 1 else 0
        first = end


def neighbours(slots: Positions) -> Iterator[tuple[int, int]]:
    """`slots` as runs of neighbours: the first of each, and the slot behind its last."""
    breaks = (np.flatnonzero(np.diff(slots) != 1) + 1).tolist()
    for first, end in zip((0, *breaks), (*breaks, len(slots)), strict=True):
        if end > first:
            yield int(slots[first]), int(slots[end - 1]) + 1
