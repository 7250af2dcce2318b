"""Clients that leave, servers that are full or shut down: the engine is free at once, and no place stays taken."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from inference_engine.engine import Engine
from inference_engine.engine.generation import Generation
from inference_engine.errors import EngineStalled, OutOfMemory, Overloaded
from inference_engine.server.address import Address
from inference_engine.server.auth import KeyRing
from inference_engine.server.http import client_connection as connection
from inference_engine.server.http import completion
from inference_engine.server.http.app import State, create_app
from inference_engine.server.http.chat_text import ChatText
from inference_engine.server.http.completion import Desk, Slots
from inference_engine.server.http.door import HttpDoor
from inference_engine.server.http.turns import RequestTurns
from inference_engine.server.ip_bans import Bars
from inference_engine.server.limits import OwnerLimits
from inference_engine.server.preauth_limits import UnauthenticatedPeers
from inference_engine.server.run import ServerHandle
from inference_engine.session.history import TokenIds
from tests.server.http.client import (
    COMPLETIONS,
    MESSAGES,
    asking,
    begin_a_body,
    begin_bodies,
    calling,
    ended,
    http_client,
    left_nothing,
    openai_client,
    posted,
    serving_http,
)
from tests.server.http.test_template import ENDLESS
from tests.server.wire import TIMEOUT_SECONDS, held
from tests.tiny import tiny_engine
from tests.tiny_folder import TEMPLATE, tiny_tokenizer

pytestmark = pytest.mark.hostile

# Sessions that go on for as long as a test needs, and never come to an end by themselves.
ENDLESS_SESSIONS = "sink_window:sink=4,window=32"
NO_END = {str(tiny_tokenizer().eos_token_id): -1000}
FOREVER: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 30_000, "logit_bias": NO_END, "temperature": 0}


@pytest.fixture
def engine() -> Iterator[Engine]:
    with tiny_engine(strategy=ENDLESS_SESSIONS) as engine:
        yield engine


async def test_a_request_that_waits_when_the_server_gives_up_on_its_engine_gets_the_reason(
    engine: Engine, chat: ChatText, called: Callable[[Engine, str], asyncio.Event]
) -> None:
    async with serving_http(engine, chat) as server, http_client(server) as client:
        with held(engine):
            is_queued = called(engine, "generate")
            answering = asyncio.create_task(client.post(COMPLETIONS, json=asking()))
            await is_queued.wait()
            await server.abandon(EngineStalled())
            answer = await answering
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stalled")
    assert int(answer.headers["retry-after"]) > 0


async def test_a_streamed_answer_ends_with_the_reason_when_the_server_gives_up_on_its_engine(
    engine: Engine, chat: ChatText, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_http(engine, chat) as server, http_client(server) as client:
        async with client.stream("POST", COMPLETIONS, json={**FOREVER, "stream": True}) as answer:
            lines = answer.aiter_lines()
            assert "role" in await anext(lines)
            giving_up = asyncio.create_task(server.abandon(EngineStalled()))
            events = [line.removeprefix("data: ") async for line in lines if line]
            await giving_up
        error = json.loads(events[-1])["error"]
        assert (error["code"], error["type"]) == ("engine_stalled", "server_error")
        assert "[DONE]" not in events
        assert all("choices" in json.loads(event) for event in events[:-1])
    assert not [record for record in caplog.records if record.exc_info]


async def test_what_a_completion_leaves_in_the_log_has_a_tag_of_its_own(
    client: openai.AsyncOpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "inference_engine")
    for _ in range(2):
        await client.chat.completions.create(**{**FOREVER, "max_tokens": 1})
    tags = {vars(record)["request"] for record in caplog.records if record.getMessage() == "a Generate ended"}
    assert len(tags) == 2


async def test_a_connection_that_waits_for_an_answer_is_not_closed(
    engine: Engine,
    client: openai.AsyncOpenAI,
    called: Callable[[Engine, str], asyncio.Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.5)
    with held(engine):
        is_queued = called(engine, "generate")
        asked = asyncio.create_task(client.chat.completions.create(**{**FOREVER, "max_tokens": 4}))
        await is_queued.wait()
        await asyncio.sleep(2 * connection.HEAD_SECONDS)
    answer = await asked
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


NO_DOOR = HttpDoor(
    UnauthenticatedPeers(KeyRing(), most=10, most_of_address=0, clock=lambda: 0.0),
    Bars(KeyRing(), lambda: 0.0, lambda: None),
    most=10,
    on_drop=lambda: None,
)


async def test_a_client_that_leaves_its_stream_frees_the_engine_within_a_step(
    engine: Engine, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    close = engine.close_session

    def closing(*arguments: Any, **named: Any) -> int:
        asked = engine.session_info(*arguments, **named).history_length
        lengths.append((asked, close(*arguments, **named)))
        return lengths[-1][1]

    monkeypatch.setattr(engine, "close_session", closing)
    stream = await client.chat.completions.create(**FOREVER, stream=True)
    for _ in range(4):
        await anext(stream)
    await stream.close()
    assert await left_nothing(engine)
    assert ended(engine, "closed") == 1
    # A token whose step was over may still have been in flight when the session was closed.
    ((asked, closed),) = lengths
    assert closed - asked <= 1


async def test_a_client_that_leaves_before_the_first_step_costs_none(
    engine: Engine, client: openai.AsyncOpenAI, called: Callable[[Engine, str], asyncio.Event]
) -> None:
    with held(engine) as let_go:
        is_queued, is_closed = called(engine, "generate"), called(engine, "close_session")
        asking_for_all = asyncio.create_task(client.chat.completions.create(**FOREVER))
        await is_queued.wait()
        asking_for_all.cancel()
        await is_closed.wait()
        let_go()
    await asyncio.to_thread(engine.drain, TIMEOUT_SECONDS)
    assert ended(engine, "closed") == 1
    # The step that was held gives the first token; another one would show.
    assert engine.metrics.registry.get_sample_value("kakeya_generate_tokens_total") == 1


async def test_a_client_that_leaves_while_its_answer_is_made_frees_the_engine(
    engine: Engine, client: openai.AsyncOpenAI, called: Callable[[Engine, str], asyncio.Event]
) -> None:
    is_running = called(engine, "generate")
    asking_for_all = asyncio.create_task(client.chat.completions.create(**FOREVER))
    await is_running.wait()
    asking_for_all.cancel()
    assert await left_nothing(engine)
    assert ended(engine, "closed") == 1


async def test_a_client_that_leaves_after_the_next_request_began_frees_the_engine(
    engine: Engine,
    server: ServerHandle,
    called: Callable[[Engine, str], asyncio.Event],
    received: Callable[[bytes], asyncio.Event],
) -> None:
    begun = b"GET /v1/models HTTP/1.1\r\n"
    is_received, is_asked = received(begun), called(engine, "generate")
    async with calling(server) as caller:
        caller.send(posted(FOREVER))
        await is_asked.wait()
        caller.send(begun)
        await is_received.wait()
    assert await left_nothing(engine)
    assert ended(engine, "closed") == 1


async def test_a_client_that_leaves_while_its_messages_are_rendered_gets_no_session(
    engine: Engine, called: Callable[[Engine, str], asyncio.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if messages|length > 2 %}" + ENDLESS + "{% endif %}" + TEMPLATE
    chat = ChatText(tokenizer, name="slow", max_render_seconds=1.0)
    loop, is_rendering = asyncio.get_running_loop(), asyncio.Event()
    render = chat.prompt_ids

    def rendering(messages: Any, *limits: Any, **options: Any) -> TokenIds:
        loop.call_soon_threadsafe(is_rendering.set)
        return render(messages, *limits, **options)

    monkeypatch.setattr(chat, "prompt_ids", rendering)
    is_created = called(engine, "create_session")
    async with serving_http(engine, chat) as handle, openai_client(handle) as client:
        slow: Any = {**FOREVER, "messages": MESSAGES * 3}
        leaving = asyncio.create_task(client.chat.completions.create(**slow))
        await is_rendering.wait()
        leaving.cancel()
        # The one that comes after it waits for the template's limit, not for ever.
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2)
        assert answer.usage is not None
        assert is_created.is_set()
        assert ended(engine, "max_tokens") == 1
        assert await left_nothing(engine)
        assert sum(ended(engine, outcome) for outcome in ("closed", "cancelled", "failed")) == 0


async def test_streams_left_at_any_moment_leave_nothing(engine: Engine, client: openai.AsyncOpenAI) -> None:
    rng = random.Random(0)

    async def leave(chunks: int) -> None:
        stream = await client.chat.completions.create(**FOREVER, stream=True)
        for _ in range(chunks):
            await anext(stream)
        await stream.close()

    for _ in range(5):
        await asyncio.gather(*(leave(rng.randrange(6)) for _ in range(4)))
    assert await left_nothing(engine)
    assert ended(engine, "closed") == 20


async def test_where_too_many_ask_some_get_429_with_a_time_and_the_rest_is_answered(chat: ChatText) -> None:
    with tiny_engine(max_running=1, max_queued=1) as engine:
        async with serving_http(engine, chat) as handle, http_client(handle) as client:
            with held(engine) as let_go:
                reserved_bytes = engine.info().kv_reserved_bytes
                bodies = [asking(stream=number % 2 == 0) for number in range(8)]
                posts = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for body in bodies]
                refused: set[asyncio.Task[Any]] = set()
                # There is one place to run, which is taken, and one to wait.
                while len(refused) < 6:
                    refused, _ = await asyncio.wait(posts, return_when=asyncio.FIRST_COMPLETED)
                let_go()
                answers = await asyncio.gather(*posts)
            statuses = [answer.status_code for answer in answers]
            assert set(statuses) == {200, 429}
            for answer in answers:
                if answer.status_code == 429:
                    assert int(answer.headers["retry-after"]) >= 1
                    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            again = [(await client.post(COMPLETIONS, json=asking())).status_code for _ in range(4)]
            assert again == [200] * 4
            await asyncio.to_thread(engine.drain, TIMEOUT_SECONDS)
            assert engine.info().kv_reserved_bytes == reserved_bytes


async def test_no_room_for_a_session_is_429_with_a_time(chat: ChatText) -> None:
    with tiny_engine(max_sessions=1) as engine:
        async with serving_http(engine, chat) as handle, openai_client(handle) as client:
            with held(engine), pytest.raises(openai.RateLimitError) as refused:
                await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2)
            assert int(refused.value.response.headers["retry-after"]) >= 1


async def test_an_owner_that_holds_every_place_keeps_no_other_owner_out(chat: ChatText, tmp_path: Path) -> None:
    keys = [letter * 32 for letter in "ab"]
    (tmp_path / "keys").write_text("\n".join(keys), encoding="utf-8")
    with tiny_engine(max_running=1, max_queued=1) as engine:
        async with (
            serving_http(engine, chat, api_key_file=str(tmp_path / "keys")) as handle,
            http_client(handle) as client,
        ):
            slow = [await begin_a_body(handle, key=keys[0]) for _ in range(2)]
            headers = [{"authorization": f"Bearer {key}"} for key in keys]
            assert (await client.post(COMPLETIONS, json=asking(), headers=headers[0])).status_code == 429
            assert (await client.post(COMPLETIONS, json=asking(), headers=headers[1])).status_code == 200
            for writer in slow:
                writer.close()
                await writer.wait_closed()


async def test_whatever_goes_wrong_every_place_is_free_again(chat: ChatText, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    places = 3
    every = {0, 200, 400, 404, 429, 500, 503}

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if rng.random() < 0.3:
                raise rng.choice((Overloaded("later"), EngineStalled(), OutOfMemory(), ZeroDivisionError("a bug")))
            return function(*arguments, **named)

        return call

    with tiny_engine(max_running=1, max_queued=places - 1) as engine:
        async with serving_http(engine, chat) as handle, http_client(handle) as client:
            bodies: list[Any] = [asking(), asking(stream=True), asking(top_k=1), asking(model="other"), {"messages": 1}]

            async def ask() -> int:
                try:
                    async with asyncio.timeout(rng.choice((0.001, 0.02, TIMEOUT_SECONDS))):
                        answer = await client.post(COMPLETIONS, json=rng.choice(bodies))
                except TimeoutError:
                    return 0  # it left
                if answer.status_code in (429, 503):
                    assert int(answer.headers["retry-after"]) >= 1
                return answer.status_code

            with monkeypatch.context() as patch:
                for part, method in (
                    (engine, "create_session"),
                    (engine, "append"),
                    (engine, "generate"),
                    (chat, "prompt_ids"),
                ):
                    patch.setattr(part, method, failing(getattr(part, method)))
                seen: set[int] = set()
                # On a machine that has much else to do nearly all give up before they have an answer.
                for rounds in range(400):
                    seen |= set(await asyncio.gather(*(ask() for _ in range(6))))
                    if rounds >= 20 and seen >= every:
                        break
            assert seen >= every
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while not (free := await begin_bodies(handle, places)):
                    pass
            refused = await client.post(COMPLETIONS, json=asking())
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            for writer in free:
                writer.close()
                await writer.wait_closed()
        assert await left_nothing(engine)


async def test_a_client_that_does_not_read_loses_its_session(
    engine: Engine, chat: ChatText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "STALL_SECONDS", 0.05)
    desk = Desk(
        engine=engine,
        chat=chat,
        limits=OwnerLimits(calls=10, calls_per_second=0, clock=lambda: 0.0),
        slots=Slots(10),
        turns=RequestTurns(1),
        max_body_bytes=10_000,
        now=lambda: 0.0,
        given_up=asyncio.get_running_loop().create_future(),
    )
    app = create_app(desk, KeyRing(), Address(host="127.0.0.1", port=0, is_loopback=True), State(), NO_DOOR)
    body = json.dumps({**FOREVER, "stream": True}).encode()
    coming: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[str] = []

    async def receive() -> Any:
        if coming:
            return coming.pop()
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if len(sent) == 5:
            await asyncio.Event().wait()

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": headers,
        "root_path": "",
        "http_version": "1.1",
        "scheme": "http",
    }
    async with asyncio.timeout(TIMEOUT_SECONDS):
        await app(scope, receive, send)
    desk.turns.close()
    assert await left_nothing(engine)
    assert ended(engine, "closed") == 1
    with desk.slots.one(""), desk.slots.one("other"):
        pass


async def test_a_client_that_does_not_read_loses_its_connection(
    engine: Engine, server: ServerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "STALL_SECONDS", 0.05)
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.05)
    made, lost = connection.Connection.connection_made, asyncio.Event()

    def connection_made(of: connection.Connection, transport: asyncio.Transport) -> None:
        # So that little is on its way before a write has to wait.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        transport.set_write_buffer_limits(high=4096)
        made(of, transport)

    monkeypatch.setattr(connection.Connection, "connection_made", connection_made)
    monkeypatch.setattr(HttpDoor, "closed", lambda _door, _peer: lost.set())
    async with asyncio.timeout(TIMEOUT_SECONDS):
        async with calling(server, receives_bytes=4096) as caller:
            caller.stop_reading()
            caller.send(posted({**FOREVER, "stream": True}))
            await lost.wait()
    assert ended(engine, "closed") == 1


async def test_while_the_server_drains_answers_go_on_and_new_ones_are_refused(chat: ChatText) -> None:
    with tiny_engine(strategy=ENDLESS_SESSIONS) as engine:
        async with (
            serving_http(engine, chat, drain_seconds=60.0) as handle,
            openai_client(handle) as client,
            http_client(handle) as other,
        ):
            stream = await client.chat.completions.create(**{**FOREVER, "max_tokens": 200}, stream=True)
            await anext(stream)
            await other.get("/models")  # a connection that is there before the port closes
            draining = asyncio.create_task(handle.drain_and_stop())
            assert handle.http_url is not None
            health = handle.http_url.removesuffix("/v1") + "/healthz"
            while (await other.get(health)).status_code == 200:
                pass
            refused = await other.post(COMPLETIONS, json=asking())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) >= 1
            last = [chunk async for chunk in stream][-1]
            assert last.choices[0].finish_reason == "length"
            await draining
        assert not engine.info().kv_reserved_bytes


async def test_an_answer_that_outlives_the_grace_ends_with_an_error_in_its_stream(
    engine: Engine, server: ServerHandle, client: openai.AsyncOpenAI
) -> None:
    stream = await client.chat.completions.create(**FOREVER, stream=True)
    await anext(stream)
    draining = asyncio.create_task(server.drain_and_stop())
    with pytest.raises(openai.APIError) as ending:
        async for _ in stream:
            pass
    assert ending.value.code == "draining"
    await draining
    assert not engine.info().kv_reserved_bytes


async def test_a_stream_that_fails_before_it_begins_has_a_status(
    engine: Engine, server: ServerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, is_queued = engine.generate, asyncio.Event()

    def generate_and_stop(*arguments: Any, **named: Any) -> Generation:
        generation = generate(*arguments, **named)
        generation.abort(Overloaded("later", retry_after_seconds=2.5))
        is_queued.set()
        return generation

    async with http_client(server) as client:
        with held(engine) as let_go:
            monkeypatch.setattr(engine, "generate", generate_and_stop)
            waiting = asyncio.create_task(client.post(COMPLETIONS, json={**FOREVER, "stream": True}))
            await is_queued.wait()
            let_go()
            answer = await waiting
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert answer.json()["error"]["message"] == "later"
