"""Reading the tables of a journal: histories, and what else is known of their sessions.

Every row is held against its checksum, and a history must be without a hole.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from inference_engine.errors import HistoryCorrupt
from inference_engine.session.journal import (
    CopyRecord,
    GenerateRecord,
    Kept,
    ReplyRecord,
    SessionEntry,
    SessionRecord,
    TokensRecord,
)
from inference_engine.session.journal_rows import (
    DAMAGE_OF_ROWS,
    answers_sum,
    copy_crc,
    damage_is_refused,
    is_entry_of,
    joined,
    reply_crc,
    session_crc,
    session_record,
    tokens_crc,
    unpacked,
    unpacked_appends,
    unpacked_entry,
    unpacked_generates,
    usage_crc,
)
from inference_engine.session.replies import DIGEST_BYTES
from inference_engine.types import TokenUsage

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Past:
    """What was recorded of a session: its tokens, its Generates, and the answers to its appends, packed."""

    tokens: list[TokensRecord] = field(default_factory=list)
    generates: list[GenerateRecord] = field(default_factory=list)
    appends: bytes = b""


REPLIES = "select session, ended_at, crc, id, owner, kind, request_id, digest, position, body from replies"
TailRow = tuple[int, int, bytes]  # the session's number, as the row says it, the tokens' position, and the entry


class Statements(Protocol):
    """What a statement of SQL is given to. Values stand where it has `?`, or `?1`, `?2`, … where one comes twice."""

    def execute(self, statement: str, bindings: Any = None, /) -> Iterator[tuple[Any, ...]]: ...


class Tail(Protocol):
    """The rows of sessions whose turns are not folded, as the commit that is being made leaves them."""

    def rows(self, number: int, position: int) -> list[TailRow]:
        """All of a session, in order, the first tokens of which should be at `position`. Raises HistoryCorrupt if there
        are fewer than there should be."""

    def last(self, number: int) -> TailRow | None:
        """The last of a session. Raises HistoryCorrupt if it should be there and is not."""

    def sessions(self) -> list[int]:
        """Those that have rows."""


class Reader:
    """Called with the journal's lock held. number: of a session.

    A damaged column may have a value of any type: what is read of rows that have no checksum is read as bytes.
    """

    SESSIONS_BY_ROW = "sessions"  # the table, for who reads all of it, damaged rows too

    def __init__(self, db: Statements, tail: Tail) -> None:
        self._db = db
        self._tail = tail

    @staticmethod
    def as_bytes(column: str) -> str:
        """A text as its bytes, in the words of the database."""
        return f"cast({column} as blob)"

    def find(self, session_id: str, owner: str) -> int | None:
        """The owner's session. Raises HistoryCorrupt."""
        rows = self._db.execute("select session from sessions where id = ? and owner = ?", (session_id, owner))
        return next((int(number) for (number,) in list(rows)), None)

    def number(self, session_id: str) -> int | None:
        """Of the session with this id, of any owner. For tools."""
        rows = self._db.execute("select session from sessions where id = ?", (session_id,))
        return next((int(number) for (number,) in list(rows)), None)

    def session(self, number: int, session_id: str) -> tuple[SessionRecord, float]:
        """How a session began, and when it was used. Raises HistoryCorrupt."""
        owner, body, length, answers, used_at, crc = next(
            self._db.execute(
                "select owner, body, length, answers, used_at, crc from sessions where session = ?", (number,)
            )
        )
        if crc != session_crc(number, owner, body, length, answers) or session_record(body).session_id != session_id:
            raise HistoryCorrupt(0)
        return session_record(body), used_at

    def past(self, number: int) -> Past:
        """All that is recorded of a session. Raises HistoryCorrupt."""
        (length,) = next(self._db.execute("select length from sessions where session = ?", (number,)))
        folded = self._folded(number, length)
        past = self.answers(number)
        since = self.tail(number, length)
        return Past(folded + since.tokens, past.generates + since.generates, past.appends + since.appends)

    def length(self, number: int) -> int:
        """Of a session's history. Raises HistoryCorrupt if the entry that says it is damaged."""
        (length,) = next(self._db.execute("select length from sessions where session = ?", (number,)))
        if (last := self._tail.last(number)) is not None:
            of, position, body = last
            if of != number or not is_entry_of(*last):
                raise HistoryCorrupt(length)
            length = position + unpacked_entry(position, body).tokens
        return int(length)

    def piece(self, number: int, first: int, end: int) -> list[TokensRecord]:
        """The tokens at [first, end) of a history that is as long at least, and no other row of it that is folded.

        Raises HistoryCorrupt.
        """
        if first >= end:
            return []
        (folded,) = next(self._db.execute("select length from sessions where session = ?", (number,)))
        found = list[TokensRecord]()
        if first < folded:
            rows = self._db.execute(
                "select position, mark, ids, logprobs, crc from tokens where session = ?1 and position < ?3 and "
                "position >= coalesce((select max(position) from tokens where session = ?1 and position <= ?2), 0) "
                "order by position",
                (number, first, end),
            )
            for position, mark, ids, logprobs, crc in list(rows):
                with damage_is_refused(position if isinstance(position, int) else first):
                    if crc != tokens_crc(position, mark, ids, logprobs):
                        raise HistoryCorrupt(position)
                    found += unpacked(position, mark, ids, logprobs)
            if not found or _end_of(found) < min(end, folded):
                found += self.end(number, folded)
        if end > folded:
            found += self.tail(number, folded).tokens
        return _between(found, first, end)

    def _folded(self, number: int, length: int) -> list[TokensRecord]:
        rows, known, position = list[TokensRecord](), 0, 0
        for first, mark, ids, logprobs, crc in self._db.execute(
            "select position, mark, ids, logprobs, crc from tokens where session = ? order by position", (number,)
        ):
            if first != position or crc != tokens_crc(first, mark, ids, logprobs):
                raise HistoryCorrupt(position)
            rows += unpacked(first, mark, ids, logprobs)
            position += sum(len(record.token_ids) for record in rows[known:])
            known = len(rows)
        end = self.end(number, length)
        if position != (end[0].position if end else length):
            raise HistoryCorrupt(position)
        return rows + end

    def answers(self, number: int) -> Past:
        """The Generates of a session and the answers to its appends that are folded, all that its row says there are.

        Raises HistoryCorrupt.
        """
        with damage_is_refused(0):
            (expected,) = next(self._db.execute("select answers from sessions where session = ?", (number,)))
            appends, generates = (
                b"".join(found for (found,) in list(self._db.execute(question, (number,))))
                for question in (
                    "select replies from appends where session = ?",
                    "select generates from begun where session = ?",
                )
            )
            if answers_sum(number, appends, generates) != expected:
                raise HistoryCorrupt(0)
            return Past(generates=unpacked_generates(generates), appends=appends)

    def end_rows(self, number: int) -> list[tuple[Any, ...]]:
        return list(
            self._db.execute("select position, mark, ids, logprobs, crc from ends where session = ?", (number,))
        )

    def end_at(self, number: int, length: int) -> list[TokensRecord]:
        """Of the first `length` tokens that are folded, those after the last whole row of `tokens`; fewer than a row.

        None of a row that is damaged.
        """
        last = self._db.execute(
            "select position, mark, ids, logprobs, crc from tokens where session = ? and position < ? "
            "order by position desc limit 1",
            (number, length),
        )
        for of, rows in ((0, list(last)), (number, self.end_rows(number))):
            with suppress(HistoryCorrupt), damage_is_refused(0):
                for position, mark, ids, logprobs, crc in rows:
                    if position >= length or crc != tokens_crc(position, mark, ids, logprobs, of):
                        continue
                    records = unpacked(position, mark, ids, logprobs)
                    ends = records[-1].position + len(records[-1].token_ids)
                    if of or ends > length:
                        return _first_of(records, length)
        return []

    def end(self, number: int, length: int) -> list[TokensRecord]:
        """The tokens that did not fill a row, the last of `length` that are folded. Raises HistoryCorrupt."""
        for position, mark, ids, logprobs, crc in self.end_rows(number):
            with damage_is_refused(position if isinstance(position, int) else 0):
                if crc != tokens_crc(position, mark, ids, logprobs, number):
                    raise HistoryCorrupt(position)
                records = unpacked(position, mark, ids, logprobs)
                if position + sum(len(record.token_ids) for record in records) != length:
                    raise HistoryCorrupt(position)
                return records
        return []

    def tail(self, number: int, position: int) -> Past:
        """What a session's entries in the tail have, whose first tokens are at `position`. Raises HistoryCorrupt."""
        past, rows = Past(), list[tuple[int, int, bytes, bytes | None]]()
        try:
            for of, first, body in self._tail.rows(number, position):
                if of != number or not is_entry_of(number, first, body):
                    raise HistoryCorrupt(position)
                entry = unpacked_entry(first, body)
                if entry.answer:
                    past.appends += entry.answer
                    continue
                if first != position:
                    raise HistoryCorrupt(position)
                if entry.began is not None:
                    past.generates.append(entry.began)
                rows.append((first, entry.mark, entry.ids, entry.logprobs))
                position += entry.tokens
            past.tokens += joined(rows)
        except DAMAGE_OF_ROWS as error:
            raise HistoryCorrupt(position) from error
        return past

    def replies_of(self, number: int, session_id: str, owner: str, appends: bytes) -> list[ReplyRecord]:
        """appends: of its past."""
        found = unpacked_appends(session_id, owner, appends)
        return found + self.replies("session = ? order by position", (number,))

    def replies(self, condition: str, values: tuple[Any, ...]) -> list[ReplyRecord]:
        """Raises HistoryCorrupt if one of them is damaged."""
        found = self.reply_rows(condition, values)
        if not all(is_intact for is_intact, _ in found):
            raise HistoryCorrupt(0)
        return [record for _, record in found]

    def reply_rows(self, condition: str, values: tuple[Any, ...]) -> list[tuple[bool, ReplyRecord]]:
        """Replies, and whether they are intact."""
        return [_reply(*row) for row in list(self._db.execute(f"{REPLIES} where {condition}", values))]

    def page(self, owner: str, after: str, most: int, now: float) -> list[SessionEntry]:
        """The owner's sessions in the order of their ids."""
        rows = self._db.execute(
            f"select session, {self.as_bytes('id')}, {self.as_bytes('body')}, length, answers, used_at, crc "  # noqa: S608 - ours
            "from sessions where owner = ? and id > ? order by id limit ?",
            (owner, after, most),
        )
        return [self._entry(owner, *row, now=now) for row in list(rows)]

    def everyone(self, now: float) -> list[SessionEntry]:
        """The sessions of all owners, by their ids. For tools."""
        texts = ", ".join(map(self.as_bytes, ("owner", "id", "body")))
        rows = self._db.execute(
            f"select {texts}, session, length, answers, used_at, crc from {self.SESSIONS_BY_ROW} order by id"  # noqa: S608 - ours
        )
        return [
            self._entry(text_of(owner), number, session_id, body, *row, now=now)
            for owner, session_id, body, number, *row in list(rows)
        ]

    def _entry(
        self,
        owner: str,
        number: int,
        session_id: bytes,
        body: bytes,
        length: int,
        answers: int,
        used_at: float,
        crc: int,
        *,
        now: float,
    ) -> SessionEntry:
        try:
            with damage_is_refused(0):
                if crc != session_crc(number, owner, body.decode(), length, answers):
                    raise HistoryCorrupt(0)
                return SessionEntry(session_record(body.decode()), float(used_at), self._end(number, length))
        except HistoryCorrupt:  # it can be closed or purged, so it is in the list
            return SessionEntry(SessionRecord(text_of(session_id), owner, "full", None, ()), now, 0)

    def copies(self) -> list[CopyRecord]:
        """The files with copies of K/V whose rows are intact, of the session used longest ago first."""
        numbers = self._db.execute("select session from copies join sessions using (session) order by used_at")
        found = []
        for (number,) in list(numbers):
            with suppress(HistoryCorrupt), damage_is_refused(0):
                *fields, crc = next(
                    self._db.execute(
                        "select id, owner, file, copies.length, bytes, header_crc, copies.crc from copies "
                        "join sessions using (session) where session = ?",
                        (number,),
                    )
                )
                if crc == copy_crc(number, record := CopyRecord(*fields)):
                    found.append(record)
        return found

    def _end(self, number: int, length: int) -> int:
        """Of a session of which `length` tokens are folded: the length that its last entry in the tail says."""
        if (last := self._tail.last(number)) is not None:
            _, position, body = last
            length = position + unpacked_entry(position, body).tokens
        return length

    def kept(self) -> dict[str, Kept]:
        """By owner, as the journal has it."""
        found = {
            text_of(owner): Kept(sessions, int(tokens))
            for owner, sessions, tokens in list(
                self._db.execute(
                    f"select {self.as_bytes('owner')}, count(*), sum(length) from sessions group by owner"  # noqa: S608 - ours
                )
            )
        }
        for number in self._tail.sessions():
            for owner, more in self.kept_by_session(number, is_folded=False):
                if owner in found:  # else an index has another one, by damage
                    found[owner] = replace(found[owner], tokens=found[owner].tokens + more)
        return found

    def kept_by_session(self, number: int, *, is_folded: bool = True) -> list[tuple[str, int]]:
        """The session's owner and its tokens, damaged ones as far as they can be counted; none if it is not there.

        is_folded: False: only those in the tail.
        """
        rows = self._db.execute(
            f"select {self.as_bytes('owner')}, length from sessions where session = ?",  # noqa: S608 - a text of ours
            (number,),
        )
        found = []
        for owner, folded in list(rows):
            end = folded
            with suppress(HistoryCorrupt), damage_is_refused(0):
                end = self._end(number, folded)
            found.append((text_of(owner), end if is_folded else end - folded))
        return found

    def used_at(self, number: int) -> float:
        """When the session was used, by its row and not by an index; infinite if there is no such session."""
        rows = list(self._db.execute("select used_at + 0.0 from sessions where session = ?", (number,)))
        return next((float(used_at) for (used_at,) in rows if used_at is not None), math.inf)

    def copy_files(self, number: int) -> list[str]:
        """The names of the session's files, damaged ones too."""
        rows = self._db.execute(f"select {self.as_bytes('file')} from copies where session = ?", (number,))  # noqa: S608 - ours
        return [text_of(file) for (file,) in list(rows)]

    def usage(self) -> dict[str, TokenUsage]:
        """What the Generates of each owner took. A damaged row counts from nothing, and is logged."""
        found: dict[str, TokenUsage] = {}
        for owner, body, crc in list(self._db.execute("select owner, body, crc from usage")):
            try:
                if crc != usage_crc(owner, body):
                    raise ValueError("its checksum is another")
                found[owner] = TokenUsage(**json.loads(body))
            except DAMAGE_OF_ROWS as damage:
                logger.error("what an owner's Generates took is damaged in the journal, and counted anew: %s", damage)
        return found


