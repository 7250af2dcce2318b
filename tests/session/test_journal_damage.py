"""Damage of a journal's files is noticed, and costs the sessions that it is in alone."""

from __future__ import annotations

import struct
from contextlib import closing
from pathlib import Path

import apsw
import numpy as np
import pytest

from inference_engine.errors import ConfigError, HistoryCorrupt
from inference_engine.session import wal_scan
from inference_engine.session.journal import APPENDED, GenerateRecord, ReplyRecord
from inference_engine.session.journal_database import PAGE_BYTES
from inference_engine.session.sqlite_journal import FILE, SQLiteJournal
from inference_engine.session.wal_scan import find_damage
from inference_engine.types import Durability, Mark
from tests.facade import a_checkpoint_after_each_commit
from tests.kept import after_a_kill
from tests.kept import sqlite_journal as open_journal
from tests.session.faulty_disk import FaultyDisk
from tests.session.journal_files import killed_after, two_sessions_killed
from tests.session.talks import (
    Talk,
    flip_bits,
    record_of,
    until_folded,
)


@pytest.mark.parametrize("seed", range(2))
def test_no_flipped_bit_gives_another_history_and_none_shortens_one_or_forgets_an_answer_without_a_word(
    tmp_path: Path, seed: int
) -> None:
    """The log's end is the exception: the last commit may look like what a crash left half written."""
    outcomes = flip_bits(tmp_path, seed=seed, count=100)
    assert outcomes["whole"] < 100, "no flip did anything"
    assert not outcomes["shorter"] + outcomes["torn"] + outcomes["forgotten"], outcomes
    assert outcomes["last"] <= 4, outcomes


def test_no_flipped_bit_of_a_database_whose_log_is_empty_loses_anything_without_a_word(tmp_path: Path) -> None:
    outcomes = flip_bits(tmp_path, seed=2, count=100, is_at_rest=True)
    assert outcomes["corrupt"], outcomes
    assert not outcomes["shorter"] + outcomes["last"] + outcomes["torn"] + outcomes["forgotten"], outcomes


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


@pytest.mark.parametrize(
    ("table", "values"),
    [
        *(
            (table, values)
            for table in ("tokens", "ends")
            for values in ("logprobs = 0", "ids = cast(x'ff00ff00' as text)", "ids = 7", "mark = null")
        ),
        *(("tail", values) for values in ("body = cast(body as text)", "body = 7", "body = null", "position = null")),
    ],
)
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
    folder = stopped_and_damaged(journal, tmp_path, table, values)
    journal = open_journal(folder)
    journal.open(record_of(9))
    assert journal._writer.flush(20), journal.failure
    with pytest.raises(HistoryCorrupt):
        journal.load("session-0", "alice")
    assert journal.load("session-1", "alice") is not None
    assert not journal.failure
    journal.stop()


@pytest.mark.parametrize("grows", [False, True])
def test_a_fork_of_a_session_whose_rows_are_damaged_is_refused_too_and_not_shorter(
    tmp_path: Path, *, grows: bool
) -> None:
    """The session is in memory, where nothing is wrong with it."""
    journal = open_journal(tmp_path)
    journal.open(record_of(0))
    journal.append("session-0", 0, np.ones(10, dtype=np.uint32), Mark.APPENDED)
    assert journal._writer.flush(20)
    with journal._db_lock:
        journal._db.execute("update tail set body = zeroblob(5 + 4 * 10)")
    journal.fork(record_of(1), "session-0", 10)
    if grows:
        journal.append("session-1", 10, np.ones(3, dtype=np.uint32), Mark.APPENDED)
    journal.leave("session-1")
    assert journal._writer.flush(20), journal.failure
    killed = after_a_kill(tmp_path)
    journal.stop()
    journal = open_journal(killed)
    for number in range(2):
        with pytest.raises(HistoryCorrupt):
            journal.load(f"session-{number}", "alice")
    journal.stop()


