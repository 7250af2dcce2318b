"""The tables of a journal in SQLite: its tail is known in memory, and damage of an index hides no row.

A file is all that there is: rows are looked for by both indexes, and damaged answers are found at the start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import apsw

from inference_engine.errors import HistoryCorrupt
from inference_engine.session.journal_reader import REPLIES, Reader, TailRow, text_of
from inference_engine.session.journal_rows import DAMAGE_OF_ROWS, is_entry_of, reply_crc, session_record
from inference_engine.session.journal_tables import Tables

ReplyKey = tuple[bytes, ...]  # of a row of replies, its columns as their bytes, since they may be damaged
_REPLY_KEY = "cast(owner as blob), cast(request_id as blob), cast(kind as blob), cast(id as blob)"
# A statement for many rows is one for all of them; and threads that wait for the interpreter get it after each.
_INSERTS = {
    rows: f"insert into tail values {', '.join(['(?, ?, ?, ?)'] * rows)}"  # noqa: S608 - a text of ours
    for rows in (128, 64, 32, 16, 8, 4, 2, 1)
}
_COLUMNS = 4


class SQLiteTail:
    """Which rows of the tail are which session's, by entries that all sessions share. Known in memory."""

    def __init__(self, db: apsw.Connection) -> None:
        """Raises ValueError for damage that would shorten a session without a word: its last rows would be missing."""
        if found := [text for (text,) in db.execute("pragma integrity_check(tail)") if text != "ok"]:
            raise ValueError("; ".join(found))
        self._db = db
        self._entries: dict[int, list[int]] = {}
        # Cast, since a value of another type is damage of its session, which is refused when it is read.
        for entry, *row in db.execute(
            "select entry, cast(session as integer), cast(position as integer), cast(body as blob) from tail "
            "order by entry"
        ):
            self._entries.setdefault(_session_of(db, *row), []).append(entry)
        (last,) = next(db.execute("select max(entry) from tail"))
        self._next = self._next_committed = 1 + (last or 0)
        # Of the commit that is being made: rows as session and entry, and those that are not inserted yet.
        self._added: list[tuple[int, int]] = []
        self._deleted: dict[int, set[int]] = {}
        self._rows: list[Any] = []  # their columns, one after another

    def sessions(self) -> list[int]:
        return list(self._entries)

    def has(self, number: int) -> bool:
        return bool(self._of(number))

    def count(self, number: int) -> int:
        return len(self._entries.get(number, ()))

    def _of(self, number: int) -> list[int]:
        """A session's rows, as the commit that is being made leaves them."""
        entries = [*self._entries.get(number, ()), *(entry for one, entry in self._added if one == number)]
        deleted = self._deleted.get(number, ())
        return [entry for entry in entries if entry not in deleted]

    def rows(self, number: int, position: int) -> list[TailRow]:
        entries = self._of(number)
        # Read to the end: an error keeps what is half read as long as it lives, and that stops checkpoints.
        found = list(
            self._db.execute(
                "select session, position, body from tail "
                "where entry in (select value from json_each(?)) order by entry",
                (json.dumps(entries),),
            )
        )
        if len(found) != len(entries):
            raise HistoryCorrupt(position)
        return found

    def last(self, number: int) -> TailRow | None:
        for entry in self._of(number)[-1:]:
            rows: list[TailRow] = list(
                self._db.execute("select session, position, body from tail where entry = ?", (entry,))
            )
            if len(rows) != 1:
                raise HistoryCorrupt(0)
            return rows[0]
        return None

    def begin(self, number: int) -> None: ...

    def end(self, number: int) -> None: ...

    def add(self, number: int, position: int, body: bytes) -> None:
        self._rows += (self._next, number, position, body)
        self._added.append((number, self._next))
        self._next += 1

    def flush(self) -> None:
        values, self._rows = self._rows, []
        start = 0
        for rows, insert in _INSERTS.items():
            while len(values) - start >= rows * _COLUMNS:
                end = start + rows * _COLUMNS
                self._db.execute(insert, values[start:end])
                start = end

    def clear(self, number: int) -> None:
        if entries := self._of(number):
            self._db.execute("delete from tail where entry in (select value from json_each(?))", (json.dumps(entries),))
            self._deleted.setdefault(number, set()).update(entries)

    def commit(self) -> None:
        for number, entry in self._added:
            self._entries.setdefault(number, []).append(entry)
        for number, entries in self._deleted.items():
            self._entries[number] = [entry for entry in self._entries[number] if entry not in entries]
            if not self._entries[number]:
                del self._entries[number]
        self._next_committed = self._next
        self._added, self._deleted = [], {}

    def roll_back(self) -> None:
        self._next = self._next_committed
        self._added, self._deleted, self._rows = [], {}, []


def _session_of(db: apsw.Connection, number: int, position: int, body: bytes) -> int:
    """Whose row of the tail this is: the session whose number its checksum has, if that number is damaged in the row.

    Then that session is refused when it is read, since the row says another number.
    """
    if is_entry_of(number, position, body):
        return number
    numbers = [one for (one,) in db.execute("select session from sessions")]
    found = next((one for one in numbers if is_entry_of(one, position, body)), number)
    if found not in numbers:
        raise ValueError(f"a row of the tail is of no session: {found!r}")
    return found


