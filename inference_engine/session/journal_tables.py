"""The tables of a journal, as its commits change them.

Each method is one change, within a transaction that the journal begins and ends. What a transaction adds to the tail
and takes from it is known in memory once it is committed (`Tail`).
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import apsw

from inference_engine.errors import HistoryCorrupt
from inference_engine.session.journal import APPENDED, CopyRecord, GenerateRecord, ReplyRecord, SessionRecord
from inference_engine.session.journal_reader import REPLY_KEY, Past, Reader, ReplyKey
from inference_engine.session.journal_rows import (
    answers_sum,
    copy_crc,
    damage_is_refused,
    is_entry_of,
    most_recent,
    packed,
    packed_answer,
    packed_generates,
    packed_tokens,
    recent_generates,
    reply_crc,
    reply_values,
    session_crc,
    tokens_crc,
    unpacked_appends,
    usage_crc,
)
from inference_engine.session.replies import KEEP_SECONDS
from inference_engine.types import TokenUsage

logger = logging.getLogger(__name__)

_EXPIRE_SESSIONS = 16
_FOLD_SESSIONS, _FOLD_ROWS = 16, 2048  # in one commit, about
# A statement for many rows is one for all of them; and threads that wait for the interpreter get it after each.
_INSERTS = {
    rows: f"insert into tail values {', '.join(['(?, ?, ?, ?)'] * rows)}"  # noqa: S608 - a text of ours
    for rows in (128, 64, 32, 16, 8, 4, 2, 1)
}
_COLUMNS = 4


class Tail:
    """Which rows of the tail are which session's. Changed by a commit, all of it or nothing."""

    def __init__(self, db: apsw.Connection) -> None:
        """Raises ValueError for damage that would shorten a session without a word: its last rows would be missing."""
        if found := [text for (text,) in db.execute("pragma integrity_check(tail)") if text != "ok"]:
            raise ValueError("; ".join(found))
        self._rows: dict[int, list[int]] = {}
        # Cast, since a value of another type is damage of its session, which is refused when it is read.
        for entry, *row in db.execute(
            "select entry, cast(session as integer), cast(position as integer), cast(body as blob) from tail "
            "order by entry"
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

    def all_committed(self) -> Mapping[int, Sequence[int]]:
        return self._rows

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
        self._cut = set(self.to_fold)  # by the process's end: when they were used is not recorded
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
            self._copy_tokens(number, parent, length)
        body = json.dumps({**asdict(record), "eos_token_ids": list(record.eos_token_ids)})
        self._db.execute(
            "insert into sessions values (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                number,
                record.session_id,
                record.owner,
                body,
                length,
                self._wall_clock(),
                session_crc(number, record.owner, body, length, 0),
                0,
            ),
        )

    def _copy_tokens(self, number: int, parent: int, length: int) -> None:
        """The first `length` tokens of a session are those of another."""
        self.fold(parent)
        self._db.execute("update sessions set used_at = ? where session = ?", (self._wall_clock(), parent))
        end = self._reader.end_at(parent, length)
        self._db.execute(
            "insert into tokens select ?, position, mark, ids, logprobs, crc from tokens where session = ? "
            "and position < ? order by position",
            (number, parent, end[0].position if end else length),
        )
        for row in packed(end):
            self._put_end(number, row.position, row.mark, row.ids, row.logprobs)

    def put_tokens(
        self, number: int, position: int, mark: int, ids: bytes, logprobs: bytes | None, began: GenerateRecord | None
    ) -> None:
        """Followed by `put_rows`, in the same transaction."""
        body = packed_tokens(number, position, mark, ids, logprobs, began)
        self._rows += (self.tail.add(number), number, position, body)

    def put_rows(self) -> None:
        """Insert the rows of the tail that were put since the last time."""
        values, self._rows = self._rows, []
        start = 0
        for rows, insert in _INSERTS.items():
            while len(values) - start >= rows * _COLUMNS:
                end = start + rows * _COLUMNS
                self._db.execute(insert, values[start:end])
                start = end

    def put_usage(self, owner: str, usage: TokenUsage) -> None:
        body = json.dumps(asdict(usage))
        self._db.execute("insert or replace into usage values (?, ?, ?)", (owner, body, usage_crc(owner, body)))

    def put_reply(self, number: int | None, record: ReplyRecord) -> None:
        """Followed by `put_rows`, in the same transaction. number: None: of a session that has ended."""
        if number is not None and record.kind == APPENDED:
            self._rows += (self.tail.add(number), number, record.position, packed_answer(number, record))
        else:
            self._insert_reply(number, record, None if number is not None else self._wall_clock())

    def _insert_reply(self, number: int | None, record: ReplyRecord, ended_at: float | None) -> None:
        values = reply_values(record)
        self._db.execute(
            "insert or replace into replies values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (number, *values, reply_crc(number, ended_at, *values), ended_at),
        )

    def rest(self, number: int, used_at: float | None = None) -> None:
        """used_at: seconds since 1970; None: now."""
        self.to_fold.append(number)
        self._cut.discard(number)
        used_at = self._wall_clock() if used_at is None else used_at
        self._db.execute("update sessions set used_at = ? where session = ?", (used_at, number))

    def end_session(self, number: int) -> None:
        self.put_rows()
        self._end_replies(number)
        is_indexed = self._reader.is_indexed(number)
        for table in ("sessions", "tokens", "ends", "begun", "appends"):
            self._db.execute(f"delete from {table} where session = ?", (number,))  # noqa: S608 - of the five above
        if not is_indexed:  # else its entries would stay, and name a row that is gone
            with suppress(apsw.ConstraintError):
                self._db.execute("reindex sessions")
        self._delete_tail(number, self.tail.of(number))
        self._forget_copy(number)

    def _end_replies(self, number: int) -> None:
        """From now on the session's answers expire. Damaged ones go with it: its id is known to no call any more."""
        ended_at = self._wall_clock()
        for is_intact, record in self._reader.reply_rows("session = ?", (number,)):
            if is_intact:
                self._insert_reply(number, record, ended_at)
        self._db.execute("delete from replies where session = ? and ended_at is null", (number,))
        with suppress(HistoryCorrupt), damage_is_refused(0):
            for session_id, owner, length in list(
                self._db.execute("select id, owner, length from sessions where session = ?", (number,))
            ):
                appends = self._reader.answers(number).appends
                appends += self._reader.tail(number, self.tail.of(number), length).appends
                for record in unpacked_appends(session_id, owner, most_recent(appends)):
                    self._insert_reply(number, record, ended_at)

    def drop_replies(self, keys: Iterable[ReplyKey]) -> None:
        """Delete damaged ones, which a search by the index may not find. For tools: it reads all rows for each."""
        for key in keys:
            self._db.execute(
                f"delete from replies not indexed where ({REPLY_KEY}) = (?, ?, ?, ?)",  # noqa: S608 - a text of ours
                key,
            )

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
                found = list(
                    self._db.execute(
                        "select owner, body, length, answers, used_at, crc from sessions where session = ?", (number,)
                    )
                )
                if not entries or not found:
                    return
                ((owner, body, length, answers, used_at, crc),) = found
                if crc != session_crc(number, owner, body, length, answers):  # it would have the right one afterwards
                    raise HistoryCorrupt(0)
                records = self._reader.end(number, length)
                since = self._reader.tail(number, entries, length)
                records += since.tokens
                past = self._reader.answers(number)
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
        answers = self._put_answers(number, past, since)
        used_at = self._wall_clock() if number in self._cut else used_at
        self._db.execute(
            "update sessions set length = ?, answers = ?, used_at = ?, crc = ? where session = ?",
            (length, answers, used_at, session_crc(number, owner, body, length, answers), number),
        )

    def _put_answers(self, number: int, past: Past, since: Past) -> int:
        """Fold Generates and answers to appends; all but the last are forgotten. Returns what they sum up to."""
        appends = most_recent(past.appends + since.appends)
        generates = packed_generates(recent_generates(past.generates + since.generates))
        if since.appends:
            self._db.execute("insert or replace into appends values (?, ?)", (number, appends))
        if since.generates and generates:
            self._db.execute("insert or replace into begun values (?, ?)", (number, generates))
        return answers_sum(number, appends, generates)

    def _put_end(self, number: int, position: int, mark: int, ids: bytes, logprobs: bytes | None) -> None:
        crc = tokens_crc(position, mark, ids, logprobs, number)
        self._db.execute("insert into ends values (?, ?, ?, ?, ?, ?)", (number, position, mark, ids, logprobs, crc))

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
        self._gone += self._reader.copy_files(number)
        self._db.execute("delete from copies where session = ?", (number,))

    def try_room(self) -> None:
        """A row that says nothing: is there room for one?"""
        self._db.execute("insert or replace into facts values ('room', null)")

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
