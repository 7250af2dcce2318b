"""The database of a journal: its tables, and what is looked at before a file is opened as one."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from inference_engine.errors import ConfigError
from inference_engine.session.journal_upgrade import upgrade
from inference_engine.session.sqlite_tables import SQLiteReader, SQLiteTail
from inference_engine.session.wal_scan import find_damage
from inference_engine.types import Durability

logger = logging.getLogger(__name__)

FORMAT = 6
PAGE_BYTES = 4096
LOG_PAGES = 1000  # before a checkpoint
LOG_BYTES = LOG_PAGES * PAGE_BYTES
# What reading a database raises that is damaged: also of texts that are none, and of rows that are gone.
DAMAGE = (apsw.Error, ValueError, TypeError, StopIteration)
SYNCED_AT_CHECKPOINTS = 1  # of SQLite's `synchronous`: what a commit needs is synced by `SyncedLog`
_APPLICATION = 0x4B616B65  # "Kake", in the header of the file
_SCHEMA = """
create table sessions (
    session integer primary key, id text unique not null, owner text not null, body text not null,
    length integer not null, used_at real not null, crc integer not null, answers integer not null default 0);
create index sessions_by_owner on sessions (owner, id);
create index sessions_by_use on sessions (used_at);
create table tokens (session integer, position integer, mark integer, ids blob, logprobs blob, crc integer);
create unique index tokens_by_position on tokens (session, position);
create table tail (entry integer primary key, session integer, position integer, body blob);
create table ends (session integer primary key, position integer, mark integer, ids blob, logprobs blob, crc integer);
create table appends (session integer primary key, replies blob);
create table begun (session integer primary key, generates blob);
create table replies (
    session integer, id text, owner text, kind text, request_id blob, digest blob, position integer, body text,
    crc integer, ended_at real, primary key (owner, request_id, kind, id)) without rowid;
create index replies_by_session on replies (session, kind, position);
create index replies_ended on replies (ended_at) where ended_at is not null;
create table copies (
    session integer primary key, file text unique not null, length integer not null, bytes integer not null,
    header_crc integer not null, crc integer not null);
create table facts (name text primary key, value text) without rowid;
create table usage (owner text primary key, body text, crc integer) without rowid;
"""


class SyncedLog:
    """The log of an open database, as a file of its own to be synced by.

    SQLite would sync it within a commit, where the connection can do nothing else: reads would wait for a slow disk. As
    there, the first sync is of the folder, too.
    """

    def __init__(self, path: Path, vfs: str | None) -> None:
        self.path = path
        self._vfs = vfs or ""
        self._file: apsw.VFSFile | None = None

    def sync(self) -> None:
        """Raises apsw.IOError. What was committed is safe then."""
        if self._file is None:
            # As SQLite opens a new one: so the first sync is of the folder, too.
            flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_WAL
            self._file = apsw.VFSFile(self._vfs, str(self.path.absolute()), [flags, 0])
        self._file.xSync(apsw.SQLITE_SYNC_NORMAL)

    def close(self) -> None:
        if self._file is not None:
            self._file.xClose()


def open_database(
    path: Path, durability: Durability, weights: str | None, vfs: str | None, *, was: str
) -> apsw.Connection:
    """Raises ConfigError for a file that is not this server's or is damaged, which is left as it is."""
    log = path.with_name(path.name + "-wal")
    has_log, damage = log.exists(), find_damage(log)
    if damage is not None:
        # Without a sync, a loss of power may have left any part of the log.
        text = f"the log {log} is damaged at byte {damage}, and what follows would be lost"
        if was != Durability.PROCESS.value:
            raise ConfigError(f"{text}; restore {path.parent} from a backup, or remove the log to go on without that")
        logger.error("%s: histories end earlier than clients may know", text)
    try:
        db = apsw.Connection(str(path), vfs=vfs)
    except apsw.Error as error:
        raise ConfigError(f"the journal {path} cannot be opened: {error}") from error
    try:
        # Closing a refused one must not write its log into its database, nor leave a log that was not there.
        db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, has_log)
        _prepare(db, path, weights)
        # What the server before did not sync is safe from here on, and what a crash left behind the log's end is gone.
        try:
            if db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE) != (0, 0):
                raise apsw.IOError("a checkpoint did not write all of the log")
        except apsw.FullError:  # nothing is lost, it stays in the log
            if damage is not None or was != durability.value:
                raise
        db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
        # The schema is never written here. With this alone SQLite goes on where a row that changes is not found in an
        # index, by a flipped bit in one of them; else one damaged session would end the journal, each time it is used
        # or deleted.
        _set(db, path, writable_schema=1)
    except BaseException as error:
        db.close()
        if isinstance(error, apsw.FullError):
            raise ConfigError(f"the journal {path} cannot be opened, since its disk is full: make room") from error
        if isinstance(error, DAMAGE):
            raise ConfigError(f"the journal {path} cannot be opened: {error!r}") from error
        raise
    return db


