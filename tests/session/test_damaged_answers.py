"""An answer that is damaged is refused or missed with a word, and never taken for a call that had not come."""

from __future__ import annotations

import re
import shlex
from contextlib import closing
from pathlib import Path

import apsw
import numpy as np
import pytest

from inference_engine.cli.main import main
from inference_engine.errors import ConfigError, HistoryCorrupt
from inference_engine.metrics import EngineMetrics
from inference_engine.session.journal import APPENDED, GenerateRecord, ReplyRecord
from inference_engine.session.journal_database import PAGE_BYTES
from inference_engine.session.replies import DIGEST_BYTES, REQUEST_ID_BYTES
from inference_engine.session.sqlite_journal import FILE, SQLiteJournal
from inference_engine.types import Durability, Mark
from tests.kept import sqlite_journal as open_journal
from tests.session.journal_files import content
from tests.session.talks import (
    record_of,
    until_folded,
)

ANSWERS = (
    "replies set digest = x'0000000000000000'",
    "replies set request_id = zeroblob(16)",
    "replies set request_id = cast(request_id as text)",
    "replies set session = 7",
    "replies set ended_at = 1.0",
    "replies set body = cast(body as blob)",
    "appends set replies = zeroblob(length(replies))",
    "appends set session = 7",
    "begun set session = 7",
    "begun set generates = zeroblob(length(generates))",
    "sessions set answers = 0",
)


def request_id(number: int) -> bytes:
    return bytes([number + 1]) * REQUEST_ID_BYTES


def answered(folder: Path, count: int = 2) -> None:
    """So many sessions with a Generate and an append that are folded, and the answer to the call that opened each."""
    journal = open_journal(folder)
    for number in range(count):
        id_, key = f"session-{number}", request_id(number)
        with journal.unit():
            journal.open(record_of(number))
            journal.reply(ReplyRecord(id_, "alice", "opened", key, key[:DIGEST_BYTES], 0, "{}"))
        began = GenerateRecord(0, key, key[:DIGEST_BYTES], 5)
        journal.append(id_, 0, np.ones(2, dtype=np.uint32), Mark.GENERATED, began=began)
        with journal.unit():
            journal.append(id_, 2, np.ones(2, dtype=np.uint32), Mark.APPENDED)
            journal.reply(ReplyRecord(id_, "alice", APPENDED, key, key[:DIGEST_BYTES], 4, "4"))
        journal.leave(id_)
    assert journal._writer.flush(20)
    until_folded(journal)
    journal.stop()


@pytest.mark.parametrize("change", ANSWERS)
def test_an_answer_that_is_damaged_is_not_as_if_its_call_had_never_come(tmp_path: Path, change: str) -> None:
    """The call would be done twice. Of a session, that alone is refused; else the start is."""
    answered(tmp_path)
    table = change.partition(" ")[0]
    with closing(apsw.Connection(str(tmp_path / FILE))) as db:
        db.execute(f"update {change} where session = 1")
        assert db.changes() == 1
    if table == "replies":
        with pytest.raises(ConfigError, match=r"is damaged.*from a backup"):
            open_journal(tmp_path)
        return
    journal = open_journal(tmp_path)
    with pytest.raises(HistoryCorrupt):
        journal.load("session-0", "alice")
    kept = journal.load("session-1", "alice")
    assert kept is not None
    assert [one.kind for one in kept.replies] == [APPENDED, "opened"]
    assert [one.position for one in kept.generates] == [0]
    journal.stop()


def test_a_page_of_answers_that_lost_its_last_one_is_refused_at_the_start(tmp_path: Path) -> None:
    answered(tmp_path)
    with closing(apsw.Connection(str(tmp_path / FILE))) as db:
        (page,) = next(db.execute("select rootpage from sqlite_schema where name = 'replies'"))
    data = bytearray((tmp_path / FILE).read_bytes())
    at = (page - 1) * PAGE_BYTES + 3  # the number of its rows
    assert int.from_bytes(data[at : at + 2], "big") == 2
    data[at + 1] = 1
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(ConfigError, match=r"is damaged.*from a backup"):
        open_journal(tmp_path)


def test_a_session_whose_answers_are_damaged_is_closed_with_those_that_are_not(tmp_path: Path) -> None:
    """That a server can start again, the tools open such a folder."""
    answered(tmp_path)
    with closing(apsw.Connection(str(tmp_path / FILE))) as db:
        db.execute("update replies set digest = x'00' where session = 1")
    tools = SQLiteJournal(tmp_path, Durability.POWER, weights=None, metrics=EngineMetrics())
    assert "'session-0'" in tools.check()
    tools.purge("session-0", "alice")
    assert not tools.check()
    tools.stop()
    journal = open_journal(tmp_path)
    assert [one.kind for one in journal.replies_to("alice", request_id(0))] == [APPENDED]
    assert journal.load("session-1", "alice") is not None
    journal.stop()


@pytest.mark.parametrize("is_closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize(
    "change",
    [
        *(change for change in ANSWERS if change.startswith("replies")),
        "replies set id = 'session-o'",
        "replies set id = cast(x'61ff' as text)",
        "replies set body = cast(x'61ff' as text)",
        "replies set ended_at = 'x'",
        "replies set ended_at = 1e300",
    ],
)
def test_a_session_with_a_damaged_answer_is_purged_as_the_refusal_says_also_if_it_has_ended(
    tmp_path: Path, change: str, *, is_closed: bool
) -> None:
    answered(tmp_path)
    if is_closed:
        journal = open_journal(tmp_path)
        assert journal.load("session-0", "alice") is not None
        journal.close("session-0")
        journal.stop()
    with closing(apsw.Connection(str(tmp_path / FILE))) as db:
        db.execute(f"update {change} where session = 1 and kind = 'opened'")
        assert db.changes() == 1
    before = content(tmp_path)
    with pytest.raises(ConfigError, match=r"is damaged.*from a backup") as refused:
        open_journal(tmp_path)
    assert content(tmp_path)[FILE] == before[FILE]
    (command,) = re.findall("`kakeya (.*?)`", str(refused.value))
    assert main(shlex.split(command)) == 0
    journal = open_journal(tmp_path)
    assert journal.load("session-0", "alice") is None
    assert not [one for one in journal.replies_to("alice", request_id(0)) if one.kind == "opened"]
    assert [one.kind for one in journal.replies_to("alice", request_id(1))] == ["opened"]
    assert journal.load("session-1", "alice") is not None
    assert not journal.check()
    journal.stop()
