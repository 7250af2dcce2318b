"""A journal that cannot be reached for a while: streams pause, calls end with a typed error, and all goes on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kakeya
from inference_engine.engine import Engine
from inference_engine.server import run
from kakeya.v1 import runtime_pb2 as pb
from tests.facade import let_leave
from tests.kept import Place, after_a_kill, keeping, remote, saved
from tests.server.wire import HISTORY, Client, Details, connected, read_rest, refused, serving, until

AWAY = "UNAVAILABLE JOURNAL_AWAY"
TOKENS = 400  # of a stream that meets the gap


def an_id() -> bytes:
    return os.urandom(16)


def is_pending(details: Details) -> bool:
    """May the call count nevertheless? Each says when to retry."""
    assert details.reason == AWAY
    assert details.retry_info is not None and details.retry_info.retry_delay.seconds == 1
    assert details.error_info is not None
    return {"true": True, "false": False}[details.error_info.metadata["pending"]]


async def until_health(client: Client, wanted: int) -> None:
    stub: Any = health_pb2_grpc.HealthStub(client.channel)
    for _ in range(200):
        if (await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)).status == wanted:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("health says something else")


def lengths_after_a_kill(place: Place) -> dict[str, int]:
    with keeping(after_a_kill(place)) as engine:
        return {one.session_id: one.history_length for one in engine.list_sessions()}


async def test_streams_pause_calls_end_typed_and_all_goes_on_when_the_journal_is_back(
    place: Place, subtests: pytest.Subtests
) -> None:
    with remote(place) as (engine, journal):
        async with serving(engine) as server, connected(server) as client:
            asked = pb.GenerateRequest(session_id=await client.open_endless(), max_tokens=TOKENS)
            undisturbed = await client.generate(await client.open_endless(), TOKENS)
            calm, gone = await client.open(), await client.open()
            let_leave(engine, gone)
            saved(engine)
            stream = client.stream(asked)
            first = await stream.read()
            journal.is_cut = True
            await until(lambda: journal.is_away)
            rest = asyncio.ensure_future(read_rest(stream))
            safe = await safe_length(engine, asked.session_id)
            calls: dict[str, Callable[[str], Awaitable[Any]]] = {
                "CreateSession": lambda _: client.open(()),
                "AppendTokens": lambda session: client.append(session, [1], request_id=an_id()),
                "Generate": lambda session: client.generate(session, 2),
                "ForkSession": lambda session: client.call("ForkSession", pb.ForkSessionRequest(session_id=session)),
                "RewindSession": lambda session: client.call(
                    "RewindSession", pb.RewindSessionRequest(session_id=session, at_position=3)
                ),
                "CloseSession": lambda session: client.call("CloseSession", pb.CloseSessionRequest(session_id=session)),
            }
            looks: dict[str, Callable[[str], Awaitable[Any]]] = {
                "GetSessionInfo": client.length,
                "ReadHistory": lambda session: client.call("ReadHistory", pb.ReadHistoryRequest(session_id=session)),
            }
            for session in (calm, gone):
                for name, call in calls.items():
                    with subtests.test(call=name, is_in_memory=session == calm):
                        assert not is_pending(await refused(call(session)))
            for name, look in looks.items():
                with subtests.test(look=name):
                    if isinstance(place, Path):
                        await look(calm)
                    else:  # the lock of its lease may be free, and who reaches the database may have the session
                        assert not is_pending(await refused(look(calm)))
                    assert not is_pending(await refused(look(gone)))
                    assert not is_pending(await refused(look(asked.session_id))), "less than was done"
            assert not is_pending(await refused(client.call("ListSessions", pb.ListSessionsRequest())))
            await client.call("GetServerInfo", pb.GetServerInfoRequest())
            await until_health(client, health_pb2.HealthCheckResponse.NOT_SERVING)
            assert not rest.done()
            assert await safe_length(engine, asked.session_id) == safe, "it pauses"
            journal.is_cut = False
            assert [frame.token_id for frame in [first, *await rest] if frame.HasField("token_id")] == undisturbed
            await until_health(client, health_pb2.HealthCheckResponse.SERVING)
            assert await client.append(gone, [1]) == await client.append(calm, [1]) == len(HISTORY) + 1
            assert engine.metrics.journal_away._value.get() == 0
            lengths = {one: await client.length(one) for one in (asked.session_id, calm, gone)}
            kept = lengths_after_a_kill(place)
    assert {one: kept[one] for one in lengths} == lengths
    assert lengths[asked.session_id] == len(HISTORY) + TOKENS


async def safe_length(engine: Engine, session_id: str) -> int:
    """Of a history, once it is the same twice."""
    length, before = -1, -2
    while length != before:
        await asyncio.sleep(0.2)
        before, length = length, engine.session_info(session_id, saved_only=True).history_length
    return length


@pytest.mark.parametrize("is_committed", [False, True])
async def test_a_call_that_the_gap_met_is_done_once_when_it_is_repeated(
    place: Place, subtests: pytest.Subtests, *, is_committed: bool
) -> None:
    """is_committed: the commit was made, and its answer was lost."""
    with remote(place) as (engine, journal):
        async with serving(engine) as server, connected(server) as client:
            sessions = [await client.open() for _ in range(4)]
            requests: dict[str, Any] = {
                "AppendTokens": pb.AppendTokensRequest(session_id=sessions[0], token_ids=[5, 6]),
                "CreateSession": pb.CreateSessionRequest(),
                "ForkSession": pb.ForkSessionRequest(session_id=sessions[1]),
                "RewindSession": pb.RewindSessionRequest(session_id=sessions[2], at_position=3),
                "CloseSession": pb.CloseSessionRequest(session_id=sessions[3]),
            }
            for name, request in requests.items():
                request.request_id = an_id()
                with subtests.test(call=name):
                    saved(engine)
                    journal.cuts_at_commit, journal.cuts_at_answer = not is_committed, is_committed
                    for _ in range(2):  # as long as it is away, and however often
                        assert is_pending(await refused(client.call(name, request)))
                    journal.is_cut = False
                    await until(lambda: not journal.is_away)
                    answer = await client.call(name, request)
                    assert answer.replayed
            assert await client.length(sessions[0]) == len(HISTORY) + 2
            kept = lengths_after_a_kill(place)
    assert sorted(kept.values()) == sorted([len(HISTORY) + 2, 0, len(HISTORY), len(HISTORY), 3])


async def test_a_server_that_stops_while_the_journal_is_away_ends_and_loses_nothing_that_was_sent(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LEAVE_SECONDS", 0.2)
    with remote(place) as (engine, journal):
        async with serving(engine) as server, connected(server) as client:
            session, streaming = await client.open(), await client.open_endless()
            said = await client.generate(session, 5)
            stream = client.stream(pb.GenerateRequest(session_id=streaming, max_tokens=30_000))
            frames = [await stream.read()]
            journal.cuts_at_commit = True
            # The stream's commit may be the one that is cut; then the append is not even tried.
            assert (await refused(client.append(session, [1, 2]))).reason == AWAY
            paused = asyncio.ensure_future(refused(read_rest(stream, into=frames)))
            await server.drain_and_stop()
            assert (await paused).reason == "UNAVAILABLE DRAINING"
    received = [frame.token_id for frame in frames]
    with keeping(place) as engine:
        for one, known in ((session, [*HISTORY, *said]), (streaming, [*HISTORY, *received])):
            engine.recall(one)
            ids = engine.read_history(one).token_ids.tolist()
            assert ids[: len(known)] == known, "what was sent is there"
            assert one == streaming or len(ids) == len(known)


async def test_an_agent_of_the_sdk_sees_a_pause(place: Place) -> None:
    with remote(place) as (engine, journal):
        async with serving(engine) as server, kakeya.AsyncClient(server.target) as client:
            session = await client.create_session(kakeya.SinkWindow(sink=4, window=32))
            await session.append(HISTORY)
            whole = (await (await session.fork()).generate(TOKENS).result()).token_ids
            stream = session.generate(TOKENS)
            tokens = aiter(stream)
            received = [await anext(tokens)]
            journal.cuts_at_answer = True
            await until(lambda: journal.is_away)
            other = asyncio.ensure_future(client.create_session())
            asyncio.get_running_loop().call_later(0.3, setattr, journal, "is_cut", False)
            received += [token async for token in tokens]
            assert received == list(whole)
            journal.cuts_at_commit = True
            asyncio.get_running_loop().call_later(0.3, setattr, journal, "is_cut", False)
            assert await session.append([1, 2]) == len(HISTORY) + TOKENS + 2
            assert (await (await other).info()).history_length == 0
            assert len([one async for one in client.sessions()]) == 3
