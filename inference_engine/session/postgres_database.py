"""The database of a journal in PostgreSQL: its tables, its connections, and what is asked of it before it is used.

All lies in a schema of its own, `kakeya`. A row of `replicas` counts the commits of a server: each commit changes it in
its own transaction, from the number before to its own (the fence). So a commit of a server that was taken for dead
changes nothing, and who lost the connection at a COMMIT asks for the number.
"""

from __future__ import annotations

import json
import math
import re
import select
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeAlias

import psycopg
from psycopg import errors as pg
from psycopg import pq
from psycopg.abc import RV, PQGen
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import error_from_result
from psycopg.generators import copy_to, execute
from psycopg.waiting import Wait

from inference_engine.errors import ConfigError
from inference_engine.session.writer import Away, DiskFull
from inference_engine.types import Durability

FORMAT = 1
FENCED = "KK001"  # a code of our own: PostgreSQL has none that begins so
_LEAST_VERSION = 140000
_CONNECT_SECONDS = 5
_SILENT_MS = 10_000  # after which a database that is asked, or its machine, is given up
# A transaction that its server leaves open for so long is ended: it may be frozen, and holds rows that others need.
_IDLE_SECONDS = 5
_LOOK_SECONDS = 0.1  # between two looks at how long it has been silent
_PREPARING = 0x4B616B65  # of the advisory lock of who makes the tables
_SCHEMA = """
create table facts (name text primary key, value text);
create table replicas (
    name text primary key, epoch bigint not null, until timestamptz not null, commits bigint not null,
    backend integer) with (fillfactor = 20);
create table sessions (
    session bigint primary key, id text collate "C" unique not null, owner text collate "C" not null,
    body text not null, length bigint not null, used_at double precision not null, crc bigint not null,
    answers bigint not null default 0, entries integer not null default 0,
    replica text, epoch bigint);
create index sessions_by_owner on sessions (owner, id);
create index sessions_by_use on sessions (used_at);
create table tokens (
    session bigint, position bigint, mark integer, ids bytea, logprobs bytea, crc bigint,
    primary key (session, position));
create table tail (
    session bigint, entry integer, position bigint not null, body bytea not null, primary key (session, entry));
create table ends (session bigint primary key, position bigint, mark integer, ids bytea, logprobs bytea, crc bigint);
create table appends (session bigint primary key, replies bytea);
create table begun (session bigint primary key, generates bytea);
create table replies (
    session bigint, id text collate "C", owner text collate "C", kind text, request_id bytea, digest bytea,
    position bigint, body text, crc bigint, ended_at double precision, primary key (owner, request_id, kind, id));
create index replies_by_session on replies (session, kind, position);
create index replies_ended on replies (ended_at) where ended_at is not null;
create table copies (
    session bigint primary key, file text unique not null, length bigint not null, bytes bigint not null,
    header_crc bigint not null, crc bigint not null, replica text);
create table usage (owner text, replica text, body text, crc bigint, primary key (owner, replica));
create function fence(who text, mine bigint, number bigint) returns void language plpgsql as $$ begin
    update replicas set commits = number where name = who and epoch = mine and commits = number - 1;
    if not found then raise exception 'another server is %, or has this number', who using errcode = 'KK001'; end if;
end $$;
create function lock_of(who text, mine bigint) returns bigint language sql immutable as
    $$ select hashtextextended('kakeya ' || who || ' ' || mine, 0) $$;
create function register(who text, lease double precision) returns bigint language plpgsql as $$
declare known replicas; mine bigint; begin
    select * into known from replicas where name = who for update;
    if found and known.until > clock_timestamp() and not pg_try_advisory_xact_lock(lock_of(who, known.epoch)) then
        return null;
    end if;
    insert into replicas (name, epoch, until, commits)
        values (who, 1, clock_timestamp() + make_interval(secs => lease), 0)
        on conflict (name) do update set epoch = replicas.epoch + 1, until = excluded.until, commits = 0
        returning epoch into mine;
    perform pg_advisory_lock(lock_of(who, mine));
    return mine;
end $$;
create function claim(wanted text, whose text, who text, mine bigint, out state text) language plpgsql as $$
declare n bigint; r text; e bigint; q replicas; begin
    perform from replicas where name = who and epoch = mine for share;
    if not found then raise exception 'another server is %', who using errcode = 'KK001'; end if;
    select session, replica, epoch into n, r, e from sessions where id = wanted and owner = whose;
    if n is null then state := 'none'; return; end if;
    if r = who and e = mine then state := 'mine'; return; end if;
    state := 'free';
    if r is not null then
        state := 'left';
        select * into q from replicas where name = r;
        if q.epoch = e then
            if q.until > clock_timestamp() and not pg_try_advisory_xact_lock(lock_of(r, e)) then
                perform pg_notify(channel_of(r), wanted);
                state := 'elsewhere';
                return;
            end if;
            -- It may have stopped in the middle of a commit, whose lock is waited for.
            perform pg_terminate_backend(pid) from pg_stat_activity
                where pid = q.backend and application_name = 'kakeya ' || r;
            update replicas set epoch = epoch + 1, until = '-infinity' where name = r and epoch = e;
        end if;
    end if;
    update sessions set replica = who, epoch = mine
        where session = n and replica is not distinct from r and epoch is not distinct from e;
    if not found then state := 'elsewhere'; end if;
end $$;
create function channel_of(who text) returns text language sql immutable as $$ select 'kakeya_' || md5(who) $$;
"""
_COPY = b"copy tail (session, entry, position, body) from stdin (format binary)"
_COPY_HEAD = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_END = b"\xff\xff"
_PIECE_BYTES = 2**17  # of a COPY, at once: libpq keeps what is not sent
_COPY_ROW = struct.Struct(">hiqiiiqi")  # of four columns, each behind its length: session, entry, position, body


