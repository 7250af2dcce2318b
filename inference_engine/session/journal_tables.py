"""The tables of a journal, as its commits change them.

Each method is one change, within a transaction that the journal begins and ends. What a transaction adds to the tail
and takes from it is known in memory once it is committed (`Tail`).
"""

from __future__ import annotations

import json
import logging
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import apsw

from inference_engine.errors import HistoryCorrupt
from inference_engine.session.journal import APPENDED, CopyRecord, GenerateRecord, ReplyRecord, SessionRecord
from inference_engine.session.journal_reader import Reader
from inference_engine.session.journal_rows import (
    appends_crc,
    copy_crc,
    crc_of,
    damage_is_refused,
    most_recent,
    packed,
    packed_append,
    reply_crc,
    session_crc,
    tokens_crc,
    unpacked_appends,
)
from inference_engine.session.replies import KEEP_SECONDS

logger = logging.getLogger(__name__)

MOST_GENERATES = 8  # of a session, that a client may continue

_EXPIRE_SESSIONS = 16
_FOLD_SESSIONS, _FOLD_ROWS = 16, 2048  # in one commit, about
# A statement for many rows is one for all of them; and threads that wait for the interpreter get it after each.
_INSERTS = {
    rows: f"insert into tail values {', '.join(['(?, ?, ?, ?, ?, ?, ?)'] * rows)}"  # noqa: S608 - a text of ours
    for rows in (128, 64, 32, 16, 8, 4, 2, 1)
}
_COLUMNS = 7


class Tail:
    """Which rows of the tail are which session's. Changed by a commit, all of it or nothing."""

    def __init__(self, db: apsw.Connection) -> None:
        """Raises ValueError for damage that would shorten a session without a word: its last rows would be missing."""
        if found := [text for (text,) in db.execute("pragma integrity_check(tail)") if text != "ok"]:
            raise ValueError("; ".join(found))
        self._rows: dict[int, list[int]] = {}
        # Cast, since a value of another type is damage of its session, which is refused when it is read.
        for entry, *row in db.execute(
            "select entry, cast(session as integer), cast(position as integer), cast(mark as integer), "
            "cast(ids as blob), cast(logprobs as blob), cast(crc as integer) from tail order by entry"
        ):
            self._rows.setdefault(_session_of(db, *row), []).append(entry)
        (last,) = next(db.execute("select max(entry) from tail"))
        self._next = self._next_committed = 1 + (last or 0)
        # Of the commit that is being made: rows as session and entry.
        self._added: list[tuple[int, int]] = []
        self._deleted: dict[int, set[int]] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    def sessions(self) -> list[int]:
        return list(self._rows)

    def committed(self, number: int) -> Sequence[int]:
        return self._rows.get(number, ())

    def of(self, number: int) -> list[int]:
        """A session's rows, as the commit that is being made leaves them."""
        entries = [*self.committed(number), *(entry for one, entry in self._added if one == number)]
        deleted = self._deleted.get(number, ())
        return [entry for entry in entries if entry not in deleted]

    def add(self, number: int) -> int:
        entry = self._next
        self._next += 1
        self._added.append((number, entry))
        return entry

    def delete(self, number: int, entries: Iterable[int]) -> None:
        self._deleted.setdefault(number, set()).update(entries)

    def commit(self) -> None:
        for number, entry in self._added:
            self._rows.setdefault(number, []).append(entry)
        for number, entries in self._deleted.items():
            self._rows[number] = [entry for entry in self._rows[number] if entry not in entries]
            if not self._rows[number]:
                del self._rows[number]
        self._next_committed = self._next
        self._added, self._deleted = [], {}

    def roll_back(self) -> None:
        self._next = self._next_committed
        self._added, self._deleted = [], {}


def _session_of(
    db: apsw.Connection, number: int, position: int, mark: int, ids: bytes, logprobs: bytes | None, crc: int
) -> int:
    """Whose row of the tail this is: the session whose number its checksum has, if that number is damaged in the row.

    Then that session is refused when it is read, since the row says another number.
    """

    def is_of(one: int) -> bool:
        try:
            return crc == tokens_crc(position, mark, ids, logprobs, one)
        except (TypeError, struct.error):  # a value of a type that no row has
            return False

    if is_of(number):
        return number
    numbers = [one for (one,) in db.execute("select session from sessions")]
    found = next(filter(is_of, numbers), number)
    if found not in numbers:
        raise ValueError(f"a row of the tail is of no session: {found!r}")
    return found


