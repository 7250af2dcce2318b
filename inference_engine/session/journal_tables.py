"""The tables of a journal, as its commits change them.

Each method is one change, within a transaction that the journal begins and ends. What a transaction adds to the tail
and takes from it is known in memory once it is committed (`Tail`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Protocol

from inference_engine.errors import HistoryCorrupt
from inference_engine.session.clock_jumps import ClockJumps
from inference_engine.session.journal import APPENDED, CopyRecord, GenerateRecord, ReplyRecord, SessionRecord
from inference_engine.session.journal_reader import Past, Reader, Statements, Tail
from inference_engine.session.journal_rows import (
    answers_sum,
    copy_crc,
    damage_is_refused,
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


class WrittenTail(Tail, Protocol):
    """The tail, as a commit changes it. Changes are the commit's until `commit` or `roll_back`."""

    def has(self, number: int) -> bool:
        """Has the session rows?"""

    def count(self, number: int) -> int:
        """How many are known in memory."""

    def add(self, number: int, position: int, body: bytes) -> None:
        """A row behind the session's others. It is inserted by `flush`, in the same transaction."""

    def flush(self) -> None:
        """Insert the rows that were added since the last time."""

    def clear(self, number: int) -> None:
        """Delete a session's rows."""

    def begin(self, number: int) -> None:
        """The session is new."""

    def end(self, number: int) -> None:
        """The session is over, or leaves memory: no rows come until it is read again."""

    def commit(self) -> None: ...

    def roll_back(self) -> None: ...


