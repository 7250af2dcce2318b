"""A history tells itself in stretches of equal mark."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inference_engine.session.history import History
from inference_engine.types import Mark

pieces = st.lists(st.tuples(st.lists(st.integers(0, 2**32 - 1), max_size=300), st.sampled_from(Mark)), max_size=12)


@given(pieces)
def test_the_runs_of_a_history_are_its_tokens_and_marks_in_order_and_never_two_of_one_mark(
    given_pieces: list[tuple[list[int], Mark]],
) -> None:
    history = History()
    for ids, mark in given_pieces:
        history.extend(np.array(ids, dtype=np.uint32), mark)
    runs = list(history.runs())
    assert all(one != other for (_, one), (_, other) in pairwise(runs))
    assert all(len(run) for run, _ in runs)
    again = History()
    for run, mark in runs:
        again.extend(run, mark)
    assert again.ids().tolist() == history.ids().tolist() == [token for ids, _ in given_pieces for token in ids]
    assert again.marks().tolist() == history.marks().tolist()
