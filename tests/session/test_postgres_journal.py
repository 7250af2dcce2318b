"""A database that is lost, refused, damaged or full: what was confirmed is there, and nothing is done twice."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_engine.config import EngineConfig
from inference_engine.errors import ConfigError, HistoryCorrupt, JournalAway
from inference_engine.metrics import EngineMetrics
from inference_engine.session.journal import CopyRecord
from inference_engine.session.journals import open_journal
from inference_engine.types import Durability, Mark
from tests.further import further_test
from tests.kept import WEIGHTS, Database, opened
from tests.session.talks import OWNER, Talk, record_of, until_folded

ONE = np.ones(1, dtype=np.uint32)


def journal_with(place: Database, **settings: Any) -> Any:
    config = EngineConfig(journal=f"postgres:{place.dsn}", durability="process", **settings)
    return open_journal(config, weights=WEIGHTS, metrics=EngineMetrics())


@contextmanager
def one_session(place: Database, tokens: int = 3) -> Iterator[Any]:
    journal: Any = opened(place)
    try:
        journal.open(record_of(0))
        journal.append("session-0", 0, np.ones(tokens, dtype=np.uint32), Mark.APPENDED)
        assert journal._writer.flush(20)
        yield journal
    finally:
        journal.stop()


def test_steps_turns_and_forks_are_there_after_connections_were_cut_and_the_process_ended(database: Database) -> None:
    journal = opened(database)
    talk = Talk(journal, 3)
    for step in range(24):
        if step % 6 == 5:
            database.server.cut(database.dsn)
        talk.step()
        talk.wait()
    killed = database.killed
    journal.stop()
    assert talk.check(killed) == talk.check(database) == "whole"


def test_a_commit_that_was_not_made_cannot_come_after_its_number_was_asked_for(database: Database) -> None:
    """The network may have it, and bring it to the database later."""
    import psycopg

    with one_session(database) as journal:
        late, number = psycopg.connect(database.dsn), journal._number + 1
        database.cut(is_cut=True)
        journal.append("session-0", 3, ONE, Mark.APPENDED)
        assert not journal._writer.flush(0.3)
        journal._doubt = (), number  # the connection was lost at a commit of this number
        late.close()
        database.cut(is_cut=False)
        assert journal._writer.flush(20)
        with psycopg.connect(database.dsn) as late, pytest.raises(psycopg.Error) as refused:
            late.execute("select kakeya.fence('server', 1, %s)", (number,))
        assert refused.value.sqlstate == "KK001"
        assert journal.look("session-0", OWNER)[0].history_length == 4


def test_a_commit_that_is_still_under_way_is_waited_for_and_not_made_again(database: Database) -> None:
    import psycopg

    with one_session(database) as journal:
        number, changes = journal._number + 1, [(journal._tables.rest, (1,))]
        with psycopg.connect(database.dsn) as under_way:
            under_way.execute("select kakeya.fence('server', 1, %s)", (number,))
            journal._doubt = changes, number
            journal.append("session-0", 3, ONE, Mark.APPENDED)
            assert not journal._writer.flush(0.3), "the answer came before it was known"
        assert journal._writer.flush(20)
        assert journal._number == number + 1
        assert journal.look("session-0", OWNER)[0].history_length == 4


def test_a_server_whose_place_was_taken_commits_nothing_more(database: Database) -> None:
    with one_session(database) as journal:
        database.say("update kakeya.replicas set epoch = epoch + 1")
        journal.append("session-0", 3, ONE, Mark.APPENDED)
        receipt = journal.receipt("session-0")
        assert not journal._writer.flush(20, receipt)
        assert receipt.is_lost and not journal.has("session-0")
        assert not journal.failure, "it goes on without its sessions"
        journal.open(record_of(1))
        assert journal._writer.flush(20, journal.receipt("session-1"))
    assert database.say("select count(*) from kakeya.tail") == [(1,)]


def test_a_full_disk_is_waited_for_and_nothing_is_confirmed_before(database: Database) -> None:
    with one_session(database) as journal:
        database.say(
            "create function kakeya.full() returns trigger language plpgsql as "
            "$$ begin raise exception 'no space' using errcode = '53100'; end $$"
        )
        for table in ("tail", "facts"):
            database.say(
                f"create trigger full_disk before insert on kakeya.{table} for each row execute function kakeya.full()"
            )
        journal.append("session-0", 3, ONE, Mark.APPENDED)
        assert not journal._writer.flush(0.5)
        assert journal.is_full and not journal.failure
        assert journal.look("session-0", OWNER)[0].history_length == 3
        database.say("drop function kakeya.full() cascade")
        assert journal._writer.flush(20)
        assert journal.look("session-0", OWNER)[0].history_length == 4


@pytest.mark.parametrize(
    "damage",
    [
        "delete from kakeya.tail where entry = 1",
        "update kakeya.tail set body = body || 'x' where entry = 1",
        "update kakeya.sessions set length = 1",
        "update kakeya.sessions set body = replace(body, 'full', 'none')",
    ],
)
def test_a_session_whose_rows_are_damaged_is_refused_and_stays_as_it_is(database: Database, damage: str) -> None:
    with one_session(database) as journal:
        for position in (3, 4):
            journal.append("session-0", position, ONE, Mark.APPENDED)
            assert journal._writer.flush(20)
        database.say(damage)
        journal.leave("session-0")
        until_folded(journal)
        with pytest.raises(HistoryCorrupt):
            journal.load("session-0", OWNER)
        assert [one.record.session_id for one in journal.page(OWNER, after="", most=5)] == ["session-0"]
    assert database.say("select count(*) from kakeya.tail") != [(0,)]


def test_a_database_that_cannot_keep_what_is_promised_is_refused_and_left_as_it_is(
    database: Database, subtests: pytest.Subtests
) -> None:
    with one_session(database), pytest.raises(ConfigError, match="is in use by another server of the name"):
        opened(database)
    cases: dict[str, tuple[dict[str, Any], str, str]] = {
        "of another model: each|weights": ({"weights": "b" * 64}, "", ""),
        "has format 99, and this version": (
            {},
            "update kakeya.facts set value = 99 where name = 'format'",
            "update kakeya.facts set value = 1 where name = 'format'",
        ),
        "a standby or read-only": (
            {},
            f"alter database {database.name} set default_transaction_read_only = on",
            f"begin read write; alter database {database.name} reset default_transaction_read_only; commit",
        ),
    }
    for complaint, (settings, before, after) in cases.items():
        with subtests.test(complaint):
            if before:
                database.say(before)
            with pytest.raises(ConfigError, match=complaint):
                opened(database, **settings)
            if after:
                database.say(after)
    with subtests.test("not synced"), pytest.raises(ConfigError, match=r"has fsync=off.*durability=process"):
        open_journal(
            EngineConfig(journal=f"postgres:{database.dsn}", durability="power"),
            weights=WEIGHTS,
            metrics=EngineMetrics(),
        )
    database.cut(is_cut=True)
    with subtests.test("not reached"), pytest.raises(ConfigError, match="cannot be reached"):
        opened(database)
    database.cut(is_cut=False)
    database.server.say("create database latin template template0 encoding 'LATIN1'")
    with subtests.test("encoding"), pytest.raises(ConfigError, match="has the encoding LATIN1"):
        opened(Database(database.server, database.server.dsn("latin")))
    with subtests.test("no DSN"), pytest.raises(ConfigError, match="postgres: takes postgres://USER@HOST/DATABASE"):
        open_journal(EngineConfig(journal="postgres:here"), weights=WEIGHTS, metrics=EngineMetrics())
    journal = opened(database)
    assert journal.load("session-0", OWNER) is not None
    journal.stop()


def test_a_look_while_the_database_is_away_is_refused_by_type(database: Database) -> None:
    with one_session(database) as journal:
        database.cut(is_cut=True)
        with pytest.raises(JournalAway):
            journal.look("session-0", OWNER)
        database.cut(is_cut=False)
        assert journal.look("session-0", OWNER)[0].history_length == 3


def test_a_database_that_is_frozen_at_a_commit_is_away_until_it_answers_and_has_it_once(database: Database) -> None:
    """Its connections stay, and nothing comes over them."""
    opened(database).stop()  # a slow machine needs longer to make the tables
    place = Database(database.server, f"connect_timeout=1 tcp_user_timeout=1000 {database.dsn}")
    with one_session(place) as journal, ExitStack() as stack:
        with suppress(JournalAway):
            journal.look("session-1", OWNER)  # a connection for reading is kept
        commit, epoch = journal._db.commit, journal._lease.epoch

        def frozen_commit() -> None:
            stack.enter_context(database.server.frozen())
            commit()

        journal._db.commit = frozen_commit
        journal.append("session-0", 3, ONE, Mark.APPENDED)
        assert not journal._writer.flush(20, journal.receipt("session-0"))
        assert journal.is_away and not journal.failure
        began = time.monotonic()
        for call in (journal.look, journal.load):
            with pytest.raises(JournalAway):
                call("session-1", OWNER)
        assert time.monotonic() - began < 20
        stack.close()
        assert journal._writer.flush(20)
        assert journal.look("session-0", OWNER)[0].history_length == 4
        assert journal._lease.epoch == epoch, "no other server took its place"
        ends = time.monotonic() + 10
        while database.say("select count(*) from pg_locks where locktype = 'advisory'") != [(1,)]:
            assert time.monotonic() < ends, "others take a server without its lock for dead"


def test_copies_of_kv_are_indexed_there_and_their_files_lie_in_a_folder(database: Database, tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    folder.mkdir(mode=0o700)
    for name in ("one", "two"):
        (folder / name).write_bytes(b"kv")
    gone: list[str] = []
    journal = journal_with(database, copies_dir=str(folder))
    assert journal.book.copies_folder == folder and not journal.copies(gone.append)
    journal.open(record_of(0))
    records = [CopyRecord("session-0", OWNER, name, 3, 2, 7) for name in ("one", "two")]
    for record in records:
        journal.book.put_copy(record)
    assert journal.copies(gone.append) == [records[1]]
    assert gone == ["one"] and not (folder / "one").exists()
    journal.stop()
    journal = journal_with(database, copies_dir=str(folder))
    assert journal.copies(gone.append) == [records[1]]
    assert journal.load("session-0", OWNER) is not None
    journal.close("session-0")
    assert journal._writer.flush(20)
    assert not list(folder.iterdir())
    journal.stop()
    assert journal_with(database).book is None


def test_the_name_of_a_server_is_that_of_its_connections(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which others end them: a name that is cut or spelled otherwise would leave a frozen server's commit open."""
    for given in ("é", "n" * 57, " ", "a\n", " a"):
        with pytest.raises(ConfigError, match="no name of a server; give one of 1 to 56 characters"):
            journal_with(database, replica=given)
    names = set()
    config = EngineConfig(journal=f"postgres:{database.dsn} application_name=other", durability="process")
    for machine in ("here", "pod-" + "x" * 59, "pod-" + "x" * 58 + "y", "büro"):
        monkeypatch.setattr(socket, "gethostname", lambda machine=machine: machine)
        journal = open_journal(config, weights=WEIGHTS, metrics=EngineMetrics())
        ((name, connection),) = database.say(
            "select r.name, a.application_name from kakeya.replicas r join pg_stat_activity a on a.pid = r.backend "
            "where r.until > clock_timestamp()"
        )
        assert connection == f"kakeya {name}"
        names.add(name)
        journal.stop()
    assert len(names) == 4
    monkeypatch.setattr(socket, "gethostname", str)
    with pytest.raises(ConfigError, match="'' is no name of a server, but this machine has it"):
        journal_with(database)


