"""A client for tests: the generated stub, with the few moves every test makes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from inference_engine.config import ServerConfig
from inference_engine.engine import Engine
from inference_engine.server.run import ServerHandle, start_server
from inference_engine.types import Event, GenerateParams, TokenCommitted
from kakeya.v1 import runtime_pb2 as pb
from kakeya.v1 import runtime_pb2_grpc

SERVICE = "/kakeya.v1.RuntimeService/"
# Long enough for a machine that is busy with something else; a call that hangs must still end.
TIMEOUT_SECONDS = 60.0
HISTORY = (3, 14, 15, 92, 65, 35, 89, 79)


class Client:
    """Calls over one channel. What the server refuses comes as grpc.aio.AioRpcError; see `details_of`."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self.channel: Any = channel
        self.stub: Any = runtime_pb2_grpc.RuntimeServiceStub(channel)
        self._metadata = tuple(metadata)

    async def call(self, method: str, request: Any) -> Any:
        """A unary RPC; for Generate, the list of its frames."""
        if method == "Generate":
            return [frame async for frame in self.stream(request)]
        return await getattr(self.stub, method)(request, timeout=TIMEOUT_SECONDS, metadata=self._metadata)

    def stream(self, request: pb.GenerateRequest, *, timeout: float = TIMEOUT_SECONDS) -> Any:
        return self.stub.Generate(request, timeout=timeout, metadata=self._metadata)

    async def raw(self, method: str, message: bytes) -> Any:
        """Send bytes that no stub would; returns the first or only answer."""
        if method == "Generate":
            return await self.channel.unary_stream(SERVICE + method)(message, timeout=TIMEOUT_SECONDS).read()
        return await self.channel.unary_unary(SERVICE + method)(message, timeout=TIMEOUT_SECONDS)

    async def open(self, history: Sequence[int] = HISTORY, **fields: Any) -> str:
        """A new session with a history."""
        opened = await self.call("CreateSession", pb.CreateSessionRequest(**fields))
        if history:
            await self.append(opened.session_id, history)
        return str(opened.session_id)

    async def open_endless(self, history: Sequence[int] = HISTORY) -> str:
        """A session whose Generates can go on for as long as a test needs."""
        return await self.open(history, strategy=pb.Strategy(sink_window=pb.SinkWindowStrategy(window=32)))

    async def append(self, session_id: str, token_ids: Sequence[int], **fields: Any) -> int:
        request = pb.AppendTokensRequest(session_id=session_id, token_ids=token_ids, **fields)
        return int((await self.call("AppendTokens", request)).history_length)

    async def generate(self, session_id: str, max_tokens: int = 8, **fields: Any) -> list[int]:
        """The tokens of one Generate."""
        request = pb.GenerateRequest(session_id=session_id, max_tokens=max_tokens, **fields)
        return [frame.token_id for frame in await self.call("Generate", request) if frame.HasField("token_id")]

    async def length(self, session_id: str) -> int:
        return int((await self.info(session_id)).history_length)

    async def info(self, session_id: str) -> Any:
        return await self.call("GetSessionInfo", pb.GetSessionInfoRequest(session_id=session_id))


class Details:
    """What an error of ours carries beside its code."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.text = error.details() or ""
        self.error_info: error_details_pb2.ErrorInfo | None = None
        self.retry_info: error_details_pb2.RetryInfo | None = None
        self.bad_request: error_details_pb2.BadRequest | None = None
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                status = status_pb2.Status.FromString(value)
                assert (status.code, status.message) == (self.code.value[0], self.text)
                for detail in status.details:
                    self._take(detail)

    def _take(self, detail: Any) -> None:
        for name in ("error_info", "retry_info", "bad_request"):
            message = getattr(error_details_pb2, name.title().replace("_", ""))()
            if detail.Unpack(message):
                setattr(self, name, message)

    @property
    def reason(self) -> str:
        """`NOT_FOUND SESSION_NOT_FOUND`: the code, and the reason if the error is ours."""
        return f"{self.code.name} {self.error_info.reason}" if self.error_info else self.code.name

    @property
    def fields(self) -> list[str]:
        return [violation.field for violation in self.bad_request.field_violations] if self.bad_request else []


async def refused(awaitable: Any) -> Details:
    """The error a call ends with. Fails if it succeeds."""
    try:
        answer = await awaitable
    except grpc.aio.AioRpcError as error:
        return Details(error)
    raise AssertionError(f"expected an error, got {answer!r}")


async def read_rest(stream: Any, *, into: list[Any] | None = None) -> list[Any]:
    """The frames that are left, also kept in `into` in case the stream ends with an error."""
    frames: list[Any] = [] if into is None else into
    while (frame := await stream.read()) is not grpc.aio.EOF:
        frames.append(frame)
    return frames


@asynccontextmanager
async def serving(engine: Engine, **settings: Any) -> AsyncIterator[ServerHandle]:
    """A server on a free loopback port, stopped at the end. The engine stays the caller's."""
    settings = {"bind": "127.0.0.1:0", "drain_seconds": 0.0, **settings}
    handle = await start_server(engine, ServerConfig(**settings))
    try:
        yield handle
    finally:
        await handle.drain_and_stop()


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for what other threads do, which no event tells."""
    for _ in range(2000):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within 20 s")


async def until_free(engine: Engine, session_id: str) -> None:
    """Returns once no operation holds the session."""
    loop, is_free = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        loop.call_soon_threadsafe(is_free.set)

    engine.when_free(session_id, notify)
    await is_free.wait()


@contextmanager
def held(engine: Engine) -> Iterator[Callable[[], None]]:
    """Keep the engine's thread inside a Generate of its own, so that whatever comes now has to wait.

    Yields what lets it go; leaving does too.
    """
    is_held, may_go = threading.Event(), threading.Event()

    def hold(event: Event) -> None:
        if isinstance(event, TokenCommitted):
            is_held.set()
            may_go.wait()

    opened = engine.create_session()
    engine.append(opened.session_id, HISTORY)
    engine.generate(opened.session_id, GenerateParams(max_tokens=1), listener=hold)
    assert is_held.wait(TIMEOUT_SECONDS)
    try:
        yield may_go.set
    finally:
        may_go.set()


@asynccontextmanager
async def connected(
    handle: ServerHandle, *, metadata: Sequence[tuple[str, str]] = (), options: Sequence[tuple[str, int]] = ()
) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(handle.target, options=options) as channel:
        yield Client(channel, metadata)