def _first_of(records: Sequence[TokensRecord], length: int) -> list[TokensRecord]:
    """Those of the tokens before position `length`."""
    return [_cut(record, record.position, length) for record in records if record.position < length]


def _between(records: Sequence[TokensRecord], first: int, end: int) -> list[TokensRecord]:
    """Those of the tokens at [first, end). Raises HistoryCorrupt where one is missing."""
    found, position = list[TokensRecord](), first
    for record in records:
        start, stop = max(first, record.position), min(end, _end_of([record]))
        if start < stop:
            if start != position:
                raise HistoryCorrupt(position)
            found.append(_cut(record, start, stop))
            position = stop
    if position != end:
        raise HistoryCorrupt(position)
    return found


def _cut(record: TokensRecord, start: int, stop: int) -> TokensRecord:
    part = slice(start - record.position, stop - record.position)
    values = None if record.logprobs is None else record.logprobs[part]
    return replace(record, position=start, token_ids=record.token_ids[part], logprobs=values)


def _end_of(records: Sequence[TokensRecord]) -> int:
    return records[-1].position + len(records[-1].token_ids)


def text_of(value: bytes | None) -> str:
    """A text that is damaged has no other's checksum either."""
    return (value or b"").decode(errors="replace")


def _reply(number: int | None, ended_at: float | None, crc: int, *values: Any) -> tuple[bool, ReplyRecord]:
    """Is the row intact, and what is in it?"""
    record = ReplyRecord(*values)
    if crc != reply_crc(number, ended_at, *values):
        return False, record
    return True, replace(record, digest=record.digest[:DIGEST_BYTES])  # an older server's were longer
