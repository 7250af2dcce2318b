"""Sessions in a journal that grow by random steps, and what is left of them when the disk misbehaves."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import apsw
import numpy as np

from inference_engine.errors import ConfigError, HistoryCorrupt
from inference_engine.metrics import EngineMetrics
from inference_engine.session.journal import GenerateRecord, SessionRecord
from inference_engine.session.journal_database import PAGE_BYTES
from inference_engine.session.journal_folder import LOCK
from inference_engine.session.sqlite_journal import FILE, SQLiteJournal
from inference_engine.types import Durability, Mark
from tests.kept import after_a_kill
from tests.kept import sqlite_journal as open_journal
from tests.session.faulty_disk import FaultyDisk

SESSIONS = 3
ANOTHER_USER = 65_534
METRICS = EngineMetrics()  # of all that only look at what is left: making them takes longer than the look


def record_of(number: int) -> SessionRecord:
    return SessionRecord(f"session-{number}", "alice", "full", None, (1, 2), segment_tokens=16, label=f"label {number}")


class Talk:
    """Sessions that grow by random steps, and what of them was confirmed: all that was safe at some moment."""

    def __init__(self, journal: SQLiteJournal, seed: int = 0) -> None:
        self.journal = journal
        self.rng = random.Random(seed)
        self.said: dict[int, list[int]] = {number: [] for number in range(SESSIONS)}
        self.confirmed = self.confirmed_before = 0  # records that were safe at some moment, and at the one before
        self.order: list[tuple[int, int]] = []  # session, its length then
        self.waits = 0
        for number in range(SESSIONS):
            with journal.unit():
                journal.open(record_of(number))
        self.wait()

    def step(self) -> None:
        for number in self.rng.sample(range(SESSIONS), self.rng.randrange(1, SESSIONS + 1)):
            said, rng = self.said[number], self.rng
            mark = Mark(rng.randrange(2))
            ids = np.array([rng.randrange(50_000) for _ in range(rng.choice([1, 1, 1, 3, 300]))], dtype=np.uint32)
            began = GenerateRecord(len(said), rng.randbytes(16), rng.randbytes(8), rng.getrandbits(64))
            self.journal.append(
                record_of(number).session_id, len(said), ids, mark, began=began if mark is Mark.GENERATED else None
            )
            said += ids.tolist()
            self.order.append((number, len(said)))
            if rng.random() < 0.2:
                self.journal.rest(record_of(number).session_id)
        self.journal.kick()

    def wait(self) -> None:
        """Until all is safe; then it is confirmed. Every other time also until turns that ended are folded, which the
        journal puts off else, to have several in one commit."""
        assert self.journal._writer.flush(20), self.journal.failure
        self.waits += 1
        if self.waits % 2:
            until_folded(self.journal)
        if len(self.order) != self.confirmed:
            self.confirmed, self.confirmed_before = len(self.order), self.confirmed

    def lengths(self, steps: int) -> dict[int, int]:
        """The length of each session after so many records."""
        return dict.fromkeys(self.said, 0) | dict(self.order[:steps])  # they only grow

    def check(self, folder: Path, *, may_refuse: bool = False) -> str:
        """What is found in a copy of the folder: nothing wrong, nothing doubled, and all that was confirmed."""
        try:
            journal = open_journal(folder, metrics=METRICS)
        except ConfigError:
            assert may_refuse
            return "refused"
        found, corrupt = {}, 0
        try:
            for number in range(SESSIONS):
                try:
                    kept = journal.load(record_of(number).session_id, "alice")
                except (HistoryCorrupt, apsw.Error):
                    corrupt += 1
                    continue
                if kept is None:
                    found[number] = -1
                    continue
                ids = [token for row in kept.tokens for token in row.token_ids.tolist()]
                assert ids == self.said[number][: len(ids)], "a history that was never confirmed"
                found[number] = len(ids)
        finally:
            journal.stop()
        if corrupt:
            assert may_refuse
            return "corrupt"
        has = {
            records: all(found[number] >= length for number, length in self.lengths(records).items())
            for records in (self.confirmed, self.confirmed_before)
        }
        outcome = "whole" if has[self.confirmed] else "last" if has[self.confirmed_before] else "shorter"
        assert may_refuse or outcome == "whole", (found, self.lengths(self.confirmed))
        return outcome


def until_folded(journal: SQLiteJournal) -> None:
    ends = time.monotonic() + 20
    while journal._tables.to_fold:
        assert not journal.failure, journal.failure
        assert time.monotonic() < ends, "turns that ended are not folded"
        time.sleep(0.0005)
    with journal._db_lock:  # while they are
        pass


@contextmanager
def no_checks() -> Iterator[None]:
    """The control of flips: rows without checksums, and a log that is not looked through."""
    reader, tables = (f"inference_engine.session.journal_{name}" for name in ("reader", "tables"))
    with (
        patch(f"{reader}.tokens_crc", lambda *_: 0),
        patch(f"{tables}.tokens_crc", lambda *_: 0),
        patch(f"{reader}.session_crc", lambda *_: 0),
        patch(f"{tables}.session_crc", lambda *_: 0),
        patch("inference_engine.session.journal_database.find_damage", lambda _: None),
    ):
        yield


def flip_bits(
    folder: Path, *, seed: int, count: int, is_at_rest: bool = False, is_checked: bool = True
) -> Counter[str]:
    """Flip one bit of what a kill left, so many times: what came of it.

    "last": the step that was recorded last is missing, or a part of it; "shorter": more is. is_at_rest: the log was
    written into the database, each of whose tables is hit as often as another; else any byte of both files. is_checked
    False: without any checks of ours, and "wrong" counts histories that no client has sent.
    """
    with nullcontext() if is_checked else no_checks():
        source = folder / "source"
        journal = open_journal(source, Durability.POWER)
        talk = Talk(journal, seed)
        for step in range(30 if is_at_rest else 80):
            talk.step()
            if step == 40:
                talk.wait()
                _checkpoint(journal)
            if is_at_rest or step % 4 == 0 or step > 70:
                talk.wait()
        talk.wait()
        if is_at_rest:
            _checkpoint(journal)
        killed = after_a_kill(source)
        (killed / LOCK).write_text("1 power\n")
        journal.stop()
        rng, outcomes, target = random.Random(seed), Counter[str](), folder / "flipped"
        pages = _pages(killed) if is_at_rest else {}
        for _ in range(count):
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(killed, target)
            target.chmod(0o700)
            file = target / (FILE if is_at_rest else rng.choice([FILE, f"{FILE}-wal"]))
            data = bytearray(file.read_bytes())
            if is_at_rest:
                at = (rng.choice(pages[rng.choice(sorted(pages))]) - 1) * PAGE_BYTES + rng.randrange(PAGE_BYTES)
            else:
                at = rng.randrange(len(data))
            data[at] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
            try:
                outcomes[talk.check(target, may_refuse=True)] += 1
            except AssertionError:
                if is_checked:
                    raise
                outcomes["wrong"] += 1
        return outcomes


def _checkpoint(journal: SQLiteJournal) -> None:
    with journal._db_lock:
        journal._checkpoint(apsw.SQLITE_CHECKPOINT_TRUNCATE)


def _pages(folder: Path) -> dict[str, list[int]]:
    """The pages of each table and index of a database whose log is empty. Removes the log."""
    db = apsw.Connection(str(folder / FILE), flags=apsw.SQLITE_OPEN_READONLY)
    found: dict[str, list[int]] = {}
    for name, page in db.execute("select name, pageno from dbstat"):
        found.setdefault(name, []).append(page)
    db.close()
    (folder / f"{FILE}-wal").unlink(missing_ok=True)
    (folder / f"{FILE}-shm").unlink(missing_ok=True)
    return found


def fail_calls(folder: Path, kind: str, numbers: Iterable[int]) -> Counter[str]:
    """Let the disk's n-th write or sync fail: nothing is confirmed after it, and what was confirmed is there."""
    outcomes = Counter[str]()
    with FaultyDisk(f"faulty-{kind}") as disk:
        for number in numbers:
            state = folder / f"{number}"
            journal = open_journal(state, Durability.POWER, vfs=disk.name)
            talk = Talk(journal, number)
            disk.fail(kind, number)
            for _ in range(300):
                talk.step()
                if not journal._writer.flush(20):
                    break
                talk.confirmed = len(talk.order)
            assert journal.failure, "the error was swallowed"
            disk.failing = None
            talk.step()
            assert not journal._writer.flush(0.05), "confirmed after an error"
            journal.stop()
            outcomes[talk.check(state)] += 1
            shutil.rmtree(state)
    return outcomes


