"""Reading the tables of a journal: histories, and what else is known of their sessions.

Every row is held against its checksum, and a history must be without a hole.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import apsw

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
    appends_crc,
    copy_crc,
    crc_of,
    damage_is_refused,
    joined,
    reply_crc,
    session_crc,
    session_record,
    tokens_crc,
    unpacked,
    unpacked_appends,
)
from inference_engine.session.replies import DIGEST_BYTES


class Reader:
    """Called with the journal's lock held. number: of a session; entries: its rows in the tail, in order."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db

    def find(self, session_id: str, owner: str) -> int | None:
        """The owner's session, in both indexes: damage of one neither hides a session nor gives another one's.

        Raises HistoryCorrupt.
        """
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

    def session(self, number: int, session_id: str) -> tuple[SessionRecord, float]:
        """How a session began, and when it was used. Raises HistoryCorrupt."""
        owner, body, length, used_at, crc = next(
            self._db.execute("select owner, body, length, used_at, crc from sessions where session = ?", (number,))
        )
        if crc != session_crc(number, owner, body, length) or session_record(body).session_id != session_id:
            raise HistoryCorrupt(0)
        return session_record(body), used_at

    def tokens(self, number: int, entries: Sequence[int]) -> list[TokensRecord]:
        """The history of a session. Raises HistoryCorrupt."""
        (length,) = next(self._db.execute("select length from sessions where session = ?", (number,)))
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
        return rows + end + self.tail(number, entries, length)

    def end_rows(self, number: int) -> list[tuple[Any, ...]]:
        return list(
            self._db.execute("select position, mark, ids, logprobs, crc from ends where session = ?", (number,))
        )

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

    def tail(self, number: int, entries: Sequence[int], position: int) -> list[TokensRecord]:
        """The tokens in rows of the tail, the first of which is at `position`. Raises HistoryCorrupt."""
        rows = list[tuple[int, int, bytes, bytes | None]]()
        try:
            # Read to the end first: an error keeps what is half read as long as it lives, and that stops checkpoints.
            found = list(
                self._db.execute(
                    "select session, position, mark, ids, logprobs, crc from tail "
                    "where entry in (select value from json_each(?)) order by entry",
                    (json.dumps(list(entries)),),
                )
            )
            for of, first, mark, ids, logprobs, crc in found:
                if (of, first) != (number, position) or crc != tokens_crc(first, mark, ids, logprobs, number):
                    raise HistoryCorrupt(position)
                rows.append((first, mark, ids, logprobs))
                position += len(ids) // 4
            if len(rows) != len(entries):
                raise HistoryCorrupt(position)
            return list(joined(rows))
        except DAMAGE_OF_ROWS as error:
            raise HistoryCorrupt(position) from error

    def generates(self, number: int) -> list[GenerateRecord]:
        """The session's Generates. One whose row is damaged is as if it had been forgotten: it says no more than where
        the one before it ends."""
        return [
            GenerateRecord(position, request_id, digest[:DIGEST_BYTES], int.from_bytes(seed, "little"))
            if kept == crc_of(struct.pack("<QQ", number, position) + request_id + digest + seed)
            else GenerateRecord(position, b"", b"", 0)
            for position, request_id, digest, seed, kept in self._db.execute(
                "select position, request_id, digest, seed, crc from generates where session = ? order by position",
                (number,),
            )
        ]

    def replies_of(self, number: int, session_id: str, owner: str) -> list[ReplyRecord]:
        found = unpacked_appends(session_id, owner, self.packed_appends(number))
        return found + self.replies("session = ? order by position", (number,))

    def replies(self, condition: str, values: tuple[Any, ...]) -> list[ReplyRecord]:
        """Replies that are intact: one that is not is as if it had been forgotten."""
        texts = ", ".join(f"cast({name} as blob)" for name in ("id", "owner", "kind", "body"))
        rows = self._db.execute(
            f"select {texts}, request_id, digest, position, crc from replies where {condition}",  # noqa: S608 - texts of ours
            values,
        )
        found = []
        for *names, request_id, digest, position, crc in rows:
            session_id, owner, kind, body = map(_text, names)
            record = ReplyRecord(session_id, owner, kind, request_id, digest, position, body)
            if crc == reply_crc(record):  # an older server's digests were longer
                found.append(replace(record, digest=digest[:DIGEST_BYTES]))
        return found

    def packed_appends(self, number: int) -> bytes:
        """Damaged ones are as if they had been forgotten."""
        for replies, crc in self._db.execute("select replies, crc from appends where session = ?", (number,)):
            if isinstance(replies, bytes) and crc == appends_crc(number, replies):
                return replies
        return b""

    def page(
        self, owner: str, after: str, most: int, committed: Callable[[int], Sequence[int]], now: float
    ) -> list[SessionEntry]:
        """The owner's sessions in the order of their ids. committed: a session's rows in the tail; most: -1: all."""
        rows = self._db.execute(
            "select session, cast(id as blob), cast(body as blob), length, used_at, crc from sessions "
            "where owner = ? and id > ? order by id limit ?",
            (owner, after, most),
        )
        return [self._entry(owner, *row, committed=committed, now=now) for row in rows]

    def everyone(self, committed: Callable[[int], Sequence[int]], now: float) -> list[SessionEntry]:
        """The sessions of all owners, by their ids. For tools."""
        rows = self._db.execute(
            "select cast(owner as blob), session, cast(id as blob), cast(body as blob), length, used_at, crc "
            "from sessions not indexed order by id"
        )
        return [self._entry(_text(owner), *row, committed=committed, now=now) for owner, *row in rows]

    def _entry(
        self,
        owner: str,
        number: int,
        session_id: bytes,
        body: bytes,
        length: int,
        used_at: float,
        crc: int,
        *,
        committed: Callable[[int], Sequence[int]],
        now: float,
    ) -> SessionEntry:
        try:
            with damage_is_refused(0):
                if crc != session_crc(number, owner, body.decode(), length):
                    raise HistoryCorrupt(0)
                for last in committed(number)[-1:]:
                    for position, ids in self._db.execute("select position, ids from tail where entry = ?", (last,)):
                        length = position + len(ids) // 4
                return SessionEntry(session_record(body.decode()), float(used_at), length)
        except HistoryCorrupt:  # it can be closed or purged, so it is in the list
            return SessionEntry(SessionRecord(_text(session_id), owner, "full", None, ()), now, 0)

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

    def kept(self) -> dict[str, Kept]:
        """By owner, as the folder has it."""
        tails = dict(
            self._db.execute(
                "select cast(owner as blob), sum(length(ids) / 4) from tail join sessions using (session) "
                "group by owner"
            )
        )
        return {
            _text(owner): Kept(sessions, int(tokens) + int(tails.get(owner) or 0))
            for owner, sessions, tokens in self._db.execute(
                "select cast(owner as blob), count(*), sum(length) from sessions group by owner"
            )
        }

    def kept_by_session(self, number: int, entries: Sequence[int]) -> list[tuple[str, int]]:
        """The session's owner and its tokens, damaged ones too; none if there is no such session."""
        rows = self._db.execute(
            "select cast(owner as blob), length + (select coalesce(sum(length(ids) / 4), 0) from tail "
            "where entry in (select value from json_each(?2))) from sessions where session = ?1",
            (number, json.dumps(list(entries))),
        )
        return [(_text(owner), tokens) for owner, tokens in rows]

    def used_at(self, number: int) -> float:
        """When the session was used, by its row and not by an index; infinite if there is no such session."""
        rows = self._db.execute("select cast(used_at as real) from sessions where session = ?", (number,))
        return next((float(used_at) for (used_at,) in rows if used_at is not None), math.inf)

    def is_indexed(self, number: int) -> bool:
        """Is the session in all indexes as it is in its row?"""
        for session_id, owner, used_at in self._db.execute(
            "select id, owner, used_at from sessions where session = ?", (number,)
        ):
            for condition, values in (
                ("where id = ?", (session_id,)),
                ("indexed by sessions_by_owner where owner = ? and id = ?", (owner, session_id)),
                ("indexed by sessions_by_use where used_at = ?", (used_at,)),
            ):
                found = self._db.execute(f"select session from sessions {condition}", values)  # noqa: S608 - texts of ours
                if (number,) not in found.fetchall():
                    return False
        return True

    def named(self, session_id: str, owner: str) -> list[int]:
        """The numbers of sessions that `everyone` shows so, by their rows alone. For tools: it reads all rows."""
        found = []
        for number, *texts in self._db.execute(
            "select session, cast(id as blob), cast(owner as blob), cast(body as blob) from sessions not indexed"
        ):
            name, of, body = map(_text, texts)
            with suppress(*DAMAGE_OF_ROWS, LookupError):
                name = session_id if session_record(body).session_id == session_id else name
            if (name, of) == (session_id, owner):
                found.append(number)
        return found

    def last_number(self) -> int:
        """The highest number that a session has, or had while its replies are remembered."""
        last = (self.value("select max(session) from sessions"), self.value("select max(session) from replies"))
        return max(one or 0 for one in last)

    def value(self, question: str) -> Any:
        return next(self._db.execute(question))[0]


def _text(value: bytes | None) -> str:
    """A text that is damaged has no other's checksum either."""
    return (value or b"").decode(errors="replace")
