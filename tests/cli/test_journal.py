"""`kakeya journal` on folders that a server has left, and on a database that one uses."""

from pathlib import Path

import apsw
import pytest

from inference_engine.cli.main import main
from inference_engine.session.journal_database import PAGE_BYTES
from inference_engine.session.sqlite_journal import FILE
from tests.kept import Database, keeping, saved, sqlite_journal
from tests.session.talks import record_of

HISTORY = list(range(40))


def sessions_in(folder: Path, *labels: str) -> list[str]:
    with keeping(folder) as engine:
        ids = [engine.create_session(label=label, owner="alice").session_id for label in labels]
        for session_id in ids:
            engine.append(session_id, HISTORY, owner="alice")
    return ids


def test_sessions_are_listed_checked_and_purged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    first, second = sessions_in(state, "one", "two")
    assert main(["journal", "list", str(state)]) == 0
    listed = capsys.readouterr().out
    assert f"{first} of alice: 40 tokens, full" in listed
    assert "'two'" in listed
    assert main(["journal", "check", str(state)]) == 0
    assert "2 sessions, 0 damaged" in capsys.readouterr().out
    assert main(["journal", "purge", str(state), first, "unknown"]) == 1
    assert main(["journal", "purge", str(state), first, "--", "-unknown"]) == 1
    assert f"{state} has no session -unknown; nothing was deleted" in capsys.readouterr().err
    assert main(["journal", "purge", str(state), first]) == 0
    capsys.readouterr()
    assert main(["journal", "check", str(state)]) == 0
    assert capsys.readouterr().out == "1 session, 0 damaged\n"
    with keeping(state) as engine:
        assert [one.session_id for one in engine.list_sessions(owner="alice")] == [second]


def test_a_damaged_session_is_named_and_others_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    damaged, whole = sessions_in(state, "one", "two")
    db = apsw.Connection(str(state / FILE))
    for table, column in (("tail", "body"), ("ends", "ids")):
        db.execute(
            f"update {table} set {column} = zeroblob(length({column})) where session = "
            "(select session from sessions where id = ?)",
            (damaged,),
        )
    db.close()
    assert main(["journal", "check", str(state)]) == 1
    out = capsys.readouterr().out
    assert f"{damaged}: the session's history on disk is damaged" in out
    assert whole not in out


def test_a_folder_that_cannot_be_written_for_a_damaged_index_has_a_backup_that_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each server on the folder ends when a session is opened: to commit it, the index has to be changed."""
    state, copy = tmp_path / "state", tmp_path / "copy"
    first, second = sessions_in(state, "one", "two")
    db = apsw.Connection(str(state / FILE))
    ((page,),) = db.execute("select rootpage from sqlite_master where name = 'sqlite_autoindex_sessions_1'")
    db.close()
    with (state / FILE).open("r+b") as file:
        file.seek((page - 1) * PAGE_BYTES + 5)  # where in the page its cells begin, which only a change of it looks at
        file.write(b"\x00\x01")
    for number in range(2):
        journal = sqlite_journal(state)
        journal.open(record_of(number))
        assert not journal._writer.flush(20) and "CorruptError" in journal.failure
        journal.stop()
    assert main(["journal", "check", str(state)]) == 1
    assert main(["journal", "purge", str(state), first]) == 1
    assert f"`kakeya journal backup {state} FOLDER` makes a copy with new indexes" in capsys.readouterr().err
    assert main(["journal", "backup", str(state), str(copy)]) == 0
    assert main(["journal", "check", str(copy)]) == 0
    with keeping(copy) as engine:
        for session_id in (first, second):
            engine.recall(session_id, owner="alice")
            assert engine.read_history(session_id, owner="alice").token_ids.tolist() == HISTORY
        engine.create_session(owner="alice")
        saved(engine)


def test_a_backup_is_a_folder_that_a_server_can_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, copy = tmp_path / "state", tmp_path / "copy"
    (session_id,) = sessions_in(state, "one")
    assert main(["journal", "backup", str(state), str(copy)]) == 0
    capsys.readouterr()
    assert main(["journal", "backup", str(state), str(copy)]) == 1
    assert "is there already; name a folder that is not" in capsys.readouterr().err
    with keeping(copy) as engine:
        engine.recall(session_id, owner="alice")
        assert engine.read_history(session_id, owner="alice").token_ids.tolist() == HISTORY


def test_a_folder_without_a_journal_or_with_a_server_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["journal", "list", str(tmp_path)]) == 1
    assert "has no journal" in capsys.readouterr().err
    with keeping(tmp_path / "state"):
        assert main(["journal", "check", str(tmp_path / "state")]) == 1
        assert "in use by process" in capsys.readouterr().err


def test_the_sessions_of_a_database_are_listed_checked_and_purged_while_a_server_goes_on(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"postgres:{database.dsn}"
    with keeping(database) as engine:
        first, second, third = (engine.create_session(owner="alice").session_id for _ in range(3))
        for session_id in (first, second, third):
            engine.append(session_id, HISTORY, owner="alice")
        saved(engine)
        assert main(["journal", "list", place]) == 0
        assert f"{first} of alice: 40 tokens, full" in capsys.readouterr().out
        assert main(["journal", "purge", place, first, "unknown"]) == 1
        assert "has no session unknown; nothing was deleted" in capsys.readouterr().err
        assert main(["journal", "purge", place, first]) == 0
        assert {one.session_id for one in engine.list_sessions(owner="alice")} == {second, third}
        database.say(f"update kakeya.sessions set crc = crc + 1 where id = '{second}'")
        capsys.readouterr()
        assert main(["journal", "check", place]) == 1
        out = capsys.readouterr().out
        assert f"{second}: the session's history on disk is damaged" in out
        assert out.endswith("2 sessions, 1 damaged\n")
        assert main(["journal", "backup", place, "somewhere"]) == 1
        assert "pg_dump" in capsys.readouterr().err
        assert main(["journal", "list", "postgres://kakeya:secret@db.internal/kakeya"]) == 1
        assert "PGPASSFILE" in capsys.readouterr().err
        assert engine.append(third, [1], owner="alice") == len(HISTORY) + 1
        saved(engine)
    assert database.say("select name from kakeya.replicas") == [("server",)], "of a command nothing stays"
