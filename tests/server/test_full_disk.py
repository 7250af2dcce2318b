"""A disk that is full or slow holds up what has to be written, and nothing else."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inference_engine.engine import Engine
from inference_engine.session.journal_folder import Reserve
from inference_engine.session.writer import DiskFull
from kakeya.v1 import runtime_pb2 as pb
from tests.kept import Gated, after_a_kill, gated, keeping
from tests.server.test_auth import ALICE, BOB, write_keys
from tests.server.wire import HISTORY, Client, Details, connected, refused, serving, until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
FOREVER = 30_000

ANSWERS, WAITS, FULL = "answers", "waits for the disk", "RESOURCE_EXHAUSTED JOURNAL_FULL"
HELD_SECONDS = 20.0  # a call that waited for the disk would not end

Call = Callable[[Client, str], Awaitable[Any]]


def an_id() -> bytes:
    return os.urandom(16)


CALLS: dict[str, Call] = {
    "GetServerInfo": lambda client, _: client.call("GetServerInfo", pb.GetServerInfoRequest()),
    "GetSessionInfo": lambda client, session_id: client.length(session_id),
    "ReadHistory": lambda client, session_id: client.call("ReadHistory", pb.ReadHistoryRequest(session_id=session_id)),
    "ListSessions": lambda client, _: client.call("ListSessions", pb.ListSessionsRequest()),
    "CreateSession": lambda client, _: client.call("CreateSession", pb.CreateSessionRequest(request_id=an_id())),
    "AppendTokens": lambda client, session_id: client.append(session_id, [1, 2], request_id=an_id()),
    "ForkSession": lambda client, session_id: client.call("ForkSession", pb.ForkSessionRequest(session_id=session_id)),
    "Generate": lambda client, session_id: client.generate(session_id, 2),
    "CloseSession": lambda client, session_id: client.call(
        "CloseSession", pb.CloseSessionRequest(session_id=session_id, request_id=an_id())
    ),
}
READS = ("GetServerInfo", "GetSessionInfo", "ReadHistory", "ListSessions")
READ, NEW = dict.fromkeys(READS, ANSWERS), ("CreateSession", "AppendTokens", "ForkSession", "Generate")
WRITES = ("ForkSession", "Generate", "CloseSession")
# What a call ends in, of an owner with nothing that waits for the disk, and about a session that has something.
SLOW = {
    "idle": {**dict.fromkeys(CALLS, WAITS), **READ},
    "busy": {**dict.fromkeys(CALLS, WAITS), **READ},
}
WITH_RESERVE = {who: {**READ, **dict.fromkeys(NEW, FULL), "CloseSession": ANSWERS} for who in SLOW}


@dataclass(frozen=True)
class Owners:
    """Two of them, each with a session for each call. Those of "busy" get something that waits for the disk."""

    engine: Engine
    journal: Gated
    clients: dict[str, Client]
    sessions: dict[tuple[str, str], str]

    def make(self, name: str, who: str) -> Awaitable[Any]:
        return CALLS[name](self.clients[who], self.sessions[who, name])

    async def health(self) -> int:
        stub: Any = health_pb2_grpc.HealthStub(self.clients["idle"].channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=HELD_SECONDS)).status)


@asynccontextmanager
async def owners(folder: Path) -> AsyncIterator[Owners]:
    keys = str(folder / "keys")
    write_keys(keys, alice=ALICE, bob=BOB)
    with gated(folder / "state") as (engine, journal):
        async with serving(engine, api_key_file=keys, busy_wait_seconds=60.0) as server:
            as_alice, as_bob = ([("authorization", f"Bearer {key}")] for key in (ALICE, BOB))
            async with connected(server, metadata=as_alice) as idle, connected(server, metadata=as_bob) as busy:
                clients = {"idle": idle, "busy": busy}
                sessions = {(who, name): await client.open() for who, client in clients.items() for name in CALLS}
                yield Owners(engine, journal, clients, sessions)


async def outcome_of(call: Awaitable[Any]) -> str:
    try:
        await asyncio.wait_for(call, HELD_SECONDS)
    except grpc.aio.AioRpcError as error:
        return Details(error).reason
    return ANSWERS


async def check(two: Owners, table: dict[str, dict[str, str]], subtests: pytest.Subtests) -> list[asyncio.Task[Any]]:
    """Make all calls while the disk is as it is. Returns those that wait for it."""
    waiting = list[asyncio.Task[Any]]()
    for who, outcomes in table.items():
        for name, outcome in outcomes.items():
            if outcome != WAITS:
                with subtests.test(call=name, owner=who):
                    assert await outcome_of(two.make(name, who)) == outcome
        waiting += [
            asyncio.create_task(outcome_of(two.make(name, who)))
            for name, outcome in outcomes.items()
            if outcome == WAITS
        ]
    # They have reached the server: it has answered others that came later.
    assert await outcome_of(two.make("GetServerInfo", "idle")) == ANSWERS
    assert not any(call.done() for call in waiting), "what it says is not safe"
    return waiting


async def test_with_a_slow_disk_a_call_waits_for_what_it_says_itself(tmp_path: Path, subtests: pytest.Subtests) -> None:
    async with owners(tmp_path) as two:
        two.journal.gate.clear()
        busy = [session_id for (who, _), session_id in two.sessions.items() if who == "busy"]
        appends = [asyncio.ensure_future(two.clients["busy"].append(session_id, [5, 6])) for session_id in busy]
        await until(lambda: two.engine.history_tokens_of("bob") == (len(HISTORY) + 2) * len(busy))
        waiting = await check(two, SLOW, subtests)
        assert not any(append.done() for append in appends)
        two.journal.gate.set()
        await asyncio.gather(*appends)
        assert set(await asyncio.gather(*waiting)) == {ANSWERS}


async def test_many_calls_that_wait_for_a_slow_disk_hold_up_no_read_of_another_owner(tmp_path: Path) -> None:
    async with owners(tmp_path) as two:
        two.journal.gate.clear()
        append = asyncio.ensure_future(two.make("AppendTokens", "busy"))
        await until(two.journal.is_syncing.is_set)
        creates = [asyncio.ensure_future(two.make("CreateSession", "busy")) for _ in range(40)]
        assert await outcome_of(two.make("ListSessions", "busy")) == ANSWERS, "it came after the calls that wait"
        for name in READS:
            assert await outcome_of(two.make(name, "idle")) == ANSWERS
        assert not any(call.done() for call in (append, *creates))
        two.journal.gate.set()
        await asyncio.gather(append, *creates)


async def test_with_a_slow_disk_what_is_on_it_alone_is_read(tmp_path: Path, subtests: pytest.Subtests) -> None:
    async with owners(tmp_path) as two:
        sessions = two.sessions
    with gated(tmp_path / "state") as (engine, journal):
        async with serving(engine, api_key_file=str(tmp_path / "keys")) as server:
            as_alice, as_bob = ([("authorization", f"Bearer {key}")] for key in (ALICE, BOB))
            async with connected(server, metadata=as_alice) as idle, connected(server, metadata=as_bob) as busy:
                two = Owners(engine, journal, {"idle": idle, "busy": busy}, sessions)
                journal.gate.clear()
                append = asyncio.ensure_future(two.make("AppendTokens", "busy"))
                await until(journal.is_syncing.is_set)
                assert not engine.lists_from_memory("alice") and not engine.lists_from_memory("bob")
                # Changes of sessions that are on the disk alone delay no read.
                changes = [asyncio.ensure_future(two.make(name, who)) for name in WRITES for who in ("idle", "busy")]
                await asyncio.sleep(0.2)
                for who in two.clients:
                    for name in READS:
                        with subtests.test(call=name, owner=who):
                            assert await outcome_of(two.make(name, who)) == ANSWERS
                assert await busy.length(sessions["busy", "AppendTokens"]) == len(HISTORY)
                assert not append.done()
                assert not any(change.done() for change in changes)
                journal.gate.set()
                await asyncio.gather(append, *changes)
                assert await busy.length(sessions["busy", "AppendTokens"]) == len(HISTORY) + 2


@pytest.mark.parametrize("name", ["AppendTokens", "Generate"])
async def test_a_read_waits_for_a_change_whose_client_has_left_before_it_knew(name: str, tmp_path: Path) -> None:
    """Else a client whose append timed out would take the old length as a sign that it did not arrive."""
    async with owners(tmp_path) as two:
        session_id, client = two.sessions["busy", name], two.clients["busy"]
        two.journal.gate.clear()
        call = asyncio.ensure_future(two.make(name, "busy"))
        await until(two.journal.is_syncing.is_set)
        assert await client.length(session_id) == len(HISTORY), "its client waits for the answer"
        call.cancel()
        reads = [
            asyncio.ensure_future(outcome_of(CALLS[read](client, session_id)))
            for read in ("GetSessionInfo", "ReadHistory")
        ]
        await asyncio.sleep(0.2)
        assert not any(read.done() for read in reads)
        assert await outcome_of(two.make("GetSessionInfo", "busy")) == ANSWERS, "of another session"
        two.journal.gate.set()
        assert set(await asyncio.gather(*reads)) == {ANSWERS}
        assert await client.length(session_id) > len(HISTORY)


async def test_a_full_disk_stops_what_is_new_and_nothing_else(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """From the reserve all is safe that streams had, and sessions can be closed."""
    async with owners(tmp_path) as two:
        session_id = two.sessions["busy", "Generate"]
        stream = two.clients["busy"].stream(pb.GenerateRequest(session_id=session_id, max_tokens=FOREVER))
        first = await stream.read()
        two.journal.is_full_disk = True
        await until(lambda: two.journal.is_full)
        await until_stuck(two, is_stuck=False)
        assert await check(two, WITH_RESERVE, subtests) == []
        await until_health(two, NOT_SERVING)
        length = await two.clients["busy"].length(session_id)
        assert length == two.engine.session_info(session_id, owner="bob").history_length, "all of it is safe"
        closed = {who: two.sessions[who, "CloseSession"] for who in two.clients}
        killed = after_a_kill(tmp_path / "state")
        two.journal.is_full_disk = False
        await until_health(two, SERVING)
        await two.clients["idle"].append(two.sessions["idle", "AppendTokens"], [1])
        stream.cancel()
        assert first.HasField("token_id")
    with keeping(killed) as engine:
        for who, owner in (("idle", "alice"), ("busy", "bob")):
            kept = {one.session_id: one.history_length for one in engine.list_sessions(owner=owner)}
            assert closed[who] not in kept, "its close was answered"
            assert set(kept) == {one for (of, _), one in two.sessions.items() if of == who} - {closed[who]}
            assert kept.get(session_id, length) == length


@pytest.mark.parametrize("has_reserve", [True, False])
async def test_a_call_that_meets_the_full_disk_is_refused_and_has_not_happened(
    tmp_path: Path, subtests: pytest.Subtests, *, has_reserve: bool
) -> None:
    async with owners(tmp_path) as two:
        client, journal = two.clients["busy"], two.journal
        session_id = two.sessions["busy", "AppendTokens"]
        before = await client.call("ListSessions", pb.ListSessionsRequest())
        requests: dict[str, Any] = {
            "CreateSession": pb.CreateSessionRequest(),
            "AppendTokens": pb.AppendTokensRequest(session_id=session_id, token_ids=[5] * 500, request_id=an_id()),
            "ForkSession": pb.ForkSessionRequest(session_id=two.sessions["busy", "ForkSession"]),
        }
        journal.before.clear()
        calls = {name: asyncio.ensure_future(client.call(name, request)) for name, request in requests.items()}
        await until(lambda: journal._writer._recorded - journal._writer._saved == len(calls))
        if has_reserve:
            journal.is_full_disk = True
        else:
            journal.raising = DiskFull()
        journal.before.set()
        for name, call in calls.items():
            with subtests.test(call=name):
                assert (await refused(call)).reason == FULL
        assert await client.length(session_id) == len(HISTORY)
        assert two.engine.session_info(session_id, owner="bob").history_length == len(HISTORY)
        assert two.engine.history_tokens_of("bob") == len(HISTORY) * len(CALLS)
        after = await client.call("ListSessions", pb.ListSessionsRequest())
        assert {one.session_id for one in after.sessions} == {one.session_id for one in before.sessions}
        with keeping(after_a_kill(tmp_path / "state")) as engine:
            assert {one.history_length for one in engine.list_sessions(owner="bob")} == {len(HISTORY)}
        journal.raising, journal.is_full_disk = None, False
        await until(lambda: not journal.is_full)
        for name, request in requests.items():
            with subtests.test(again=name):
                answer = await client.call(name, request)
                assert not answer.replayed, "the first call had not happened"
        length = len(HISTORY) + 500
        assert await client.length(session_id) == length
        killed = after_a_kill(tmp_path / "state")
    with keeping(killed) as engine:
        found = sorted(one.history_length for one in engine.list_sessions(owner="bob"))
        assert found == [0, *[len(HISTORY)] * len(CALLS), length]


async def test_a_server_that_starts_on_a_full_disk_reads_and_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with owners(tmp_path) as two:
        sessions = two.sessions
    has_room = False
    take = Reserve.take
    monkeypatch.setattr(Reserve, "take", lambda self: has_room and take(self))
    with gated(tmp_path / "state") as (engine, _):
        async with serving(engine, api_key_file=str(tmp_path / "keys")) as server:
            as_alice = [("authorization", f"Bearer {ALICE}")]
            async with connected(server, metadata=as_alice) as client:
                two = Owners(engine, two.journal, {"idle": client}, sessions)
                assert await two.health() == NOT_SERVING
                assert await client.length(sessions["idle", "GetSessionInfo"]) == len(HISTORY)
                assert await outcome_of(two.make("AppendTokens", "idle")) == FULL
                assert await outcome_of(two.make("CloseSession", "idle")) == ANSWERS
                has_room = True
                await until_health(two, SERVING)
                assert await outcome_of(two.make("AppendTokens", "idle")) == ANSWERS


async def until_stuck(two: Owners, *, is_stuck: bool) -> None:
    await until(lambda: two.journal.is_full and two.journal._writer.is_stuck == is_stuck)


async def until_health(two: Owners, status: int) -> None:
    for _ in range(2000):
        if await two.health() == status:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("health did not change within 20 s")
