"""Files of a journal, as tests find, leave and damage them."""

from __future__ import annotations

import shutil
import struct
import zlib
from contextlib import closing
from pathlib import Path

import apsw
import numpy as np

from inference_engine.session.journal import APPENDED, GenerateRecord, ReplyRecord
from inference_engine.session.journal_folder import LOCK
from inference_engine.session.journal_rows import tokens_crc, unpacked_appends, unpacked_entry, unpacked_generates
from inference_engine.session.sqlite_journal import FILE
from inference_engine.types import Durability, Mark
from tests.kept import after_a_kill
from tests.kept import sqlite_journal as open_journal
from tests.session.talks import Talk, record_of


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {file.name: (file.stat().st_mode, file.read_bytes()) for file in folder.iterdir()}


def killed_after(folder: Path, durability: Durability, steps: int = 20) -> tuple[Talk, Path]:
    """What a talk was sent, and a folder that its server leaves when it is killed: the log is not empty."""
    journal = open_journal(folder, durability)
    talk = Talk(journal)
    for _ in range(steps):
        talk.step()
        talk.wait()
    killed = after_a_kill(folder)
    shutil.copy(folder / LOCK, killed)
    journal.stop()
    return talk, killed


_FORMAT_3 = """
drop table usage;
alter table tail rename to new_tail;
alter table appends rename to new_appends;
create table tail (
    entry integer primary key, session integer, position integer, mark integer, ids blob, logprobs blob, crc integer);
create table generates (
    session integer, position integer, request_id blob, digest blob, seed blob, crc integer,
    primary key (session, position)) without rowid;
create table appends (session integer primary key, replies blob, crc integer);
"""


def as_format_3(folder: Path) -> None:
    """What the version before this format would have written: nothing accounts for answers, and each is a row."""
    with closing(apsw.Connection(str(folder / FILE))) as db, db:
        db.execute(_FORMAT_3)
        sessions = {
            number: rest for number, *rest in db.execute("select session, id, owner, body, length from sessions")
        }
        for entry, number, position, body in list(db.execute("select * from new_tail order by entry")):
            found = unpacked_entry(position, body)
            session_id, owner, *_ = sessions[number]
            for reply in unpacked_appends(session_id, owner, found.answer):
                values = (number, session_id, owner, APPENDED, reply.request_id, reply.digest, position, str(position))
                db.execute("insert into replies values (?, ?, ?, ?, ?, ?, ?, ?, 0, null)", values)
            if not found.answer:
                row = (position, found.mark, found.ids, found.logprobs)
                db.execute(
                    "insert into tail values (?, ?, ?, ?, ?, ?, ?)", (entry, number, *row, tokens_crc(*row, number))
                )
            if found.began is not None:
                _insert_generate(db, number, found.began)
        for number, generates in list(db.execute("select * from begun")):
            for began in unpacked_generates(generates):
                _insert_generate(db, number, began)
        for number, replies in list(db.execute("select * from new_appends")):
            db.execute("insert into appends values (?, ?, ?)", (number, replies, zlib.crc32(replies, number)))
        for number, (_, owner, body, length) in sessions.items():
            crc = zlib.crc32(f"{number} {length} {owner} {body}".encode())
            db.execute("update sessions set crc = ? where session = ?", (crc, number))
        for values in list(db.execute("select id, owner, kind, request_id, digest, position, body from replies")):
            crc = reply_crc_before(ReplyRecord(*values))
            db.execute(
                "update replies set crc = ? where id = ? and owner = ? and kind = ? and request_id = ?",
                (crc, *values[:4]),
            )
        db.execute("drop table new_tail; drop table new_appends; drop table begun")
        db.execute("alter table sessions drop column answers; pragma user_version = 3")


def reply_crc_before(record: ReplyRecord) -> int:
    return zlib.crc32(repr(record).encode())


def _insert_generate(db: apsw.Connection, number: int, began: GenerateRecord) -> None:
    seed = began.seed.to_bytes(8, "little")
    crc = zlib.crc32(struct.pack("<QQ", number, began.position) + began.request_id + began.digest + seed)
    values = (number, began.position, began.request_id, began.digest, seed, crc)
    db.execute("insert into generates values (?, ?, ?, ?, ?, ?)", values)


def two_sessions_killed(folder: Path) -> Path:
    """Of three tokens each, in the tail: the last row is of the second."""
    journal = open_journal(folder)
    for number in range(2):
        journal.open(record_of(number))
    for position in range(3):
        for number in range(2):
            journal.append(f"session-{number}", position, np.array([position + 1], dtype=np.uint32), Mark.APPENDED)
    assert journal._writer.flush(20)
    killed = after_a_kill(folder)
    journal.stop()
    return killed
