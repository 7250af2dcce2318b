"""Prompt lookup finds the longest, latest copy of the history's end, as a search by hand would."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inference_engine.decode.draft import Drafter, Wanted
from kv_cache_proposer.ngram import NgramDrafter


def propose(drafter: Drafter, history: Sequence[int], limit: int) -> list[int]:
    (draft,) = drafter.propose([Wanted(None, np.array(history, dtype=np.uint32), limit)])
    return [int(token) for token in draft]


def by_hand(history: Sequence[int], limit: int, *, max_ngram: int, min_ngram: int) -> list[int]:
    for length in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(history) - length - 1, -1, -1):
            if history[start : start + length] == history[len(history) - length :]:
                draft = list(history)
                for place in range(start + length, start + length + limit):
                    draft.append(draft[place])
                return draft[len(history) :]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 3), st.integers(0, 3))
def test_the_draft_is_what_a_search_by_hand_finds(history: list[int], limit: int, least: int, more: int) -> None:
    drafter = NgramDrafter(max_ngram=least + more, min_ngram=least)
    assert propose(drafter, history, limit) == by_hand(history, limit, max_ngram=least + more, min_ngram=least)


def test_the_latest_of_equally_long_copies_wins() -> None:
    assert propose(NgramDrafter(), [1, 2, 7, 7, 1, 2, 8, 8, 1, 2], 2) == [8, 8]


def test_a_repetition_goes_on_past_the_end() -> None:
    assert propose(NgramDrafter(), [4, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_draft_is_as_long_as_asked_and_no_longer_than_the_drafter_goes() -> None:
    repeated = [1, 2] * 30
    assert len(propose(NgramDrafter(longest=5), repeated, 3)) == 3
    assert len(propose(NgramDrafter(longest=5), repeated, 30)) == 5


def test_ids_before_the_horizon_are_not_searched() -> None:
    history = [1, 2, 3, *range(10, 40), 1, 2]
    assert propose(NgramDrafter(), history, 1) == [3]
    assert propose(NgramDrafter(horizon=32), history, 1) == []