class Tables:
    """Called with the journal's lock held. number: of a session.

    to_fold: sessions whose turn has ended. wall_clock: seconds since 1970.
    """

    def __init__(self, db: apsw.Connection, reader: Reader, wall_clock: Callable[[], float]) -> None:
        self._db = db
        self._reader = reader
        self._wall_clock = wall_clock
        self.tail = Tail(db)
        self.to_fold: deque[int] = deque(self.tail.sessions())
        self._gone: list[str] = []
        self._rows: list[Any] = []  # of the tail, that are not inserted yet: their columns, one after another

    def next_to_fold(self) -> list[int]:
        """Some of the sessions to fold. They are not asked for again."""
        numbers, rows = dict[int, None](), 0
        while self.to_fold and len(numbers) < _FOLD_SESSIONS and rows < _FOLD_ROWS:
            number = self.to_fold.popleft()
            numbers[number] = None
            rows += len(self.tail.committed(number))
        return list(numbers)

    def commit(self) -> list[str]:
        """The transaction is committed. Files of copies that have no row any more."""
        self.tail.commit()
        gone, self._gone = self._gone, []
        return gone

    def roll_back(self) -> None:
        self.tail.roll_back()
        self._gone, self._rows = [], []

    def put_session(self, number: int, record: SessionRecord, parent: int | None, length: int) -> None:
        """length: of its history, all of which is its parent's: a fork of damaged rows lacks them, and is refused."""
        if parent is not None:
            self.fold(parent)
            self._db.execute(
                "insert into tokens select ?, position, mark, ids, logprobs, crc from tokens where session = ? "
                "order by position",
                (number, parent),
            )
            for position, mark, ids, logprobs, crc in self._reader.end_rows(parent):
                if crc == tokens_crc(position, mark, ids, logprobs, parent):
                    self._put_end(number, position, mark, ids, logprobs)
        body = json.dumps({**asdict(record), "eos_token_ids": list(record.eos_token_ids)})
        self._db.execute(
            "insert into sessions values (?, ?, ?, ?, ?, ?, ?)",
            (
                number,
                record.session_id,
                record.owner,
                body,
                length,
                self._wall_clock(),
                session_crc(number, record.owner, body, length),
            ),
        )

    def put_tokens(
        self, number: int, position: int, mark: int, ids: bytes, logprobs: bytes | None, began: GenerateRecord | None
    ) -> None:
        """Followed by `put_rows`, in the same transaction."""
        crc = tokens_crc(position, mark, ids, logprobs, number)
        self._rows += (self.tail.add(number), number, position, mark, ids, logprobs, crc)
        if began is not None:
            seed = began.seed.to_bytes(8, "little")
            self._db.execute(
                "insert or replace into generates values (?, ?, ?, ?, ?, ?)",
                (
                    number,
                    began.position,
                    began.request_id,
                    began.digest,
                    seed,
                    crc_of(struct.pack("<QQ", number, began.position) + began.request_id + began.digest + seed),
                ),
            )

    def put_rows(self) -> None:
        """Insert the rows of the tail that were put since the last time."""
        values, self._rows = self._rows, []
        start = 0
        for rows, insert in _INSERTS.items():
            while len(values) - start >= rows * _COLUMNS:
                end = start + rows * _COLUMNS
                self._db.execute(insert, values[start:end])
                start = end

    def put_reply(self, number: int | None, record: ReplyRecord) -> None:
        # The reply to a close comes after it.
        ended_at = self._wall_clock() if number is None else None
        self._db.execute(
            "insert or replace into replies values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                number,
                record.session_id,
                record.owner,
                record.kind,
                record.request_id,
                record.digest,
                record.position,
                record.body,
                reply_crc(record),
                ended_at,
            ),
        )

    def rest(self, number: int) -> None:
        self.to_fold.append(number)
        self._db.execute("update sessions set used_at = ? where session = ?", (self._wall_clock(), number))

    def end_session(self, number: int) -> None:
        self.put_rows()
        with suppress(HistoryCorrupt), damage_is_refused(0):
            for session_id, owner in list(
                self._db.execute("select id, owner from sessions where session = ?", (number,))
            ):
                for record in unpacked_appends(session_id, owner, self._reader.packed_appends(number)):
                    self.put_reply(number, record)
        is_indexed = self._reader.is_indexed(number)
        for table in ("sessions", "tokens", "ends", "generates", "appends"):
            self._db.execute(f"delete from {table} where session = ?", (number,))  # noqa: S608 - of the five above
        if not is_indexed:  # else its entries would stay, and name a row that is gone
            with suppress(apsw.ConstraintError):
                self._db.execute("reindex sessions")
        self._delete_tail(number, self.tail.of(number))
        self._forget_copy(number)
        self._db.execute("update replies set ended_at = ? where session = ?", (self._wall_clock(), number))

    def _delete_tail(self, number: int, entries: Sequence[int]) -> None:
        if not entries:
            return
        self._db.execute(
            "delete from tail where entry in (select value from json_each(?))", (json.dumps(list(entries)),)
        )
        self.tail.delete(number, entries)

    def fold(self, number: int) -> None:
        """Move a session's rows from the tail into `tokens`. Damaged ones stay, for `load` to refuse."""
        self.put_rows()
        entries = self.tail.of(number)
        try:
            with damage_is_refused(0):
                found = list(self._db.execute("select owner, body, length from sessions where session = ?", (number,)))
                if not entries or not found:
                    return
                ((owner, body, length),) = found
                records = self._reader.end(number, length)
                records += self._reader.tail(number, entries, length)
        except HistoryCorrupt as damage:
            logger.error("records of a session are damaged, and kept as they are: %s", damage)
            return
        self._db.execute("delete from ends where session = ?", (number,))
        for row in packed(records):
            length = row.position + row.tokens
            values = (row.position, row.mark, row.ids, row.logprobs)
            if not row.is_full and length == records[-1].position + len(records[-1].token_ids):
                self._put_end(number, *values)
            else:
                self._db.execute("insert into tokens values (?, ?, ?, ?, ?, ?)", (number, *values, tokens_crc(*values)))
        self._delete_tail(number, entries)
        self._db.execute(
            "update sessions set length = ?, used_at = ?, crc = ? where session = ?",
            (length, self._wall_clock(), session_crc(number, owner, body, length), number),
        )
        self._db.execute(
            "delete from generates where session = ?1 and position < (select position from generates where "
            "session = ?1 and request_id != x'' order by position desc limit 1 offset ?2)",
            (number, MOST_GENERATES - 1),
        )
        # One that no call can name is needed only to say where the one before it ends.
        self._db.execute(
            "delete from generates where session = ?1 and request_id = x'' and coalesce((select before.request_id from "
            "generates before where before.session = ?1 and before.position < generates.position "
            "order by before.position desc limit 1), x'') = x''",
            (number,),
        )
        self._fold_appends(number)

    def _put_end(self, number: int, position: int, mark: int, ids: bytes, logprobs: bytes | None) -> None:
        crc = tokens_crc(position, mark, ids, logprobs, number)
        self._db.execute("insert into ends values (?, ?, ?, ?, ?, ?)", (number, position, mark, ids, logprobs, crc))

    def _fold_appends(self, number: int) -> None:
        """Move the replies to a session's appends into one row, and forget all but the last."""
        found = self._reader.replies("session = ? and kind = ? order by position", (number, APPENDED))
        for record in found:
            self._db.execute(
                "delete from replies where owner = ? and request_id = ? and kind = ? and id = ?",
                (record.owner, record.request_id, record.kind, record.session_id),
            )
        if found:
            replies = most_recent(self._reader.packed_appends(number) + b"".join(map(packed_append, found)))
            self._db.execute(
                "insert or replace into appends values (?, ?, ?)", (number, replies, appends_crc(number, replies))
            )

    def put_copy(self, record: CopyRecord) -> None:
        found = list(self._db.execute("select session from sessions where id = ?", (record.session_id,)))
        if not found:  # closed meanwhile
            self._gone.append(record.file)
            return
        (number,) = found[0]
        self._forget_copy(number)
        self._db.execute(
            "insert into copies values (?, ?, ?, ?, ?, ?)",
            (number, record.file, record.length, record.nbytes, record.header_crc, copy_crc(number, record)),
        )

    def _forget_copy(self, number: int) -> None:
        self._gone += [file for (file,) in self._db.execute("select file from copies where session = ?", (number,))]
        self._db.execute("delete from copies where session = ?", (number,))

    def drop_copy(self, file: str) -> None:
        self._gone.append(file)
        self._db.execute("delete from copies where file = ?", (file,))

    def expire(self, keep_seconds: float, resident: Collection[int]) -> list[tuple[str, int]]:
        """Delete old replies, and some of the sessions that are unused for longer. Their owners and lengths.

        keep_seconds: 0: no session; resident: numbers of sessions in memory, which are in use.
        """
        now = self._wall_clock()
        self._db.execute("delete from replies where ended_at < ?", (now - KEEP_SECONDS,))
        if not keep_seconds:
            return []
        expired: list[tuple[str, int]] = []
        old = self._db.execute(
            "select session from sessions where used_at < ? order by used_at limit ?",
            (now - keep_seconds, _EXPIRE_SESSIONS + len(resident)),
        )
        for number in [number for (number,) in old if number not in resident][:_EXPIRE_SESSIONS]:
            if self._reader.used_at(number) >= now - keep_seconds:  # the index is damaged
                continue
            expired += self._reader.kept_by_session(number, self.tail.of(number))
            self.end_session(number)
        return expired