def _prepare(db: apsw.Connection, path: Path, weights: str | None) -> None:
    db.set_busy_timeout(0)
    _set(db, path, locking_mode="exclusive")
    fixed = {"page_size": PAGE_BYTES, "auto_vacuum": 0}  # when a file is made: another program's has others
    for name, value in fixed.items():
        db.execute(f"pragma {name}={value}").fetchall()
    _refuse_other(db, path, weights)
    path.chmod(0o600)
    _set(db, path, **fixed, journal_mode="wal", wal_autocheckpoint=0, cache_size=-8192)
    _set(db, path, synchronous=SYNCED_AT_CHECKPOINTS)
    # After an append that was large, the log gives its space back when it begins anew.
    _set(db, path, journal_size_limit=LOG_BYTES)
    if not next(db.execute("select count(*) from sqlite_schema"))[0]:
        with _transaction(db):
            db.execute(_SCHEMA)
            db.execute("insert into facts values ('weights', ?)", (weights,))
            db.execute(f"pragma application_id={_APPLICATION}")
            db.execute(f"pragma user_version={FORMAT}")
    if (version := next(db.execute("pragma user_version"))[0]) < FORMAT:
        with _transaction(db):
            upgrade(db, version)
            if weights is not None:  # else a tool's, which may delete them
                refuse_damaged_replies(SQLiteReader(db, SQLiteTail(db)), path.parent)
            db.execute(f"pragma user_version={FORMAT}")


def _set(db: apsw.Connection, path: Path, **settings: int | str) -> None:
    """Change settings of SQLite. Raises ConfigError if one has another value then: SQLite reports no error for that."""
    for name, value in settings.items():
        db.execute(f"pragma {name}={value}").fetchall()
        (found,) = next(db.execute(f"pragma {name}"))
        if found == value:
            continue
        if name == "journal_mode":
            raise ConfigError(
                f"state_dir {path.parent}: SQLite cannot have a write-ahead log there (it answers {found!r} to "
                f"journal_mode={value}), and without one what is sent would not be safe; name a folder on a local disk "
                "that can be written"
            )
        raise ConfigError(
            f"the journal {path} cannot be used: SQLite has {name}={found} there, and {value} is needed; name another "
            "state_dir"
        )


@contextmanager
def _transaction(db: apsw.Connection) -> Iterator[None]:
    """All or none. `with db` hides why it failed, where SQLite has rolled back by itself, as on a full disk."""
    db.execute("begin immediate")
    try:
        yield
        db.execute("commit")
    except BaseException:
        if db.in_transaction:
            db.execute("rollback")
        raise


def refuse_damaged_replies(reader: SQLiteReader, folder: Path) -> None:
    """Raise ConfigError for an answer that would not be found when its call is repeated. ValueError: see the reader."""
    for name in reader.damaged_replies().values():
        raise ConfigError(
            f"the journal in {folder} is damaged: an answer is damaged, to a call about the session {name!r}, and the "
            f"call would be done twice when it is repeated; `kakeya journal purge {folder} -- {shlex.quote(name)}` "
            f"deletes the session and the answer, or restore {folder} from a backup"
        )


def _refuse_other(db: apsw.Connection, path: Path, weights: str | None) -> None:
    """Raise ConfigError for a file that is not this server's."""
    if not next(db.execute("select count(*) from sqlite_schema"))[0]:
        return
    application, version = (next(db.execute(f"pragma {name}"))[0] for name in ("application_id", "user_version"))
    if application != _APPLICATION:
        raise ConfigError(f"{path} is not a journal of this program: name another state_dir")
    if version > FORMAT:
        raise ConfigError(
            f"{path} has format {version}, and this version knows formats up to {FORMAT}: run the newer one, or name "
            "another state_dir"
        )
    (known,) = next(db.execute("select value from facts where name = 'weights'"))
    if weights is not None and known != weights:
        raise ConfigError(
            f"{path.parent} keeps sessions of another model, with weights {known[:16]}…, and this one's are "
            f"{weights[:16]}…: each model needs a state_dir of its own"
        )