def fill_disk(folder: Path, numbers: Iterable[int]) -> Counter[str]:
    """Let the disk be full from its n-th write on, and have room again later.

    Nothing is confirmed meanwhile, what was confirmed is there if the process is killed then, and later all is.
    """
    outcomes = Counter[str]()
    with FaultyDisk("filling") as disk:
        for number in numbers:
            state = folder / f"{number}"
            journal = open_journal(state, Durability.POWER, vfs=disk.name)
            talk = Talk(journal, number)
            disk.fill(number)
            while not journal.is_full:
                talk.step()
                while not journal._writer.flush(0.05) and not journal.is_full:
                    assert not journal.failure
                if not journal.is_full:
                    talk.confirmed = len(talk.order)
            assert disk.is_full
            talk.step()
            assert not journal._writer.flush(0.05), "confirmed on a full disk"
            outcomes[talk.check(after_a_kill(state))] += 1
            disk.is_full = False
            talk.wait()
            talk.step()
            talk.wait()
            journal.stop()
            outcomes[talk.check(state)] += 1
            for one in (state, after_a_kill(state)):
                shutil.rmtree(one)
    return outcomes


def start_read_only(numbers: Iterable[int]) -> Counter[str]:
    """Start on a folder that cannot be written, left by a kill or by a stop in order, or empty.

    The start is refused by type, nothing is changed, and once it can be written all is there.
    """
    outcomes = Counter[str]()
    for number in numbers:
        with TemporaryDirectory() as folder:
            Path(folder).chmod(0o711)  # another user goes through it
            state = Path(folder) / "state"
            journal = open_journal(state, Durability.POWER)
            talk = Talk(journal, number)
            for _ in range(number):
                talk.step()
                talk.wait()
            killed = after_a_kill(state)
            (killed / LOCK).write_text("1 power\n")
            journal.stop()
            empty = Path(folder) / "empty"
            empty.mkdir(mode=0o700)
            for one in (killed, state, empty):
                before = {file.name: file.read_bytes() for file in one.iterdir()}
                with read_only(one):
                    assert not opens(one), "a folder that cannot be written was taken"
                assert {file.name: file.read_bytes() for file in one.iterdir()} == before
            for one in (killed, state):
                outcomes[talk.check(one)] += 1
            assert opens(empty)
            outcomes["whole"] += 1
    return outcomes


