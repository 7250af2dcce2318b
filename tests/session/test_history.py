"""A history is its tokens in order, with how each came; forks share what they have in common, and it counts once."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_engine.session import history as histories
from inference_engine.session.history import (
    BRANCH_TOKENS,
    LEAF_TOKENS,
    History,
    Holdings,
    Leaves,
    Stretch,
    TokenIds,
)
from inference_engine.session.journal import MemoryJournal, SessionRecord
from inference_engine.types import Mark

VOCABULARY = 700

pieces = st.lists(st.tuples(st.lists(st.integers(0, VOCABULARY - 1), max_size=300), st.sampled_from(Mark)), max_size=12)


SMALL_LEAF_TOKENS = 128


@contextmanager
def small_leaves() -> Iterator[None]:
    """So that a short history has many, and several branches."""
    with mock.patch.multiple(histories, LEAF_TOKENS=SMALL_LEAF_TOKENS, BRANCH_LEAVES=2, BRANCH_TOKENS=256):
        yield


def array(token_ids: list[int]) -> TokenIds:
    return np.array(token_ids, dtype=np.uint32)


def some(count: int, seed: int = 0) -> TokenIds:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.uint32)


def walked(token_ids: list[int]) -> list[bool]:
    """Which ids occur."""
    occurring = set(token_ids)
    return [token_id in occurring for token_id in range(VOCABULARY)]


@given(pieces)
def test_the_runs_of_a_history_are_its_tokens_and_marks_in_order_and_never_two_of_one_mark(
    given_pieces: list[tuple[list[int], Mark]],
) -> None:
    with small_leaves():
        history = History()
        for ids, mark in given_pieces:
            history.extend(array(ids), mark)
        runs = list(history.runs())
        assert all(one != other for (_, one), (_, other) in pairwise(runs))
        assert all(len(run) for run, _ in runs)
        again = History()
        for run, mark in runs:
            again.extend(run, mark)
        assert again.ids().tolist() == history.ids().tolist() == [token for ids, _ in given_pieces for token in ids]
        assert again.marks().tolist() == history.marks().tolist()


class Cell:
    """A token as the model of a history keeps it: forks that share it share the object."""

    def __init__(self, token_id: int, mark: Mark) -> None:
        self.token_id = token_id
        self.mark = mark


@settings(max_examples=60)
@given(st.data())
def test_histories_that_fork_and_end_are_each_their_own_and_count_what_they_share_once(data: st.DataObject) -> None:
    with small_leaves():
        holdings, leaves = Holdings(), Leaves()
        alive: list[tuple[History, list[Cell]]] = [(History(holdings, leaves), [])]
        for number in range(data.draw(st.integers(1, 14))):
            history, cells = alive[data.draw(st.integers(0, len(alive) - 1))]
            match data.draw(st.sampled_from(["extend", "extend", "fork", "end", "reserve"])):
                case "extend":
                    ids, mark = some(data.draw(st.integers(0, 400)), number), data.draw(st.sampled_from(Mark))
                    history.extend(ids, mark)
                    cells += [Cell(token_id, mark) for token_id in ids.tolist()]
                case "fork":
                    length = data.draw(st.one_of(st.just(len(cells)), st.integers(0, len(cells))))
                    copied = length % 128
                    shared = length - copied
                    assert history.unshared_tokens(length) == copied
                    alive.append(
                        (
                            history.fork(length),
                            cells[:shared] + [Cell(one.token_id, one.mark) for one in cells[shared:length]],
                        )
                    )
                case "reserve":
                    history.reserve(data.draw(st.integers(0, 300)))
                case "end" if len(alive) > 1:
                    alive.remove((history, cells))
                    history.release()
                case _:
                    pass
            for one, expected in alive:
                ids_now = [cell.token_id for cell in expected]
                assert len(one) == len(expected)
                assert one.ids().tolist() == ids_now
                assert one.marks().tolist() == [cell.mark for cell in expected]
                assert one.seen(VOCABULARY).tolist() == walked(ids_now)
            assert holdings.tokens == len({id(cell) for _, expected in alive for cell in expected})
            assert holdings.nbytes == counted([one for one, _ in alive])
        for one, _ in alive:
            one.release()
            one.release()
        assert holdings == Holdings()


def counted(alive: list[History]) -> int:
    """The bytes of each object that these hold, once."""
    branches = {id(branch): branch for one in alive for branch in one._branches if branch is not None}
    leaves = {id(leaf): leaf for branch in branches.values() for leaf in branch.leaves}
    of_branches = sum(
        histories._BRANCH_BYTES + (0 if branch.seen is None else branch.seen.nbytes) for branch in branches.values()
    )
    return of_branches + sum(leaf.nbytes for leaf in leaves.values())


def test_what_is_counted_is_what_the_process_holds() -> None:
    holdings, leaves = Holdings(), Leaves()
    ids = some(65_536)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        history = History(holdings, leaves)
        for _ in range(24):
            history.extend(ids, Mark.APPENDED)
        assert tracemalloc.get_traced_memory()[0] - before == pytest.approx(holdings.nbytes, rel=0.02)
        short = [History(holdings, leaves) for _ in range(200)]
        for one in short:
            one.extend(ids[:70], Mark.APPENDED)
        assert tracemalloc.get_traced_memory()[0] - before == pytest.approx(holdings.nbytes, rel=0.02)
        for one in (history, *short):
            one.release()
        assert tracemalloc.get_traced_memory()[0] - before >= leaves.going_bytes > 24 * 65_536 * 5
        while leaves.tidy():
            pass
        assert leaves.going_bytes == holdings.nbytes == 0
        assert tracemalloc.get_traced_memory()[0] - before < 2**17
    finally:
        tracemalloc.stop()


def test_a_fork_of_a_long_history_holds_next_to_nothing_until_it_grows() -> None:
    holdings = Holdings()
    history = History(holdings)
    for _ in range(64):
        history.extend(some(65_536), Mark.APPENDED)
    before = Holdings(holdings.tokens, holdings.nbytes)
    tracemalloc.start()
    forks = [history.fork(len(history)) for _ in range(100)]
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 100 * 4096
    assert holdings == before
    forks[0].extend(some(1), Mark.APPENDED)
    assert (holdings.tokens, len(forks[0]), len(history)) == (before.tokens + 1, before.tokens + 1, before.tokens)
    assert holdings.nbytes - before.nbytes < 2048


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000), st.data())
def test_a_stretch_says_what_its_history_said_and_counts_until_it_is_given_up(
    length: int, one: int, other: int, data: st.DataObject
) -> None:
    start, stop = sorted((min(one, length), min(other, length)))
    with small_leaves():
        holdings, leaves = Holdings(), Leaves()
        history, ids = History(holdings, leaves), some(length).tolist()
        history.extend(array(ids), Mark.APPENDED)
        stretch = Stretch(history, start, stop)
        history.extend(array(ids), Mark.APPENDED)  # no other code writes into it
        history.release()
        assert holdings.tokens == stop - start
        first = data.draw(st.integers(start, stop))
        last = data.draw(st.integers(first, stop))
        assert stretch.ids(first, last).tolist() == ids[first:last]
        for _ in range(2):
            stretch.give_up()
            leaves.recount()
            assert holdings == Holdings()


def record(session_id: str) -> SessionRecord:
    return SessionRecord(session_id, "", "full", None, ())


def test_a_fork_is_in_the_journal_from_its_beginning_and_costs_it_nothing() -> None:
    journal = MemoryJournal()
    journal.open(record("parent"))
    ids = some(4 * LEAF_TOKENS)
    journal.append("parent", 0, ids, Mark.APPENDED)
    held = journal.held_bytes()
    journal.fork(record("fork"), "parent", len(ids))
    assert journal.held_bytes() - held < 1024
    journal.append("parent", len(ids), some(3, 1), Mark.GENERATED)
    journal.append("fork", len(ids), some(3, 2), Mark.GENERATED)
    for session_id, seed in (("parent", 1), ("fork", 2)):
        began, records = journal.read(session_id)
        assert began.session_id == session_id
        assert [(one.position, one.mark) for one in records] == [(0, Mark.APPENDED), (len(ids), Mark.GENERATED)]
        assert [one.token_ids.tolist() for one in records] == [ids.tolist(), some(3, seed).tolist()]
    journal.close("parent")
    assert journal.read("fork")[1][0].token_ids.tolist() == ids.tolist()
    journal.close("fork")
    while journal.tidy():
        pass
    assert journal.held_bytes() == 0


@pytest.mark.parametrize("kept", [0, 5, LEAF_TOKENS, LEAF_TOKENS + 1, BRANCH_TOKENS - 1, BRANCH_TOKENS])
def test_a_history_goes_on_from_where_tokens_were_taken_back(kept: int) -> None:
    ids = np.arange(BRANCH_TOKENS + 7, dtype=np.uint32) % 1000
    taken, plain = History(Holdings()), History(Holdings())
    taken.extend(ids[:kept], Mark.APPENDED)
    taken.extend(ids[kept:] + 1, Mark.APPENDED)
    taken.take_back(kept)
    plain.extend(ids[:kept], Mark.APPENDED)
    assert (len(taken), taken.holdings.tokens) == (len(plain), plain.holdings.tokens) == (kept, kept)
    for history in (taken, plain):
        for start in (kept, kept + 1):
            history.extend(ids[start : start + 1], Mark.GENERATED)
        history.extend(ids[kept + 2 :], Mark.APPENDED)
    assert np.array_equal(taken.ids(), ids)
    assert np.array_equal(taken.marks(), plain.marks())
    assert np.array_equal(taken.seen(2000), plain.seen(2000))
    assert taken.holdings.tokens == plain.holdings.tokens
    taken.release()
    assert taken.holdings.tokens == 0
    assert taken.holdings.nbytes == 0
