"""The pool: no two allocations overlap, nothing leaks, neighbours merge."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from inference_engine.kv.memory.pool import RunAllocator

TOTAL = 64


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=60))
def test_runs_never_overlap_and_all_units_come_back(moves: list[tuple[bool, int]]) -> None:
    runs = RunAllocator(TOTAL)
    taken: list[tuple[int, int]] = []
    for is_take, size in moves:
        if is_take:
            start = runs.take(size)
            if start is None:
                occupied = sorted(taken)
                edges = [(0, 0), *occupied, (TOTAL, 0)]
                gaps = [right[0] - (left[0] + left[1]) for left, right in pairwise(edges)]
                assert max(gaps) < size, "a long enough gap was there"
            else:
                assert start >= 0
                assert start + size <= TOTAL
                assert all(start + size <= other or other + length <= start for other, length in taken)
                taken.append((start, size))
        elif taken:
            runs.give_back(*taken.pop(size % len(taken)))
        assert runs.free == TOTAL - sum(length for _, length in taken)
    for run in taken:
        runs.give_back(*run)
    assert runs.take(TOTAL) == 0
