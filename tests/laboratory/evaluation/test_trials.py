"""Intervals are Wilson's, and pairs are counted trial by trial."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laboratory.evaluation.trials import pair, wilson

INTERVALS: list[tuple[int, int, float, float]] = [
    (0, 10, 0.0, 0.2775),
    (10, 10, 0.7225, 1.0),
    (38, 40, 0.8350, 0.9862),
    (50, 100, 0.4038, 0.5962),
]


def test_intervals_are_those_of_the_published_formula(subtests: pytest.Subtests) -> None:
    for hits, trials, low, high in INTERVALS:
        with subtests.test(hits=hits, trials=trials, low=low, high=high):
            assert wilson(hits, trials) == pytest.approx((low, high), abs=5e-5)


@given(trials=st.integers(1, 2000), data=st.data())
def test_an_interval_holds_its_share_and_stays_a_share(trials: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, trials))
    low, high = wilson(hits, trials)
    assert 0.0 <= low <= hits / trials <= high <= 1.0
    assert high - low > 0


def test_pairs_are_counted_by_which_was_right() -> None:
    paired = pair([True, True, True, False, False], [True, False, False, True, False])
    assert (paired.both, paired.only_baseline, paired.only_other, paired.neither) == (1, 2, 1, 1)
    assert paired.discordant == 3
