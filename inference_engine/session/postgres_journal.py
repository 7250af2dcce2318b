"""The journal in a PostgreSQL database: sessions outlive the process, and its machine.

The rows are SQLite's (`sqlite_journal.py`), a step's by one binary COPY. Every commit is fenced: in its transaction it
counts this server's commits up by one, which fails once another server has taken its place. A connection that is lost
at a COMMIT leaves the commit in doubt. Then that number says whether it was made: asked for with the row locked, so
that the answer waits for a commit that is still under way, and counted up if it was not, so that it cannot come later.

    commit n      fence n-1 → n │ changes │ COPY of the tail's rows │ COMMIT
    connection lost             │ ask: n → it was made; n-1 → it was not: count up, and make the same changes again

Errors of the connection pass (`writer.Away`); a full disk is waited for, without a reserve. Anything else is final.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
from psycopg import errors as pg

from inference_engine.errors import ConfigError, HistoryCorrupt, JournalAway
from inference_engine.metrics import EngineMetrics
from inference_engine.session.journal import CopyBook
from inference_engine.session.kept_journal import KeptJournal
from inference_engine.session.postgres_database import (
    PostgresConnection,
    connect,
    is_fenced,
    open_database,
    passing,
    place_of,
)
from inference_engine.session.postgres_tables import PostgresReader, PostgresTables, TailRows
from inference_engine.session.writer import Away, Change, Writer
from inference_engine.types import Durability

logger = logging.getLogger(__name__)

_NUMBER_BITS = 62  # of a session's number, which no other server may draw
_IDLE_CONNECTIONS = 4  # for reading, that are kept
_LOCK_SECONDS, _LOOK_SECONDS = 2.0, 0.02
_SERVING = 0x4B616B66  # of the advisory lock of the server that has the database


class Fenced(Exception):
    """Another server has taken this one's place."""


