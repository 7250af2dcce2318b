"""A journal that an older version wrote, made one of this version's format, in one transaction.

format 1    no copies of K/V
format 2    no `ends`: each turn in rows of its own, which are read as they are; answers to appends in `replies`
format 3    a column for each value of the tail; Generates and the answers to appends in rows of their own, which
            nothing accounted for
"""

from __future__ import annotations

import struct
import zlib

import apsw

from inference_engine.session.journal import APPENDED, GenerateRecord, ReplyRecord
from inference_engine.session.journal_rows import (
    DAMAGE_OF_ROWS,
    answers_sum,
    crc_of,
    most_recent,
    packed_append,
    packed_generates,
    packed_tokens,
    recent_generates,
    reply_crc,
    session_crc,
    tokens_crc,
)
from inference_engine.session.replies import DIGEST_BYTES

_TABLES = ("tail", "generates", "replies", "appends")  # whose rows are written anew
_COPIES = """
create table copies (
    session integer primary key, file text unique not null, length integer not null, bytes integer not null,
    header_crc integer not null, crc integer not null);
"""
_ENDS = """
create table ends (session integer primary key, position integer, mark integer, ids blob, logprobs blob, crc integer);
create table appends (session integer primary key, replies blob, crc integer);
"""
_ANSWERS = """
alter table sessions add column answers integer not null default 0;
alter table tail rename to old_tail;
alter table appends rename to old_appends;
create table tail (entry integer primary key, session integer, position integer, body blob);
create table appends (session integer primary key, replies blob);
create table begun (session integer primary key, generates blob);
"""
_OLD = "drop table old_tail; drop table old_appends; drop table generates;"


def upgrade(db: apsw.Connection, version: int) -> None:
    """From a format below this version's. Within a transaction.

    Raises ValueError for damage of what has to be written anew, unless it is of one session: that is refused later.
    """
    for older, schema in enumerate((_COPIES, _ENDS), start=1):
        if version <= older:
            db.execute(schema)
    for table in _TABLES:
        if found := [text for (text,) in db.execute(f"pragma integrity_check({table})") if text != "ok"]:
            raise ValueError("; ".join(found))
    db.execute(_ANSWERS)
    try:
        _move_tail(db)
        appends = _move_replies(db)
    except struct.error as error:  # a number that no row has
        raise ValueError(f"a row is damaged: {error}") from error
    for number, owner, body, length, crc in list(db.execute("select session, owner, body, length, crc from sessions")):
        if crc == session_crc(number, owner, body, length, 0):  # else it is refused in any case
            _sum_answers(db, number, owner, body, length, appends.get(number, b""))
    db.execute(_OLD)


def _move_tail(db: apsw.Connection) -> None:
    for entry, number, position, mark, ids, logprobs, crc in list(
        db.execute("select entry, session, position, mark, ids, logprobs, crc from old_tail order by entry")
    ):
        if crc != tokens_crc(position, mark, ids, logprobs, number):
            raise ValueError(f"a turn of session {number} is damaged")
        body = packed_tokens(number, position, mark, ids, logprobs, None)
        db.execute("insert into tail values (?, ?, ?, ?)", (entry, number, position, body))


def _move_replies(db: apsw.Connection) -> dict[int, bytes]:
    """Returns the answers to appends that were not folded, by session."""
    appends = dict[int, bytes]()
    for number, ended_at, crc, *values in list(
        db.execute(
            "select session, ended_at, crc, id, owner, kind, request_id, digest, position, body from replies "
            "order by session, position"
        )
    ):
        record = ReplyRecord(*values)
        if crc != crc_of(repr(record).encode()):
            raise ValueError(f"an answer is damaged, to a call about the session {record.session_id!r}")
        key = record.owner, record.request_id, record.kind, record.session_id
        if record.kind == APPENDED and number is not None and ended_at is None:
            appends[number] = appends.get(number, b"") + packed_append(record)
            db.execute("delete from replies where owner = ? and request_id = ? and kind = ? and id = ?", key)
        else:
            db.execute(
                "update replies set crc = ? where owner = ? and request_id = ? and kind = ? and id = ?",
                (reply_crc(number, ended_at, *values), *key),
            )
    return appends


def _sum_answers(db: apsw.Connection, number: int, owner: str, body: str, length: int, more: bytes) -> None:
    try:
        appends, generates = _appends(db, number) + more, _generates(db, number)
    except DAMAGE_OF_ROWS:
        db.execute("update sessions set answers = -1 where session = ?", (number,))  # which its checksum is not of
        return
    appends, packed = most_recent(appends), packed_generates(recent_generates(generates))
    if appends:
        db.execute("insert into appends values (?, ?)", (number, appends))
    if packed:
        db.execute("insert into begun values (?, ?)", (number, packed))
    answers = answers_sum(number, appends, packed)
    db.execute(
        "update sessions set answers = ?, crc = ? where session = ?",
        (answers, session_crc(number, owner, body, length, answers), number),
    )


def _appends(db: apsw.Connection, number: int) -> bytes:
    found: bytes = b""
    for found, crc in list(db.execute("select replies, crc from old_appends where session = ?", (number,))):
        if crc != zlib.crc32(found, number & 0xFFFFFFFF):
            raise ValueError("answers to appends are damaged")
    return found


def _generates(db: apsw.Connection, number: int) -> list[GenerateRecord]:
    found = []
    for position, request_id, digest, seed, crc in list(
        db.execute(
            "select position, request_id, digest, seed, crc from generates where session = ? order by position",
            (number,),
        )
    ):
        if crc != crc_of(struct.pack("<QQ", number, position) + request_id + digest + seed):
            raise ValueError("how a Generate began is damaged")
        found.append(GenerateRecord(position, request_id, digest[:DIGEST_BYTES], int.from_bytes(seed, "little")))
    return found
