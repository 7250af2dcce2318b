"""The journal in a folder: sessions outlive the process.

    tail        one row for each step of a session, in the order in which they came; a step adds rows at its end only.
                Such a row says, too, which Generate began with it; the answer to an append is one as well
    tokens      the same, folded when a Generate ends: full rows, by position
    ends        what did not fill a row, one row a session; the next fold takes it up again
    appends     the last answers to a session's appends, folded too, one row a session
    begun       how its last Generates began, likewise
    sessions    how each began, how many of its tokens are folded, and a checksum of its rows of the last two
    replies     the answers to all other calls
    usage       what each owner's Generates took, one row an owner
    copies      the files with copies of sessions' K/V, which are in a folder of their own (`hibernation.py`)

One connection, which a lock shares: the writer's thread commits, others read what is not in memory. The lock is free
while the log is synced, which is what takes long on a slow disk; a checkpoint holds it. Every row of a history carries
a checksum, and a history must be without a hole: a damaged session is refused, and others are not concerned. An answer
that is forgotten would let a repeated call be done twice, so each is accounted for: by the row of its session, or in
the tail and in `replies`, which the start looks through.

`power`: a commit is synced (fsync) before it is confirmed and before the next one is written. `process`: the system may
write it later; checkpoints sync.
A full disk is waited for, with a reserve for what is under way and for closing sessions (see `writer.py`). Any other
error of the disk is final: after a failed sync SQLite may take the next commit and lose this one. Checkpoints are made
here, not by SQLite, which does not report when one fails.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import apsw

from inference_engine.errors import ConfigError, EngineStalled, JournalAway, JournalFull
from inference_engine.metrics import EngineMetrics
from inference_engine.session.history import TokenIds
from inference_engine.session.journal import (
    SAFE,
    CopyBook,
    CopyRecord,
    GenerateRecord,
    Kept,
    Logprobs,
    Receipt,
    ReplyRecord,
    Saved,
    SessionEntry,
    SessionKept,
    SessionRecord,
    TokensRecord,
)
from inference_engine.session.journal_database import (
    DAMAGE,
    LOG_BYTES,
    LOG_PAGES,
    PAGE_BYTES,
    SyncedLog,
    open_database,
    refuse_damaged_replies,
)
from inference_engine.session.journal_folder import Reserve, check_private, take_folder
from inference_engine.session.journal_reader import Past, Reader, ReplyKey
from inference_engine.session.journal_rows import damage_is_refused
from inference_engine.session.journal_tables import Tables
from inference_engine.session.writer import Callback, Change, DiskFull, Unit, Writer
from inference_engine.types import Durability, Mark, TokenUsage

logger = logging.getLogger(__name__)

FILE, COPIES = "journal.db", "copies"

# Free within the files, as much makes room for more where the disk has none: sessions that were closed have left it.
_ROOM_PAGES = 64
_FLUSH_SECONDS = 30.0
_EXPIRE_SECONDS = 30.0


@dataclass(slots=True)
class _Count:
    """What is kept of one owner. receipt: of what was recorded last of any of their sessions."""

    sessions: int = 0
    tokens: int = 0
    receipt: Receipt = SAFE


_NONE_KEPT = _Count()


@dataclass(slots=True)
class _Open:
    """A session in memory. length: as recorded. count: its owner's."""

    number: int
    owner: str
    saved: Saved
    length: int
    count: _Count


