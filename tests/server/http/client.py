"""A shim over a real engine on TinyModel, the `openai` client for it, and the same questions asked over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx2
import openai

from inference_engine.config import ServerConfig
from inference_engine.engine import Engine
from inference_engine.server.http.chat_text import ChatText
from inference_engine.server.run import ServerHandle, start_server
from kakeya import tokenization
from kakeya.v1 import runtime_pb2 as pb
from tests.server.wire import TIMEOUT_SECONDS, connected
from tests.tiny_folder import tiny_tokenizer

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
COMPLETIONS = "/chat/completions"


def tiny_chat() -> ChatText:
    return ChatText(tiny_tokenizer(), name="tiny", processes=1)  # a second one takes time to start


@asynccontextmanager
async def serving_http(engine: Engine, chat: ChatText, **settings: Any) -> AsyncIterator[ServerHandle]:
    """A server with both ports free ones on loopback, stopped at the end."""
    given = {"bind": "127.0.0.1:0", "http_bind": "127.0.0.1:0", "drain_seconds": 0.0, **settings}
    handle = await start_server(engine, ServerConfig(**given), chat=chat)
    try:
        yield handle
    finally:
        await handle.drain_and_stop()


@asynccontextmanager
async def openai_client(handle: ServerHandle, *, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    """The client as it comes, but that a refusal is shown instead of tried again."""
    assert handle.http_url is not None
    own = openai.DefaultAsyncHttpxClient(base_url=handle.http_url, verify=trusted(), timeout=TIMEOUT_SECONDS)
    async with openai.AsyncOpenAI(
        base_url=handle.http_url, api_key=key, max_retries=0, timeout=TIMEOUT_SECONDS, http_client=own
    ) as client:
        yield client


@cache
def trusted() -> ssl.SSLContext:
    """Reading these certificates takes most of the time of making a client, and on loopback no call uses them."""
    return ssl.create_default_context()


@asynccontextmanager
async def http_client(handle: ServerHandle, **options: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """For requests that no library of that API would send."""
    assert handle.http_url is not None
    given = {"base_url": handle.http_url, "timeout": TIMEOUT_SECONDS, "verify": trusted(), **options}
    async with httpx2.AsyncClient(**given) as client:
        yield client


def asking(**parameters: Any) -> dict[str, Any]:
    """The body of a small request, changed by `parameters`."""
    return {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, **parameters}


async def over_grpc(
    handle: ServerHandle, messages: Sequence[Any], max_tokens: int, **parameters: Any
) -> tuple[list[int], list[float], Any]:
    """Ids, logprobs and `done` of a session whose history is these messages, rendered by the SDK."""
    tokenizer = tiny_tokenizer()
    async with connected(handle) as client:
        ends = tokenization.end_of_turn_ids(tokenizer)
        session_id = await client.open(tokenization.tokens_for_chat(messages, tokenizer), eos_token_ids=ends)
        request = pb.GenerateRequest(
            session_id=session_id, max_tokens=max_tokens, token_details=True, logprobs=True, **parameters
        )
        frames = await client.call("Generate", request)
        tokens = [frame.token for frame in frames if frame.HasField("token")]
        await client.call("CloseSession", pb.CloseSessionRequest(session_id=session_id))
        return [token.token_id for token in tokens], [token.logprob for token in tokens], frames[-1].done


def ended(engine: Engine, outcome: str) -> int:
    """How many Generates ended so."""
    return int(engine.metrics.registry.get_sample_value("kakeya_generate_total", {"outcome": outcome}) or 0)


async def left_nothing(engine: Engine) -> bool:
    """Whether the engine comes to rest by itself, with no session left. It takes no work afterwards."""
    await asyncio.to_thread(engine.drain, TIMEOUT_SECONDS)
    return not ended(engine, "draining") and not engine.info().kv_reserved_bytes


class Caller:
    """Writes to the shim, byte by byte if it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def stop_reading(self) -> None:
        transport = self._writer.transport
        assert isinstance(transport, asyncio.Transport)  # a socket's, which reads as well
        transport.pause_reading()

    async def status(self) -> bytes:
        """The first line of an answer."""
        return await asyncio.wait_for(self._reader.readline(), TIMEOUT_SECONDS)

    async def answer(self) -> tuple[bytes, bytes]:
        """The head of an answer and its body. The server closes the connection."""
        head, _, body = (await self.rest()).partition(b"\r\n\r\n")
        return head, body

    async def rest(self) -> bytes:
        """All that comes until the server closes the connection."""
        return await asyncio.wait_for(self._reader.read(), TIMEOUT_SECONDS)

    def end(self) -> None:
        """Send no more, and go on reading."""
        self._writer.write_eof()

    async def is_hung_up(self) -> bool:
        """Whether the server closes the connection, without a word more."""
        try:
            return not await asyncio.wait_for(self._reader.read(), TIMEOUT_SECONDS)
        except ConnectionResetError:
            return True

    async def leave(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


@contextlib.asynccontextmanager
async def calling(server: ServerHandle, *, receives_bytes: int = 0) -> AsyncIterator[Caller]:
    """receives_bytes: what the system receives before the caller reads it; 0: as usual."""
    assert server.http_url is not None
    host, _, port = server.http_url.removeprefix("http://").removesuffix("/v1").partition(":")
    sock = socket.socket()
    sock.setblocking(False)
    if receives_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives_bytes)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    caller = Caller(*await asyncio.open_connection(sock=sock))
    try:
        yield caller
    finally:
        await caller.leave()


async def begin_a_body(handle: ServerHandle, *, key: str = "none") -> asyncio.StreamWriter:
    """A request whose body never comes, once the server waits for it."""
    assert handle.http_url is not None
    host, port = handle.http_url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer " + key.encode() + b"\r\n"
        b"content-length: 1000\r\nexpect: 100-continue\r\n\r\n"
    )
    assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
    return writer


async def begin_bodies(handle: ServerHandle, count: int) -> list[asyncio.StreamWriter]:
    """So many requests that wait for their bodies; none if there are not as many places yet."""
    begun = await asyncio.gather(*(begin_a_body(handle) for _ in range(count)), return_exceptions=True)
    writers = [each for each in begun if isinstance(each, asyncio.StreamWriter)]
    if len(writers) == count:
        return writers
    for writer in writers:
        writer.close()
    return []


def posted(body: Any) -> bytes:
    """A request for a completion, as it is sent."""
    content = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