@pytest.mark.parametrize("table", ["tokens", "ends", "tail", "begun", "appends", "sessions"])
def test_a_session_that_is_refused_stops_no_checkpoint(tmp_path: Path, table: str) -> None:
    """The error lives on while its answer waits for what is recorded, and what it was found by must not."""
    journal = open_journal(tmp_path)
    some = np.ones(3000, dtype=np.uint32)
    for number in range(2):
        journal.open(record_of(number))
        began = GenerateRecord(0, bytes(16), bytes(8), 0)
        journal.append(f"session-{number}", 0, some, Mark.GENERATED, began=began)
        journal.reply(ReplyRecord(f"session-{number}", "alice", APPENDED, bytes([number]) * 16, bytes(8), 0, "0"))
    if table != "tail":
        journal.leave("session-0")
    assert journal._writer.flush(20)
    column = {"tail": "body", "begun": "generates", "appends": "replies"}.get(table, "crc")
    folder = stopped_and_damaged(journal, tmp_path, table, f"{column} = cast('text' as blob)")
    refused = None
    with a_checkpoint_after_each_commit():
        journal = open_journal(folder)
        try:
            journal.load("session-0", "alice")
        except HistoryCorrupt as error:
            refused = error
        assert refused is not None
        journal.open(record_of(9))
        assert journal._writer.flush(20), journal.failure
        assert not journal.failure
        journal.stop()


def stopped_and_damaged(journal: SQLiteJournal, folder: Path, table: str, values: str) -> Path:
    """The folder of what is left, with `values` in the first session's rows; a tail is there after a kill alone."""
    killed = after_a_kill(folder)
    journal.stop()
    left = killed if table == "tail" else folder
    with closing(apsw.Connection(str(left / FILE))) as db:
        db.execute(f"update {table} set {values} where session = 1")
        assert db.changes()
    return left


def at_rest(folder: Path, count: int) -> list[float]:
    """So many sessions of three tokens, in a database whose log is empty. Returns when each was used."""
    journal = open_journal(folder)
    for number in range(count):
        journal.open(record_of(number))
        journal.append(f"session-{number}", 0, np.ones(3, dtype=np.uint32), Mark.APPENDED)
        journal.leave(f"session-{number}")
        assert journal._writer.flush(20)
    journal.stop()
    with closing(apsw.Connection(str(folder / FILE), flags=apsw.SQLITE_OPEN_READONLY)) as db:
        return [used_at for (used_at,) in db.execute("select used_at from sessions order by session")]


def flip_row(folder: Path, used_at: float, column: str) -> None:
    """Flip a bit of the first session's row, which its indexes do not know then."""
    data = bytearray((folder / FILE).read_bytes())
    row = data.index(b'session-0alice{"')
    if column == "used_at":
        at = data.index(struct.pack(">d", used_at), row) + 3
    else:
        at = row + {"id": 3, "owner": 12}[column]
    data[at] ^= 1
    (folder / FILE).write_bytes(data)


@pytest.mark.parametrize("column", ["id", "owner"])
def test_a_session_is_purged_as_it_is_listed_whatever_its_indexes_say(tmp_path: Path, column: str) -> None:
    flip_row(tmp_path, at_rest(tmp_path, 2)[0], column)
    journal = open_journal(tmp_path)
    damaged, whole = (one.record for one in journal.everyone())
    journal.purge(damaged.session_id, damaged.owner)
    assert [one.record.session_id for one in journal.everyone()] == [whole.session_id]
    assert not journal.check()
    journal.stop()


def test_turns_that_cannot_be_folded_stay_where_they_are_and_end_no_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each start would fold them again."""
    journal = open_journal(tmp_path / "state")
    ids = np.arange(3000, dtype=np.uint32)  # a full row, and more
    for number in range(2):
        journal.open(record_of(number))
        journal.append(f"session-{number}", 0, ids, Mark.GENERATED)
    assert journal._writer.flush(20)
    folder = after_a_kill(tmp_path / "state")
    journal.stop()
    with closing(apsw.Connection(str(folder / FILE))) as db:
        db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        (page,) = next(db.execute("select rootpage from sqlite_schema where name = 'tokens'"))
    data = bytearray((folder / FILE).read_bytes())
    data[(page - 1) * PAGE_BYTES] ^= 0xFF  # the page's type
    (folder / FILE).write_bytes(data)
    for _ in range(2):
        caplog.clear()
        journal = open_journal(folder)
        until_folded(journal)
        assert caplog.text.count("cannot be folded") == 2
        for number in range(2):
            _, (tokens,) = journal.read(f"session-{number}")
            assert tokens.token_ids.tolist() == ids.tolist()
        assert not journal.failure
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
