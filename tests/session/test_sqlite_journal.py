"""The journal in a folder: what it refuses, what it notices, and what it keeps when its disk fails."""

from __future__ import annotations

import errno
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import apsw
import numpy as np
import pytest

from inference_engine.errors import ConfigError, HistoryCorrupt
from inference_engine.metrics import EngineMetrics
from inference_engine.session import sqlite_journal, wal_scan
from inference_engine.session.journal import GenerateRecord, ReplyRecord
from inference_engine.session.journal_database import FORMAT, PAGE_BYTES
from inference_engine.session.journal_folder import LOCK, take_folder
from inference_engine.session.journal_rows import ROW_BYTES, reply_crc, tokens_crc, unpacked
from inference_engine.session.replies import MOST_PER_SESSION
from inference_engine.session.sqlite_journal import FILE, SQLiteJournal
from inference_engine.session.wal_scan import find_damage
from inference_engine.session.writer import Change, DiskFull
from inference_engine.types import Durability, Mark
from tests.further import further
from tests.kept import after_a_kill
from tests.kept import sqlite_journal as open_journal
from tests.session.faulty_disk import FaultyDisk
from tests.session.talks import (
    Talk,
    cut_power,
    fail_calls,
    fill_disk,
    flip_bits,
    record_of,
    start_read_only,
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


def test_turns_that_a_full_disk_has_no_room_to_fold_are_folded_when_it_has(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    transact, was_full = journal._transact, threading.Event()

    def on_a_full_disk(changes: Sequence[Change]) -> None:
        if any(apply == journal._tables.fold for apply, _ in changes):
            was_full.set()
            raise DiskFull
        transact(changes)

    with patch.object(journal, "_transact", on_a_full_disk):
        for number in range(2):
            journal.open(record_of(number))
            journal.append(f"session-{number}", 0, np.ones(3, dtype=np.uint32), Mark.APPENDED)
            journal.rest(f"session-{number}")
        assert journal._writer.flush(20)
        assert was_full.wait(20)
        assert len(journal._tables.tail.sessions()) == 2
    journal.kick()
    until_folded(journal)
    assert not journal._tables.tail.sessions()
    journal.stop()


def test_a_session_that_is_unused_for_too_long_is_deleted_and_no_other(tmp_path: Path) -> None:
    now = 1000.0
    journal = open_journal(tmp_path, wall_clock=lambda: now, keep_seconds=50.0)
    talk = Talk(journal)
    talk.step()
    journal.leave("session-0")
    journal.leave("session-1")
    talk.wait()
    now += 40
    assert journal.load("session-1", "alice") is not None  # it is in memory again, however long
    journal.rest("session-1")
    talk.wait()
    now += 40
    journal.stop()
    journal = open_journal(tmp_path, wall_clock=lambda: now, keep_seconds=50.0)
    assert journal._writer.flush(20)
    journal.kick()
    journal.open(record_of(9))
    assert journal._writer.flush(20)
    kept = {entry.record.session_id for entry in journal.page("alice", after="", most=10)}
    journal.stop()
    assert "session-1" in kept
    assert "session-9" in kept


def test_a_session_in_memory_is_not_deleted_however_long_it_is_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_journal, "_EXPIRE_SECONDS", 0.0)
    now = 1000.0
    journal = open_journal(tmp_path, wall_clock=lambda: now, keep_seconds=50.0)
    for number in range(2):
        journal.open(record_of(number))
    journal.leave("session-0")
    assert journal._writer.flush(20)
    while len(journal.page("alice", after="", most=10)) > 1:  # looked through after each commit
        now += 100  # folding a session is a use of it
        journal.kick()
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


def test_generates_that_no_call_can_name_leave_nothing_behind_but_where_others_end(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.open(record_of(0))
    one = np.ones(1, dtype=np.uint32)
    named = {5, 6, 30}
    for position in range(60):
        request_id = bytes([position]) * 16 if position in named else b""
        began = GenerateRecord(position, request_id, b"", position)
        journal.append("session-0", position, one, Mark.GENERATED, began=began)
    journal.leave("session-0")
    assert journal._writer.flush(20)
    journal.stop()
    journal = open_journal(tmp_path)
    kept = journal.load("session-0", "alice")
    journal.stop()
    assert kept is not None
    assert [record.position for record in kept.generates] == [5, 6, 7, 30, 31]


@pytest.mark.parametrize("largest", [200, 60_000, 150_000, 2**32 - 1], ids=str)
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_turns_of_any_size_are_read_again_as_they_were(tmp_path: Path, largest: int, *, has_logprobs: bool) -> None:
    rng = np.random.default_rng(largest)
    journal = open_journal(tmp_path)
    journal.open(record_of(0))
    ids, marks, values = list[int](), list[int](), list[float]()
    for turn in range(60):
        for mark in (Mark.APPENDED, Mark.GENERATED):
            some = rng.integers(0, largest, rng.choice([1, 3, 40, 700]), endpoint=True).astype(np.uint32)
            logprobs = rng.random(len(some), dtype=np.float32) if has_logprobs and mark is Mark.GENERATED else None
            journal.append("session-0", len(ids), some, mark, logprobs=logprobs)
            ids += some.tolist()
            marks += [int(mark)] * len(some)
            values += [np.nan] * len(some) if logprobs is None else logprobs.tolist()
        journal.rest("session-0")
        assert journal._writer.flush(20)
        if turn % 20 == 5:
            journal.leave("session-0")
            journal.stop()
            journal = open_journal(tmp_path)
            assert journal.load("session-0", "alice") is not None
    journal.fork(record_of(1), "session-0")
    journal.stop()
    journal = open_journal(tmp_path)
    for number in range(2):
        kept = journal.load(f"session-{number}", "alice")
        assert kept is not None
        assert [row.position for row in kept.tokens] == np.cumsum([0, *(len(one.token_ids) for one in kept.tokens)])[
            :-1
        ].tolist()
        assert np.concatenate([row.token_ids for row in kept.tokens]).tolist() == ids
        assert [int(row.mark) for row in kept.tokens for _ in row.token_ids] == marks
        found = [np.full(len(one.token_ids), np.nan) if one.logprobs is None else one.logprobs for one in kept.tokens]
        np.testing.assert_array_equal(np.concatenate(found), values)
    journal.stop()


def test_short_turns_fill_rows(tmp_path: Path) -> None:
    """One id a turn: a row of its own for each would take ten times the ids."""
    journal = open_journal(tmp_path)
    journal.open(record_of(0))
    one = np.full(1, 100_000, dtype=np.uint32)
    for position in range(2000):
        journal.append("session-0", position, one, Mark(position % 2))
        journal.rest("session-0")
        if position % 50 == 0:
            assert journal._writer.flush(20)
    journal.stop()
    with closing(apsw.Connection(str(tmp_path / FILE))) as db:
        rows = [next(db.execute(f"select count(*) from {table}"))[0] for table in ("tokens", "ends", "tail")]
    assert rows == [3, 1, 0]


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


def as_format_2(folder: Path, rows: int) -> None:
    """What the version before this format would have written: one mark and ids of four bytes in a row."""
    with closing(apsw.Connection(str(folder / FILE))) as db, db:
        packed_rows = [
            row
            for table in ("tokens", "ends")
            for row in db.execute(f"select position, mark, ids, logprobs from {table} order by position")
        ]
        records = [record for row in packed_rows for record in unpacked(*row)]
        db.execute("delete from tokens")
        for record in records:
            for start in range(0, len(record.token_ids), rows):
                ids = record.token_ids[start : start + rows].tobytes()
                values = (record.position + start, int(record.mark), ids, None)
                db.execute("insert into tokens values (1, ?, ?, ?, ?, ?)", (*values, tokens_crc(*values)))
        db.execute("drop table ends")
        db.execute("drop table appends")
        request_id, digest = bytes([7]) * 16, bytes(range(32))
        reply = ReplyRecord("session-0", "alice", "appended", request_id, digest, 600, "600")
        db.execute(
            "insert into replies values (1, 'session-0', 'alice', 'appended', ?, ?, 600, '600', ?, null)",
            (request_id, digest, reply_crc(reply)),
        )
        db.execute("pragma user_version = 2")


def test_a_folder_of_the_format_before_is_read_and_written_on(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.open(record_of(0))
    ids = np.random.default_rng(3).integers(0, 2**32, 900).astype(np.uint32)
    journal.append("session-0", 0, ids[:600], Mark.APPENDED)
    journal.append("session-0", 600, ids[600:800], Mark.GENERATED)
    journal.leave("session-0")
    journal.stop()
    as_format_2(tmp_path, 498)
    journal = open_journal(tmp_path)
    kept = journal.load("session-0", "alice")
    assert kept is not None
    assert np.concatenate([row.token_ids for row in kept.tokens]).tolist() == ids[:800].tolist()
    assert [(one.request_id, one.digest) for one in kept.replies] == [(bytes([7]) * 16, bytes(range(8)))]
    journal.append("session-0", 800, ids[800:], Mark.APPENDED)
    journal.leave("session-0")
    journal.stop()
    journal = open_journal(tmp_path)
    kept = journal.load("session-0", "alice")
    assert kept is not None
    assert np.concatenate([row.token_ids for row in kept.tokens]).tolist() == ids.tolist()
    assert [one.request_id for one in kept.replies] == [bytes([7]) * 16]
    assert not journal.check()
    journal.stop()


# -- folders ----------------------------------------------------------------------------------------------------------


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {file.name: (file.stat().st_mode, file.read_bytes()) for file in folder.iterdir()}


def killed_after(folder: Path, durability: Durability, steps: int = 20) -> tuple[Talk, Path]:
    """What a talk was sent, and a folder that its server leaves when it is killed: the log is not empty."""
    journal = open_journal(folder, durability)
    talk = Talk(journal)
    for _ in range(steps):
        talk.step()
        talk.wait()
    killed = after_a_kill(folder)
    shutil.copy(folder / LOCK, killed)
    journal.stop()
    return talk, killed


def damage_log(folder: Path) -> None:
    log = folder / f"{FILE}-wal"
    flipped = bytearray(log.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    log.write_bytes(flipped)


def test_a_second_server_is_refused_with_the_process_of_the_first(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    before = content(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        open_journal(tmp_path)
    assert content(tmp_path) == before
    journal.stop()
    open_journal(tmp_path).stop()


def test_a_server_that_is_refused_while_another_one_starts_names_no_process_that_is_gone(tmp_path: Path) -> None:
    open_journal(tmp_path).stop()
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (tmp_path / LOCK).write_bytes(ended.stdout.strip() + b" power\n")
    lock = take_folder(tmp_path)
    with pytest.raises(ConfigError, match="in use by another process"):
        open_journal(tmp_path)
    lock.release()


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_a_folder_of_another_model_or_of_a_newer_format_is_refused_and_left_as_it_is(
    tmp_path: Path, *, is_killed: bool
) -> None:
    _, killed = killed_after(tmp_path / "state", Durability.POWER)
    folder = killed if is_killed else tmp_path / "state"
    before = content(folder)
    assert bool(before.get(f"{FILE}-wal")) == is_killed
    with pytest.raises(ConfigError, match="another model"):
        open_journal(folder, weights="b" * 64)
    assert content(folder) == before
    with closing(apsw.Connection(str(folder / FILE))) as db:
        db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, is_killed)
        db.execute("pragma locking_mode = exclusive").fetchall()
        db.execute(f"pragma user_version = {FORMAT + 1}")
    before = content(folder)
    with pytest.raises(ConfigError, match="newer one"):
        open_journal(folder)
    assert content(folder) == before


@pytest.mark.parametrize("has_lock", [False, True])
def test_a_database_of_another_program_is_refused_and_left_as_it_is(tmp_path: Path, *, has_lock: bool) -> None:
    with closing(apsw.Connection(str(tmp_path / FILE))) as db:
        db.execute("create table t (x)")
    if has_lock:
        (tmp_path / LOCK).write_text("someone else's")
    tmp_path.chmod(0o700)
    before = content(tmp_path)
    with pytest.raises(ConfigError, match="not a journal"):
        open_journal(tmp_path)
    assert content(tmp_path) == before
    (tmp_path / FILE).write_bytes(b"no database at all" * 1000)
    before = content(tmp_path)
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_journal(tmp_path)
    assert content(tmp_path) == before


def test_a_folder_that_others_can_reach_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        open_journal(folder)
    assert list(folder.iterdir()) == []
    folder.chmod(0o700)
    with patch("os.geteuid", return_value=os.geteuid() + 1), pytest.raises(ConfigError, match="belongs to user"):
        open_journal(folder)
    assert list(folder.iterdir()) == []
    (tmp_path / "file").touch(mode=0o600)
    with pytest.raises(ConfigError):
        SQLiteJournal(tmp_path / "file", Durability.POWER, weights="a", metrics=EngineMetrics())
    with pytest.raises(ConfigError, match="No such file"):
        SQLiteJournal(tmp_path / "gone" / "state", Durability.POWER, weights="a", metrics=EngineMetrics())


def test_a_file_system_that_is_mounted_read_only_is_named_before_anything_is_opened(tmp_path: Path) -> None:
    """What SQLite says of it is "disk I/O error"."""
    tmp_path.chmod(0o700)
    mounted = os.statvfs_result((*os.statvfs(tmp_path)[:8], os.ST_RDONLY, 255))
    with patch("os.statvfs", return_value=mounted), pytest.raises(ConfigError, match="read-only: mount it for writing"):
        open_journal(tmp_path)
    assert list(tmp_path.iterdir()) == []
    refused = OSError(errno.EROFS, os.strerror(errno.EROFS))
    with patch.object(Path, "mkdir", side_effect=refused), pytest.raises(ConfigError, match="mounted read-only"):
        SQLiteJournal(tmp_path / "new", Durability.POWER, weights="a", metrics=EngineMetrics())


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_no_flipped_bit_gives_another_history_and_none_shortens_one_without_a_word(tmp_path: Path, seed: int) -> None:
    """The log's end is the exception: the last commit may look like what a crash left half written."""
    outcomes = flip_bits(tmp_path, seed=seed, count=100)
    assert outcomes["whole"] < 100, "no flip did anything"
    assert not outcomes["shorter"], outcomes
    assert outcomes["last"] <= 4, outcomes


def test_no_flipped_bit_of_a_database_whose_log_is_empty_shortens_a_history_without_a_word(tmp_path: Path) -> None:
    outcomes = flip_bits(tmp_path, seed=2, count=100, is_at_rest=True)
    assert outcomes["corrupt"], outcomes
    assert not outcomes["shorter"] + outcomes["last"], outcomes


def test_flipped_bits_are_caught_where_nothing_is_checked(tmp_path: Path) -> None:
    """The control: so many flips are enough to notice that checksums and the look through the log are needed."""
    for name in ("killed", "rests"):
        (tmp_path / name).mkdir()
    assert flip_bits(tmp_path / "killed", seed=1, count=40, is_checked=False)["shorter"]
    assert flip_bits(tmp_path / "rests", seed=1, count=60, is_at_rest=True, is_checked=False)["wrong"]


@pytest.mark.parametrize("order", "<>")
def test_the_checksum_of_a_page_is_that_of_the_format(order: str, subtests: pytest.Subtests) -> None:
    for nbytes in (8, 24, 4096):
        with subtests.test(str(nbytes)):
            data = np.random.default_rng(nbytes).bytes(nbytes)
            low, high = start = 0xFFFFFFFF, 0x12345678
            for first, second in struct.iter_unpack(f"{order}2I", data):
                low = (low + first + high) & 0xFFFFFFFF
                high = (high + second + low) & 0xFFFFFFFF
            assert wal_scan._checksum(order, data, start) == (low, high)


def test_a_damaged_log_is_refused_as_often_as_a_server_starts_with_whatever_durability(tmp_path: Path) -> None:
    _, folder = killed_after(tmp_path / "state", Durability.POWER)
    damage_log(folder)
    before = content(folder)
    for durability in (Durability.PROCESS, Durability.PROCESS, Durability.POWER, Durability.PROCESS):
        with pytest.raises(ConfigError, match="damaged at byte"):
            open_journal(folder, durability)
        assert content(folder) == before


def test_damage_that_process_allows_is_gone_from_the_log_before_the_durability_is_recorded(tmp_path: Path) -> None:
    """Commits behind the damage would else be taken for damage when the next server is killed."""
    talk, folder = killed_after(tmp_path / "state", Durability.PROCESS)
    damage_log(folder)
    journal = open_journal(folder, Durability.POWER)
    assert not (folder / f"{FILE}-wal").stat().st_size
    assert (folder / LOCK).read_text().split() == [str(os.getpid()), "power"]
    journal.open(record_of(9))
    assert journal._writer.flush(20)
    killed = after_a_kill(folder)
    journal.stop()
    assert talk.check(killed, may_refuse=True) in ("last", "shorter")


def test_what_a_server_did_not_sync_is_safe_before_one_that_does_is_ready(tmp_path: Path) -> None:
    talk, folder = killed_after(tmp_path / "state", Durability.PROCESS)
    with FaultyDisk("syncs") as disk:
        disk.record(folder)
        journal = open_journal(folder, Durability.POWER, vfs=disk.name)
        kinds = [event[:2] for event in disk.events]
        last_write = max(at for at, event in enumerate(kinds) if event == ("write", FILE))
        assert kinds.index(("sync", f"{FILE}-wal")) < kinds.index(("write", FILE))
        assert ("sync", FILE) in kinds[last_write:]
        journal.stop()
    assert talk.check(folder) == "whole"


@pytest.mark.parametrize("table", ["tokens", "ends", "tail"])
@pytest.mark.parametrize("values", ["logprobs = 0", "ids = cast(x'ff00ff00' as text)", "ids = 7", "mark = null"])
def test_a_value_of_another_type_is_damage_of_its_session_alone(tmp_path: Path, table: str, values: str) -> None:
    """One flipped bit of a row's header does that, and its checksum may still be right."""
    journal = open_journal(tmp_path)
    some = np.ones(3000, dtype=np.uint32)  # a full row, and what does not fill one
    for number in range(2):
        journal.open(record_of(number))
        journal.append(f"session-{number}", 0, some, Mark.APPENDED)
    assert journal._writer.flush(20)
    if table != "tail":
        journal.rest("session-0")
        journal.leave("session-0")
        assert journal._writer.flush(20)
    killed = after_a_kill(tmp_path)
    journal.stop()
    folder = killed if table == "tail" else tmp_path
    with closing(apsw.Connection(str(folder / FILE))) as db:
        db.execute(f"update {table} set {values} where session = 1")
        assert db.changes()
    journal = open_journal(folder)
    journal.open(record_of(9))
    assert journal._writer.flush(20), journal.failure
    with pytest.raises(HistoryCorrupt):
        journal.load("session-0", "alice")
    assert journal.load("session-1", "alice") is not None
    assert not journal.failure
    journal.stop()


def two_sessions_killed(folder: Path) -> Path:
    """Of three tokens each, in the tail: the last row is of the second."""
    journal = open_journal(folder)
    for number in range(2):
        journal.open(record_of(number))
    for position in range(3):
        for number in range(2):
            journal.append(f"session-{number}", position, np.array([position + 1], dtype=np.uint32), Mark.APPENDED)
    assert journal._writer.flush(20)
    killed = after_a_kill(folder)
    journal.stop()
    return killed


def test_a_last_row_that_names_another_session_is_damage_of_its_own(tmp_path: Path) -> None:
    killed = two_sessions_killed(tmp_path / "state")
    with closing(apsw.Connection(str(killed / FILE))) as db:
        db.execute("update tail set session = 1 where entry = (select max(entry) from tail)")
    journal = open_journal(killed)
    with pytest.raises(HistoryCorrupt):
        journal.load("session-1", "alice")
    kept = journal.load("session-0", "alice")
    assert kept is not None
    assert kept.saved.tokens == 3
    journal.stop()


def test_a_tail_whose_page_lost_its_last_row_is_refused_at_the_start(tmp_path: Path) -> None:
    killed = two_sessions_killed(tmp_path / "state")
    with closing(apsw.Connection(str(killed / FILE))) as db:
        db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        (page,) = next(db.execute("select rootpage from sqlite_schema where name = 'tail'"))
    data = bytearray((killed / FILE).read_bytes())
    at = (page - 1) * PAGE_BYTES + 3  # the number of its rows
    rows = int.from_bytes(data[at : at + 2], "big")
    assert rows == 6
    data[at : at + 2] = (rows - 1).to_bytes(2, "big")
    (killed / FILE).write_bytes(data)
    with pytest.raises(ConfigError, match=r"is damaged.*from a backup"):
        open_journal(killed)


@pytest.mark.parametrize("change", ["facts set value", "sessions set owner"])
def test_bytes_that_are_no_text_are_damage(tmp_path: Path, change: str) -> None:
    killed = two_sessions_killed(tmp_path / "state")
    with closing(apsw.Connection(str(killed / FILE))) as db:
        db.execute(f"update {change} = cast(x'61ff' as text)")
    if change.startswith("facts"):
        with pytest.raises(ConfigError, match="cannot be opened"):
            open_journal(killed)
        return
    journal = open_journal(killed)
    assert [entry.record.label for entry in journal.everyone()] == ["", ""]
    with pytest.raises(HistoryCorrupt):
        journal.read("session-0")
    assert not journal.failure
    journal.stop()


def test_a_session_that_is_damaged_is_listed_with_the_others_and_found_by_a_check(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    for number in range(3):
        journal.open(record_of(number))
    journal.stop()
    with closing(apsw.Connection(str(tmp_path / FILE))) as db:
        db.execute("update sessions set body = substr(body, 2) where id = 'session-0'")
        db.execute("update sessions set used_at = 'x' where id = 'session-1'")
    journal = open_journal(tmp_path)
    listed = {entry.record.session_id: entry.record.label for entry in journal.page("alice", after="", most=10)}
    assert listed == {"session-0": "", "session-1": "", "session-2": "label 2"}
    with pytest.raises(HistoryCorrupt):
        journal.read("session-0")
    journal.purge("session-0", "alice")
    assert len(journal.everyone()) == 2
    journal.stop()


@pytest.mark.parametrize("index", ["sqlite_autoindex_sessions_1", "sessions_by_owner"])
@pytest.mark.parametrize("found", [b"session-0", b"session-1"])
def test_damage_of_an_index_neither_hides_a_session_nor_gives_another_one(
    tmp_path: Path, index: str, found: bytes
) -> None:
    journal = open_journal(tmp_path)
    for number in range(2):
        journal.open(record_of(number))
    journal.stop()
    with closing(apsw.Connection(str(tmp_path / FILE))) as db:
        (root,) = next(db.execute("select rootpage from sqlite_schema where name = ?", (index,)))
    data = bytearray((tmp_path / FILE).read_bytes())
    at = data.index(found, (root - 1) * 4096, root * 4096)
    for offset in (6, len(found) - 1):  # out of order; as another one's
        flipped = bytearray(data)
        flipped[at + offset] ^= 1 if offset > 6 else 16
        (tmp_path / FILE).write_bytes(flipped)
        journal = open_journal(tmp_path)
        outcomes = set[str]()
        for number in range(2):
            try:
                kept = journal.load(f"session-{number}", "alice")
                assert kept is not None
                assert kept.record.session_id == f"session-{number}"
            except HistoryCorrupt:
                outcomes.add("refused")
        assert outcomes
        journal.stop()
        (tmp_path / FILE).write_bytes(data)


def test_a_torn_end_of_the_log_is_no_damage_and_a_hole_in_it_is(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, Durability.POWER)
    talk = Talk(journal)
    for _ in range(20):
        talk.step()
        talk.wait()
    log = after_a_kill(tmp_path) / f"{FILE}-wal"
    journal.stop()
    whole = log.read_bytes()
    assert find_damage(log) is None
    for cut in (0, 20, 32, 100, len(whole) // 2, len(whole) - 1):
        log.write_bytes(whole[:cut])
        assert find_damage(log) is None
    page = 4096 + 24
    for at in (
        len(whole) // 2,
        40 + page * ((len(whole) // page) - 1),
    ):  # in the middle; which log the last frame is of
        flipped = bytearray(whole)
        flipped[at] ^= 1
        log.write_bytes(flipped)
        assert find_damage(log) is not None
    assert find_damage(tmp_path / "gone") is None


# -- disks that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_after_any_error_of_the_disk_nothing_more_is_confirmed_and_what_was_is_there(tmp_path: Path, kind: str) -> None:
    assert fail_calls(tmp_path, kind, (*range(1, 12), 17, 29, 60, 111))["whole"] == 15


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_a_checkpoint_that_fails_is_an_error_of_the_disk(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_journal, "_WAL_PAGES", 1)  # one after each commit
    assert fail_calls(tmp_path, kind, range(1, 9))["whole"] == 8


def test_a_full_disk_is_waited_for_and_loses_nothing(tmp_path: Path) -> None:
    assert fill_disk(tmp_path, (1, 2, 3, 5, 8, 13, 40)) == {"whole": 14}


def test_a_folder_that_cannot_be_written_is_refused_and_loses_nothing() -> None:
    assert start_read_only((0, 7)) == {"whole": 6}


@pytest.mark.parametrize("seed", [*range(5), *map(further, range(5, 10))])
def test_whatever_a_loss_of_power_leaves_has_all_that_was_confirmed(tmp_path: Path, seed: int) -> None:
    assert cut_power(tmp_path, seed=seed, states=500) == {"whole": 500}


def test_a_log_whose_syncs_are_left_out_is_caught(tmp_path: Path) -> None:
    """The control: so many states are enough to notice."""
    assert cut_power(tmp_path, seed=2, states=80, without_syncs_of="-wal").keys() != {"whole"}


def test_cuts_that_are_said_to_leave_the_same_leave_equal_files(tmp_path: Path) -> None:
    """Only one of them is looked at."""
    with FaultyDisk("power") as disk:
        journal = open_journal(tmp_path, Durability.POWER, vfs=disk.name)
        disk.record(tmp_path)
        talk = Talk(journal)
        for step in range(6):
            talk.step()
            talk.wait()
            if step == 3:
                with journal._db_lock:
                    journal._checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)
        journal.stop()
        for without in ("\0", "-wal"):
            known = dict[tuple[Any, ...], dict[str, bytes]]()
            for cut in disk.cuts(random.Random(1), draws=1000, without_syncs_of=without):
                assert known.setdefault(cut.left, cut.files()) == cut.files()
            assert 10 < len(known) < 1000
