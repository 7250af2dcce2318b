"""The tables of a journal in PostgreSQL, where they differ from those in a file.

An entry of the tail has a number within its session, one more than the one before: two servers can never both write
one, and a row that is gone leaves a hole. `sessions.entries` is the first that is not folded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace

from inference_engine.errors import HistoryCorrupt
from inference_engine.session.journal import CopyRecord, Kept, ReplyRecord, SessionEntry, SessionRecord
from inference_engine.session.journal_reader import Reader, TailRow
from inference_engine.session.journal_rows import copy_crc, usage_crc
from inference_engine.session.journal_tables import Tables
from inference_engine.session.postgres_database import PostgresConnection, TailEntry
from inference_engine.session.writer import Unit
from inference_engine.types import TokenUsage


class TailRows:
    """The tail, as a connection sees it."""

    def __init__(self, db: PostgresConnection) -> None:
        self._db = db

    def rows(self, number: int, position: int) -> list[TailRow]:
        found, expected = list[TailRow](), None
        for first, entry, *row in self._db.execute(
            "select s.entries, t.entry, t.session, t.position, t.body from tail t join sessions s using (session) "
            "where session = ? order by entry",
            (number,),
        ):
            if entry != (first if expected is None else expected):
                raise HistoryCorrupt(position)
            expected = entry + 1
            found.append((row[0], row[1], row[2]))
        return found

    def last(self, number: int) -> TailRow | None:
        rows = self._db.execute(
            "select session, position, body from tail where session = ? order by entry desc limit 1", (number,)
        )
        return next(((of, position, body) for of, position, body in rows), None)

    def sessions(self) -> list[int]:
        return [number for (number,) in self._db.execute("select distinct session from tail")]


class PostgresTail(TailRows):
    """The tail, as commits change it. The next entry of a session is known in memory from its first row here on."""

    def __init__(self, db: PostgresConnection) -> None:
        super().__init__(db)
        self._next: dict[int, int] = {}
        self._before: dict[int, int | None] = {}  # of sessions that the commit that is being made changes
        self._rows: list[TailEntry] = []  # not inserted yet

    def sessions(self) -> list[int]:
        return []  # others may have them

    def forget(self) -> None:
        """Other servers have taken over the sessions."""
        self._next, self._before, self._rows = {}, {}, []

    def has(self, number: int) -> bool:
        return self.last(number) is not None

    def count(self, number: int) -> int:
        return 0

    def _set(self, number: int, entry: int | None) -> None:
        self._before.setdefault(number, self._next.get(number))
        if entry is None:
            self._next.pop(number, None)
        else:
            self._next[number] = entry

    def begin(self, number: int) -> None:
        self._set(number, 0)

    def end(self, number: int) -> None:
        self._set(number, None)

    def add(self, number: int, position: int, body: bytes) -> None:
        if (entry := self._next.get(number)) is None:
            entry = next(
                (
                    int(entry)
                    for (entry,) in self._db.execute(
                        "select greatest(entries, (select max(entry) + 1 from tail where session = ?1)) from sessions "
                        "where session = ?1",
                        (number,),
                    )
                ),
                0,
            )
        self._set(number, entry + 1)
        self._rows.append((number, entry, position, body))

    def flush(self) -> None:
        if rows := self.taken():
            self._db.copy_tail(rows)

    def taken(self) -> list[TailEntry]:
        """The rows that were added and are not inserted, for who commits them."""
        rows, self._rows = self._rows, []
        return rows

    def clear(self, number: int) -> None:
        self._db.execute(
            "update sessions set entries = greatest(entries, (select max(entry) + 1 from tail where session = ?1)) "
            "where session = ?1",
            (number,),
        )
        self._db.execute("delete from tail where session = ?", (number,))

    def commit(self) -> None:
        self._before = {}

    def roll_back(self) -> None:
        before, self._before, self._rows = self._before, {}, []
        for number, entry in before.items():
            self._set(number, entry)
        self._before = {}


class PostgresReader(Reader):
    """replica: the server whose copies of K/V they are. ahead_seconds: the database's clock of this machine's, by which
    sessions that are read were used."""

    def __init__(self, db: PostgresConnection, tail: TailRows, replica: str, ahead_seconds: float = 0.0) -> None:
        super().__init__(db, tail)
        self._replica, self._ahead_seconds = replica, ahead_seconds

    def session(self, number: int, session_id: str) -> tuple[SessionRecord, float]:
        record, used_at = super().session(number, session_id)
        return record, used_at - self._ahead_seconds

    def page(self, owner: str, after: str, most: int, now: float) -> list[SessionEntry]:
        return self._by_this_clock(super().page(owner, after, most, now + self._ahead_seconds))

    def everyone(self, now: float) -> list[SessionEntry]:
        return self._by_this_clock(super().everyone(now + self._ahead_seconds))

    def _by_this_clock(self, entries: Sequence[SessionEntry]) -> list[SessionEntry]:
        return [replace(entry, used_at=entry.used_at - self._ahead_seconds) for entry in entries]

    @staticmethod
    def as_bytes(column: str) -> str:
        return f"convert_to({column}, 'UTF8')"

    def copies(self) -> list[CopyRecord]:
        return self._copies("c.replica = ?", self._replica)

    def copy_of(self, session_id: str) -> CopyRecord | None:
        """Whichever server has made it."""
        return next(iter(self._copies("id = ?", session_id)), None)

    def _copies(self, condition: str, value: str) -> list[CopyRecord]:
        rows = self._db.execute(
            "select session, id, owner, file, c.length, bytes, header_crc, c.crc from copies c "  # noqa: S608 - ours
            f"join sessions s using (session) where {condition} order by used_at",
            (value,),
        )
        found = [(number, CopyRecord(*fields), crc) for number, *fields, crc in rows]
        return [record for number, record, crc in found if crc == copy_crc(number, record)]

    def kept_elsewhere(self, owners: Sequence[str], epoch: int) -> dict[str, Kept]:
        """What these owners keep and this server has not in memory, as far as it is folded."""
        rows = self._db.execute(
            "select owner, count(*), sum(length) from sessions where owner = any(?) "
            "and (replica, epoch) is distinct from (?, ?) group by owner",
            (list(owners), self._replica, epoch),
        )
        return {owner: Kept(sessions, int(tokens)) for owner, sessions, tokens in rows}

    def usages(self, owners: Sequence[str] | None) -> tuple[dict[str, TokenUsage], dict[str, TokenUsage]]:
        """What the Generates of these owners took (None: of all): by this server, and by all others."""
        ours, others = dict[str, TokenUsage](), dict[str, TokenUsage]()
        of, bindings = ("", None) if owners is None else (" where owner = any(?)", (list(owners),))
        for owner, replica, body, crc in self._db.execute(f"select owner, replica, body, crc from usage{of}", bindings):  # noqa: S608 - a text of ours
            if crc == usage_crc(owner, body):
                book = ours if replica == self._replica else others
                book[owner] = book.get(owner, TokenUsage()) + TokenUsage(**json.loads(body))
        return ours, others

    def size(self) -> tuple[int, int]:
        """How many sessions there are, and the bytes of all tables and indexes."""
        ((sessions, nbytes),) = self._db.execute(
            "select (select count(*) from sessions), (select sum(pg_total_relation_size(c.oid)) from pg_class c "
            "join pg_namespace n on n.oid = c.relnamespace where n.nspname = 'kakeya' and c.relkind = 'r')"
        )
        return sessions, int(nbytes)


class PostgresTables(Tables):
    """A connection that was lost gives way to another (`reconnected`).

    replica, epoch: this server, whose sessions alone it changes: one that it has let go of may be another's.
    """

    tail: PostgresTail

    def __init__(self, db: PostgresConnection, replica: str, epoch: int, wall_clock: Callable[[], float]) -> None:
        tail = PostgresTail(db)
        super().__init__(db, PostgresReader(db, tail, replica), tail, wall_clock)
        self._replica, self.epoch = replica, epoch
        self._repeats: list[Unit] = []  # of the commit that is being made
        self.repeated: list[Unit] = []  # of commits that were made: other servers had answered their calls before

    def commit(self) -> list[str]:
        repeats, self._repeats = self._repeats, []
        self.repeated += repeats
        return super().commit()

    def roll_back(self) -> None:
        self._repeats = []
        super().roll_back()

    def reconnected(self, db: PostgresConnection) -> None:
        self._db = self.tail._db = db
        self._reader = PostgresReader(db, self.tail, self._replica)

    def begin_anew(self, epoch: int) -> None:
        """Other servers have taken over the sessions."""
        self.epoch = epoch
        self.tail.forget()
        self._repeats.clear()
        self.to_fold.clear()

    def note_cut(self) -> None:
        """When the sessions were used whose turns this server's end has cut is not recorded: they count as used now."""
        self._db.execute(
            "update sessions s set used_at = greatest(used_at, ?) where replica = ? and epoch < ? "
            "and exists (select from tail t where t.session = s.session)",
            (self._wall_clock(), self._replica, self.epoch),
        )

    def put_session(self, number: int, record: SessionRecord, parent: int | None, length: int) -> None:
        super().put_session(number, record, parent, length)
        self._db.execute(
            "update sessions set replica = ?, epoch = ? where session = ?", (self._replica, self.epoch, number)
        )

    def put_first_reply(self, number: int, record: ReplyRecord, unit: Unit) -> None:
        """If another server has answered the call meanwhile, which made this session, the session is deleted."""
        call = record.owner, record.request_id
        key = f"{record.owner} {record.request_id.hex()}"
        list(self._db.execute("select pg_advisory_xact_lock(hashtextextended('kakeya call ' || ?, 0))", (key,)))
        others = self._reader.reply_rows("owner = ? and request_id = ?", call)
        if any(other.kind == record.kind and other.session_id != record.session_id for _, other in others):
            self._delete_rows(number)
            self.tail.end(number)
            self._repeats.append(unit)
        else:
            self.put_reply(number, record)

    def put_usage(self, owner: str, usage: TokenUsage) -> None:
        """What this server's Generates took."""
        body = json.dumps(asdict(usage))
        self._db.execute(
            "insert into usage (owner, replica, body, crc) values (?, ?, ?, ?) "
            "on conflict (owner, replica) do update set body = excluded.body, crc = excluded.crc",
            (owner, self._replica, body, usage_crc(owner, body)),
        )

    def put_copy(self, record: CopyRecord) -> None:
        """Not in place of a longer one, nor of a session that another server has meanwhile."""
        may_be = self._db.execute(
            "select from sessions s left join copies c using (session) where id = ? and coalesce(c.length, 0) <= ? "
            "and (s.replica is null or (s.replica = ? and s.epoch = ?))",
            (record.session_id, record.length, self._replica, self.epoch),
        )
        if not list(may_be):
            self._gone.append(record.file)
            return
        super().put_copy(record)
        self._db.execute("update copies set replica = ? where file = ?", (self._replica, record.file))

    def leave(self, number: int, used_at: float | None) -> None:
        """It is folded before another server may have it."""
        self.rest(number, used_at)
        self.fold(number)
        self._db.execute(
            "update sessions set replica = null, epoch = null where session = ? and replica = ? and epoch = ?",
            (number, self._replica, self.epoch),
        )
        self.tail.end(number)

    def fold(self, number: int) -> None:
        rows = self._db.execute(
            "select from sessions where session = ? and replica = ? and epoch = ?", (number, self._replica, self.epoch)
        )
        if list(rows):
            super().fold(number)

    def _unused(self, before: float, most: int, resident: Collection[int]) -> list[int]:
        """Of those that no server has. They are locked: a server that wants one waits, and finds it gone."""
        rows = self._db.execute(
            "select session from sessions s where used_at < ? and not exists "
            "(select from replicas r where r.name = s.replica and r.epoch = s.epoch) "
            "order by used_at limit ? for update skip locked",
            (before, most),
        )
        return [number for (number,) in rows]

    def let_go(self, session_id: str) -> None:
        """Of a session that could not be read here."""
        self._db.execute(
            "update sessions set replica = null, epoch = null where id = ? and replica = ? and epoch = ?",
            (session_id, self._replica, self.epoch),
        )

    def try_room(self) -> None:
        """A row that says nothing: is there room for one?"""
        self._db.execute("insert into facts values ('room', null) on conflict (name) do update set value = null")
