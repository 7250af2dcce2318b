"""Servers that share a database: a session is one server's at a time, and goes on at another when that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import psycopg
import pytest

import kakeya
from inference_engine.compose import DLMRestoredVerifier
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.errors import ConfigError, JournalAway, QuotaExceeded, SessionElsewhere
from inference_engine.metrics import EngineMetrics
from inference_engine.session.kept_journal import KeptJournal
from inference_engine.session.postgres_journal import PostgresJournal
from inference_engine.types import Durability, GenerateParams, Mark, TokenCommitted
from kakeya.v1 import runtime_pb2 as pb
from tests.kept import WEIGHTS, Database, saved
from tests.load.scripted import scripted_engine
from tests.server.wire import HISTORY, Details, connected, read_rest, refused, serving, until
from tests.session.talks import OWNER, record_of
from tests.tiny import SMALL, tiny_forward

ELSEWHERE = "UNAVAILABLE SESSION_ELSEWHERE"
# A server that was taken for dead loses the connection by which it commits, too.
PASSING = (ELSEWHERE, "UNAVAILABLE JOURNAL_AWAY")
PROMPT = list(range(3, 43))
ONE = np.ones(1, dtype=np.uint32)


@contextmanager
def replica(
    database: Database, name: str, *, lease_seconds: float = 5.0, **settings: Any
) -> Iterator[tuple[Engine, Any]]:
    """A server's engine, and its journal. It is stopped in order at the end."""
    metrics = EngineMetrics()
    journal = made_journal(database.dsn, name, metrics, lease_seconds)
    with scripted_engine(journal=journal, metrics=metrics, state_dir=name, **settings) as engine:
        yield engine, journal


@contextmanager
def journal_of(
    database: Database, name: str, *, dsn: str = "", lease_seconds: float = 5.0, **settings: Any
) -> Iterator[tuple[Any, EngineMetrics]]:
    """Without a server."""
    metrics = EngineMetrics()
    journal = made_journal(dsn or database.dsn, name, metrics, lease_seconds, **settings)
    try:
        yield journal, metrics
    finally:
        journal.stop()


def made_journal(dsn: str, name: str, metrics: EngineMetrics, lease_seconds: float, **settings: Any) -> PostgresJournal:
    return PostgresJournal(
        dsn,
        Durability.PROCESS,
        weights=WEIGHTS,
        metrics=metrics,
        replica=name,
        lease_seconds=lease_seconds,
        **settings,
    )