class PostgresJournal(KeptJournal):
    """The sessions in one database. One process has a database at a time."""

    _tables: PostgresTables
    _is_corrupt = (pg.DataCorrupted, pg.IndexCorrupted)

    def __init__(
        self,
        dsn: str,
        durability: Durability,
        *,
        weights: str | None,
        metrics: EngineMetrics,
        name: str = "server",
        keep_seconds: float = 0.0,
        copies_folder: Path | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """dsn: what libpq takes. name: of this server. copies_folder: for copies of K/V; None: there are none.

        The others are as for SQLiteJournal. Raises ConfigError for a database that cannot be used.
        """
        super().__init__(durability, metrics=metrics, keep_seconds=keep_seconds, wall_clock=wall_clock)
        self._dsn, self._name, self.weights = dsn, name, weights
        self._has_copies = copies_folder is not None
        self.copies_folder = copies_folder or Path()
        self._idle: list[PostgresConnection] = []  # for reading
        self._db = open_database(dsn, durability, weights, name)
        try:
            if not self._has_lock(self._db):
                raise ConfigError(
                    f"the journal {place_of(dsn)} is in use by another server: stop that, or name another database"
                )
            ((self._epoch,),) = self._db.execute(
                "insert into replicas values (?, 1, 0) on conflict (name) do update set epoch = replicas.epoch + 1, "
                "commits = 0 returning epoch",
                (name,),
            )
            self._number = 0  # of the last commit
            self._doubt: tuple[Sequence[Change], int] | None = None  # a commit that may have been made, and its number
            self._files_to_remove: list[str] = []
            self._tables = PostgresTables(self._db, wall_clock)
            with self._reading() as reader:
                self._count_all(reader.kept())
                self._used = reader.usage()
            self._measure()
        except BaseException as error:
            self._db.close()
            if isinstance(error, psycopg.Error | JournalAway):
                raise ConfigError(f"the journal {place_of(dsn)} cannot be used: {error}") from error
            raise
        is_tool = weights is None
        self._writer = Writer(
            self._commit,
            self._tidy,
            lambda: not self._tables.to_fold,
            metrics,
            has_room=self._has_room,
            tidies_at_the_end=not is_tool,
        )

    def _has_lock(self, db: PostgresConnection) -> bool:
        """Take the lock of who has the database. A process that has just ended may have it for a moment."""
        ends = time.monotonic() + _LOCK_SECONDS
        while True:
            ((is_ours,),) = db.execute("select pg_try_advisory_lock(?)", (_SERVING,))
            if is_ours or time.monotonic() > ends:
                return bool(is_ours)
            time.sleep(_LOOK_SECONDS)

    def _new_number(self) -> int:
        return secrets.randbits(_NUMBER_BITS)

    @property
    def book(self) -> CopyBook | None:
        return self if self._has_copies else None

    @property
    def failure(self) -> str:
        return self._writer.failure and (
            f"{self._writer.failure}: whether the last changes are in the database is not known, and nothing of them "
            "was sent. Start again; what clients received is there. If it ends so again, see the log of the database "
            f"{place_of(self._dsn)}"
        )

    def _close(self) -> None:
        for db in (self._db, *self._idle):
            with suppress(psycopg.Error):
                db.release_locks()
            db.close()

    # -- the writer's thread ----------------------------------------------------------------------------------------

    def _commit(self, changes: Sequence[Change]) -> None:
        self._transact(changes)

    def _transact(self, changes: Sequence[Change]) -> None:
        with self._db_lock:
            files = self._apply(changes)
        for file in files:
            self._remove_copy(file)

    def _apply(self, changes: Sequence[Change]) -> Sequence[str]:
        """Returns the names of files that are no session's copy then."""
        has_begun = False
        try:
            if not self._db.is_open:
                self._reconnect()
            if self._was_made(changes):
                return self._gone_files()
            number, has_begun = self._number + 1, True
            self._db.begin()
            self._db.execute("select fence(?, ?, ?)", (self._name, self._epoch, number))
            for apply, arguments in changes:
                apply(*arguments)
            self._tables.tail.flush()
            self._db.wait()
            self._doubt = changes, number
            self._db.commit()
            self._made()
            return self._gone_files()
        except BaseException as error:
            self._db.roll_back()
            if has_begun and (self._doubt is None or self._db.is_open):  # else it is asked for
                self._tables.roll_back()
                self._doubt = None
            if is_fenced(error):
                raise Fenced(str(error).splitlines()[0]) from error
            if (waits := passing(error)) is not None:
                raise waits from error
            raise

    def _made(self) -> None:
        """The commit in doubt was made."""
        assert self._doubt is not None
        self._number, self._doubt = self._doubt[1], None
        self._files_to_remove += self._tables.commit()

    def _gone_files(self) -> Sequence[str]:
        """Of commits that were made, also of one that was in doubt."""
        gone, self._files_to_remove = self._files_to_remove, []
        return gone

    def _was_made(self, changes: Sequence[Change]) -> bool:
        """Settle a commit in doubt: was it made, and had these changes?"""
        if self._doubt is None:
            return False
        doubtful, number = self._doubt
        self._db.begin()
        found = list(
            self._db.execute(
                "select commits from replicas where name = ? and epoch = ? for update", (self._name, self._epoch)
            )
        )
        if not found:
            raise Fenced(f"another server is {self._name}")
        ((commits,),) = found
        if commits == number - 1:
            self._db.execute(
                "update replicas set commits = ? where name = ? and epoch = ?", (number + 1, self._name, self._epoch)
            )
        self._db.commit()
        logger.warning("the commit that lost its connection was %s", "made" if commits == number else "not made")
        if commits == number:
            self._made()
            return doubtful is changes
        self._number, self._doubt = number + 1, None
        self._tables.roll_back()
        return False

    def _reconnect(self) -> None:
        self._db = connect(self._dsn, self.durability, self._name)
        self._tables.reconnected(self._db)
        if not self._has_lock(self._db):
            self._db.close()
            raise Away("another connection has its lock")

    def _has_room(self) -> bool:
        self._transact([(self._tables.try_room, ())])
        return True

    def _measure(self) -> None:
        with self._reading() as reader:
            sessions, nbytes = reader.size()
        self._metrics.sessions_kept.set(sessions)
        self._metrics.journal_bytes.set(nbytes)

    # -- reading ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[PostgresReader]:
        db = self._reader_connection()
        try:
            yield PostgresReader(db, TailRows(db))
            db.commit()
        except BaseException as error:
            db.roll_back()
            if isinstance(error, self._is_corrupt):
                raise HistoryCorrupt(0) from error
            if isinstance(error, psycopg.Error) and passing(error) is not None:
                raise JournalAway from error
            raise
        finally:
            if db.is_open and len(self._idle) < _IDLE_CONNECTIONS and not self._is_stopped:
                self._idle.append(db)
            else:
                db.close()

    def _reader_connection(self) -> PostgresConnection:
        """One at the beginning of a transaction, which sees one moment. Raises JournalAway."""
        while True:
            try:
                db, is_new = self._idle.pop(), False
            except IndexError:
                try:
                    db, is_new = connect(self._dsn, self.durability, self._name), True
                except psycopg.OperationalError as error:
                    raise JournalAway from error
            try:
                db.begin("isolation level repeatable read read only")
                db.wait()
                return db
            except psycopg.OperationalError as error:  # one that was lost while it was idle
                db.close()
                if is_new:
                    raise JournalAway from error
