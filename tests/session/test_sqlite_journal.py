"""What is recorded in a folder is read again, in few rows and statements."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import apsw
import numpy as np
import pytest

from inference_engine.cli.main import main
from inference_engine.errors import ConfigError, HistoryCorrupt
from inference_engine.session.journal import GenerateRecord, ReplyRecord
from inference_engine.session.journal_database import FORMAT
from inference_engine.session.journal_rows import ROW_BYTES
from inference_engine.session.sqlite_journal import FILE
from inference_engine.types import Durability, Mark
from tests.kept import after_a_kill
from tests.kept import sqlite_journal as open_journal
from tests.session.journal_files import as_format_3, content, two_sessions_killed
from tests.session.talks import (
    Talk,
    record_of,
    until_folded,
)


@pytest.mark.parametrize("durability", [Durability.PROCESS, Durability.POWER])
def test_what_was_recorded_is_read_again_after_a_kill_folded_or_not(tmp_path: Path, durability: Durability) -> None:
    journal = open_journal(tmp_path, durability)
    talk = Talk(journal)
    for _ in range(60):
        talk.step()
    talk.wait()
    killed = after_a_kill(tmp_path)
    journal.stop()
    assert talk.check(killed) == "whole"
    assert talk.check(tmp_path) == "whole"
    with closing(apsw.Connection(str(tmp_path / FILE))) as db:
        assert next(db.execute("select count(*) from tokens"))[0]
        assert next(db.execute("select max(length(ids)) from tokens"))[0] <= ROW_BYTES


def test_a_step_is_a_few_statements_and_a_turn_is_folded_by_as_many_however_long_it_was(tmp_path: Path) -> None:
    journal, count = open_journal(tmp_path), 100
    statements: list[str] = []
    for number in range(count):
        journal.open(record_of(number))
    assert journal._writer.flush(20)

    def step(position: int, *, sessions: int = count) -> None:
        with journal.unit():
            for number in range(sessions):
                journal.append(f"session-{number}", position, np.array([position], dtype=np.uint32), Mark.GENERATED)
        assert journal._writer.flush(20)

    def commit_with(part: str) -> list[str]:
        """The statements of the last commit that has one with this text."""
        at = max(index for index, text in enumerate(statements) if part in text)
        begin = max(index for index, text in enumerate(statements[:at]) if text.startswith("begin"))
        return statements[begin : statements.index("commit", at)]

    def folded_in(number: int) -> int:
        journal.rest(f"session-{number}")
        assert journal._writer.flush(20)
        until_folded(journal)
        return len(commit_with("delete from tail"))

    journal._db.trace_v2(apsw.SQLITE_TRACE_STMT, lambda event: statements.append(event["sql"]))
    step(0)
    assert [text.partition(" ")[0] for text in commit_with("insert into tail")] == [
        "begin",
        "insert",
        "insert",
        "insert",
    ]
    short = folded_in(1)
    for position in range(1, 50):
        step(position, sessions=1)
    assert folded_in(0) == short
    kept = journal.load("session-0", "alice")
    assert kept is not None
    assert [token for row in kept.tokens for token in row.token_ids.tolist()] == list(range(50))
    journal.stop()


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_a_folder_of_the_format_before_has_all_that_was_recorded(tmp_path: Path, *, is_killed: bool) -> None:
    """Folded and not: tokens, Generates, answers to calls of every kind."""
    journal = open_journal(tmp_path / "state", Durability.POWER)
    talk = Talk(journal, 7)
    for step in range(40):
        talk.step()
        if step % 3 == 0 or step > 35:
            talk.wait()
    talk.wait()
    folder = after_a_kill(tmp_path / "state") if is_killed else tmp_path / "state"
    journal.stop()
    as_format_3(folder)
    assert talk.check(folder) == "whole"
    with closing(apsw.Connection(str(folder / FILE))) as db:
        assert next(db.execute("pragma user_version"))[0] == FORMAT
        names = {name for (name,) in db.execute("select name from sqlite_schema")}
    assert "generates" not in names
    assert not {name for name in names if name.startswith("old_")}
    assert talk.check(folder) == "whole"


def test_answers_that_are_damaged_in_the_format_before_are_refused(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    for number in range(2):
        journal.open(record_of(number))
        began = GenerateRecord(0, bytes([number]) * 16, bytes(8), 3)
        journal.append(f"session-{number}", 0, np.ones(3, dtype=np.uint32), Mark.GENERATED, began=began)
        journal.reply(ReplyRecord(f"session-{number}", "alice", "opened", bytes([number]) * 16, bytes(8), 0, "{}"))
        journal.leave(f"session-{number}")
    journal.stop()
    as_format_3(tmp_path)
    with closing(apsw.Connection(str(tmp_path / FILE))) as db:
        db.execute("update generates set seed = x'0000000000000000' where session = 1")
    copy = after_a_kill(tmp_path)
    journal = open_journal(tmp_path)
    with pytest.raises(HistoryCorrupt):
        journal.load("session-0", "alice")
    assert journal.load("session-1", "alice") is not None
    journal.stop()
    with closing(apsw.Connection(str(copy / FILE))) as db:
        db.execute("update replies set body = '[]' where session = 1")
    before = content(copy)
    with pytest.raises(ConfigError, match=r"an answer is damaged.*journal purge .* -- session-0`"):
        open_journal(copy)
    assert content(copy)[FILE] == before[FILE]
    assert main(["journal", "purge", str(copy), "session-0"]) == 0
    journal = open_journal(copy)
    assert journal.load("session-0", "alice") is None
    assert journal.load("session-1", "alice") is not None
    journal.stop()


@pytest.mark.parametrize(
    "change",
    ["ids = zeroblob(4)", "ids = cast(x'ff' as text)", "mark = null", "crc = 0", "session = 2", "position = 9"],
)
def test_a_turn_that_is_damaged_in_the_format_before_is_refused_with_its_session(tmp_path: Path, change: str) -> None:
    folder = two_sessions_killed(tmp_path / "state")
    as_format_3(folder)
    with closing(apsw.Connection(str(folder / FILE))) as db:
        db.execute(f"update tail set {change} where entry = 5")
    for _ in range(2):
        journal = open_journal(folder)
        until_folded(journal)
        with pytest.raises(HistoryCorrupt):
            journal.load("session-0", "alice")
        kept = journal.load("session-1", "alice")
        assert kept is not None and kept.saved.tokens == 3
        journal.stop()
    assert main(["journal", "purge", str(folder), "session-0"]) == 0
    journal = open_journal(folder)
    assert len(journal.everyone()) == 1 and not journal.check()
    journal.stop()
