"""A journal that an older version wrote, made one of this version's format, in one transaction.

format 1    no copies of K/V
format 2    no `ends`: each turn in rows of its own, which are read as they are; answers to appends in `replies`
format 3    a column for each value of the tail; Generates and the answers to appends in rows of their own, which
            nothing accounted for
format 4    one log-probability of a token at most; read as it is
format 5    no `usage`
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
_USAGE = "create table usage (owner text primary key, body text, crc integer) without rowid"
_OLD = "drop table old_tail; drop table old_appends; drop table generates;"


def upgrade(db: apsw.Connection, version: int) -> None:
    """From a format below this version's. Within a transaction.

    A session whose rows are damaged is refused later, as is a folder with an answer that is. Raises ValueError for
    damage of a table, whose rows may be gone, and of a row of the tail that is of no session.
    """
    if version < 4:
        _account_for_answers(db, version)
    db.execute(_USAGE)


def _account_for_answers(db: apsw.Connection, version: int) -> None:
    for older, schema in enumerate((_COPIES, _ENDS), start=1):
        if version <= older:
            db.execute(schema)
    for table in _TABLES:
        if found := [text for (text,) in db.execute(f"pragma integrity_check({table})") if text != "ok"]:
            raise ValueError("; ".join(found))
    db.execute(_ANSWERS)
    _move_tail(db)
    appends = _move_replies(db)
    for number, owner, body, length, crc in list(db.execute("select session, owner, body, length, crc from sessions")):
        if crc == session_crc(number, owner, body, length, 0):  # else it is refused in any case
            _sum_answers(db, number, owner, body, length, appends.get(number, b""))
    db.execute(_OLD)


def _move_tail(db: apsw.Connection) -> None:
    numbers = [number for (number,) in db.execute("select session from sessions")]
    for entry, number, crc, *row in list(
        db.execute(
            "select entry, cast(session as integer), crc, cast(position as integer), cast(mark as integer), "
            "cast(ids as blob), cast(logprobs as blob) from old_tail order by entry"
        )
    ):
        if _is_old_entry(crc, number, *row):
            position, mark, ids, logprobs = row
            body = packed_tokens(number, position, mark, ids, logprobs, None)
            db.execute("insert into tail values (?, ?, ?, ?)", (entry, number, position, body))
            continue
        # Whose it is: the session whose number its checksum has, if that number is damaged in the row.
        found = next((one for one in numbers if _is_old_entry(crc, one, *row)), number)
        if found not in numbers:
            raise ValueError(f"a row of the tail is of no session: {found!r}")
        db.execute("insert into tail values (?, ?, 0, x'')", (entry, found))  # which no entry is: it is refused


def _is_old_entry(crc: int, number: int, position: int, mark: int, ids: bytes, logprobs: bytes | None) -> bool:
    try:
        return crc == tokens_crc(position, mark, ids, logprobs, number)
    except (TypeError, struct.error):
        return False


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
        key = record.owner, record.request_id, record.kind, record.session_id
        if crc != crc_of(repr(record).encode()):
            # Which none has.
            db.execute("update replies set crc = -1 where owner = ? and request_id = ? and kind = ? and id = ?", key)
        elif record.kind == APPENDED and number is not None and ended_at is None:
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
