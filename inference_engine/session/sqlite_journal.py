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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import apsw

from inference_engine.errors import ConfigError
from inference_engine.metrics import EngineMetrics
from inference_engine.session.journal import CopyRecord, FoundCopy, ignored
from inference_engine.session.journal_database import (
    DAMAGE,
    LOG_BYTES,
    LOG_PAGES,
    PAGE_BYTES,
    SyncedLog,
    open_database,
    refuse_damaged_replies,
)
from inference_engine.session.journal_folder import NO_SPACE, FolderGone, Reserve, check_private, take_folder
from inference_engine.session.journal_reader import Reader
from inference_engine.session.kept_journal import KeptJournal
from inference_engine.session.sqlite_tables import ReplyKey, SQLiteReader, SQLiteTables, SQLiteTail
from inference_engine.session.writer import Change, DiskFull, Writer
from inference_engine.types import Durability

logger = logging.getLogger(__name__)

FILE, COPIES = "journal.db", "copies"

# Free within the files, as much makes room for more where the disk has none: sessions that were closed have left it.
_ROOM_PAGES = 64


class SQLiteJournal(KeptJournal):
    """The sessions in one folder. One process has a folder at a time."""

    _tables: SQLiteTables
    _is_corrupt = (apsw.CorruptError,)

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
        even_clock: Callable[[], float] | None = None,
    ) -> None:
        """weights: digest of the model's; the folder belongs to it. None: whichever it is, for tools; the folder must
        have a journal then. keep_seconds: sessions unused for longer are deleted; 0: none is.

        Raises ConfigError, before anything is written, for a folder that is another process's, another model's, of a
        newer format, damaged, or not private.
        """
        super().__init__(
            durability, metrics=metrics, keep_seconds=keep_seconds, wall_clock=wall_clock, even_clock=even_clock
        )
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
            self._folder_lock.follow(FILE, self._log.path.name)
            tail = SQLiteTail(self._db)
            self._reader = SQLiteReader(self._db, tail)
            self._tables = SQLiteTables(self._db, self._reader, tail, wall_clock)
            if weights is not None:  # a tool may look at what is damaged, and purge it
                refuse_damaged_replies(self._reader, folder)
            self._count_all(self._reader.kept())
            self._used = self._reader.usage()
            self._next_number = 1 + self._reader.last_number()
            metrics.sessions_kept.set(self._reader.value("select count(*) from sessions"))
        except BaseException as error:
            self._db.close()
            self._folder_lock.release()
            if isinstance(error, DAMAGE):
                raise _damaged(folder, error) from error
            raise
        self._wal_pages = 0
        self._moved = ""
        self._db.set_wal_hook(self._note_wal)
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

    def _new_number(self) -> int:
        number, self._next_number = self._next_number, self._next_number + 1
        return number

    @property
    def failure(self) -> str:
        if self._moved:
            return self._moved
        folder = self.copies_folder.parent
        return self._writer.failure and (
            f"{self._writer.failure}: whether the last changes are on the disk is not known, and nothing of them was "
            "sent. Start again; what clients received is there. If it ends so again, the disk or the journal is "
            f"damaged: `kakeya journal backup {folder} FOLDER` makes a copy with new indexes, which helps if only an "
            f"index is damaged; else restore {folder} from a backup"
        )

    def _close(self) -> None:
        try:
            if not self._writer.failure:
                self._checkpoint(apsw.SQLITE_CHECKPOINT_TRUNCATE)
            self._db.set_wal_hook(None)
            self._log.close()
            self._db.close()
        except apsw.Error as error:  # what was confirmed is safe; the next start reads the log
            logger.error("the journal could not be closed in order, and the next start reads its log: %s", error)
        finally:
            self._folder_lock.release()

    # -- the writer's thread ----------------------------------------------------------------------------------------

    def _commit(self, changes: Sequence[Change]) -> None:
        super()._commit(changes)
        if self._wal_pages >= min(LOG_PAGES, self._reserve.nbytes // PAGE_BYTES):
            with self._db_lock:
                self._checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)

    def _transact(self, changes: Sequence[Change]) -> None:
        """Apply changes, all or none, and make them safe. Others may read between the two."""
        try:
            self._folder_lock.check()
        except FolderGone as gone:
            self._moved = str(gone)
            raise
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
            self._tables.tail.flush()
            self._db.execute("commit")
        except BaseException as error:
            is_full, number = self._is_full(error), self._errno_of(error)
            self._tables.roll_back()
            if self._db.in_transaction:
                self._db.execute("rollback")
            if is_full:
                raise DiskFull from error
            if number:  # SQLite knows "disk I/O error" alone, as of a disk that became read-only
                raise OSError(number, os.strerror(number), str(self._log.path)) from error
            raise
        return self._tables.commit()

    def _is_full(self, error: BaseException) -> bool:
        """SQLite itself knows one of NO_SPACE. Not of a sync, after which it is not known what is written."""
        return isinstance(error, apsw.FullError) or self._errno_of(error) in NO_SPACE

    def _errno_of(self, error: BaseException) -> int:
        """Of a write that failed; 0 of any other error."""
        is_of_write = getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_WRITE
        return self._db.system_errno if is_of_write else 0

    def _checkpoint(self, mode: int) -> bool:
        """Raises if not all could be written into the database: a checkpoint that failed is a failed write. False: the
        disk is full."""
        try:
            logged, done = self._db.wal_checkpoint(mode=mode)
        except (apsw.FullError, apsw.IOError) as error:
            if self._is_full(error):
                return False  # nothing is lost, it stays in the log
            raise
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

    def _measure(self) -> None:
        self._metrics.sessions_kept.set(self._reader.value("select count(*) from sessions"))
        self._metrics.journal_bytes.set(self._reader.value("pragma page_count") * PAGE_BYTES)

    # -- reading ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[Reader]:
        with self._db_lock:
            yield self._reader

    def copies(self, on_gone: Callable[[str], object], on_found: FoundCopy = ignored) -> list[CopyRecord]:
        """Raises ConfigError if their table is damaged: a server could not record others."""
        try:
            return super().copies(on_gone, on_found)
        except DAMAGE as error:
            raise _damaged(self.copies_folder.parent, error) from error

    @property
    def place(self) -> str:
        return str(self.copies_folder.parent)

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


def _damaged(folder: Path, error: BaseException) -> ConfigError:
    return ConfigError(f"the journal {folder / FILE} is damaged: {error!r}; restore {folder} from a backup")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
