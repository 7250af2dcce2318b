"""Sessions in a journal that grow by random steps, and what is left of them when the disk misbehaves."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import apsw
import numpy as np

from inference_engine.errors import ConfigError, HistoryCorrupt
from inference_engine.metrics import EngineMetrics
from inference_engine.session.journal import APPENDED, CopyRecord, GenerateRecord, ReplyRecord, SessionRecord
from inference_engine.session.journal_database import PAGE_BYTES
from inference_engine.session.journal_folder import LOCK
from inference_engine.session.journal_rows import MOST_GENERATES
from inference_engine.session.kept_journal import KeptJournal
from inference_engine.session.replies import DIGEST_BYTES, MOST_PER_SESSION, REQUEST_ID_BYTES
from inference_engine.session.sqlite_journal import FILE, SQLiteJournal
from inference_engine.types import Durability, Mark
from tests.kept import Place, after_a_kill, opened
from tests.kept import sqlite_journal as open_journal
from tests.session.faulty_disk import FaultyDisk, unsynced

OWNER = "alice"
SESSIONS, MOST_SESSIONS = 3, 5  # that are open at first, and at once
ANOTHER_USER = 65_534
NO_FILE = "\0"
METRICS = EngineMetrics()  # of all that only look at what is left: making them takes longer than the look
ACTIONS = {"append": 40, "generate": 40, "fork": 6, "rewind": 4, "close": 5, "copy": 6, "drop": 2}


def record_of(number: int, name: str = "session") -> SessionRecord:
    return SessionRecord(f"{name}-{number}", OWNER, "full", None, (1, 2), segment_tokens=16, label=f"label {number}")


@dataclass(slots=True)
class Begun:
    """A Generate. tokens: of it, so far."""

    record: GenerateRecord
    tokens: int = 0


@dataclass(slots=True)
class Life:
    """A session as it was recorded: what is true of it, and since which unit."""

    record: SessionRecord
    opened: int
    ids: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)  # of its history, and the unit that made it so long
    closed: int | None = None
    generates: list[Begun] = field(default_factory=list)
    is_generating: bool = False
    replies: dict[tuple[str, bytes], tuple[int, ReplyRecord]] = field(default_factory=dict)
    copies: list[tuple[int, CopyRecord | None]] = field(default_factory=list)  # None: it was dropped

    @property
    def id(self) -> str:
        return self.record.session_id


class Found:
    """What is left of a talk, as units: all that is there was recorded until `least`, and of each kind of thing that
    was recorded until `most` nothing is missing."""

    HISTORIES, ANSWERS, COPIES = "sessions and their histories", "replies and Generates", "files with K/V"

    def __init__(self, units: int) -> None:
        self.least = 0
        self.most = dict.fromkeys((self.HISTORIES, self.ANSWERS, self.COPIES), units)

    def there(self, unit: int) -> None:
        self.least = max(self.least, unit)

    def missing(self, kind: str, unit: int) -> None:
        """What this unit recorded."""
        self.most[kind] = min(self.most[kind], unit - 1)

    def outcome(self, confirmed: int, confirmed_before: int) -> str:
        histories, answers, copies = self.most.values()
        for most, least, name in (
            (histories, confirmed_before, "shorter"),
            (answers, confirmed_before, "forgotten"),
            (histories, confirmed, "last"),
            (answers, confirmed, "forgotten"),
            (copies, confirmed, "uncopied"),
            (min(histories, answers, copies), self.least, "torn"),
        ):
            if most < least:
                return name
        return "whole"


class Talk:
    """Sessions that live by random steps, and what of them was confirmed: all that was safe at some moment.

    They are opened, forked and closed, with the replies to that; they take appends with replies, and Generates with
    request ids and without; they have copies of K/V, as rows, without files; and between steps they leave memory and
    come back. What belongs together is one unit, as the engine has it.
    """

    def __init__(self, journal: KeptJournal, seed: int = 0) -> None:
        self.journal = journal
        self.rng = random.Random(seed)
        self.lives: list[Life] = []
        self.by_id: dict[str, Life] = {}
        self.units = 0
        self.confirmed = self.confirmed_before = 0  # units that were safe at some moment, and at the one before
        self.waits = 0
        for _ in range(SESSIONS):
            self._open(None)
        self.wait()

    @property
    def alive(self) -> list[Life]:
        return [one for one in self.lives if one.closed is None]

    def step(self) -> None:
        rng = self.rng
        for one in rng.sample(self.alive, rng.randrange(1, len(self.alive) + 1)):
            (action,) = rng.choices(list(ACTIONS), list(ACTIONS.values()))
            alive = len(self.alive)
            if action == "fork" and alive < MOST_SESSIONS:
                self._open(one)
            elif action == "rewind":
                self._open(one, closes=True)
            elif action == "close" and alive > 1:
                self._close(one)
            elif action in ("copy", "drop") and one.ids:
                self._copy(one, is_dropped=action == "drop")
            else:
                self._grow(one, is_generated=action == "generate")
        if len(self.alive) < SESSIONS:
            self._open(None)
        self.journal.request_sync()

    def _open(self, parent: Life | None, *, closes: bool = False) -> None:
        """With a parent, with its first tokens; closes: in its place."""
        record = record_of(len(self.lives), "talk")
        self.units += 1
        one = Life(record, self.units)
        with self.journal.unit():
            if parent is None:
                self.journal.open(record)
            else:
                length = len(parent.ids) if self.rng.random() < 0.3 else self.rng.randrange(len(parent.ids) + 1)
                self.journal.fork(record, parent.id, length)
                one.ids, one.marks = parent.ids[:length], parent.marks[:length]
                if closes:
                    self.journal.close(parent.id)
                    parent.closed = self.units
            kind = "opened" if parent is None else "rewound" if closes else "forked"
            self._reply(one, kind, "x" * self.rng.randrange(200))
        one.lengths[len(one.ids)] = self.units
        self.lives.append(one)
        self.by_id[one.id] = one

    def _close(self, one: Life) -> None:
        self.units += 1
        with self.journal.unit():
            self.journal.close(one.id)
            self._reply(one, "closed", f"{len(one.ids)}")
        one.closed = self.units

    def _copy(self, one: Life, *, is_dropped: bool) -> None:
        last = one.copies[-1][1] if one.copies else None
        if is_dropped and last is None:
            return
        self.units += 1
        if is_dropped and last is not None:
            self.journal.drop_copy(last.file)
            one.copies.append((self.units, None))
        else:
            numbers = (self.rng.randrange(1, len(one.ids) + 1), self.rng.getrandbits(20), self.rng.getrandbits(32))
            copy = CopyRecord(one.id, OWNER, f"{one.id}-{self.units}", *numbers)
            self.journal.put_copy(copy)
            one.copies.append((self.units, copy))

    def _grow(self, one: Life, *, is_generated: bool) -> None:
        rng, length = self.rng, len(one.ids)
        ids = np.array([rng.randrange(50_000) for _ in range(rng.choice([1, 1, 1, 3, 300]))], dtype=np.uint32)
        began: GenerateRecord | None = None
        if is_generated and (not one.is_generating or rng.random() < 0.3):
            is_named = rng.random() < 0.8
            has = (rng.randbytes(16), rng.randbytes(8)) if is_named else (b"", b"")
            began = GenerateRecord(length, *has, rng.getrandbits(64))
            one.generates.append(Begun(began))
        self.units += 1
        mark = Mark.GENERATED if is_generated else Mark.APPENDED
        one.ids += ids.tolist()
        with self.journal.unit():
            self.journal.append(one.id, length, ids, mark, began=began)
            if not is_generated:
                self._reply(one, APPENDED, f"{len(one.ids)}")
        one.marks += [int(mark)] * len(ids)
        one.lengths[len(one.ids)] = self.units
        one.is_generating = is_generated
        if is_generated:
            one.generates[-1].tokens += len(ids)
        if rng.random() < 0.2:
            self.journal.rest(one.id)
            one.is_generating = False

    def _reply(self, one: Life, kind: str, body: str) -> None:
        id_, digest = self.rng.randbytes(REQUEST_ID_BYTES), self.rng.randbytes(DIGEST_BYTES)
        record = ReplyRecord(one.id, OWNER, kind, id_, digest, len(one.ids), body)
        self.journal.reply(record)
        one.replies[kind, id_] = self.units, record

    def wait(self) -> None:
        """Until all is safe; then it is confirmed. Every other time also until turns that ended are folded, which the
        journal puts off else, to have several in one commit. Then a session may leave memory and come back."""
        assert self.journal._writer.flush(20), self.journal.failure
        self.waits += 1
        if self.waits % 2:
            until_folded(self.journal)
        self.confirm()
        if self.rng.random() < 0.3:
            self._leave(self.rng.choice(self.alive))

    def confirm(self) -> None:
        """All is safe."""
        if self.units != self.confirmed:
            self.confirmed, self.confirmed_before = self.units, self.confirmed

    def _leave(self, one: Life) -> None:
        self.journal.leave(one.id)
        one.is_generating = False
        if self.rng.random() < 0.5:
            until_folded(self.journal)
        found = Found(self.units)
        try:
            self._look(self.journal, one, found)
        except HistoryCorrupt as error:
            raise AssertionError("a session that left memory cannot come back") from error
        assert found.outcome(self.units, self.units) == "whole", found.most

    def check(self, place: Place, *, may_refuse: bool = False) -> str:
        """What is found in a copy of the place: nothing wrong, nothing doubled, all that was confirmed, and of what
        was not only what was recorded until some moment."""
        try:
            journal = opened(place, metrics=METRICS, vfs=unsynced())
        except ConfigError:
            assert may_refuse
            return "refused"
        found, lengths, corrupt = Found(self.units), dict[str, int](), 0
        try:
            try:
                copies = journal.copies(lambda _: None)  # as the engine does first
            except ConfigError:
                assert may_refuse
                return "refused"
            for one in self.lives:
                try:
                    if (length := self._look(journal, one, found)) is not None:
                        lengths[one.id] = length
                except (HistoryCorrupt, apsw.Error):
                    corrupt += 1
            if not corrupt:
                page = journal.page(OWNER, after="", most=len(self.lives) + 1)
                listed = {entry.record.session_id: entry.history_length for entry in page}
                assert {one: listed[one] for one in listed if one in self.by_id} == lengths, "the list differs"
                self._look_at_copies(copies, lengths, found)
        finally:
            journal.stop()
        is_refused = "failed" if journal.failure else "corrupt" if corrupt else ""
        outcome = is_refused or found.outcome(self.confirmed, self.confirmed_before)
        assert may_refuse or outcome == "whole", (outcome, found.least, found.most, self.confirmed)
        return outcome

    def _look(self, journal: KeptJournal, one: Life, found: Found) -> int | None:
        """What is found of a session. Returns its length; None: it is not there."""
        first, most = self.rng.randrange(60), self.rng.randrange(60)
        looked = journal.look(one.id, OWNER, first=first, most=most)
        kept = journal.load(one.id, OWNER)
        assert (looked is None) == (kept is None), "a look finds what a load does not, or the other way round"
        if kept is None:
            answers = [reply for _, id_ in one.replies for reply in journal.replies_to(OWNER, id_)]
            # Of one that was opened and closed since what was confirmed, its replies say which.
            if one.closed is not None and (one.opened <= self.confirmed or answers):
                found.there(one.closed)
            else:
                found.missing(Found.HISTORIES, one.opened)
            self._look_at_replies(one, answers, found, is_open=False)
            return None
        if one.closed is not None:
            found.missing(Found.HISTORIES, one.closed)
        assert kept.record == one.record, "a session of another kind"
        ids = [token for row in kept.tokens for token in row.token_ids.tolist()]
        length = len(ids)
        assert looked is not None
        entry, records = looked
        assert (entry.record, entry.history_length) == (kept.record, length), "a look says something else"
        seen = [token for row in records for token in row.token_ids.tolist()]
        assert seen == ids[first : first + most], "a look has other tokens"
        assert ids == one.ids[:length], "a history that was never confirmed"
        marks = [mark for row in kept.tokens for mark in [int(row.mark)] * len(row.token_ids)]
        assert marks == one.marks[:length], "tokens that came otherwise"
        assert length in one.lengths, "a part of what was added at once"
        for at, unit in one.lengths.items():
            if at <= length:
                found.there(unit)
            else:
                found.missing(Found.HISTORIES, unit)
        self._look_at_generates(one, kept.generates, length, found)
        self._look_at_replies(one, kept.replies, found, is_open=True)
        return length

    @staticmethod
    def _look_at_generates(one: Life, kept: Sequence[GenerateRecord], length: int, found: Found) -> None:
        """Each is as it began and has its own tokens; of those that a call can name the last few are there."""
        known = {begun.record.position: begun for begun in one.generates}
        ends = [*(record.position for record in kept[1:]), length]
        for record, end in zip(kept, ends, strict=False):
            if not record.request_id:
                continue
            begun = known.get(record.position)
            assert begun is not None, "a Generate that never began"
            assert record == begun.record, f"another Generate: {record}, not {begun.record}"
            generated = takewhile(int(Mark.GENERATED).__eq__, one.marks[record.position : min(end, length)])
            tokens, known_tokens = len(list(generated)), min(begun.tokens, length - record.position)
            assert tokens <= known_tokens, "a Generate has another's tokens"
            if tokens < known_tokens:
                found.missing(Found.ANSWERS, one.lengths[record.position + known_tokens])
        there = {record.position for record in kept if record.request_id}
        named = [one for one in known if known[one].record.request_id and one < length]
        for position in named[-MOST_GENERATES:]:
            if position not in there:
                found.missing(Found.ANSWERS, min(unit for at, unit in one.lengths.items() if at > position))

    def _look_at_replies(self, one: Life, kept: Sequence[ReplyRecord], found: Found, *, is_open: bool) -> None:
        there = set[tuple[str, bytes]]()
        for reply in kept:
            # One may come with another session, by damage, and is still of its own.
            key = reply.kind, reply.request_id
            of = self.by_id.get(reply.session_id)
            unit, record = (of.replies if of is not None else {}).get(key, (0, None))
            assert reply == record, f"another answer: {reply}, not {record}"
            found.there(unit)
            if reply.session_id == one.id:
                there.add(key)
        appends = [key for key in one.replies if key[0] == APPENDED]
        forgotten = set(appends[:-MOST_PER_SESSION])
        for key, (unit, _) in one.replies.items():
            if not (key in there or key in forgotten or (is_open and key[0] == "closed")):
                found.missing(Found.ANSWERS, unit)

    def _look_at_copies(self, copies: Sequence[CopyRecord], lengths: Mapping[str, int], found: Found) -> None:
        # One whose session's id is damaged is no session's: its file is never read, and goes with the session.
        kept = {copy.session_id: copy for copy in copies}
        for one in self.lives:
            if one.id not in lengths:
                continue
            copy, units = kept.get(one.id), [0, *(unit for unit, _ in one.copies)]
            spans = [
                (since, next_at)
                for since, next_at, (_, known) in zip(units, [*units[1:], None], [(0, None), *one.copies], strict=True)
                if known == copy
            ]
            assert spans, "a copy that was never made"
            # There are several spans without one.
            now = max(found.least, self.confirmed)
            since, next_at = next((span for span in spans if span[1] is None or span[1] > now), spans[-1])
            found.there(since)
            if next_at is not None:
                found.missing(Found.COPIES, next_at)


def until_folded(journal: KeptJournal) -> None:
    ends = time.monotonic() + 20
    while journal._tables.to_fold:
        assert not journal.failure, journal.failure
        assert time.monotonic() < ends, "turns that ended are not folded"
        time.sleep(0.0005)


@contextmanager
def no_checks() -> Iterator[None]:
    """The control of flips: rows without checksums, answers that nothing accounts for, and a log that is not looked
    through."""
    package = "inference_engine.session"
    modules = [f"{package}.journal_{name}" for name in ("reader", "tables")]
    sums = ("tokens_crc", "session_crc", "answers_sum", "reply_crc")
    with ExitStack() as stack:
        for name in (f"{package}.journal_rows.entry_crc", *(f"{one}.{name}" for one in modules for name in sums)):
            stack.enter_context(patch(name, lambda *_: 0))
        stack.enter_context(patch(f"{package}.sqlite_tables.SQLiteReader.damaged_replies", lambda _: {}))
        stack.enter_context(patch(f"{package}.journal_database.find_damage", lambda _: None))
        yield


def flip_bits(
    folder: Path, *, seed: int, count: int, is_at_rest: bool = False, is_checked: bool = True
) -> Counter[str]:
    """Flip one bit of what a kill left, so many times: what came of it.

    "last": the step that was recorded last is missing, or a part of it; "shorter": more is. "forgotten": an answer is
    missing, and its call would be done twice; "uncopied": only a copy is. "failed": what is read is right, and the
    damage stops what comes then. is_at_rest: the log was written into the database, each of whose tables is hit as
    often as another; else any byte of both files. is_checked False: without any checks of ours, and "wrong" counts
    histories that no client has sent.
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
                talk.confirm()
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
                    talk.confirm()
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


def cut_power(folder: Path, *, seed: int, states: int, without_syncs_of: str = NO_FILE) -> Counter[str]:
    """Cut the power at random moments of a journal under load: what is found in so many states that differ.

    without_syncs_of: the control, files whose names end so are not synced.
    """
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
                try:
                    outcomes[talk.check(target, may_refuse=True)] += 1
                except AssertionError:
                    if without_syncs_of == NO_FILE:
                        raise
                    outcomes["wrong"] += 1
            assert len(seen) > known, f"there are no more than {known} states"
    return outcomes


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Let the folder have these files and no others."""
    for file in folder.iterdir():
        file.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
