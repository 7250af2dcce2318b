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

import hashlib
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import psycopg
from psycopg import errors as pg

from inference_engine.errors import ConfigError, HistoryCorrupt, JournalAway, SessionElsewhere, counted
from inference_engine.metrics import EngineMetrics
from inference_engine.session.clock_jumps import ClockJumps
from inference_engine.session.journal import (
    OPENED,
    SAFE,
    CopyBook,
    Kept,
    Receipt,
    ReplyRecord,
    Resident,
    SessionEntry,
    SessionKept,
)
from inference_engine.session.kept_journal import KeptJournal
from inference_engine.session.postgres_database import (
    PostgresConnection,
    check_alike,
    connect,
    is_fenced,
    open_database,
    passing,
    place_of,
)
from inference_engine.session.postgres_lease import Lease
from inference_engine.session.postgres_tables import PostgresReader, PostgresTables, TailRows
from inference_engine.session.writer import Change, Lost, Unit, Writer
from inference_engine.types import Durability, TokenUsage

logger = logging.getLogger(__name__)

_NUMBER_BITS = 62  # of a session's number, which no other server may draw
_IDLE_CONNECTIONS = 4  # for reading, that are kept
_LOOK_SECONDS = 0.05  # between two attempts to begin anew
_LET_GO_SECONDS = 5.0  # for a server to let go of a session that is to be deleted
_SAME_SECONDS = 1.0  # by which clocks that are set may differ
_COUNT_SECONDS = 10.0  # between two looks at what other servers keep


class _NoSessions:
    """Until there is an engine."""

    def locked(self) -> AbstractContextManager[object]:
        return nullcontext()

    def let_go(self, session_id: str) -> None: ...

    def lose(self) -> None: ...


@contextmanager
def _refused(place: str) -> Iterator[None]:
    """What goes wrong at a start is a refusal."""
    try:
        yield
    except (psycopg.Error, JournalAway) as error:
        raise ConfigError(f"the journal {place} cannot be used: {error}") from error


def _nothing() -> None:
    """The change of a commit that only shows that it can be made."""