@further_test
def test_a_database_that_is_killed_and_started_again_has_what_was_confirmed(database: Database) -> None:
    server = database.server
    server.say("alter system set fsync = on")
    server.say("select pg_reload_conf()")
    journal: Any = open_journal(
        EngineConfig(journal=f"postgres:{database.dsn}", replica="server"),
        weights=WEIGHTS,
        metrics=(metrics := EngineMetrics()),
    )
    assert journal.durability is Durability.POWER
    try:
        talk = Talk(journal, 5)
        for _ in range(3):
            for _ in range(6):
                talk.step()
                talk.wait()
            server.stop(signal.SIGQUIT)
            talk.step()
            assert not journal._writer.flush(0.5)
            assert journal.is_away and metrics.journal_away._value.get() == 1
            server.start()
            talk.wait()
        journal.stop()
        assert talk.check(database) == "whole"
    finally:
        server.say("alter system reset fsync")
        server.say("select pg_reload_conf()")


def test_a_process_that_has_just_ended_does_not_keep_the_next_one_from_its_database(database: Database) -> None:
    began = time.monotonic()
    for _ in range(5):
        opened(database).stop()
    assert time.monotonic() - began < 60


def test_a_server_folds_nothing_of_a_session_that_another_one_has_by_then(database: Database) -> None:
    """It was noted for folding before it was let go of. Rows that the other commits between reading and deletion would
    be deleted unread."""
    claimed, has_read, written = (threading.Event() for _ in range(3))
    with one_session(database) as one:
        two: Any = opened(database, replica="two")
        fold, clear, folds = one._tables.fold, one._tables.tail.clear, list[int]()

        def after_the_claim(number: int) -> None:
            folds.append(number)
            assert len(folds) == 1 or claimed.wait(20)
            fold(number)

        def after_a_commit(number: int) -> None:
            if len(folds) > 1:
                has_read.set()
                assert written.wait(20)
            clear(number)

        one._tables.fold, one._tables.tail.clear = after_the_claim, after_a_commit
        try:
            one.leave("session-0")
            assert one._writer.flush(20, one.receipt("session-0"))
            assert two.load("session-0", OWNER) is not None
            two.append("session-0", 3, ONE, Mark.APPENDED)
            assert two._writer.flush(20)
            claimed.set()
            while one._tables.to_fold and not has_read.is_set():
                time.sleep(0.001)
            two.append("session-0", 4, ONE, Mark.APPENDED)
            assert two._writer.flush(20)
            written.set()
            until_folded(one)
            assert len(folds) > 1
        finally:
            two.stop()
    three: Any = opened(database, replica="three")
    assert three.load("session-0", OWNER).record.session_id == "session-0"
    assert three.look("session-0", OWNER)[0].history_length == 5
    three.stop()
