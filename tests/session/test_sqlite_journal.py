"""What is recorded in a folder is read again, in few rows and statements."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import apsw
import numpy as np
import pytest

from inference_engine.cli.main import main
from inference_engine.errors import ConfigError, HistoryCorrupt
from inference_engine.session.journal import GenerateRecord, ReplyRecord
from inference_engine.session.journal_database import FORMAT
from inference_engine.session.journal_rows import ROW_BYTES
from inference_engine.session.replies import MOST_PER_SESSION
from inference_engine.session.sqlite_journal import FILE
from inference_engine.types import Durability, Mark
from tests.facade import looking_for_unused_sessions_after_each_commit
from tests.kept import after_a_kill
from tests.kept import sqlite_journal as open_journal
from tests.session.journal_files import as_format_3, content, two_sessions_killed
from tests.session.talks import (
    Talk,
    record_of,
    until_folded,
)


@pytest.mark.parametrize("durability", [Durability.PROCESS, Durability.POWER])
def test_what_was_recorded_is_read_again_after_a_kill_folded_or_not(tmp_path: Path, durability: Durability) -> None:
    journal = open_journal(tmp_path, durability)
    talk = Talk(journal)
    for _ in range(60):
        talk.step()
    talk.wait()
    killed = after_a_kill(tmp_path)
    journal.stop()
    assert talk.check(killed) == "whole"
    assert talk.check(tmp_path) == "whole"
    with closing(apsw.Connection(str(tmp_path / FILE))) as db:
        assert next(db.execute("select count(*) from tokens"))[0]
        assert next(db.execute("select max(length(ids)) from tokens"))[0] <= ROW_BYTES


def test_a_step_is_a_few_statements_and_a_turn_is_folded_by_as_many_however_long_it_was(tmp_path: Path) -> None:
    journal, count = open_journal(tmp_path), 100
    statements: list[str] = []
    for number in range(count):
        journal.open(record_of(number))
    assert journal._writer.flush(20)

    def step(position: int, *, sessions: int = count) -> None:
        with journal.unit():
            for number in range(sessions):
                journal.append(f"session-{number}", position, np.array([position], dtype=np.uint32), Mark.GENERATED)
        assert journal._writer.flush(20)

    def commit_with(part: str) -> list[str]:
        """The statements of the last commit that has one with this text."""
        at = max(index for index, text in enumerate(statements) if part in text)
        begin = max(index for index, text in enumerate(statements[:at]) if text.startswith("begin"))
        return statements[begin : statements.index("commit", at)]

    def folded_in(number: int) -> int:
        journal.rest(f"session-{number}")
        assert journal._writer.flush(20)
        until_folded(journal)
        return len(commit_with("delete from tail"))

    journal._db.trace_v2(apsw.SQLITE_TRACE_STMT, lambda event: statements.append(event["sql"]))
    step(0)
    assert [text.partition(" ")[0] for text in commit_with("insert into tail")] == [
        "begin",
        "insert",
        "insert",
        "insert",
    ]
    short = folded_in(1)
    for position in range(1, 50):
        step(position, sessions=1)
    assert folded_in(0) == short
    kept = journal.load("session-0", "alice")
    assert kept is not None
    assert [token for row in kept.tokens for token in row.token_ids.tolist()] == list(range(50))
    journal.stop()


def test_a_session_that_is_unused_for_too_long_is_deleted_and_no_other(tmp_path: Path) -> None:
    now = 1000.0
    journal = open_journal(tmp_path, wall_clock=lambda: now, keep_seconds=50.0)
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
    journal = open_journal(tmp_path, wall_clock=lambda: now, keep_seconds=50.0)
    assert journal._writer.flush(20)
    journal.request_sync()
    journal.open(record_of(9))
    assert journal._writer.flush(20)
    kept = {entry.record.session_id for entry in journal.page("alice", after="", most=10)}
    journal.stop()
    assert "session-1" in kept
    assert "session-9" in kept


@looking_for_unused_sessions_after_each_commit()
def test_a_session_in_memory_is_not_deleted_however_long_it_is_unused(tmp_path: Path) -> None:
    now = 1000.0
    journal = open_journal(tmp_path, wall_clock=lambda: now, keep_seconds=50.0)
    for number in range(2):
        journal.open(record_of(number))
    journal.leave("session-0")
    assert journal._writer.flush(20)
    while len(journal.page("alice", after="", most=10)) > 1:  # looked through after each commit
        now += 100  # folding a session is a use of it
        journal.request_sync()
    assert [entry.record.session_id for entry in journal.everyone()] == ["session-1"]
    journal.stop()


def test_a_reply_is_its_owner_s_alone(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    for number, owner in enumerate(("alice", "bob")):
        journal.open(replace(record_of(number), owner=owner))
        journal.reply(ReplyRecord(f"session-{number}", owner, "opened", b"1" * 16, b"2" * 8, 0, "{}"))
    for number, owner in enumerate(("alice", "bob")):
        assert [one.session_id for one in journal.replies_to(owner, b"1" * 16)] == [f"session-{number}"]
    assert not journal.replies_to("carol", b"1" * 16)
    journal.stop()


@pytest.mark.parametrize("largest", [200, 60_000, 150_000, 2**32 - 1], ids=str)
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_turns_of_any_size_are_read_again_as_they_were(tmp_path: Path, largest: int, *, has_logprobs: bool) -> None:
    """Some turns have the log-probabilities of other tokens beside their own."""
    rng = np.random.default_rng(largest)
    journal = open_journal(tmp_path)
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
            journal = open_journal(tmp_path)
            assert journal.load("session-0", "alice") is not None
    lengths = [len(ids), len(ids), 0, 1, 500, 2000, *rng.integers(0, len(ids), 8).tolist()]
    for number, length in enumerate(lengths[1:], start=1):
        journal.fork(record_of(number), "session-0", length)
    journal.stop()
    journal = open_journal(tmp_path)
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


def test_the_last_appends_are_remembered_in_one_row_and_after_the_session_s_end(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
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
    journal = open_journal(tmp_path)
    kept = journal.load("session-0", "alice")
    assert kept is not None
    assert list(kept.replies) == [reply(number) for number in range(100 - MOST_PER_SESSION, 100)]
    journal.close("session-0")
    assert journal.replies_to("alice", reply(99).request_id) == [reply(99)]
    assert journal.replies_to("alice", reply(100 - MOST_PER_SESSION).request_id)
    assert not journal.replies_to("alice", reply(0).request_id)
    journal.stop()


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_a_folder_of_the_format_before_has_all_that_was_recorded(tmp_path: Path, *, is_killed: bool) -> None:
    """Folded and not: tokens, Generates, answers to calls of every kind."""
    journal = open_journal(tmp_path / "state", Durability.POWER)
    talk = Talk(journal, 7)
    for step in range(40):
        talk.step()
        if step % 3 == 0 or step > 35:
            talk.wait()
    talk.wait()
    folder = after_a_kill(tmp_path / "state") if is_killed else tmp_path / "state"
    journal.stop()
    as_format_3(folder)
    assert talk.check(folder) == "whole"
    with closing(apsw.Connection(str(folder / FILE))) as db:
        assert next(db.execute("pragma user_version"))[0] == FORMAT
        names = {name for (name,) in db.execute("select name from sqlite_schema")}
    assert "generates" not in names
    assert not {name for name in names if name.startswith("old_")}
    assert talk.check(folder) == "whole"


def test_answers_that_are_damaged_in_the_format_before_are_refused(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    for number in range(2):
        journal.open(record_of(number))
        began = GenerateRecord(0, bytes([number]) * 16, bytes(8), 3)
        journal.append(f"session-{number}", 0, np.ones(3, dtype=np.uint32), Mark.GENERATED, began=began)
        journal.reply(ReplyRecord(f"session-{number}", "alice", "opened", bytes([number]) * 16, bytes(8), 0, "{}"))
        journal.leave(f"session-{number}")
    journal.stop()
    as_format_3(tmp_path)
    with closing(apsw.Connection(str(tmp_path / FILE))) as db:
        db.execute("update generates set seed = x'0000000000000000' where session = 1")
    copy = after_a_kill(tmp_path)
    journal = open_journal(tmp_path)
    with pytest.raises(HistoryCorrupt):
        journal.load("session-0", "alice")
    assert journal.load("session-1", "alice") is not None
    journal.stop()
    with closing(apsw.Connection(str(copy / FILE))) as db:
        db.execute("update replies set body = '[]' where session = 1")
    before = content(copy)
    with pytest.raises(ConfigError, match=r"an answer is damaged.*journal purge .* -- session-0`"):
        open_journal(copy)
    assert content(copy)[FILE] == before[FILE]
    assert main(["journal", "purge", str(copy), "session-0"]) == 0
    journal = open_journal(copy)
    assert journal.load("session-0", "alice") is None
    assert journal.load("session-1", "alice") is not None
    journal.stop()


@pytest.mark.parametrize(
    "change",
    ["ids = zeroblob(4)", "ids = cast(x'ff' as text)", "mark = null", "crc = 0", "session = 2", "position = 9"],
)
def test_a_turn_that_is_damaged_in_the_format_before_is_refused_with_its_session(tmp_path: Path, change: str) -> None:
    folder = two_sessions_killed(tmp_path / "state")
    as_format_3(folder)
    with closing(apsw.Connection(str(folder / FILE))) as db:
        db.execute(f"update tail set {change} where entry = 5")
    for _ in range(2):
        journal = open_journal(folder)
        until_folded(journal)
        with pytest.raises(HistoryCorrupt):
            journal.load("session-0", "alice")
        kept = journal.load("session-1", "alice")
        assert kept is not None and kept.saved.tokens == 3
        journal.stop()
    assert main(["journal", "purge", str(folder), "session-0"]) == 0
    journal = open_journal(folder)
    assert len(journal.everyone()) == 1 and not journal.check()
    journal.stop()


def test_a_session_was_used_when_it_is_said_to_have_been_whenever_it_leaves_memory_or_is_folded(tmp_path: Path) -> None:
    now = 1000.0
    journal = open_journal(tmp_path, wall_clock=lambda: now)
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
    killed = after_a_kill(tmp_path)
    journal.stop()
    now = 9000.0  # when it was last used before the kill is not recorded
    journal = open_journal(killed, wall_clock=lambda: now)
    until_folded(journal)
    assert [one.used_at for one in journal.everyone()] == [9000.0]
    assert journal.load("session-0", "alice") is not None
    now = 9500.0
    journal.fork(record_of(1), "session-0", 5)
    assert [one.used_at for one in journal.everyone()] == [9500.0, 9500.0]
    journal.stop()
