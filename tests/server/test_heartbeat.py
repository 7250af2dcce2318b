"""A Generate that waits is not silent, if its client asks: over gRPC by `progress` frames, over HTTP by comments."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from inference_engine.engine import Engine
from inference_engine.server.http import completion
from kakeya.v1 import runtime_pb2 as pb
from laboratory.scripted import Script
from tests.load.scripted import scripted_engine
from tests.server.http.client import COMPLETIONS, asking, http_client, serving_http, tiny_chat
from tests.server.wire import HISTORY, Client, connected, held, read_rest, refused, serving
from tests.tiny_native import served_engine

OFTEN_SECONDS = 0.1
SOME = 3  # frames, before what it waits for comes


def asked(session_id: str, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(session_id=session_id, max_tokens=4, **{"heartbeat_seconds": OFTEN_SECONDS, **fields})


def kinds(frames: list[Any]) -> list[str]:
    return [frame.WhichOneof("payload") for frame in frames]


Waiting = Callable[[Client, str], AbstractAsyncContextManager[Callable[[], Any]]]


@asynccontextmanager
async def in_the_queue(client: Client, _session_id: str) -> AsyncIterator[Callable[[], Any]]:
    other = client.stream(pb.GenerateRequest(session_id=await client.open_endless(), max_tokens=30_000))
    await other.read()
    yield other.cancel


@asynccontextmanager
async def for_its_busy_session(client: Client, session_id: str) -> AsyncIterator[Callable[[], Any]]:
    other = client.stream(pb.GenerateRequest(session_id=session_id, max_tokens=30_000))
    await other.read()
    yield other.cancel


@pytest.mark.parametrize(("waits", "is_accepted"), [(in_the_queue, True), (for_its_busy_session, False)])
async def test_a_generate_that_waits_sends_progress_until_it_begins(waits: Waiting, is_accepted: bool) -> None:
    with served_engine(max_running=1) as engine:
        async with serving(engine, busy_wait_seconds=60.0) as server, connected(server) as client:
            session_id = await client.open_endless()
            async with waits(client, session_id) as let_go:
                stream = client.stream(asked(session_id))
                frames = [await stream.read() for _ in range(SOME)]
                let_go()
                frames += await read_rest(stream)
    assert set(kinds(frames[:SOME])) == {"progress"}
    total = len(HISTORY) if is_accepted else 0
    assert {(one.progress.done_token_count, one.progress.total_token_count) for one in frames[:SOME]} == {(0, total)}
    assert kinds(frames)[-5:] == ["token_id"] * 4 + ["done"]


def assert_given(turn: threading.Semaphore) -> None:
    assert turn.acquire(timeout=60)


async def test_a_long_prefill_tells_how_far_it_is_and_stops_with_the_first_token() -> None:
    script, may_go = Script(), threading.Semaphore(0)
    with scripted_engine(script=script) as engine:
        async with serving(engine) as server, connected(server) as client:
            script.on_step = lambda _: assert_given(may_go)
            session_id = await client.open(
                range(64), strategy=pb.Strategy(sink_window=pb.SinkWindowStrategy(window=16))
            )
            stream, frames = client.stream(asked(session_id)), list[Any]()
            for done in (0, 16, 32, 48):  # each segment waits until it is known how far those before it came
                while not frames or frames[-1].progress.done_token_count < done:
                    frames.append(await stream.read())
                may_go.release()
            script.on_step = None
            may_go.release()  # of a step that began before
            frames += await read_rest(stream)
    names = kinds(frames)
    assert names == sorted(names, key=["progress", "truncated", "token_id", "done"].index)
    reported = [frame.progress.done_token_count for frame in frames if frame.HasField("progress")]
    assert reported == sorted(reported) and {0, 16, 32, 48} <= set(reported)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 0.05, 1e9, float("nan"), float("inf")])
async def test_a_heartbeat_that_is_none_is_refused_by_its_name(client: Client, seconds: float) -> None:
    details = await refused(client.call("Generate", asked(await client.open(), heartbeat_seconds=seconds)))
    assert (details.reason, details.fields) == ("INVALID_ARGUMENT INVALID_ARGUMENT", ["heartbeat_seconds"])
    details = await refused(client.call("Generate", asked("unknown", heartbeat_seconds=seconds)))
    assert details.reason == "NOT_FOUND SESSION_NOT_FOUND"


async def test_a_client_that_leaves_between_two_beats_leaves_nothing(client: Client, engine: Engine) -> None:
    session_id = await client.open_endless()
    with held(engine) as let_go:
        stream = client.stream(asked(session_id))
        await stream.read()
        stream.cancel()
        let_go()
    assert len(await client.generate(session_id)) == 8


async def test_an_answer_that_waits_sends_comments_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "HEARTBEAT_SECONDS", OFTEN_SECONDS)
    with served_engine() as engine:
        async with serving_http(engine, tiny_chat()) as server, http_client(server) as http:
            with held(engine) as let_go:
                async with http.stream("POST", COMPLETIONS, json=asking(stream=True)) as answer:
                    lines = answer.aiter_lines()
                    waiting = [await anext(lines) for _ in range(2 * SOME)]
                    let_go()
                    rest = [line async for line in lines if line.startswith("data: ")]
    assert answer.status_code == 200
    assert waiting == [": waiting", ""] * SOME
    assert rest[-1] == "data: [DONE]"
