"""Whose turn it is."""

from __future__ import annotations

from inference_engine.scheduler.batching import _MOST_TURNS, OwnerTurns


def test_the_owner_served_longest_ago_has_the_smallest_number_and_a_neighbour_none() -> None:
    turns = OwnerTurns()
    turns.served([("a", False), ("b", False)])
    turns.served([("b", False), ("b", True)])
    assert turns.last(("neighbour", False)) == 0
    assert turns.last(("a", False)) < turns.last(("b", False)) == turns.last(("b", True))


def test_however_many_owners_come_those_served_lately_are_remembered_and_no_more() -> None:
    turns = OwnerTurns()
    turns.served([("first", False)])
    for number in range(_MOST_TURNS):
        turns.served([(f"owner {number}", False)])
    assert turns.last(("first", False)) == 0
    assert turns.last(("owner 0", False)) == 2
    assert turns.last((f"owner {_MOST_TURNS - 1}", False)) == _MOST_TURNS + 1
