"""Forks are measured against sessions that are given everything, and say what those say."""

from __future__ import annotations

from laboratory.evaluation.forks import ALIKE, ANEW, CLOSED, COPIED, EARLY, SHARED, measure
from laboratory.evaluation.models import Target
from tests.tiny import VOCABULARY

TEXT = [(7 * place) % VOCABULARY for place in range(400)]


def test_every_variant_gives_the_same_sessions_and_leaves_none_behind(tiny_target: Target) -> None:
    found = measure(tiny_target, TEXT, 100, forks=3, appended=5, tokens=8, rounds=1)
    assert set(found) == {SHARED, COPIED, EARLY, ALIKE, CLOSED, ANEW}
    (shared,), (copied,), (anew,) = found[SHARED], found[COPIED], found[ANEW]
    assert all(one.token_ids == anew.token_ids for (one,) in found.values())
    assert len(set(anew.token_ids)) == 3, "each was given something of its own"
    assert all(len(ids) == 1 + 8 for ids in anew.token_ids)
    # The target's model has a layer with a window of its own, so that every fork copies.
    assert shared.reserved_bytes == copied.reserved_bytes == anew.reserved_bytes
    assert shared.held_bytes == anew.held_bytes > 0