class _Silent(psycopg.OperationalError):
    """The database may be frozen, or no packet comes through."""


class _Connection(psycopg.Connection[tuple[Any, ...]]):
    """One whose database says nothing for `patience` seconds while it is asked is closed: TCP finds a machine that is
    gone, not a database that is frozen."""

    patience = math.inf

    def wait(self, gen: PQGen[RV], interval: float = _LOOK_SECONDS, timeout: float | None = None) -> RV:
        """timeout: of one who listens; then silence is usual."""
        try:
            if timeout is not None:
                return super().wait(gen, interval, timeout)
            return super().wait(_answered(gen, self.patience), interval)
        except _Silent:
            self.close()
            raise


def _answered(gen: PQGen[RV], patience: float) -> PQGen[RV]:
    """As `gen`. Raises _Silent."""
    ends = time.monotonic() + patience
    try:
        waits_for = next(gen)
        while True:
            if ready := (yield waits_for):
                ends = time.monotonic() + patience
            elif time.monotonic() > ends:
                raise _Silent(f"the database says nothing for {patience:g} seconds")
            waits_for = gen.send(ready)
    except StopIteration as done:
        result: RV = done.value
        return result


Connection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"
TailEntry = tuple[int, int, int, bytes]  # session, entry, position, body


@lru_cache(maxsize=256)
def _numbered(statement: str) -> bytes:
    """With `$1` where a statement for either database has `?` or `?1`."""
    count = 0

    def place(found: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return f"${found[1] or count}"

    return re.sub(r"\?(\d*)", place, statement).encode()


class PostgresConnection:
    """A connection. In a transaction, statements whose answer is not read are sent without waiting for it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pipeline: Any = None
        self._unsent: list[bytes] = []  # what the transaction begins with: sent together with what follows
        self._is_copying = False  # all of the transaction is sent but the end of its last rows, which commits it

    @property
    def is_open(self) -> bool:
        return not self._connection.closed

    def execute(self, statement: str, bindings: Any = None, /) -> Iterator[tuple[Any, ...]]:
        if self._unsent:
            self._pipeline = self._connection.pipeline()
            self._pipeline.__enter__()
            unsent, self._unsent = self._unsent, []
            for one in unsent:
                self._connection.execute(one)
        cursor = psycopg.RawCursor(self._connection)
        cursor.execute(_numbered(statement), bindings, prepare=bindings is not None, binary=True)
        return _rows(cursor)

    def begin(self, *fence: Any) -> None:
        """fence: the arguments of the database's function, if the transaction begins with it."""
        self._unsent = [b"begin"]
        if fence:
            escaped = self._escaped(fence[0])
            self._unsent.append(b"select fence(%b, %d, %d)" % (escaped, *fence[1:]))

    def _escaped(self, text: str) -> bytes:
        return bytes(pq.Escaping(self._connection.pgconn).escape_literal(text.encode()))

    def begin_reading(self) -> None:
        """Of one moment, with its answers read one by one."""
        self._connection.execute("begin isolation level repeatable read read only")

    def wait(self) -> None:
        """Until all was answered that was sent. Raises the first error of it."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.__exit__(None, None, None)

    def send_all(self, rows: Sequence[TailEntry]) -> None:
        """All of the transaction, with the last rows of its tail; `commit` follows. Raises the first error of it.

        A step has nothing but rows: then what it begins with, the rows and the COMMIT are one message.
        """
        self.wait()
        unsent, self._unsent = self._unsent, []
        if rows:
            self._begin_copy(b"; ".join((*unsent, _COPY, b"commit")), rows)
            self._is_copying = True
        elif unsent:
            self._say(b"; ".join(unsent))

    def commit(self) -> None:
        self.wait()
        status = (self._end_copy() if self._is_copying else self._say(b"commit"))[-1].command_status
        if status != b"COMMIT":
            raise pg.InFailedSqlTransaction(f"the transaction was ended by {status!r}")

    def roll_back(self) -> None:
        """Raises nothing: a connection that cannot even do that is closed."""
        self._unsent, self._is_copying = [], False
        try:
            try:
                self.wait()
            except psycopg.Error:  # why it is rolled back
                pass
            self._connection.execute("rollback")
        except psycopg.Error:
            self._connection.close()

    def copy_tail(self, rows: Sequence[TailEntry]) -> None:
        """Rows of the tail, as their columns: one message, whose cost for the client is that of one row."""
        in_transaction = self._pipeline is not None or bool(self._unsent)
        self.wait()
        unsent, self._unsent = self._unsent, []
        self._begin_copy(b"; ".join((*unsent, _COPY)), rows)
        self._end_copy()
        if in_transaction:
            self._pipeline = self._connection.pipeline()
            self._pipeline.__enter__()

    def _say(self, statements: bytes) -> list[pq.abc.PGresult]:
        """Without values, in one message. Raises psycopg.Error."""
        pgconn = self._connection.pgconn
        pgconn.send_query(statements)
        return _checked(self._connection.wait(execute(pgconn)))

    def _begin_copy(self, statements: bytes, rows: Sequence[TailEntry]) -> None:
        """statements: with the COPY in its place. What follows it is done once the copy ends."""
        self._say(statements)
        data = [_COPY_HEAD]
        for number, entry, position, body in rows:
            data += (_COPY_ROW.pack(4, 8, number, 4, entry, 8, position, len(body)), body)
        data.append(_COPY_END)
        whole = b"".join(data)
        for start in range(0, len(whole), _PIECE_BYTES):
            self._connection.wait(
                copy_to(self._connection.pgconn, whole[start : start + _PIECE_BYTES], flush=start > 0)
            )

    def _end_copy(self) -> list[pq.abc.PGresult]:
        self._is_copying = False
        return _checked(self._connection.wait(_copy_ended(self._connection.pgconn)))

    def commits_for(self, replica: str, epoch: int) -> None:
        """This is the connection of a server by which it commits: see `claim`."""
        self.execute("update replicas set backend = pg_backend_pid() where name = ? and epoch = ?", (replica, epoch))

    def is_alive(self) -> bool:
        """Was it not lost since it was used last?"""
        looked = select.poll()
        looked.register(self._connection, select.POLLIN)
        if not looked.poll(0):
            return True  # its end would be there to be read; of a machine that is gone, the next statement tells
        try:
            self._connection.execute("")
        except psycopg.Error:
            return False
        return True

    def listen(self, replica: str) -> None:
        ((channel,),) = self.execute("select channel_of(?)", (replica,))
        self._connection.execute(f"listen {channel}")

    def notified(self, seconds: float) -> Iterator[str]:
        """What others notify of within that time."""
        for notice in self._connection.notifies(timeout=seconds):
            yield notice.payload

    def release(self, replica: str, epoch: int, *, is_for_good: bool) -> None:
        """A server stops. Others wait neither for its lease nor for its lock, which would end a moment later."""
        with suppress(psycopg.Error):
            change = b"delete from replicas" if is_for_good else b"update replicas set until = '-infinity'"
            self._connection.execute(change + b" where name = %s and epoch = %s", (replica, epoch))
            self._connection.execute("select pg_advisory_unlock_all()")

    def close(self) -> None:
        self._connection.close()


def _checked(results: list[pq.abc.PGresult]) -> list[pq.abc.PGresult]:
    if results[-1].status in (pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.BAD_RESPONSE):
        raise error_from_result(results[-1], encoding="utf-8")
    return results


def _copy_ended(pgconn: pq.abc.PGconn) -> PQGen[list[pq.abc.PGresult]]:
    """As psycopg's `copy_end`, of a message with more statements. Returns the results of all."""
    while pgconn.put_copy_end() == 0:
        yield Wait.W
    results: list[pq.abc.PGresult] = yield from execute(pgconn)
    return results


def _rows(cursor: psycopg.RawCursor[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    yield from cursor.fetchall()


def connect(dsn: str, durability: Durability, name: str) -> PostgresConnection:
    """Raises psycopg.Error, as each of its statements after `tcp_user_timeout` without a word from the database."""
    given = conninfo_to_dict(dsn)
    defaults: dict[str, str | int] = {
        "connect_timeout": _CONNECT_SECONDS,
        "tcp_user_timeout": _SILENT_MS,
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
    }
    try:
        silent_ms = max(0, int(given.get("tcp_user_timeout") or 0)) or _SILENT_MS
    except ValueError as error:
        raise psycopg.OperationalError(f"tcp_user_timeout takes milliseconds: {error}") from error
    settings = {key: value for key, value in defaults.items() if key not in given}
    settings["application_name"] = f"kakeya {name}"  # by which `claim` knows it
    connection = _Connection.connect(make_conninfo(dsn, **settings), autocommit=True)
    connection.patience = silent_ms / 1000
    # A lock that a frozen one holds is waited for again, so that none who wait for it are left behind.
    connection.execute(
        f"set search_path = kakeya; set idle_in_transaction_session_timeout = '{_IDLE_SECONDS}s'; "
        f"set lock_timeout = '{silent_ms // 2}ms'"
    )
    if durability is Durability.PROCESS:  # the database may write it later
        connection.execute("set synchronous_commit = off")
    return PostgresConnection(connection)


def passing(error: BaseException) -> Exception | None:
    """What a writer waits for; None: the error is final."""
    if isinstance(error, pg.DiskFull):
        return DiskFull(str(error))
    if isinstance(error, psycopg.OperationalError | pg.ReadOnlySqlTransaction | pg.InFailedSqlTransaction):
        return Away((str(error).strip() or type(error).__name__).splitlines()[0])
    return None


def is_fenced(error: BaseException) -> bool:
    return isinstance(error, psycopg.Error) and error.sqlstate == FENCED


def place_of(dsn: str) -> str:
    """Where the database is, without what others may not see."""
    known = conninfo_to_dict(dsn)
    return "postgres:" + " ".join(f"{key}={known[key]}" for key in ("host", "port", "dbname", "user") if known.get(key))


def parsed(place: str) -> str:
    """What libpq takes, of what stands behind `postgres:`: an URL's rest, or words such as host=… dbname=….

    Raises ConfigError.
    """
    dsn = f"postgres:{place}" if place.startswith("//") else place
    try:
        conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as error:
        raise ConfigError(
            "journal: postgres: takes postgres://USER@HOST/DATABASE, or postgres:host=… dbname=…; libpq says: "
            f"{str(error).strip()}"
        ) from error
    return dsn


def open_database(dsn: str, durability: Durability, weights: str | None, name: str) -> PostgresConnection:
    """A connection to a database that is this model's, with its tables. weights: None: whichever it is, for tools.

    Raises ConfigError for one that cannot be used, which is left as it is.
    """
    place = place_of(dsn)
    try:
        db = connect(dsn, durability, name)
    except psycopg.Error as error:
        raise ConfigError(f"the journal {place} cannot be reached: {str(error).strip()}") from error
    try:
        _refuse_settings(db, place, durability)
        _prepare(db, place, weights)
    except psycopg.Error as error:
        db.close()
        raise ConfigError(f"the journal {place} cannot be used: {str(error).strip()}") from error
    except BaseException:
        db.close()
        raise
    return db


def check_alike(db: PostgresConnection, place: str, replica: str, facts: Mapping[str, str]) -> None:
    """Record what decides the tokens of this server, which is registered.

    Raises ConfigError, and nothing is recorded, if another one that is alive decides otherwise: a session that goes on
    there would be refused, or get other tokens.
    """
    db.begin()
    try:
        list(db.execute("select pg_advisory_xact_lock(?)", (_PREPARING,)))
        db.execute(
            "delete from facts where starts_with(name, 'server ') "
            "and substr(name, 8) not in (select name from replicas)"
        )
        db.execute(
            "insert into facts values (?, ?) on conflict (name) do update set value = excluded.value",
            (f"server {replica}", json.dumps(dict(facts))),
        )
        for other, value in db.execute(
            "select r.name, f.value from replicas r join facts f on f.name = 'server ' || r.name where r.name <> ? and "
            "r.until > clock_timestamp() and not pg_try_advisory_xact_lock(lock_of(r.name, r.epoch))",
            (replica,),
        ):
            theirs = json.loads(value)
            if unlike := [name for name, own in facts.items() if theirs.get(name, own) != own]:
                said = ", ".join(f"{name} {theirs[name]!r} there and {facts[name]!r} here" for name in unlike)
                raise ConfigError(
                    f"the journal {place}: the server {other!r} is alive and has {said}, which decides tokens, and "
                    "sessions go from one to the other: start both alike, stop that one first, or name another database"
                )
        db.commit()
    except BaseException:
        db.roll_back()
        raise


def _refuse_settings(db: PostgresConnection, place: str, durability: Durability) -> None:
    connection = db._connection
    if connection.info.server_version < _LEAST_VERSION:
        raise ConfigError(
            f"the journal {place}: PostgreSQL {connection.info.server_version // 10000} is too old: use 14"
        )
    found = dict(db.execute("select name, setting from pg_settings"))
    ((pid, is_standby),) = db.execute("select pg_backend_pid(), pg_is_in_recovery()")
    if pid != connection.info.backend_pid:
        raise ConfigError(
            f"the journal {place} is reached through a pooler, which keeps no locks: name the database itself"
        )
    if is_standby or found["transaction_read_only"] == "on":
        raise ConfigError(f"the journal {place} is a standby or read-only: name the primary, as with a host that moves")
    if found["server_encoding"] != "UTF8":
        raise ConfigError(
            f"the journal {place} has the encoding {found['server_encoding']}: make a database with encoding 'UTF8'"
        )
    if durability is Durability.POWER:
        for name in ("fsync", "full_page_writes", "synchronous_commit"):
            if found[name] == "off":
                raise ConfigError(
                    f"the journal {place} has {name}=off, so that a loss of power loses what was sent: turn it on, or "
                    "choose durability=process"
                )


def _prepare(db: PostgresConnection, place: str, weights: str | None) -> None:
    db.begin()
    try:
        list(db.execute("select pg_advisory_xact_lock(?)", (_PREPARING,)))
        ((is_there,),) = db.execute("select to_regclass('kakeya.facts') is not null")
        if not is_there:
            if weights is None:
                raise ConfigError(f"{place} has no journal: name the database of a server")
            db.wait()
            db._connection.execute("create schema if not exists kakeya")
            db._connection.execute(_SCHEMA)
            db.execute("insert into facts values ('format', ?), ('weights', ?)", (str(FORMAT), weights))
        facts = dict(db.execute("select name, value from facts"))
        if int(facts["format"]) != FORMAT:
            raise ConfigError(
                f"the journal {place} has format {facts['format']}, and this version knows {FORMAT}: run the version "
                "that made it, or name another database"
            )
        if weights is not None and (known := facts["weights"]) != weights:
            raise ConfigError(
                f"{place} keeps sessions of another model, with weights {known[:16]}…, and this one's are "
                f"{weights[:16]}…: each model needs a database of its own"
            )
        db.commit()
    except BaseException:
        db.roll_back()
        raise