class Tables:
    """Called with the journal's lock held. number: of a session.

    to_fold: sessions whose turn has ended. wall_clock: seconds since 1970.
    """

    def __init__(self, db: Statements, reader: Reader, tail: WrittenTail, wall_clock: Callable[[], float]) -> None:
        self._db = db
        self._reader = reader
        self._wall_clock = wall_clock
        self.tail = tail
        self.to_fold: dict[int, None] = dict.fromkeys(self.tail.sessions())  # a set, the first to come first
        self._cut = set(self.to_fold)  # by the process's end: when they were used is not recorded
        self._gone: list[str] = []

    def next_to_fold(self) -> list[int]:
        """Some of the sessions to fold."""
        numbers, rows = list[int](), 0
        for number in self.to_fold:
            if len(numbers) == _FOLD_SESSIONS or rows >= _FOLD_ROWS:
                break
            numbers.append(number)
            rows += self.tail.count(number)
        return numbers

    def has_folded(self, numbers: Sequence[int]) -> None:
        """Or has tried in vain. They are not asked for again."""
        for number in numbers:
            del self.to_fold[number]

    def commit(self) -> list[str]:
        """The transaction is committed. Files of copies that have no row any more."""
        self.tail.commit()
        gone, self._gone = self._gone, []
        return gone

    def roll_back(self) -> None:
        self.tail.roll_back()
        self._gone = []

    def put_session(self, number: int, record: SessionRecord, parent: int | None, length: int) -> None:
        """length: of its history, all of which is its parent's: a fork of damaged rows lacks them, and is refused."""
        if parent is not None:
            self._copy_tokens(number, parent, length)
        body = json.dumps({**asdict(record), "eos_token_ids": list(record.eos_token_ids)})
        crc = session_crc(number, record.owner, body, length, 0)
        self._db.execute(
            "insert into sessions (session, id, owner, body, length, used_at, crc, answers) "
            "values (?, ?, ?, ?, ?, ?, ?, 0)",
            (number, record.session_id, record.owner, body, length, self._wall_clock(), crc),
        )
        self.tail.begin(number)

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
        self.tail.add(number, position, packed_tokens(number, position, mark, ids, logprobs, began))

    def put_usage(self, owner: str, usage: TokenUsage) -> None:
        body = json.dumps(asdict(usage))
        self._db.execute(
            "insert into usage (owner, body, crc) values (?, ?, ?) "
            "on conflict (owner) do update set body = excluded.body, crc = excluded.crc",
            (owner, body, usage_crc(owner, body)),
        )

    def put_reply(self, number: int | None, record: ReplyRecord) -> None:
        """number: None: of a session that has ended."""
        if number is not None and record.kind == APPENDED:
            self.tail.add(number, record.position, packed_answer(number, record))
        else:
            self._insert_reply(number, record, None if number is not None else self._wall_clock())

    def _insert_reply(self, number: int | None, record: ReplyRecord, ended_at: float | None) -> None:
        values = reply_values(record)
        self._db.execute(
            "insert into replies (session, id, owner, kind, request_id, digest, position, body, crc, ended_at) "
            "values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) on conflict (owner, request_id, kind, id) do update set "
            "session = excluded.session, digest = excluded.digest, position = excluded.position, "
            "body = excluded.body, crc = excluded.crc, ended_at = excluded.ended_at",
            (number, *values, reply_crc(number, ended_at, *values), ended_at),
        )

    def rest(self, number: int, used_at: float | None = None) -> None:
        """used_at: seconds since 1970; None: now."""
        self.to_fold[number] = None
        self._cut.discard(number)
        used_at = self._wall_clock() if used_at is None else used_at
        self._db.execute("update sessions set used_at = ? where session = ?", (used_at, number))

    def leave(self, number: int, used_at: float | None) -> None:
        """The session leaves memory. used_at: as for `rest`."""
        self.rest(number, used_at)
        self.tail.end(number)

    def end_session(self, number: int) -> None:
        self.tail.flush()
        self._end_replies(number)
        self._delete_rows(number)
        self.tail.clear(number)
        self.tail.end(number)
        self._forget_copy(number)

    def _delete_rows(self, number: int) -> None:
        for table in ("sessions", "tokens", "ends", "begun", "appends"):
            self._db.execute(f"delete from {table} where session = ?", (number,))  # noqa: S608 - of the five above

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
                appends += self._reader.tail(number, length).appends
                for record in unpacked_appends(session_id, owner, most_recent(appends)):
                    self._insert_reply(number, record, ended_at)

    def fold(self, number: int) -> None:
        """Move a session's rows from the tail into `tokens`. Damaged ones stay, for `load` to refuse."""
        self.tail.flush()
        try:
            with damage_is_refused(0):
                found = list(
                    self._db.execute(
                        "select owner, body, length, answers, used_at, crc from sessions where session = ?", (number,)
                    )
                )
                if not found or not self.tail.has(number):
                    return
                ((owner, body, length, answers, used_at, crc),) = found
                if crc != session_crc(number, owner, body, length, answers):  # it would have the right one afterwards
                    raise HistoryCorrupt(0)
                records = self._reader.end(number, length)
                since = self._reader.tail(number, length)
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
        self.tail.clear(number)
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
            self._db.execute(
                "insert into appends values (?, ?) on conflict (session) do update set replies = excluded.replies",
                (number, appends),
            )
        if since.generates and generates:
            self._db.execute(
                "insert into begun values (?, ?) on conflict (session) do update set generates = excluded.generates",
                (number, generates),
            )
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

    def drop_copy(self, file: str) -> None:
        self._gone.append(file)
        self._db.execute("delete from copies where file = ?", (file,))

    def expire(self, keep_seconds: float, resident: Collection[int], jumps: ClockJumps) -> list[tuple[str, int]]:
        """Delete old replies, and some of the sessions that are unused for longer. Their owners and lengths.

        keep_seconds: 0: no session; resident: numbers of sessions in memory, which are in use.
        """
        now = self._wall_clock()
        self._db.execute("delete from replies where ended_at < ?", (now - jumps.ahead(KEEP_SECONDS) - KEEP_SECONDS,))
        if not keep_seconds:
            return []
        now -= jumps.ahead(keep_seconds)
        expired: list[tuple[str, int]] = []
        old = self._unused(now - keep_seconds, _EXPIRE_SESSIONS, resident)
        for number in [number for number in old if number not in resident][:_EXPIRE_SESSIONS]:
            if self._reader.used_at(number) >= now - keep_seconds:  # the index is damaged
                continue
            expired += self._reader.kept_by_session(number)
            self.end_session(number)
        return expired

    def _unused(self, before: float, most: int, resident: Collection[int]) -> list[int]:
        """So many sessions at least, besides those in memory, that were used last before then, oldest first."""
        rows = self._db.execute(
            "select session from sessions where used_at < ? order by used_at limit ?", (before, most + len(resident))
        )
        return [number for (number,) in list(rows)]