class SQLiteJournal:
    """The sessions in one folder. One process has a folder at a time."""

    keeps = True

    def __init__(
        self,
        folder: Path,
        durability: Durability,
        *,
        weights: str | None,
        metrics: EngineMetrics,
        keep_seconds: float = 0.0,
        vfs: str | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """weights: digest of the model's; the folder belongs to it. None: whichever it is, for tools; the folder must
        have a journal then. keep_seconds: sessions unused for longer are deleted; 0: none is.

        Raises ConfigError, before anything is written, for a folder that is another process's, another model's, of a
        newer format, damaged, or not private.
        """
        assert durability is not Durability.NONE
        self.durability: Durability = durability
        self._metrics = metrics
        self._keep_seconds = keep_seconds
        self._wall_clock = wall_clock
        if weights is None and not (folder / FILE).exists():
            raise ConfigError(f"{folder} has no journal: name the state_dir of a server")
        check_private(folder)
        self.copies_folder = folder / COPIES
        self.weights = weights
        self._log = SyncedLog(folder / f"{FILE}-wal", vfs)
        self._folder_lock = take_folder(folder)
        try:
            self._db = open_database(folder / FILE, durability, weights, vfs, was=self._folder_lock.was)
        except BaseException:
            self._folder_lock.release()
            raise
        try:
            self._folder_lock.note(durability)
            self._reader = Reader(self._db)
            self._tables = Tables(self._db, self._reader, wall_clock)
            if weights is not None:  # a tool may look at what is damaged, and purge it
                refuse_damaged_replies(self._reader, folder)
            kept = self._reader.kept(self._tables.tail.all_committed())
            self._kept = {owner: _Count(one.sessions, one.tokens) for owner, one in kept.items()}
            self._used = self._reader.usage()
            self._next_number = 1 + self._reader.last_number()
            metrics.sessions_kept.set(self._reader.value("select count(*) from sessions"))
        except BaseException as error:
            self._db.close()
            self._folder_lock.release()
            if isinstance(error, DAMAGE):
                raise _damaged(folder, error) from error
            raise
        self._db_lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._kept_lock = threading.Lock()
        self._expired: list[tuple[str, int]] = []  # owner and length
        self._on_copy_gone: Callable[[str], object] = lambda _: None
        self._unit: Unit | None = None
        self._gone: dict[str, Receipt] = {}  # of sessions that left memory or were closed, by id
        self._expire_at = 0.0
        self._wal_pages = 0
        self._db.set_wal_hook(self._note_wal)
        self._is_stopped = False
        # The log becomes as long before a checkpoint, so that all of it can be put into the database then.
        self._reserve = Reserve(folder, LOG_BYTES)
        is_tool = weights is None  # it looks at a folder, and leaves it as it is
        self._writer = Writer(
            self._commit,
            self._tidy,
            lambda: not self._tables.to_fold,
            metrics,
            make_room=self._begin_on_reserve,
            has_room=self._has_room,
            tidies_at_the_end=not is_tool,
            is_full=not is_tool and not self._reserve.take(),
        )

    # -- changes, in memory -----------------------------------------------------------------------------------------

    def unit(self, refuse: Callable[[], bool] | None = None) -> AbstractContextManager[object]:
        return self._one_unit(refuse)

    @contextmanager
    def _one_unit(self, refuse: Callable[[], bool] | None) -> Iterator[None]:
        assert self._unit is None, "units do not nest"
        self._unit = unit = Unit(refuse=refuse)
        try:
            yield
        finally:
            self._unit = None
            if unit.changes:
                self._writer.record(unit)

    def _record(self, change: Change, confirmed: tuple[Saved, int] | None = None, of: _Open | None = None) -> Receipt:
        """of: the session that the change is of, if answers about it have to wait for that."""
        unit = self._unit or Unit()
        unit.changes.append(change)
        if confirmed is not None:
            unit.confirmed.append(confirmed)
        if of is not None:
            saved = of.saved
            if saved.receipt is not unit and not saved.receipt.is_safe:
                unit.replaced = saved.receipt
            saved.receipt = of.count.receipt = unit
        if unit is not self._unit:
            self._writer.record(unit)
        return unit

    def open(self, record: SessionRecord) -> Saved:
        known = self._begin(record, 0)
        self._record((self._tables.put_session, (known.number, record, None, 0)), (known.saved, 0), known)
        return known.saved

    def fork(self, record: SessionRecord, parent_id: str, length: int) -> Saved:
        parent = self._open[parent_id]
        assert length <= parent.length
        known = self._begin(record, length)
        put = self._tables.put_session, (known.number, record, parent.number, known.length)
        self._record(put, (known.saved, known.length), known)
        return known.saved

    def _begin(self, record: SessionRecord, length: int) -> _Open:
        number, self._next_number = self._next_number, self._next_number + 1
        count = self._count_kept(record.owner, 1, length)
        known = self._open[record.session_id] = _Open(number, record.owner, Saved(-1), length, count)
        return known

    def forget(self, session_id: str) -> None:
        if (known := self._open.pop(session_id, None)) is not None:
            self._count_kept(known.owner, -1, -known.length)

    def append(
        self,
        session_id: str,
        position: int,
        token_ids: TokenIds,
        mark: Mark,
        *,
        began: GenerateRecord | None = None,
        logprobs: Logprobs | None = None,
    ) -> None:
        known = self._open[session_id]
        assert position == known.length, f"a record for position {position} follows {known.length}"
        known.length = end = position + len(token_ids)
        with self._kept_lock:
            known.count.tokens += len(token_ids)
        values = None if logprobs is None else logprobs.tobytes()
        self._record(
            (self._tables.put_tokens, (known.number, position, int(mark), token_ids.tobytes(), values, began)),
            (known.saved, end),
            known,
        )

    def take_back(self, session_id: str, length: int) -> None:
        known = self._open[session_id]
        with self._kept_lock:
            known.count.tokens -= known.length - length
        known.length = length
        if isinstance(known.saved.receipt, Unit):
            known.saved.receipt = known.saved.receipt.replaced

    def reply(self, record: ReplyRecord) -> None:
        known = self._open.get(record.session_id)
        self._record((self._tables.put_reply, (None if known is None else known.number, record)), of=known)

    def rest(self, session_id: str) -> None:
        if (known := self._open.get(session_id)) is not None:
            self._record((self._tables.rest, (known.number,)))

    def leave(self, session_id: str, used_at: float | None = None) -> None:
        if (known := self._open.pop(session_id, None)) is not None:
            receipt = self._record((self._tables.rest, (known.number, used_at)))
            if not known.saved.receipt.is_safe:
                self._leaves_memory(session_id, receipt)

    def close(self, session_id: str) -> None:
        if (known := self._open.pop(session_id, None)) is not None:
            receipt = self._record((self._tables.end_session, (known.number,)), of=known)
            self._leaves_memory(session_id, receipt)
            self._count_kept(known.owner, -1, -known.length)

    def _leaves_memory(self, session_id: str, receipt: Receipt) -> None:
        """Calls about the session wait for its receipt though it is not here, until that is safe."""
        self._gone.pop(session_id, None)
        self._gone[session_id] = receipt
        while next(iter(self._gone.values())).is_safe:  # they become safe in this order
            del self._gone[next(iter(self._gone))]

    # -- copies of K/V ----------------------------------------------------------------------------------------------

    def copies(self, on_gone: Callable[[str], object]) -> list[CopyRecord]:
        """The copies that are recorded, of the session used longest ago first. Waits for the disk.

        on_gone: called with the name of a file that was removed for any reason, from any thread. Raises ConfigError if
        their table is damaged: a server could not record others.
        """
        self._flush()
        self._on_copy_gone = on_gone
        with self._db_lock:
            try:
                return self._reader.copies()
            except DAMAGE as error:
                raise _damaged(self.copies_folder.parent, error) from error

    def put_copy(self, record: CopyRecord) -> None:
        """Record a file that is whole and safe. The one that the session had before is removed."""
        self._record((self._tables.put_copy, (record,)))

    def drop_copy(self, file: str) -> None:
        """Remove a file."""
        self._record((self._tables.drop_copy, (file,)))

    def use(self, owner: str, usage: TokenUsage) -> None:
        with self._kept_lock:
            self._used[owner] = total = self.used_by(owner) + usage
        self._record((self._tables.put_usage, (owner, total)))

    def used_by(self, owner: str) -> TokenUsage:
        return self._used.get(owner, TokenUsage())

    def kept_by(self, owner: str) -> Kept:
        count = self._kept.get(owner, _NONE_KEPT)
        return Kept(count.sessions, count.tokens)

    def _count_kept(self, owner: str, sessions: int, tokens: int) -> _Count:
        """Returns the owner's count, which stays the same while a session of theirs is kept."""
        with self._kept_lock:
            count = self._kept.setdefault(owner, _Count())
            count.sessions += sessions
            count.tokens += tokens
            if not count.sessions and count.receipt.is_safe:
                del self._kept[owner]
            return count

    # -- what is safe -----------------------------------------------------------------------------------------------

    def receipt(self, session_id: str) -> Receipt:
        known = self._open.get(session_id)
        return self._gone.get(session_id, SAFE) if known is None else known.saved.receipt

    def receipt_of_owner(self, owner: str) -> Receipt:
        return self._kept.get(owner, _NONE_KEPT).receipt

    def on_saved(self, callback: Callback, receipt: Receipt | None = None) -> None:
        self._writer.on_saved(callback, receipt)

    def request_sync(self) -> None:
        self._writer.request_sync()

    def is_behind(self) -> bool:
        return self._writer.is_behind()

    def refuse_when_blocked(self, *, to_close: bool = False) -> None:
        if self._writer.failure:
            raise EngineStalled
        if self._writer.is_away:
            raise JournalAway
        if self._writer.is_stuck if to_close else self._writer.is_full:
            raise JournalFull(can_close=not self._writer.is_stuck)

    @property
    def is_full(self) -> bool:
        return self._writer.is_full

    @property
    def is_away(self) -> bool:
        return self._writer.is_away  # a folder never is

    @property
    def failure(self) -> str:
        folder = self.copies_folder.parent
        return self._writer.failure and (
            f"{self._writer.failure}: whether the last changes are on the disk is not known, and nothing of them was "
            "sent. Start again; what clients received is there. If it ends so again, the disk or the journal is "
            f"damaged: `kakeya journal backup {folder} FOLDER` makes a copy with new indexes, which helps if only an "
            f"index is damaged; else restore {folder} from a backup"
        )

    @property
    def book(self) -> CopyBook:
        return self

    def stop(self) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        self._writer.stop()
        with self._db_lock:
            try:
                if not self._writer.failure:
                    self._checkpoint(apsw.SQLITE_CHECKPOINT_TRUNCATE)
                self._db.set_wal_hook(None)
                self._log.close()
                self._db.close()
            except apsw.Error:  # what was confirmed is safe; the next start reads the log
                logger.exception("the journal could not be closed in order")
            finally:
                self._folder_lock.release()

    # -- the writer's thread ----------------------------------------------------------------------------------------

    def _commit(self, changes: Sequence[Change]) -> None:
        self._transact(changes)
        if self._wal_pages >= min(LOG_PAGES, self._reserve.nbytes // PAGE_BYTES):
            with self._db_lock:
                self._checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)

    def _transact(self, changes: Sequence[Change]) -> None:
        """Apply changes, all or none, and make them safe. Others may read between the two."""
        with self._db_lock:
            files = self._apply(changes)
        self._sync()
        for file in files:
            self._remove_copy(file)

    def _sync(self) -> None:
        if self.durability is Durability.POWER:
            self._log.sync()

    def _apply(self, changes: Sequence[Change]) -> Sequence[str]:
        """Returns the names of files that are no session's copy then. Called with the lock held."""
        try:
            self._db.execute("begin immediate")
            for apply, arguments in changes:
                apply(*arguments)
            self._tables.put_rows()
            self._db.execute("commit")
        except BaseException as error:
            self._tables.roll_back()
            if self._db.in_transaction:
                self._db.execute("rollback")
            if isinstance(error, apsw.FullError):
                raise DiskFull from error
            raise
        return self._tables.commit()

    def _remove_copy(self, file: str) -> None:
        try:
            (self.copies_folder / file).unlink(missing_ok=True)
        except OSError as error:  # the next start removes it
            logger.warning("%s could not be removed: %s", self.copies_folder / file, error)
        self._on_copy_gone(file)

    def _tidy(self) -> None:
        if self._tables.to_fold:
            numbers = self._tables.next_to_fold()
            try:
                self._fold(numbers)
            except DiskFull:
                self._tables.to_fold.extend(numbers)
                raise
        elif (now := time.monotonic()) >= self._expire_at:
            self._expire_at = now + _EXPIRE_SECONDS
            self._delete_old()
            with self._db_lock:
                for owner, length in self._expired:
                    self._count_kept(owner, -1, -length)
                    self._metrics.sessions_forgotten.inc()
                self._metrics.sessions_kept.set(self._reader.value("select count(*) from sessions"))
                self._metrics.journal_bytes.set(self._reader.value("pragma page_count") * PAGE_BYTES)

    def _fold(self, numbers: Sequence[int]) -> None:
        """In one commit, or one each if some rows are damaged: those stay in the tail, which is read as well."""
        try:
            self._transact([(self._tables.fold, (number,)) for number in numbers if number in self._tables.tail])
        except apsw.CorruptError as damage:
            if len(numbers) == 1:
                logger.error("a session's turns cannot be folded, because the journal is damaged: %s", damage)
                return
            for number in numbers:
                self._fold([number])

    def _delete_old(self) -> None:
        self._expired = []
        try:
            self._transact([(self._expire, ())])
        except apsw.CorruptError:  # they may stay: no call waits for it, and after a restart it would be the same
            logger.exception("old records cannot be deleted, because the journal is damaged: run kakeya journal check")

    def _expire(self) -> None:
        self._expired = self._tables.expire(self._keep_seconds, {known.number for known in list(self._open.values())})

    def _checkpoint(self, mode: int) -> bool:
        """Raises if not all could be written into the database: a checkpoint that failed is a failed write. False: the
        disk is full."""
        try:
            logged, done = self._db.wal_checkpoint(mode=mode)
        except apsw.FullError:
            return False  # nothing is lost, it stays in the log
        if done != logged:
            raise apsw.IOError(f"a checkpoint wrote {done} of {logged} pages")
        self._wal_pages = 0
        return True

    def _begin_on_reserve(self) -> None:
        """The disk is full: with the reserve, the log is put into the database and begins anew where it lies."""
        with self._db_lock:
            self._reserve.give_up()
            self._checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)

    def _has_room(self) -> bool:
        """Has the disk room for the reserve again, or have the files room within? Raises DiskFull if not a row has."""
        self._transact([(self._tables.try_room, ())])
        with self._db_lock:
            begins_anew = self._checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)
            free_pages = self._reader.value("pragma freelist_count")
            log_bytes = self._log.path.stat().st_size
        has_within = begins_anew and min(free_pages, log_bytes // PAGE_BYTES) >= _ROOM_PAGES
        return self._reserve.take() or has_within

    def _note_wal(self, _db: apsw.Connection, _name: str, pages: int) -> int:
        self._wal_pages = pages
        return apsw.SQLITE_OK

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self, session_id: str) -> tuple[SessionRecord, Sequence[TokensRecord]]:
        self._flush()
        with self._db_lock, damage_is_refused(0):
            found = list(self._db.execute("select session from sessions where id = ?", (session_id,)))
            if not found:
                raise KeyError(session_id)
            (number,) = found[0]
            record, _ = self._reader.session(number, session_id)
            return record, self._past(number).tokens

    def load(self, session_id: str, owner: str) -> SessionKept | None:
        self._flush(self.receipt(session_id))
        with self._db_lock, damage_is_refused(0):
            number = self._reader.find(session_id, owner)
            if number is None:
                return None
            record, used_at = self._reader.session(number, session_id)
            past = self._past(number)
            saved = Saved(sum(len(one.token_ids) for one in past.tokens))
            replies = self._reader.replies_of(number, session_id, owner, past.appends)
            count = self._count_kept(owner, 0, 0)
            self._open[session_id] = _Open(number, owner, saved, saved.tokens, count)
            return SessionKept(record, used_at, past.tokens, past.generates, replies, saved)

    def look(
        self, session_id: str, owner: str, *, first: int = 0, most: int = 0
    ) -> tuple[SessionEntry, Sequence[TokensRecord]] | None:
        self._flush(self.receipt(session_id), unless_full=True)
        with self._db_lock, damage_is_refused(0):
            number = self._reader.find(session_id, owner)
            if number is None:
                return None
            record, used_at = self._reader.session(number, session_id)
            entries = self._tables.tail.committed(number)
            length = self._reader.length(number, entries)
            tokens = self._reader.piece(number, entries, first, min(first + most, length))
            return SessionEntry(record, used_at, length), tokens

    def _past(self, number: int) -> Past:
        return self._reader.past(number, self._tables.tail.committed(number))

    def replies_to(self, owner: str, request_id: bytes) -> Sequence[ReplyRecord]:
        self._flush(self.receipt_of_owner(owner))
        with self._db_lock, damage_is_refused(0):
            return self._reader.replies("owner = ? and request_id = ?", (owner, request_id))

    def page(self, owner: str, *, after: str, most: int) -> Sequence[SessionEntry]:
        with self._db_lock:  # what is recorded and not committed yet is of sessions in memory
            return self._reader.page(owner, after, most, self._tables.tail.committed, self._wall_clock())

    def everyone(self) -> list[SessionEntry]:
        """The sessions of all owners, by their ids. For tools."""
        self._flush()
        with self._db_lock:
            return self._reader.everyone(self._tables.tail.committed, self._wall_clock())

    def check(self) -> str:
        """What is wrong with the database as a whole; "": nothing. Reads all of it."""
        self._flush()
        with self._db_lock:
            found = [str(text) for (text,) in self._db.execute("pragma integrity_check")]
            if found == ["ok"]:
                return "; ".join(
                    f"an answer is damaged, to a call about the session {name!r}"
                    for name in self._damaged_replies().values()
                )
        return "; ".join(found)

    def back_up(self, folder: Path) -> None:
        """Write all that is recorded into a new folder, which a server can take for its own. Raises ConfigError."""
        self._flush()
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError as error:
            raise ConfigError(f"{folder} is there already; name a folder that is not") from error
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}") from error
        try:
            with self._db_lock:
                self._db.execute("vacuum into ?", (str(folder / FILE),))  # without copies of K/V, which a start notices
            (folder / FILE).chmod(0o600)
            for path in (folder / FILE, folder, folder.absolute().parent):  # SQLite does not sync such a file
                _sync(path)
        except (apsw.Error, OSError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(f"{folder}: the copy cannot be written: {error}") from error

    def damaged(self) -> set[str]:
        """The ids of sessions, those that have ended too, to calls about which an answer is damaged. For tools."""
        self._flush()
        with self._db_lock:
            return set(self._damaged_replies().values())

    def _damaged_replies(self) -> dict[ReplyKey, str]:
        with suppress(ValueError):  # of a table that is damaged it cannot be said which: `check` tells of it
            return self._reader.damaged_replies()
        return {}

    def purge(self, session_id: str, owner: str) -> None:
        """Delete a session, damaged or not, and the damaged answers to calls about it, also if it has ended.

        For tools. Raises ConfigError if there is no space for that, not even in the reserve.
        """
        self._flush()
        with self._db_lock:
            damaged = [key for key, name in self._damaged_replies().items() if name == session_id]
            ends = [(self._tables.end_session, (number,)) for number in self._reader.named(session_id, owner)]
        changes: list[Change] = [(self._tables.drop_replies, (damaged,)), *ends]
        try:
            self._transact(changes)
        except DiskFull:
            self._begin_on_reserve()
            try:
                self._transact(changes)
            except DiskFull as error:
                folder = self.copies_folder.parent
                raise ConfigError(f"the disk of {folder} is full, and its reserve is used up: make room") from error

    def held_bytes(self, session_id: str | None = None) -> int:
        return 0  # histories are in memory once, with their sessions; what waits to be written is bounded

    def tidy(self) -> bool:
        return False

    def _flush(self, receipt: Receipt | None = None, *, unless_full: bool = False) -> None:
        """Wait until all is written that is read next. Raises as `refuse_when_blocked` if it cannot be.

        unless_full: then what is written is read.
        """
        is_written = self._writer.flush(_FLUSH_SECONDS, receipt) or (receipt is not None and receipt.is_refused)
        if not is_written and not (unless_full and self.is_full):
            self.refuse_when_blocked()
            raise EngineStalled


def _damaged(folder: Path, error: BaseException) -> ConfigError:
    return ConfigError(f"the journal {folder / FILE} is damaged: {error!r}; restore {folder} from a backup")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
