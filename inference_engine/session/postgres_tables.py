"""The tables of a journal in PostgreSQL, where they differ from those in a file.

An entry of the tail has a number within its session, one more than the one before: two servers can never both write
one, and a row that is gone leaves a hole. `sessions.entries` is the first that is not folded.
"""

from __future__ import annotations

from collections.abc import Callable

from inference_engine.errors import HistoryCorrupt
from inference_engine.session.journal_reader import Reader, TailRow
from inference_engine.session.journal_tables import Tables
from inference_engine.session.postgres_database import PostgresConnection


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
        self._rows: list[tuple[int, int, int, bytes]] = []  # not inserted yet: session, entry, position, body

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
        rows, self._rows = self._rows, []
        if rows:
            self._db.copy_tail(rows)

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
    @staticmethod
    def as_bytes(column: str) -> str:
        return f"convert_to({column}, 'UTF8')"

    def size(self) -> tuple[int, int]:
        """How many sessions there are, and the bytes of all tables and indexes."""
        ((sessions, nbytes),) = self._db.execute(
            "select (select count(*) from sessions), (select sum(pg_total_relation_size(c.oid)) from pg_class c "
            "join pg_namespace n on n.oid = c.relnamespace where n.nspname = 'kakeya' and c.relkind = 'r')"
        )
        return sessions, int(nbytes)


class PostgresTables(Tables):
    """A connection that was lost gives way to another (`reconnected`)."""

    tail: PostgresTail

    def __init__(self, db: PostgresConnection, wall_clock: Callable[[], float]) -> None:
        tail = PostgresTail(db)
        super().__init__(db, PostgresReader(db, tail), tail, wall_clock)

    def reconnected(self, db: PostgresConnection) -> None:
        self._db = self.tail._db = db
        self._reader = PostgresReader(db, self.tail)

    def try_room(self) -> None:
        """A row that says nothing: is there room for one?"""
        self._db.execute("insert into facts values ('room', null) on conflict (name) do update set value = null")
