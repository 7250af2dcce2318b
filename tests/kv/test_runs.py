"""Runs say exactly what the numbers they stand for say."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inference_engine.kv.slots import evenly_apart, neighbours

numbers = st.lists(st.integers(0, 12), max_size=12)


@given(starts=numbers)
def test_runs_that_ascend_evenly_are_the_starts_in_their_order(starts: list[int]) -> None:
    runs = list(evenly_apart(starts))
    reported = [starts[of.start] + apart * place for of, apart in runs for place in range(of.stop - of.start)]
    assert reported == starts
    assert [place for of, _ in runs for place in range(of.start, of.stop)] == list(range(len(starts)))
    assert all((apart > 0) == (of.stop - of.start > 1) for of, apart in runs)


@given(slots=numbers)
def test_neighbours_are_the_slots_in_their_order(slots: list[int]) -> None:
    runs = list(neighbours(np.array(slots, dtype=np.int64)))
    assert [slot for first, end in runs for slot in range(first, end)] == slots
    assert all(one[1] != other[0] for one, other in itertools.pairwise(runs))
