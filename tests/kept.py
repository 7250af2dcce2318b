"""Engines that keep sessions in a folder or a database, and what a kill leaves of them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from inference_engine.engine import Engine
from inference_engine.errors import JournalAway
from inference_engine.metrics import EngineMetrics
from inference_engine.session.journal import ReplyRecord, SessionEntry, SessionKept, TokensRecord
from inference_engine.session.journal_folder import LOCK, RESERVE
from inference_engine.session.kept_journal import KeptJournal
from inference_engine.session.sqlite_journal import SQLiteJournal
from inference_engine.session.writer import Away, Change, DiskFull, Lost
from inference_engine.types import Durability
from tests.load.scripted import scripted_engine

if TYPE_CHECKING:
    from tests.session.postgres_server import PostgresServer

WEIGHTS = "a" * 64


def sqlite_journal(
    folder: Path, durability: Durability = Durability.PROCESS, *, weights: str = WEIGHTS, **settings: Any
) -> SQLiteJournal:
    folder.mkdir(mode=0o700, exist_ok=True)
    metrics = settings.pop("metrics", None) or EngineMetrics()  # making them takes longer than to open the journal
    return SQLiteJournal(folder, durability, weights=weights, metrics=metrics, **settings)


class Database:
    """A database of a server that tests started, and those that a kill leaves of it."""

    def __init__(self, server: PostgresServer, dsn: str = "") -> None:
        self.server = server
        self.dsn = dsn or server.database()
        self.name = self.dsn.rpartition("=")[2]
        self.is_cut = False

    def say(self, statement: str) -> list[tuple[object, ...]]:
        return self.server.say(statement, self.dsn)

    def cut(self, *, is_cut: bool) -> None:
        """End its connections, and let none begin; or let them."""
        self.is_cut = is_cut
        self.server.say(f"alter database {self.name} allow_connections {str(not is_cut).lower()}")
        if is_cut:
            self.server.cut(self.dsn)

    @property
    def killed(self) -> Database:
        """All that is committed now, in a database of its own: the journal is out of reach for a moment."""
        self.cut(is_cut=True)
        try:
            return Database(self.server, self.server.database(template=self.dsn))
        finally:
            self.cut(is_cut=False)


Place = Path | Database  # what sessions are kept in


def opened(place: Place, durability: Durability = Durability.PROCESS, **settings: Any) -> KeptJournal:
    """Its journal. vfs: of SQLite."""
    if isinstance(place, Path):
        return sqlite_journal(place, durability, **settings)
    from inference_engine.session.postgres_journal import PostgresJournal

    settings.pop("vfs", None)
    given: dict[str, Any] = {"weights": WEIGHTS, "metrics": EngineMetrics(), "replica": "server"} | settings
    return PostgresJournal(place.dsn, Durability.PROCESS, **given)


def settings_of(place: Place) -> dict[str, str]:
    """Of an engine that is given the journal: it looks only at whether there is a place."""
    return {"state_dir": str(place) if isinstance(place, Path) else place.name}


@contextmanager
def keeping(place: Place, *, make: Any = scripted_engine, **settings: Any) -> Iterator[Engine]:
    """An engine that keeps its sessions in `place`, stopped in order at the end."""
    metrics = EngineMetrics()
    journal = opened(place, metrics=metrics)
    with make(journal=journal, metrics=metrics, **settings_of(place), **settings) as engine:
        yield engine


class Gated(SQLiteJournal):
    """A journal whose disk can be stopped, filled and broken.

    gate: while it is closed the log is not synced, as on a slow disk; before: nothing is written. is_full_disk: the
    disk has no more space than the journal's own reserve. raising: why nothing can be written.
    """

    def __init__(self, folder: Path, metrics: EngineMetrics) -> None:
        self.gate, self.before = threading.Event(), threading.Event()
        self.gate.set()
        self.before.set()
        self.is_syncing = threading.Event()
        self.is_full_disk = False
        self.raising: BaseException | None = None
        self.folder = folder
        super().__init__(folder, Durability.PROCESS, weights=WEIGHTS, metrics=metrics)

    def _sync(self) -> None:
        if not self.gate.is_set():
            self.is_syncing.set()
            self.gate.wait()

    def _transact(self, changes: Sequence[Change]) -> None:
        self.before.wait()
        if self.raising is not None:
            raise self.raising
        if self.is_full_disk and (self.folder / RESERVE).exists():
            raise DiskFull
        super()._transact(changes)

    def _has_room(self) -> bool:
        return super()._has_room() if not self.is_full_disk else False


class Remote(SQLiteJournal):
    """A journal that is reached over a connection, which a test cuts: now, at the next commit, or at its answer."""

    def __init__(self, folder: Path, metrics: EngineMetrics) -> None:
        self.is_cut = self.cuts_at_commit = self.cuts_at_answer = False
        self.is_taken = False  # other servers have the sessions: as in a database
        self._in_doubt: Sequence[Change] | None = None
        super().__init__(folder, Durability.PROCESS, weights=WEIGHTS, metrics=metrics)

    def _commit(self, changes: Sequence[Change]) -> None:
        if self.is_taken:
            self.is_taken = False
            raise Lost
        self.is_cut |= self.cuts_at_commit
        self.cuts_at_commit = False
        if self.is_cut:
            raise Away("no connection")
        if changes is not self._in_doubt:  # as the number of a commit says to one who asks for it
            super()._commit(changes)
        self._in_doubt = None
        if self.cuts_at_answer:
            self.is_cut, self.cuts_at_answer, self._in_doubt = True, False, changes
            raise Away("the connection ended before the answer")

    def _tidy(self) -> None:
        if self.is_cut:
            raise Away("no connection")
        super()._tidy()

    def load(self, session_id: str, owner: str) -> SessionKept | None:
        self._require_connection()
        return super().load(session_id, owner)

    def look(
        self, session_id: str, owner: str, *, first: int = 0, most: int = 0
    ) -> tuple[SessionEntry, Sequence[TokensRecord]] | None:
        self._require_connection()
        return super().look(session_id, owner, first=first, most=most)

    def replies_to(self, owner: str, request_id: bytes) -> Sequence[ReplyRecord]:
        self._require_connection()
        return super().replies_to(owner, request_id)

    def page(self, owner: str, *, after: str, most: int) -> Sequence[SessionEntry]:
        self._require_connection()
        return super().page(owner, after=after, most=most)

    def _require_connection(self) -> None:
        if self.is_cut:
            raise JournalAway


def _remote_database(place: Database, metrics: EngineMetrics) -> Any:
    """A journal in a database, which a test cuts likewise."""
    from psycopg import OperationalError

    from inference_engine.session.postgres_journal import PostgresJournal

    class RemoteDatabase(PostgresJournal):
        cuts_at_commit = cuts_at_answer = False

        @property
        def is_cut(self) -> bool:
            return place.is_cut

        @is_cut.setter
        def is_cut(self, value: bool) -> None:
            place.cut(is_cut=value)

        def _transact(self, changes: Sequence[Change]) -> None:
            if self.cuts_at_commit:
                self.cuts_at_commit, self.is_cut = False, True
            super()._transact(changes)

        def _made(self) -> None:
            if self.cuts_at_answer:
                self.cuts_at_answer, self.is_cut = False, True
                raise OperationalError("the connection ended before the answer")
            super()._made()

    return RemoteDatabase(place.dsn, Durability.PROCESS, weights=WEIGHTS, metrics=metrics, replica="server")


@contextmanager
def remote(place: Place) -> Iterator[tuple[Engine, Any]]:
    metrics = EngineMetrics()
    journal: Any = Remote(place, metrics) if isinstance(place, Path) else _remote_database(place, metrics)
    settings: dict[str, Any] = dict(settings_of(place))
    with scripted_engine(journal=journal, metrics=metrics, **settings) as engine:
        yield engine, journal
    if isinstance(place, Database):
        place.cut(is_cut=False)


@contextmanager
def gated(folder: Path) -> Iterator[tuple[Engine, Gated]]:
    journal = Gated(folder, metrics := EngineMetrics())
    with scripted_engine(journal=journal, metrics=metrics, state_dir=str(folder)) as engine:
        try:
            yield engine, journal
        finally:
            journal.raising, journal.is_full_disk = None, False
            journal.gate.set()
            journal.before.set()


def saved(engine: Engine) -> None:
    """Returns once everything is safe that was done until now."""
    from threading import Event

    done = Event()
    engine.journal.on_saved(done.set)
    assert done.wait(30), "the journal does not commit"


PlaceT = TypeVar("PlaceT", bound=Place)


def after_a_kill(place: PlaceT) -> PlaceT:
    """What a process that is killed now would leave, in a place of its own."""
    found: Any = place.killed if isinstance(place, Database) else _files_after_a_kill(place)
    return cast("PlaceT", found)


def _files_after_a_kill(folder: Path) -> Path:
    found = folder.with_name(f"{folder.name}-killed")
    shutil.rmtree(found, ignore_errors=True)
    found.mkdir(mode=0o700)
    shutil.copytree(
        folder, found, dirs_exist_ok=True, ignore=shutil.ignore_patterns(LOCK, RESERVE), copy_function=_copy_if_there
    )
    return found


def _copy_if_there(file: str, to: str) -> None:
    """The process goes on meanwhile: a file that it removes before it is copied was gone when it was killed."""
    with suppress(FileNotFoundError):
        shutil.copy2(file, to)