class PostgresJournal(KeptJournal):
    """The sessions in one database, which servers of one model share."""

    is_shared = True
    _lets_go = True
    _tables: PostgresTables
    _is_corrupt = (pg.DataCorrupted, pg.IndexCorrupted)

    def __init__(
        self,
        dsn: str,
        durability: Durability,
        *,
        weights: str | None,
        metrics: EngineMetrics,
        replica: str,
        lease_seconds: float = 5.0,
        keep_seconds: float = 0.0,
        copies_folder: Path | None = None,
        facts: Mapping[str, str] | None = None,
        wall_clock: Callable[[], float] = time.time,
        even_clock: Callable[[], float] | None = None,
    ) -> None:
        """dsn: what libpq takes. replica: name of this server, which no other one of the database has. lease_seconds:
        other servers take over its sessions when it was not heard of for so long. copies_folder: for copies of K/V, in
        a folder of this server's own within it, where others read them, too, if they have the folder; None: there are
        none. facts: what decides the tokens of this server beside the weights; those that are alive have the same.

        The others are as for SQLiteJournal. Raises ConfigError for a database that cannot be used.
        """
        super().__init__(
            durability, metrics=metrics, keep_seconds=keep_seconds, wall_clock=wall_clock, even_clock=even_clock
        )
        self._dsn, self._replica, self.weights = dsn, replica, weights
        self._has_copies = copies_folder is not None
        self.copies_folder = copies_folder or Path()
        digest = hashlib.sha256(replica.encode()).hexdigest()[:8]
        self.copies_prefix = f"{re.sub('[^A-Za-z0-9]', '_', replica)[:40]}-{digest}/"
        self._idle: list[PostgresConnection] = []  # for reading
        self._resident: Resident = _NoSessions()
        self._proof: Unit | None = None
        self._proof_lock = threading.Lock()
        self._number = 0  # of the last commit
        self._doubt: tuple[Sequence[Change], int] | None = None  # a commit that may have been made, and its number
        # By session: of the first commit after it was claimed, how often the writer had reconnected before, and the
        # version of its row when no server had it.
        self._claimed: dict[str, tuple[Receipt, int, str | None]] = {}
        self._free_versions: dict[str, str] = {}  # of sessions that are being read
        self._reconnects = 0
        self._files_to_remove: list[str] = []
        self._used_elsewhere: dict[str, TokenUsage] = {}
        self._asked_of: set[str] = set()  # owners whose limits were asked for since others were counted last
        self._counted_at = 0.0
        self._ahead_seconds = 0.0  # is the database's clock of this machine's
        self._db = open_database(dsn, durability, weights, replica)
        with ExitStack() as undo, _refused(place_of(dsn)):
            undo.callback(self._db.close)
            self._lease = Lease(dsn, replica, lease_seconds, on_asked=self._asked, on_lost=self._ask_for_proof)
            undo.callback(self._lease.stop)
            if facts is not None:
                check_alike(self._db, place_of(dsn), replica, facts)
            self._db.commits_for(replica, self._lease.epoch)
            self.look_at_clock(self._db)
            self._jumps = ClockJumps(self._now, even_clock)
            self._tables = PostgresTables(self._db, replica, self._lease.epoch, self._now)
            self._tables.note_cut()
            with self._reading() as reader:
                self._count_all(reader.kept())
                self._used, self._used_elsewhere = reader.usages(None)
            self._measure()
            undo.pop_all()
        self._is_tool = weights is None
        self._writer = Writer(
            self._commit,
            self._tidy,
            lambda: not self._tables.to_fold,
            metrics,
            has_room=self._has_room,
            tidies_at_the_end=not self._is_tool,
            lose=self._begin_anew,
        )
        self._lease.start()

    def look_at_clock(self, db: PostgresConnection) -> None:
        """Servers' clocks may differ by minutes: when sessions were used is kept by the database's."""
        ((there,),) = db.execute("select extract(epoch from clock_timestamp())::float8")
        ahead = there - self._wall_clock()
        self._ahead_seconds = ahead if abs(ahead) > _SAME_SECONDS else 0.0

    def _now(self) -> float:
        return self._wall_clock() + self._ahead_seconds

    def leave(self, session_id: str, used_at: float | None = None) -> None:
        super().leave(session_id, None if used_at is None else used_at + self._ahead_seconds)

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
        self._lease.stop(is_for_good=self._is_tool)
        for db in (self._db, *self._idle):
            db.close()

    # -- whose sessions they are ------------------------------------------------------------------------------------

    def serves(self, sessions: Resident) -> None:
        self._resident = sessions

    def proof(self) -> Receipt:
        """A commit shows it, where the lease may be over: it is fenced."""
        return SAFE if self._lease.is_sure else self._ask_for_proof()

    def _ask_for_proof(self) -> Receipt:
        with self._proof_lock:
            if self._proof is None or self._proof.is_safe or self._proof.is_refused:
                self._proof = Unit(changes=[(_nothing, ())])
                self._writer.record(self._proof)
                self._writer.request_sync()
            return self._proof

    def _asked(self, session_id: str) -> None:
        """Another server wants the session."""
        self._resident.let_go(session_id)

    def reply(self, record: ReplyRecord) -> None:
        """Of two servers that were sent one CreateSession, the first to commit has answered it."""
        known, unit = self._open.get(record.session_id), self._unit
        if record.kind != OPENED or known is None or unit is None or unit.refuse is None:
            super().reply(record)
        else:
            self._record((self._tables.put_first_reply, (known.number, record, unit)), of=known)

    def _claim(self, session_id: str, owner: str) -> int:
        term, epoch = self._term, self._lease.epoch
        with self._connection() as db:
            # It is on the disk with the commit that its first answer waits for: see `_await_claim`.
            ((version, state, _),) = db.execute(
                "select (select xmin::text from sessions where id = ?1), claim(?1, ?2, ?3, ?4), "
                "set_config('synchronous_commit', 'off', true)",
                (session_id, owner, self._replica, epoch),
            )
        if state == "elsewhere":
            raise SessionElsewhere
        if state == "free":
            self._free_versions[session_id] = version
        return term

    def load(self, session_id: str, owner: str) -> SessionKept | None:
        reconnects = self._reconnects
        with self._let_go_unread(session_id):
            kept = super().load(session_id, owner)
        self._await_claim(session_id, reconnects)
        if kept is not None and self._has_copies:
            with suppress(HistoryCorrupt, JournalAway), self._reading() as reader:  # without it, it is prefilled
                self._on_copy_found(session_id, reader.copy_of(session_id))
        return kept

    def claim(self, session_id: str, owner: str) -> SessionEntry | None:
        reconnects = self._reconnects
        with self._let_go_unread(session_id):
            entry = super().claim(session_id, owner)
        self._await_claim(session_id, reconnects)
        return entry

    def _await_claim(self, session_id: str, reconnects: int) -> None:
        """Answers about the session wait for a commit, which is behind its claim in the database's log.

        If the database ends before, it may not know of the claim: who reconnects looks.
        """
        version = self._free_versions.pop(session_id, None)
        with self._kept_lock:
            if (known := self._open.get(session_id)) is None:
                return
            known.saved.receipt = unit = Unit(changes=[(_nothing, ())])
            self._claimed[session_id] = unit, reconnects, version
        self._writer.record(unit)

    def _check_claims(self) -> None:
        """Are the sessions still this server's that no commit has followed yet? Raises Lost.

        One that the database does not know of is claimed again with this commit if no server has had it since: each
        claim makes another version of the row.
        """
        with self._kept_lock:
            self._claimed = {name: claim for name, claim in self._claimed.items() if not claim[0].is_safe}
            versions = {name: version for name, (_, at, version) in self._claimed.items() if at != self._reconnects}
        if versions:
            us = self._replica, self._tables.epoch
            ours = self._db.execute(
                "select id from sessions where id = any(?) and replica = ? and epoch = ?", (list(versions), *us)
            )
            for name in versions.keys() - {name for (name,) in ours}:
                again = self._db.execute(
                    "update sessions set replica = ?, epoch = ? where id = ? and replica is null and xmin::text = ? "
                    "returning id",
                    (*us, name, versions[name]),
                )
                if not list(again):
                    raise Lost("the database has ended, and does not know of its last hand-overs")

    @contextmanager
    def _let_go_unread(self, session_id: str) -> Iterator[None]:
        """Another server may read what this one cannot. It is read again here only once it is let go of: else others
        might take it while it is in memory."""
        try:
            yield
        except (HistoryCorrupt, JournalAway):
            self._free_versions.pop(session_id, None)
            with self._resident.locked():
                self._leaves_memory(session_id, self._record((self._tables.let_go, (session_id,))))
            raise

    def _begin_anew(self, settle: Callable[[], object]) -> None:
        """Other servers have taken over the sessions. On the writer's thread."""
        with self._resident.locked():
            settle()
            with self._kept_lock:
                self._term += 1
                self._open.clear()
                self._gone.clear()
                self._claimed.clear()
            self._resident.lose()
        while not self._is_stopped:
            try:
                epoch = self._lease.renew()
            except psycopg.Error as error:
                logger.warning("the journal cannot be reached: %s", error)
                epoch = None
            if epoch is not None:
                self._number, self._doubt = 0, None
                self._tables.begin_anew(epoch)
                if self._db.is_open:
                    with suppress(psycopg.Error):
                        self._db.commits_for(self._replica, epoch)
                return
            time.sleep(_LOOK_SECONDS)

    # -- what owners keep -------------------------------------------------------------------------------------------

    def used_by(self, owner: str) -> TokenUsage:
        """With what other servers' Generates took until some seconds ago."""
        self._asked_of.add(owner)
        return super().used_by(owner) + self._used_elsewhere.get(owner, TokenUsage())

    def kept_by(self, owner: str) -> Kept:
        self._asked_of.add(owner)
        return super().kept_by(owner)

    def use(self, owner: str, usage: TokenUsage) -> None:
        with self._kept_lock:
            self._used[owner] = total = super().used_by(owner) + usage
        self._record((self._tables.put_usage, (owner, total)))

    def _tidy(self) -> None:
        super()._tidy()
        if (now := time.monotonic()) >= self._counted_at + _COUNT_SECONDS:
            self._counted_at = now
            with suppress(JournalAway):
                self._count_again()

    def _count_again(self) -> None:
        """What other servers keep of the owners whose limits are asked for here: within some seconds a limit holds for
        all. Other owners' rows are not read again and again."""
        asked, self._asked_of = self._asked_of, set()
        owners = sorted(asked | {known.owner for known in list(self._open.values())})  # others change it meanwhile
        with self._connection() as db:
            self.look_at_clock(db)
        with self._reading() as reader:
            elsewhere = reader.kept_elsewhere(owners, self._lease.epoch)
            _, used = reader.usages(owners)
        self._used_elsewhere.update(used)
        with self._kept_lock:
            here: dict[str, list[int]] = {}
            for known in list(self._open.values()):
                here.setdefault(known.owner, []).append(known.length)
            for owner in owners:
                if (count := self._kept.get(owner)) is not None:
                    kept, lengths = elsewhere.get(owner, Kept()), here.get(owner, [])
                    count.sessions, count.tokens = kept.sessions + len(lengths), kept.tokens + sum(lengths)

    # -- for tools --------------------------------------------------------------------------------------------------

    @property
    def place(self) -> str:
        return place_of(self._dsn)

    def check(self) -> str:
        """As of a folder; whether pages are damaged the database says itself."""
        with self._reading() as reader:
            count = sum(not is_intact for is_intact, _ in reader.reply_rows("true", ()))
        return f"{counted(count, 'answer')} to calls damaged" if count else ""

    def back_up(self, folder: Path) -> None:
        raise ConfigError(f"the database has backups of its own, {folder} cannot be one: use pg_dump, or a standby")

    def damaged(self) -> set[str]:
        return set()  # answers that are damaged go with their sessions

    def purge(self, session_id: str, owner: str) -> None:
        """Delete a session, damaged or not. Raises ConfigError if another server has it and does not let go of it."""
        ends = time.monotonic() + _LET_GO_SECONDS
        while True:
            try:
                self._claim(session_id, owner)
                break
            except SessionElsewhere as error:
                if time.monotonic() > ends:
                    raise ConfigError(
                        f"the session {session_id} is in use at a server: close it there, or stop the server"
                    ) from error
                time.sleep(_LOOK_SECONDS)
        with self._reading() as reader:
            number = reader.find(session_id, owner)
        if number is not None:
            self._transact([(self._tables.end_session, (number,))])

    # -- the writer's thread ----------------------------------------------------------------------------------------

    def _transact(self, changes: Sequence[Change]) -> None:
        with self._db_lock:
            files = self._apply(changes)
        for file in files:
            self._remove_copy(file)
        repeated, self._tables.repeated = self._tables.repeated, []
        for unit in repeated:
            if unit.refuse is not None and unit.refuse():
                unit.settle(is_safe=False, is_lost=True)

    def _apply(self, changes: Sequence[Change]) -> Sequence[str]:
        """Returns the names of files that are no session's copy then."""
        has_begun = False
        try:
            if not self._db.is_open:
                self._reconnect()
            if self._was_made(changes):
                return self._gone_files()
            number, has_begun = self._number + 1, True
            self._db.begin(self._replica, self._tables.epoch, number)
            self._check_claims()
            for apply, arguments in changes:
                apply(*arguments)
            self._db.send_all(self._tables.tail.taken())
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
                raise Lost(str(error).splitlines()[0]) from error
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
        us = self._replica, self._tables.epoch
        self._db.begin()
        found = list(self._db.execute("select commits from replicas where name = ? and epoch = ? for update", us))
        if not found:
            raise Lost(f"another server is {self._replica}")
        ((commits,),) = found
        if commits == number - 1:
            self._db.execute("update replicas set commits = ? where name = ? and epoch = ?", (number + 1, *us))
        self._db.commit()
        logger.warning("the commit that lost its connection was %s", "made" if commits == number else "not made")
        if commits == number:
            self._made()
            return doubtful is changes
        self._number, self._doubt = number + 1, None
        self._tables.roll_back()
        return False

    def _reconnect(self) -> None:
        self._db = connect(self._dsn, self.durability, self._replica)
        self._reconnects += 1
        self.look_at_clock(self._db)
        self._tables.reconnected(self._db)
        self._db.commits_for(self._replica, self._tables.epoch)

    def _has_room(self) -> bool:
        self._transact([(self._tables.try_room, ())])
        return True

    def _measure(self) -> None:
        with suppress(JournalAway):  # the next time
            with self._reading() as reader:
                sessions, nbytes = reader.size()
            self._metrics.sessions_kept.set(sessions)
            self._metrics.journal_bytes.set(nbytes)

    # -- reading ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[PostgresReader]:
        """In a transaction, which sees one moment."""
        with self._connection() as db:
            db.begin_reading()
            yield PostgresReader(db, TailRows(db), self._replica, self._ahead_seconds)
            db.commit()

    @contextmanager
    def _connection(self) -> Iterator[PostgresConnection]:
        """One that no other thread uses meanwhile. Raises JournalAway."""
        try:
            db = self._idle.pop()
            if not db.is_alive():
                db.close()
                raise IndexError
        except IndexError:
            try:
                db = connect(self._dsn, self.durability, self._replica)
            except psycopg.OperationalError as error:
                raise JournalAway from error
        try:
            yield db
        except BaseException as error:
            db.roll_back()
            if isinstance(error, self._is_corrupt):
                raise HistoryCorrupt(0) from error
            if is_fenced(error):
                self._ask_for_proof()
                raise SessionElsewhere from error
            if isinstance(error, psycopg.Error) and passing(error) is not None:
                raise JournalAway from error
            raise
        finally:
            if db.is_open and len(self._idle) < _IDLE_CONNECTIONS and not self._is_stopped:
                self._idle.append(db)
            else:
                db.close()