class SQLiteReader(Reader):
    SESSIONS_BY_ROW = "sessions not indexed"

    def find(self, session_id: str, owner: str) -> int | None:
        """In both indexes: damage of one neither hides a session nor gives another one's."""
        (found, known) = (
            list(self._db.execute(f"select session from sessions {condition}", (session_id, owner)))  # noqa: S608 - a text of ours
            for condition in (
                "where id = ?1 and +owner = ?2",
                "indexed by sessions_by_owner where owner = ?2 and id = ?1",
            )
        )
        if found != known:
            raise HistoryCorrupt(0)
        return int(found[0][0]) if found else None

    def damaged_replies(self) -> dict[ReplyKey, str]:
        """The rows of replies that are damaged, and the ids of the sessions that their calls were about.

        Where one is not found, the call would be a new one when it is repeated. Some are to calls that name no session,
        so all are looked through. Raises ValueError for damage of the table, whose rows may be gone.
        """
        if found := [text for (text,) in self._db.execute("pragma integrity_check(replies)") if text != "ok"]:
            raise ValueError("; ".join(found))
        with suppress(ValueError):  # a text that is none
            if all(
                crc == reply_crc(number, ended_at, *values)
                for number, ended_at, crc, *values in self._db.execute(REPLIES)
            ):
                return {}
        ids = {
            number: text_of(session_id)
            for number, session_id in self._db.execute("select session, cast(id as blob) from sessions not indexed")
        }
        known = set(ids.values())
        keys = list(self._db.execute(f"select {_REPLY_KEY}, cast(session as integer) from replies"))  # noqa: S608 - ours
        return {
            key: name if (name := text_of(key[-1])) in known else ids.get(number, name)
            for *values, number in keys
            if not self._is_intact_reply(key := tuple(values))
        }

    def _is_intact_reply(self, key: ReplyKey) -> bool:
        owner, request_id, kind, session_id = key
        try:
            found = self.reply_rows(
                "owner = cast(? as text) and request_id = ? and kind = cast(? as text) and id = cast(? as text)",
                (owner, request_id, kind, session_id),
            )
        except ValueError:
            return False
        return [is_intact for is_intact, _ in found] == [True]

    def is_indexed(self, number: int) -> bool:
        """Is the session in all indexes as it is in its row?"""
        try:
            rows = list(self._db.execute("select id, owner, used_at from sessions where session = ?", (number,)))
        except ValueError:  # a text that is none, which cannot be looked for
            return False
        for session_id, owner, used_at in rows:
            for condition, values in (
                ("where id = ?", (session_id,)),
                ("indexed by sessions_by_owner where owner = ? and id = ?", (owner, session_id)),
                ("indexed by sessions_by_use where used_at = ?", (used_at,)),
            ):
                found = self._db.execute(f"select session from sessions {condition}", values)  # noqa: S608 - texts of ours
                if (number,) not in list(found):
                    return False
        return True

    def named(self, session_id: str, owner: str) -> list[int]:
        """The numbers of sessions that `everyone` shows so, by their rows alone. For tools: it reads all rows."""
        found = []
        for number, *texts in self._db.execute(
            "select session, cast(id as blob), cast(owner as blob), cast(body as blob) from sessions not indexed"
        ):
            name, of, body = map(text_of, texts)
            with suppress(*DAMAGE_OF_ROWS, LookupError):
                name = session_id if session_record(body).session_id == session_id else name
            if (name, of) == (session_id, owner):
                found.append(number)
        return found

    def last_number(self) -> int:
        """The highest number that any row says. One that says so by damage must not be of a session to come."""
        found = [0]
        for table in ("sessions", "tokens", "tail", "ends", "appends", "begun", "replies", "copies"):
            with suppress(*DAMAGE_OF_ROWS):
                last = self.value(f"select max(session) from {table}")  # noqa: S608 - of the eight above
                found += [last] if isinstance(last, int) else []
        return max(found)

    def value(self, question: str) -> Any:
        return next(self._db.execute(question))[0]


class SQLiteTables(Tables):
    _reader: SQLiteReader

    def __init__(
        self, db: apsw.Connection, reader: SQLiteReader, tail: SQLiteTail, wall_clock: Callable[[], float]
    ) -> None:
        super().__init__(db, reader, tail, wall_clock)

    def _delete_rows(self, number: int) -> None:
        is_indexed = self._reader.is_indexed(number)
        super()._delete_rows(number)
        if not is_indexed:  # else its entries would stay, and name a row that is gone
            with suppress(apsw.ConstraintError):
                self._db.execute("reindex sessions")

    def drop_replies(self, keys: Iterable[ReplyKey]) -> None:
        """Delete damaged ones, which a search by the index may not find. For tools: it reads all rows for each."""
        for key in keys:
            self._db.execute(
                f"delete from replies not indexed where ({_REPLY_KEY}) = (?, ?, ?, ?)",  # noqa: S608 - a text of ours
                key,
            )

    def try_room(self) -> None:
        """A row that says nothing: is there room for one?"""
        self._db.execute("insert or replace into facts values ('room', null)")