def opens(folder: Path) -> bool:
    try:
        open_journal(folder, Durability.POWER).stop()
    except ConfigError:
        return False
    return True


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing in the folder can be changed meanwhile. Root could: it is another user then, whose folder it is."""
    me, files = os.geteuid(), list(folder.iterdir())
    for file in (*files, folder):
        file.chmod(0o500 if file == folder else 0o400)
        if me == 0:
            os.chown(file, ANOTHER_USER, -1)
    if me == 0:
        os.seteuid(ANOTHER_USER)
    try:
        yield
    finally:
        os.seteuid(me)
        for file in (folder, *files):
            os.chown(file, me, -1)
            file.chmod(0o700 if file == folder else 0o600)


def cut_power(folder: Path, *, seed: int, states: int, without_syncs_of: str = "\0") -> Counter[str]:
    """Cut the power at random moments of a journal under load: what is found in so many states that differ."""
    outcomes, target, rng = Counter[str](), folder / "cut", random.Random(seed)
    target.mkdir(mode=0o700)
    drawn, seen = set[tuple[Any, ...]](), set[int]()
    with FaultyDisk("power") as disk:
        journal = open_journal(folder / "state", Durability.POWER, vfs=disk.name)
        talk = Talk(journal, seed)
        disk.record(folder / "state")
        confirmed: list[tuple[int, int]] = [(0, 0)]  # events of the disk so far, and what was confirmed by then
        for step in range(24):
            talk.step()
            talk.wait()
            confirmed.append((len(disk.events), talk.confirmed))
            if step == 12:
                with journal._db_lock:
                    journal._checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)
        journal.stop()
        while len(seen) < states:
            known = len(seen)
            for cut in disk.cuts(rng, draws=states, without_syncs_of=without_syncs_of):
                talk.confirmed = talk.confirmed_before = max(
                    count for events, count in confirmed if events <= cut.moment
                )
                if len(seen) == states or (what := (talk.confirmed, *cut.left)) in drawn:
                    continue
                drawn.add(what)
                files = cut.files()
                found = hash((talk.confirmed, *sorted(files.items())))
                if found in seen:
                    continue
                seen.add(found)
                _write(target, {LOCK: b"1 power\n", **files})
                outcomes[talk.check(target, may_refuse=True)] += 1
            assert len(seen) > known, f"there are no more than {known} states"
    return outcomes


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Let the folder have these files and no others."""
    for file in folder.iterdir():
        file.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
