"""Connections of the HTTP door: slow ones, broken bodies, one too many."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from inference_engine.engine import Engine
from inference_engine.server.http import client_connection as connection
from inference_engine.server.http.chat_text import ChatText
from inference_engine.server.http.door import HttpDoor
from inference_engine.server.preauth_limits import Peer
from inference_engine.server.run import ServerHandle
from tests.server.http.client import (
    MESSAGES,
    Caller,
    calling,
    ended,
    left_nothing,
    posted,
    serving_http,
)
from tests.server.wire import TIMEOUT_SECONDS, held, until

pytestmark = pytest.mark.hostile


SLOW = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


@pytest.mark.parametrize(
    ("answered", "begun"),
    [(b"", b""), (b"", SLOW), (b"HEAD /none HTTP/1.1\r\nHost: localhost\r\n\r\n", SLOW)],
    ids=["silent", "slow", "reused"],
)
async def test_a_connection_that_never_finishes_its_request_is_closed(
    server: ServerHandle, monkeypatch: pytest.MonkeyPatch, answered: bytes, begun: bytes
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.05)
    async with calling(server) as caller:
        caller.send(answered)
        while answered and await caller.status() not in (b"\r\n", b""):
            pass
        caller.send(begun)  # from here on it is no idle connection, which would be closed, too
        assert await caller.is_hung_up()


async def test_a_client_forgets_a_quiet_connection_before_the_server_closes_it(
    server: ServerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a request that it sends just then is lost."""
    loop, delays = asyncio.get_running_loop(), []
    later = loop.call_later

    def watched(delay: float, callback: Any, *arguments: Any, **named: Any) -> asyncio.TimerHandle:
        if isinstance(getattr(callback, "__self__", None), connection.Connection):
            delays.append(delay)
        return later(delay, callback, *arguments, **named)

    monkeypatch.setattr(loop, "call_later", watched)
    async with calling(server) as caller:
        caller.send(MODELS % b"keep-alive")
        assert (await caller.status()).startswith(b"HTTP/1.1 200")
    assert len(delays) == 2  # of a connection without a request, and after the answer
    assert min(delays) > 2 * (httpx2.Limits().keepalive_expiry or 0)


MODELS = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: %s\r\n\r\n"
CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"mod\r\n'
)


@pytest.mark.parametrize("broken", [b"zz\r\nabc\r\n", b"-1\r\n", b"f" * 40 + b"\r\n"])
@pytest.mark.parametrize("is_waited_for", [False, True])
async def test_a_body_whose_chunks_are_broken_is_answered_like_other_errors(
    engine: Engine, server: ServerHandle, caplog: pytest.LogCaptureFixture, broken: bytes, is_waited_for: bool
) -> None:
    async with calling(server) as caller:
        if is_waited_for:
            caller.send(CHUNKED.replace(b"\r\nHost", b"\r\nExpect: 100-continue\r\nHost"))
            assert await caller.status() == b"HTTP/1.1 100 Continue\r\n"  # the application reads the body
            assert await caller.status() == b"\r\n"
            caller.send(broken)
        else:
            caller.send(CHUNKED + broken)
        head, body = await caller.answer()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"\r\ndeprecation: " in head.lower()
    assert b"\r\nconnection: close" in head.lower()
    assert json.loads(body)["error"]["code"] == "bad_http"
    assert await left_nothing(engine)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("begun", [CHUNKED, posted({"model": "tiny"})[:-3]], ids=["chunks", "length"])
async def test_a_client_that_ends_its_body_early_and_still_reads_is_answered(
    server: ServerHandle, begun: bytes
) -> None:
    async with calling(server) as caller:
        caller.send(begun)
        caller.end()
        head, body = await caller.answer()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "bad_http"


@pytest.mark.parametrize("is_broken", [True, False], ids=["broken", "left"])
async def test_a_body_that_breaks_off_counts_at_the_door_once(
    engine: Engine, server: ServerHandle, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    """Once as what is not HTTP; what the application answers to a client that has left is never read."""
    counted: list[bool] = []
    answers = HttpDoor.answers

    def counting(door: HttpDoor, peer: Peer, *, refuses: bool) -> bool:
        counted.append(refuses)
        return answers(door, peer, refuses=refuses)

    monkeypatch.setattr(HttpDoor, "answers", counting)
    async with calling(server) as caller:
        caller.send(CHUNKED.replace(b"\r\nHost", b"\r\nExpect: 100-continue\r\nHost"))
        assert await caller.status() == b"HTTP/1.1 100 Continue\r\n"  # the application reads the body
        if is_broken:
            caller.send(b"zz\r\n")
            await caller.rest()
    await until(lambda: bool(answered_with(engine, 400)))
    assert counted == [True]


def answered_with(engine: Engine, status: int) -> float | None:
    labels = {"route": "/v1/chat/completions", "status": str(status)}
    return engine.metrics.registry.get_sample_value("kakeya_http_response_total", labels)


@pytest.mark.parametrize("more", [b"\r\n", MODELS % b"close"], ids=["line", "request"])
@pytest.mark.parametrize(
    "asked",
    [
        posted({"model": "tiny", "messages": MESSAGES}).replace(b"\r\nHost", b"\r\nConnection: close\r\nHost"),
        posted({"model": "tiny", "messages": MESSAGES}).replace(b"HTTP/1.1", b"HTTP/1.0"),
    ],
    ids=["close", "HTTP/1.0"],
)
async def test_what_follows_the_last_request_of_a_connection_is_ignored(
    engine: Engine,
    server: ServerHandle,
    called: Callable[[Engine, str], asyncio.Event],
    received: Callable[[bytes], asyncio.Event],
    asked: bytes,
    more: bytes,
) -> None:
    is_received, is_asked = received(more), called(engine, "generate")
    async with calling(server) as caller:
        with held(engine):
            caller.send(asked)
            await is_asked.wait()
            caller.send(more)
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await is_received.wait()
        answer = await caller.rest()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert json.loads(body)["choices"]
    assert ended(engine, "closed") == 0


async def test_chunks_that_break_after_the_answer_began_add_nothing_to_it(engine: Engine, server: ServerHandle) -> None:
    async with calling(server) as caller:
        caller.send(CHUNKED.replace(b"/v1/chat/completions", b"/none"))
        assert await caller.status() == b"HTTP/1.1 404 Not Found\r\n"
        caller.send(b"zz\r\n")
        rest = await caller.rest()
    assert b"HTTP/1.1 " not in rest


async def test_one_connection_too_many_is_closed_and_one_that_left_makes_room(engine: Engine, chat: ChatText) -> None:
    async with serving_http(engine, chat, max_connections=2) as server, contextlib.AsyncExitStack() as stack:

        async def known() -> Caller:
            caller = await stack.enter_async_context(calling(server))
            caller.send(MODELS % b"keep-alive")
            assert (await caller.status()).startswith(b"HTTP/1.1 200")
            return caller

        _, second = await known(), await known()
        async with calling(server) as third:
            assert await third.is_hung_up()
        second.send(MODELS % b"close")
        await second.is_hung_up()
        async with calling(server) as fourth:
            fourth.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await fourth.status()).startswith(b"HTTP/1.1 200")
