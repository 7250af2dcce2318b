"""The pool: no two allocations overlap, nothing leaks, neighbours merge."""

from __future__ import annotations

import copy
from itertools import pairwise
from random import Random

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


@given(
    st.lists(st.integers(1, 9), max_size=20),
    st.randoms(use_true_random=False),
    st.lists(st.integers(0, 20), max_size=4),
)
def test_what_has_to_be_given_back_is_known_before_it_is(sizes: list[int], random: Random, counts: list[int]) -> None:
    """And nothing changes until then."""
    runs = RunAllocator(TOTAL)
    taken = [(start, size) for size in sizes if (start := runs.take(size)) is not None]
    random.shuffle(taken)
    given = [taken[index : index + 2] for index in range(0, len(taken), 2)][: random.randint(0, len(taken))]
    least = random.randint(0, len(given))
    found = runs.least_given_back(given, counts, least=least)
    now = copy.deepcopy(runs)
    for some in given[: len(given) if found is None else found]:
        for run in some:
            now.give_back(*run)
    assert (found is None) == (None in [now.take(count) for count in counts])
    if (
        found is not None and found > least and len(set(counts)) == 1
    ):  # first fit of unlike sizes may waste what is more
        fewer = copy.deepcopy(runs)
        for some in given[: found - 1]:
            for run in some:
                fewer.give_back(*run)
        assert None in [fewer.take(count) for count in counts]
    assert runs.free == TOTAL - sum(size for _, size in taken)