def eventually(is_so: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError


def brought(engine: Engine, session_id: str) -> None:
    """As calls do that an SDK repeats."""
    for _ in range(400):
        try:
            engine.recall(session_id)
        except SessionElsewhere as error:
            time.sleep(error.retry_after_seconds or 0)
        else:
            return
    raise AssertionError("the other server does not let go of the session")


async def until_there(call: Callable[[], Awaitable[Any]]) -> Any:
    """As an SDK: again, as long as another server has the session."""
    for _ in range(1000):
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            if Details(error).reason not in PASSING:
                raise
            await asyncio.sleep(0.03)
    raise AssertionError("the other server does not let go of the session")


def test_servers_that_would_give_other_tokens_are_not_alive_together(database: Database) -> None:
    """A session that goes on at the other one would be refused there, or go on with other tokens."""
    alone, split = {"numerics": "listed", "dtype": "float32"}, {"numerics": "listed, 2 ranks", "dtype": "float32"}
    with journal_of(database, "one", facts=alone):
        with pytest.raises(
            ConfigError, match="'one' is alive and has numerics 'listed' there and 'listed, 2 ranks' here"
        ):
            made_journal(database.dsn, "two", EngineMetrics(), 5.0, facts=split)
        with (
            journal_of(database, "two", facts={**alone, "a fact of a later version": "1"}),
            journal_of(database, "an earlier version"),
        ):
            pass
    with journal_of(database, "two", facts=split), journal_of(database, "three", facts=split):
        pass


def test_what_decides_tokens_is_compared_when_a_server_starts(database: Database) -> None:
    def parts() -> DLMRestoredVerifier:
        return DLMRestoredVerifier(forward=tiny_forward(), latent=None, drafter=None, digests=lambda: (WEIGHTS, ""))

    def settings(replica: str, **more: Any) -> EngineConfig:
        journal = {"journal": f"postgres:{database.dsn}", "durability": "process", "replica": replica}
        return EngineConfig(**{**SMALL, **journal, **more})

    with (
        parts().engine(settings("one")),
        parts().engine(settings("two")),
        pytest.raises(ConfigError, match="segment_tokens '16' there and '32' here"),
    ):
        parts().engine(settings("three", segment_tokens=32))


def test_a_session_goes_to_the_server_that_is_asked_and_back(database: Database) -> None:
    with replica(database, "one") as (one, _), replica(database, "two") as (two, _):
        session = one.create_session().session_id
        one.append(session, PROMPT)
        list(one.generate(session, GenerateParams(max_tokens=5)))
        saved(one)
        for engine, added in ((two, 3), (one, 2), (two, 1)):
            before = two.kept_session_info(session).history_length
            brought(engine, session)
            assert engine.session_info(session).history_length == before
            engine.append(session, range(added))
            saved(engine)
            other = one if engine is two else two
            with pytest.raises(Exception, match="session"):
                other.session_info(session)
        assert one.kept_session_info(session).history_length == len(PROMPT) + 5 + 6


async def test_a_server_keeps_a_session_while_it_generates_and_lets_go_of_it_then(database: Database) -> None:
    with replica(database, "one") as (one, _), replica(database, "two") as (two, _):
        async with (
            serving(one) as here,
            serving(two) as there,
            connected(here) as client,
            connected(there) as other,
            kakeya.AsyncClient(there.target) as agents,
        ):
            session = await client.open_endless()
            stream = client.stream(pb.GenerateRequest(session_id=session, max_tokens=30_000))
            await stream.read()
            away = await refused(other.append(session, [1]))
            assert away.reason == ELSEWHERE
            assert away.retry_info is not None and away.retry_info.retry_delay.ToMilliseconds() == 30
            assert away.error_info is not None and away.error_info.metadata["pending"] == "false"
            look = await other.info(session)  # a look takes no session away
            assert look.history_length >= len(HISTORY)
            await stream.read()
            mine = await agents.create_session()
            await mine.append(HISTORY)
            stream.cancel()
            length = await until_there(lambda: other.append(session, [1, 2]))
            assert (await other.info(session)).history_length == length
            listed = (await client.call("ListSessions", pb.ListSessionsRequest())).sessions
            assert {one.session_id for one in listed} == {session, mine.id}


async def test_a_server_that_was_taken_for_dead_tells_nothing_stale_and_goes_on_without_its_sessions(
    database: Database,
) -> None:
    with replica(database, "one") as (one, journal), replica(database, "two") as (two, _):
        async with serving(one) as here, serving(two) as there, connected(here) as client, connected(there) as other:
            session, streaming, idle = await client.open(), await client.open_endless(), await client.open()
            stream = client.stream(pb.GenerateRequest(session_id=streaming, max_tokens=30_000))
            frames = [await stream.read()]
            # Its lock is gone, as after its connection, and its lease is over; it has not noticed yet.
            with journal._lease._lock:  # nor is it renewed meanwhile
                journal._lease._sure_until = 0.0
                database.say("update kakeya.replicas set until = '-infinity' where name = 'one'")
                assert await other.append(session, [1, 2, 3]) == len(HISTORY) + 3
            answers = await asyncio.gather(
                client.info(session),
                client.append(session, [9], request_id=os.urandom(16), expected_history_length=len(HISTORY)),
                client.call("ReadHistory", pb.ReadHistoryRequest(session_id=session)),
                return_exceptions=True,
            )
            for answer in answers:  # by then it may have noticed: then it says what is true now
                if isinstance(answer, grpc.aio.AioRpcError):
                    details: Any = Details(answer)
                    assert details.reason in PASSING or details.error_info.metadata["actual"] == f"{len(HISTORY) + 3}"
                else:
                    info: Any = answer
                    assert info.history_length == len(HISTORY) + 3
            assert (await refused(read_rest(stream, into=frames))).reason == ELSEWHERE
            # It has its model still, and new sessions; those that no other server took come back.
            await until(lambda: not one.journal.is_away)
            assert await client.length(idle) == len(HISTORY)
            assert await client.append(idle, [1]) == len(HISTORY) + 1
            assert await client.length(await client.open()) == len(HISTORY)
            received = [frame.token_id for frame in frames if frame.HasField("token_id")]
            kept = (await other.call("ReadHistory", pb.ReadHistoryRequest(session_id=streaming))).token_ids
            assert list(kept)[len(HISTORY) :][: len(received)] == received
            assert await other.length(session) == len(HISTORY) + 3


async def test_an_idle_server_that_was_taken_for_dead_says_what_is_true_now(database: Database) -> None:
    """It was stopped, and has not heard of anything since."""
    with replica(database, "one") as (one, journal), replica(database, "two") as (two, _):
        async with serving(one) as here, serving(two) as there, connected(here) as client, connected(there) as other:
            sessions = [await client.open() for _ in range(3)]
            journal._lease._is_stopping.set()
            journal._lease._thread.join()
            journal._lease._sure_until = 0.0
            database.say("update kakeya.replicas set until = '-infinity' where name = 'one'")
            for session in sessions:
                await other.append(session, [1, 2, 3])
            wrong = pb.AppendTokensRequest(session_id=sessions[0], token_ids=[1], expected_history_length=99)
            assert (await refused(client.call("AppendTokens", wrong))).reason in PASSING
            assert await until_there(lambda: client.length(sessions[1])) == len(HISTORY) + 3
            read = await client.call("ReadHistory", pb.ReadHistoryRequest(session_id=sessions[2]))
            assert list(read.token_ids) == [*HISTORY, 1, 2, 3]
            assert one.metrics.journal_lost._value.get() == 1


def test_a_server_whose_place_may_be_taken_at_once_is_not_sure_of_it(database: Database) -> None:
    """The connection that has its lock is lost, long before its lease is over."""
    with replica(database, "one", lease_seconds=60) as (one, journal), replica(database, "two") as (two, _):
        session = one.create_session().session_id
        one.append(session, PROMPT)
        saved(one)
        assert journal.proof().is_safe
        database.say(
            "select pg_terminate_backend(l.pid) from pg_locks l join pg_stat_activity a using (pid) "
            "where l.locktype = 'advisory' and a.application_name = 'kakeya one'"
        )
        brought(two, session)
        eventually(lambda: not journal.proof().is_safe)
        eventually(lambda: not journal.has(session))


def test_a_commit_that_takes_long_does_not_cost_the_place(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    """It has the row that the lease is renewed in, for longer than a lock is waited for."""
    with journal_of(database, "one", lease_seconds=1.0, dsn=f"{database.dsn} tcp_user_timeout=200"):
        holders = "select pid from pg_locks where locktype = 'advisory' and database is not null"
        before = database.say(holders)
        with psycopg.connect(database.dsn) as slow:
            slow.execute("select from kakeya.replicas for update")
            eventually(lambda: "the lease is not renewed yet" in caplog.text)
        assert before and database.say(holders) == before


def test_a_claim_that_the_database_lost_is_not_relied_on(database: Database) -> None:
    """The log with it was not on the disk yet when the database ended; a commit's is."""
    with journal_of(database, "two") as (two, _), journal_of(database, "one") as (one, metrics):
        one.open(record_of(0))
        one.append("session-0", 0, ONE, Mark.APPENDED)
        one.leave("session-0")
        assert one._writer.flush(20)
        assert one.load("session-0", OWNER) is not None
        assert not one.receipt("session-0").is_safe, "an answer would not wait for it"
        assert one._writer.flush(20) and one.receipt("session-0").is_safe
        one.leave("session-0")
        assert one._writer.flush(20)
        with one._db_lock:
            assert one.load("session-0", OWNER) is not None
            database.say("update kakeya.sessions set replica = null, epoch = null")
            assert two.load("session-0", OWNER) is not None
            database.server.cut(database.dsn)
        two.append("session-0", 1, ONE, Mark.APPENDED)
        one.append("session-0", 1, ONE, Mark.APPENDED)
        receipt = one.receipt("session-0")
        assert not one._writer.flush(20, receipt)
        eventually(lambda: receipt.is_lost)  # at first the journal is away
        assert not one.failure
        assert two._writer.flush(20)
        assert two.look("session-0", OWNER)[0].history_length == 2
        assert metrics.journal_lost._value.get() == 1


def test_a_claim_that_is_lost_while_its_session_is_read_is_not_relied_on(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with journal_of(database, "two") as (two, _), journal_of(database, "one") as (one, metrics):
        for place in range(2):
            one.open(record_of(place))
            one.append(f"session-{place}", 0, ONE, Mark.APPENDED)
        one.leave("session-0")
        assert one._writer.flush(20)
        load = KeptJournal.load

        def lost(journal: KeptJournal, session_id: str, owner: str) -> Any:
            kept = load(journal, session_id, owner)
            if journal is two:
                return kept
            database.say("update kakeya.sessions set replica = null, epoch = null where id = 'session-0'")
            assert two.load("session-0", OWNER) is not None
            database.server.cut(database.dsn)
            one.append("session-1", 1, ONE, Mark.APPENDED)
            assert one._writer.flush(20)
            return kept

        monkeypatch.setattr(KeptJournal, "load", lost)
        assert one.load("session-0", OWNER) is not None
        receipt = one.receipt("session-0")
        assert not one._writer.flush(20, receipt)
        eventually(lambda: receipt.is_lost)  # at first the journal is away
        assert not one.failure
        assert metrics.journal_lost._value.get() == 1


@pytest.mark.parametrize("is_others", [False, True])
def test_a_claim_that_the_database_lost_is_made_again_if_no_server_has_had_the_session(
    database: Database, is_others: bool
) -> None:
    with journal_of(database, "two") as (two, _), journal_of(database, "one") as (one, metrics):
        one.open(record_of(0))
        one.append("session-0", 0, ONE, Mark.APPENDED)
        one.leave("session-0")
        assert one._writer.flush(20)
        claim, connection = one._claim, one._connection

        @contextmanager
        def lost() -> Iterator[Any]:
            with connection() as db:
                db._connection.execute("begin")
                yield db
                db._connection.execute("rollback")

        def claimed(*of: str) -> Any:
            one._connection = lost
            try:
                return claim(*of)
            finally:
                one._connection = connection

        with one._db_lock:
            one._claim = claimed
            assert one.load("session-0", OWNER) is not None
            one._claim = claim
            if is_others:
                assert two.load("session-0", OWNER) is not None
                two.append("session-0", 1, ONE, Mark.APPENDED)
                two.leave("session-0")
                assert two._writer.flush(20)
            database.server.cut(database.dsn)
        one.append("session-0", 1, ONE, Mark.APPENDED)
        receipt = one.receipt("session-0")
        one.request_sync()
        eventually(lambda: receipt.is_lost if is_others else receipt.is_safe)
        assert metrics.journal_lost._value.get() == int(is_others)
        assert one.look("session-0", OWNER)[0].history_length == 2
        if not is_others:
            assert database.say("select replica from kakeya.sessions") == [("one",)]


def test_clocks_of_servers_may_differ(database: Database) -> None:
    """By more than sessions are kept: what was used a moment ago is not deleted, and each says so by its own clock."""
    ahead = {name: hours * 3600.0 for name, hours in (("here", 0), ("early", -1), ("late", 1))}

    def clock_of(name: str) -> Callable[[], float]:
        return lambda: time.time() + ahead[name]

    with contextlib.ExitStack() as stack:
        journals = {
            name: stack.enter_context(journal_of(database, name, keep_seconds=600.0, wall_clock=clock_of(name)))[0]
            for name in ahead
        }
        for place, (name, journal) in enumerate(journals.items()):
            journal.open(record_of(place))
            journal.append(f"session-{place}", 0, ONE, Mark.APPENDED)
            journal.leave(f"session-{place}", clock_of(name)() - 60)
            assert journal._writer.flush(20)
        for journal in journals.values():
            journal._delete_old()
        for name, journal in journals.items():
            used = [entry.used_at - clock_of(name)() for entry in journal.page(OWNER, after="", most=9)]
            assert np.allclose(used, [-60.0] * len(ahead), atol=30), (name, used)
            assert abs(journal.load("session-0", OWNER).used_at - clock_of(name)() + 60) < 30
            journal.leave("session-0", clock_of(name)() - 60)
            assert journal._writer.flush(20)


async def test_a_create_that_two_servers_are_sent_makes_one_session(database: Database) -> None:
    """The second did not find the first one's answer, which was not committed yet."""
    request = pb.CreateSessionRequest(request_id=b"create".ljust(16, b"-"))
    with replica(database, "one") as (one, _), replica(database, "two") as (two, journal):
        async with serving(one) as here, serving(two) as there, connected(here) as client, connected(there) as other:
            sessions: list[str] = []
            look = journal.replies_to

            def late(owner: str, request_id: bytes) -> Any:
                found = look(owner, request_id)
                if not sessions:
                    created = asyncio.run_coroutine_threadsafe(client.call("CreateSession", request), loop)
                    sessions.append(created.result(20).session_id)
                return found

            loop = asyncio.get_running_loop()
            journal.replies_to = late
            pending = await refused(other.call("CreateSession", request))
            assert pending.reason == ELSEWHERE
            assert pending.error_info is not None and pending.error_info.metadata["pending"] == "true"
            again = await other.call("CreateSession", request)
            assert [again.session_id] == sessions
            assert [entry.session_id for entry in two.list_sessions()] == sessions
            for server in (client, other):
                listed = (await server.call("ListSessions", pb.ListSessionsRequest())).sessions
                assert [entry.session_id for entry in listed] == sessions
    assert database.say("select count(*) from kakeya.sessions") == [(1,)]


def test_limits_of_an_owner_hold_for_all_servers_within_some_seconds(database: Database) -> None:
    limits = {"kept_sessions_per_owner": 3, "kept_tokens_per_owner": 1000}
    with replica(database, "one", **limits) as (one, of_one), replica(database, "two", **limits) as (two, of_two):
        assert not two.usage_of("").generated_tokens
        for engine in (one, two):
            session = engine.create_session().session_id
            engine.append(session, PROMPT)
            list(engine.generate(session, GenerateParams(max_tokens=3)))
            saved(engine)
        for journal in (of_one, of_two):
            journal._count_again()
            assert journal.kept_by("").sessions == 2
            assert journal.used_by("").generated_tokens == 6
        one.create_session()
        saved(one)
        of_two._count_again()
        with pytest.raises(QuotaExceeded, match="kept_sessions_per_owner"):
            two.create_session()


def test_a_session_that_could_not_be_read_is_let_go_of_before_it_is_read_again(
    database: Database,
) -> None:
    """Else it would be another server's while it is in memory here."""

    def away() -> Any:
        raise JournalAway

    with replica(database, "two") as (two, _):
        session = two.create_session().session_id
        two.append(session, PROMPT)
    with replica(database, "one") as (one, journal):
        with journal._db_lock:  # what is recorded waits, as while the database is away
            journal._reading = away
            with pytest.raises(JournalAway):
                one.recall(session)
            del journal._reading
            again = threading.Thread(target=one.recall, args=(session,))
            again.start()
            again.join(0.3)
        again.join(30)
        saved(one)
        assert one.session_info(session).history_length == len(PROMPT)
        assert database.say(f"select replica from kakeya.sessions where id = '{session}'") == [("one",)]


async def test_clients_of_a_server_that_stops_need_not_wait_for_its_restart(database: Database) -> None:
    with replica(database, "one") as (one, _):
        async with serving(one) as here, connected(here) as client:
            one.drain(0.0)
            draining = await refused(client.call("CreateSession", pb.CreateSessionRequest()))
            assert draining.reason == "UNAVAILABLE DRAINING"
            assert draining.retry_info is not None and draining.retry_info.retry_delay.ToMilliseconds() == 100


def test_a_name_is_one_server_s_and_one_that_stops_in_order_leaves_all_at_once(database: Database) -> None:
    with replica(database, "one", lease_seconds=60) as (one, _), replica(database, "two", lease_seconds=60) as (two, _):
        with pytest.raises(ConfigError, match=r"another server of the name 'one'.*--replica"), replica(database, "one"):
            pass
        session = one.create_session().session_id
        one.append(session, PROMPT)
        generation = iter(one.generate(session, GenerateParams(max_tokens=30)))
        said = [event.token_id for event in generation if isinstance(event, TokenCommitted)]
        one.close()
        two.recall(session)
        assert two.read_history(session).token_ids.tolist() == PROMPT + said
    with replica(database, "one", lease_seconds=60) as (one, _):
        one.recall(session)
        assert one.session_info(session).history_length == len(PROMPT) + 30
