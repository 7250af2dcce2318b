"""What the shim does not do is refused by its name, in the envelope clients know; it is never ignored."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest

from inference_engine import logs
from inference_engine.engine import Engine
from inference_engine.server.http.chat_text import ChatText
from inference_engine.server.http.completion import MAX_BODY_SECONDS
from inference_engine.server.run import ServerHandle
from tests.server.http.client import (
    COMPLETIONS,
    MESSAGES,
    asking,
    ended,
    http_client,
    left_nothing,
    openai_client,
    serving_http,
)
from tests.tiny import tiny_engine
from tests.tiny_folder import tiny_tokenizer

pytestmark = pytest.mark.hostile

MAX_BODY_BYTES = 4096


@pytest.fixture
async def server(engine: Engine, chat: ChatText) -> AsyncIterator[ServerHandle]:
    async with serving_http(engine, chat, max_message_bytes=MAX_BODY_BYTES) as handle:
        yield handle
        assert await left_nothing(engine)


@pytest.fixture
async def client(server: ServerHandle) -> AsyncIterator[httpx2.AsyncClient]:
    async with http_client(server) as client:
        yield client


def error_of(answer: httpx2.Response) -> dict[str, Any]:
    """The error in the envelope, which has exactly these fields."""
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


NOT_HONOURED: list[tuple[dict[str, Any], str]] = [
    ({"top_k": 5}, "top_k"),
    ({"temperature": -1}, "temperature"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_tokens": None, "max_completion_tokens": 10**9}, "max_completion_tokens"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"messages": [*MESSAGES, {"role": "user"}]}, "messages[1].content"),
]


async def test_what_is_not_honoured_is_refused_by_its_name(
    client: httpx2.AsyncClient, subtests: pytest.Subtests
) -> None:
    for parameters, param in NOT_HONOURED:
        with subtests.test(param):
            body = json.dumps(asking(**parameters)).encode()
            answer = await client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
            error = error_of(answer)
            assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
            assert param.rpartition(".")[2] in error["message"]


HALF_SURROGATES: list[bytes] = [
    b'{"\\ud800": 1}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "a", "\\udc00": 1}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "\\uD834": 1}]}]}',
    b'{"model": "tiny", "messages": [], "stream": true, "stream_options": {"\\ud800": 1}}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "logit_bias": {"\\ud800": 1}}',
    b'{"model": "\\ud800", "messages": [{"role": "user", "content": "a"}]}',
    b'{"model": "tiny", "messages": [{"role": "\\ud800", "content": "a"}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "stop": "\\ud800"}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "n": "\\ud800"}',
    b'{"\xed\xa0\x80": 1}',
    b'{"model": "tiny", "messages": [], "\\ud800": 1, "\\ud800": 2}',
]


@pytest.mark.hostile
async def test_half_a_surrogate_anywhere_is_the_callers_mistake(
    client: httpx2.AsyncClient, subtests: pytest.Subtests
) -> None:
    for body in HALF_SURROGATES:
        with subtests.test(str(body)):
            stream = io.StringIO()
            with logs.written("text", stream):
                answer = await client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, error_of(answer)["type"]) == (400, "invalid_request_error")
            assert "Traceback" not in stream.getvalue() and "ud800" not in stream.getvalue()


async def test_a_whole_surrogate_pair_in_a_name_is_a_name(client: httpx2.AsyncClient) -> None:
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "\\ud83d\\ude42": 1}'
    answer = await client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "\U0001f642")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_that_a_page_could_send_unasked_is_refused(client: httpx2.AsyncClient, kind: str) -> None:
    answer = await client.post(COMPLETIONS, content=json.dumps(asking()).encode(), headers={"content-type": kind})
    assert answer.status_code == 415
    assert error_of(answer)["code"] == "unsupported_media_type"


async def test_a_body_that_is_too_large_is_refused_though_it_says_no_length(client: httpx2.AsyncClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 64 + 1):
            yield b" " * 64

    answer = await client.post(COMPLETIONS, content=chunks(), headers={"content-type": "application/json"})
    assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")


async def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(
    client: httpx2.AsyncClient, subtests: pytest.Subtests
) -> None:
    """Its sender may wait for `100 Continue`, and a connection that sends nothing is kept for half a minute."""
    port = client.base_url.port
    assert port is not None
    for length in (MAX_BODY_BYTES + 1, 2**64 - 1):
        with subtests.test(length=length):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                f"POST /v1{COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                f"Expect: 100-continue\r\nContent-Length: {length}\r\n\r\n".encode()
            )
            async with asyncio.timeout(MAX_BODY_SECONDS / 2):
                answer = await reader.readline()
            assert answer.split()[1] == b"413"
            writer.close()


async def test_messages_that_leave_no_room_for_an_answer_are_refused(client: httpx2.AsyncClient) -> None:
    answer = await client.post(COMPLETIONS, json=asking(messages=[{"role": "user", "content": "x" * 512}]))
    error = error_of(answer)
    assert (answer.status_code, error["param"], error["code"]) == (400, "messages", "context_length_exceeded")


async def test_what_the_chat_template_refuses_is_the_callers(engine: Engine, chat: ChatText) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
        + tokenizer.chat_template
    )
    strict = ChatText(tokenizer, name="strict")
    async with serving_http(engine, strict) as handle, http_client(handle) as client:
        answer = await client.post(COMPLETIONS, json=asking(messages=[{"role": "system", "content": "x"}]))
        error = error_of(answer)
        assert (answer.status_code, error["param"]) == (400, "messages")
        assert error["message"].endswith("no system messages")


OTHER_ROUTES: list[tuple[str, str, int]] = [
    ("GET", COMPLETIONS, 405),
    ("OPTIONS", COMPLETIONS, 405),
    ("POST", "/completions", 404),
    ("GET", "/docs", 404),
    ("POST", f"{COMPLETIONS}/", 404),  # not sent elsewhere: clients drop their key or their body on the way
    ("GET", "/" + "x" * 10_000, 404),
]


async def test_other_routes_and_methods_are_not_served(client: httpx2.AsyncClient, subtests: pytest.Subtests) -> None:
    for method, path, status in OTHER_ROUTES:
        with subtests.test(method=method, path=path):
            answer = await client.request(method, path)
            assert answer.status_code == status
            assert len(answer.content) < 1000
            assert "POST /v1/chat/completions, GET /v1/models" in error_of(answer)["message"]


async def test_the_openai_client_raises_its_own_kinds(server: ServerHandle) -> None:
    async with openai_client(server) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, presence_penalty=1)
        assert bad.value.param == "presence_penalty"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=MESSAGES)


async def test_an_answer_that_never_fits_is_refused_for_good(chat: ChatText) -> None:
    with tiny_engine(growth="guaranteed", kv_bytes=100_000, default_limit_tokens=100) as engine:
        async with serving_http(engine, chat) as handle, http_client(handle) as client:
            answer = await client.post(COMPLETIONS, json=asking(max_tokens=None))
            error = error_of(answer)
            assert (answer.status_code, error["param"]) == (400, "max_tokens")
            assert (await client.post(COMPLETIONS, json=asking())).status_code == 200


@pytest.mark.parametrize(
    ("setting", "status", "code"),
    [
        ("history_tokens_per_session", 400, "context_length_exceeded"),
        ("history_tokens_per_owner", 429, "rate_limit_exceeded"),
    ],
)
async def test_messages_that_pass_a_cap_on_histories_are_refused_by_its_name(
    chat: ChatText, setting: str, status: int, code: str
) -> None:
    settings: dict[str, Any] = {setting: 60}
    with tiny_engine(**settings) as engine:
        async with serving_http(engine, chat) as handle, http_client(handle) as client:
            long = [{"role": "user", "content": "long " * 40}]
            answer = await client.post(COMPLETIONS, json=asking(messages=long))
            error = error_of(answer)
            assert (answer.status_code, error["code"]) == (status, code)
            assert setting in error["message"]
            assert await left_nothing(engine)
            assert engine.history_tokens_of("") == 0


async def test_a_bug_is_reported_as_an_incident_and_nothing_else(
    server: ServerHandle,
    engine: Engine,
    client: httpx2.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_arguments: object, **_named: object) -> None:
        raise ZeroDivisionError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "generate", broken)
        answer = await client.post(COMPLETIONS, json=asking())
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["code"]) == (500, "server_error", "internal")
    assert "secret" not in answer.text
    incident = error["message"].rpartition(" ")[2]
    assert any(incident in record.getMessage() and record.exc_info for record in caplog.records)
    assert ended(engine, "failed") == 0
