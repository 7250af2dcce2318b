"""What is recorded in a journal that keeps sessions is read again, whichever database has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inference_engine.session.clock_jumps import ClockJumps
from inference_engine.session.journal import ReplyRecord
from inference_engine.session.replies import MOST_PER_SESSION
from inference_engine.types import Mark
from tests.facade import looking_for_unused_sessions_after_each_commit
from tests.kept import Place, after_a_kill, opened
from tests.session.talks import Talk, record_of, until_folded


def test_what_was_recorded_is_there_after_a_kill_folded_or_not(place: Place) -> None:
    journal = opened(place)
    talk = Talk(journal)
    for _ in range(60):
        talk.step()
    talk.wait()
    killed = after_a_kill(place)
    journal.stop()
    assert talk.check(killed) == "whole"
    assert talk.check(place) == "whole"


def test_a_session_that_is_unused_for_too_long_is_deleted_and_no_other(place: Place) -> None:
    now = 1000.0
    journal = opened(place, wall_clock=lambda: now, keep_seconds=50.0)
    for number in range(2):
        journal.open(record_of(number))
        journal.append(f"session-{number}", 0, np.ones(3, dtype=np.uint32), Mark.APPENDED)
        journal.leave(f"session-{number}")
    assert journal._writer.flush(20)
    now += 40
    assert journal.load("session-1", "alice") is not None  # it is in memory again, however long
    journal.rest("session-1")
    assert journal._writer.flush(20)
    now += 40
    journal.stop()
    journal = opened(place, wall_clock=lambda: now, keep_seconds=50.0)
    assert journal._writer.flush(20)
    journal.request_sync()
    journal.open(record_of(9))
    assert journal._writer.flush(20)
    kept = {entry.record.session_id for entry in journal.page("alice", after="", most=10)}
    journal.stop()
    assert "session-1" in kept
    assert "session-9" in kept


@looking_for_unused_sessions_after_each_commit()
def test_a_session_in_memory_is_not_deleted_however_long_it_is_unused(place: Place) -> None:
    now = 1000.0
    journal = opened(place, wall_clock=lambda: now, keep_seconds=50.0)
    for number in range(2):
        journal.open(record_of(number))
    journal.leave("session-0")
    assert journal._writer.flush(20)
    while len(journal.page("alice", after="", most=10)) > 1:  # looked through after each commit
        now += 100  # folding a session is a use of it
        journal.request_sync()
    assert [entry.record.session_id for entry in journal.everyone()] == ["session-1"]
    journal.stop()


@looking_for_unused_sessions_after_each_commit()
def test_a_clock_that_is_set_ahead_deletes_no_session(place: Place) -> None:
    """As on a machine that learns the date after its start."""
    day, passed = 0.0, 0.0
    journal = opened(place, wall_clock=lambda: day + passed, even_clock=lambda: passed, keep_seconds=50.0)
    for number in range(2):
        journal.open(record_of(number))
    journal.leave("session-0")
    assert journal._writer.flush(20)

    def kept_after(seconds: float) -> list[str]:
        nonlocal passed
        passed += seconds
        for number in range(10, 14):
            journal.reply(ReplyRecord("session-1", "alice", "opened", bytes([number]) * 16, b"2" * 8, 0, "{}"))
            assert journal._writer.flush(20)
        return [entry.record.session_id for entry in journal.everyone()]

    both = ["session-0", "session-1"]
    for day in (1e9, 2e9):  # noqa: B007 - the clocks read it
        assert kept_after(10) == both
    while kept_after(20) == both:  # folding a session is a use of it
        assert passed < 1000
    journal.stop()


def test_what_a_clock_says_and_has_not_passed_counts_until_that_makes_no_difference() -> None:
    clocks = [1005.0, 5.0]
    jumps = ClockJumps(lambda: clocks[0], lambda: clocks[1])
    for day, passed, ahead in (
        (1000.0, 500.0, 0.0),
        (1030.0, 510.0, 0.0),  # clocks run differently
        (9030.0, 520.0, 8000.0),
        (9030.0, 560.0, 8000.0),
        (9530.0, 565.0, 8500.0),
        (530.0, 570.0, 0.0),  # set back: what was recorded meanwhile is kept for longer
        (1530.0, 580.0, 1000.0),
        (1530.0, 629.0, 1000.0),
        (1530.0, 631.0, 0.0),  # what is unused since is old by now
    ):
        clocks[:] = day + passed, passed
        assert jumps.ahead(50.0) == ahead


def test_a_reply_is_its_owner_s_alone(place: Place) -> None:
    journal = opened(place)
    for number, owner in enumerate(("alice", "bob")):
        journal.open(replace(record_of(number), owner=owner))
        journal.reply(ReplyRecord(f"session-{number}", owner, "opened", b"1" * 16, b"2" * 8, 0, "{}"))
    for number, owner in enumerate(("alice", "bob")):
        assert [one.session_id for one in journal.replies_to(owner, b"1" * 16)] == [f"session-{number}"]
    assert not journal.replies_to("carol", b"1" * 16)
    journal.stop()


@pytest.mark.parametrize("largest", [200, 60_000, 150_000, 2**32 - 1], ids=str)
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_turns_of_any_size_are_read_again_as_they_were(place: Place, largest: int, *, has_logprobs: bool) -> None:
    """Some turns have the log-probabilities of other tokens beside their own."""
    rng = np.random.default_rng(largest)
    journal = opened(place)
    journal.open(record_of(0))
    ids, marks, values = list[int](), list[int](), list[object]()
    for turn in range(60):
        for mark in (Mark.APPENDED, Mark.GENERATED):
            some = rng.integers(0, largest, rng.choice([1, 3, 40, 700]), endpoint=True).astype(np.uint32)
            width = rng.choice([1, 1, 3, 41])
            shape = (len(some), width) if width > 1 else len(some)
            logprobs = rng.random(shape, dtype=np.float32) if has_logprobs and mark is Mark.GENERATED else None
            journal.append("session-0", len(ids), some, mark, logprobs=logprobs)
            ids += some.tolist()
            marks += [int(mark)] * len(some)
            values += [None] * len(some) if logprobs is None else logprobs.tolist()
        journal.rest("session-0")
        assert journal._writer.flush(20)
        if turn % 20 == 5:
            journal.leave("session-0")
            journal.stop()
            journal = opened(place)
            assert journal.load("session-0", "alice") is not None
    lengths = [len(ids), len(ids), 0, 1, 500, 2000, *rng.integers(0, len(ids), 8).tolist()]
    for number, length in enumerate(lengths[1:], start=1):
        journal.fork(record_of(number), "session-0", length)
    journal.stop()
    journal = opened(place)
    for number, length in enumerate(lengths):
        kept = journal.load(f"session-{number}", "alice")
        assert kept is not None
        assert sum(len(row.token_ids) for row in kept.tokens) == length
        if not length:
            continue
        assert [row.position for row in kept.tokens] == np.cumsum([0, *(len(one.token_ids) for one in kept.tokens)])[
            :-1
        ].tolist()
        assert np.concatenate([row.token_ids for row in kept.tokens]).tolist() == ids[:length]
        assert [int(row.mark) for row in kept.tokens for _ in row.token_ids] == marks[:length]
        found = [[None] * len(one.token_ids) if one.logprobs is None else one.logprobs.tolist() for one in kept.tokens]
        assert [each for row in found for each in row] == values[:length]
        journal.append(f"session-{number}", length, np.array([7, 8], dtype=np.uint32), Mark.APPENDED)
        journal.leave(f"session-{number}")  # which folds them
        again = journal.load(f"session-{number}", "alice")
        assert again is not None
        assert np.concatenate([row.token_ids for row in again.tokens]).tolist() == [*ids[:length], 7, 8]
    journal.stop()


def test_the_last_appends_are_remembered_in_one_row_and_after_the_session_s_end(place: Place) -> None:
    journal = opened(place)
    journal.open(record_of(0))

    def reply(number: int) -> ReplyRecord:
        key = number.to_bytes(2, "big")
        return ReplyRecord("session-0", "alice", "appended", key * 8, key * 4, number + 1, str(number + 1))

    for number in range(100):
        with journal.unit():
            journal.append("session-0", number, np.ones(1, dtype=np.uint32), Mark.APPENDED)
            journal.reply(reply(number))
        if number % 30 == 5:
            journal.rest("session-0")
            assert journal._writer.flush(20)
            until_folded(journal)  # else the turns so far are folded at once
    journal.leave("session-0")
    journal.stop()
    journal = opened(place)
    kept = journal.load("session-0", "alice")
    assert kept is not None
    assert list(kept.replies) == [reply(number) for number in range(100 - MOST_PER_SESSION, 100)]
    journal.close("session-0")
    assert journal.replies_to("alice", reply(99).request_id) == [reply(99)]
    assert journal.replies_to("alice", reply(100 - MOST_PER_SESSION).request_id)
    assert not journal.replies_to("alice", reply(0).request_id)
    journal.stop()


def test_a_session_was_used_when_it_is_said_to_have_been_whenever_it_leaves_memory_or_is_folded(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(place, Path):  # whose clock is this one: a test of its own has clocks that differ
        from inference_engine.session.postgres_journal import PostgresJournal

        monkeypatch.setattr(PostgresJournal, "look_at_clock", lambda *_: None)
    now = 1000.0
    journal = opened(place, wall_clock=lambda: now)
    journal.open(record_of(0))
    journal.append("session-0", 0, np.ones(5, dtype=np.uint32), Mark.APPENDED)
    now = 5000.0
    journal.leave("session-0", 2000.0)
    assert journal._writer.flush(20)
    until_folded(journal)
    assert [one.used_at for one in journal.everyone()] == [2000.0]
    assert journal.load("session-0", "alice") is not None
    journal.append("session-0", 5, np.ones(5, dtype=np.uint32), Mark.APPENDED)
    assert journal._writer.flush(20)
    killed = after_a_kill(place)
    journal.stop()
    now = 9000.0  # when it was last used before the kill is not recorded
    journal = opened(killed, wall_clock=lambda: now)
    until_folded(journal)
    assert [one.used_at for one in journal.everyone()] == [9000.0]
    assert journal.load("session-0", "alice") is not None
    now = 9500.0
    journal.fork(record_of(1), "session-0", 5)
    assert [one.used_at for one in journal.everyone()] == [9500.0, 9500.0]
    journal.stop()
