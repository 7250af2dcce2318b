"""A real server on a tiny model for the SDK to talk to, and a scripted one for what a network does to calls."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import socket
import threading
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

import kakeya
from inference_engine.config import ServerConfig, configure_threads_environment, forbid_model_hub
from kakeya.v1.runtime_pb2_grpc import RuntimeServiceServicer, add_RuntimeServiceServicer_to_server
from tests.further import make_further

# Before anything imports torch or transformers: both come with the engine, on first use.
configure_threads_environment()
forbid_model_hub()

# Small, so that short appends already come in several requests.
MAX_APPEND_TOKENS = 40
EXAMPLES = Path(__file__).parent.parent / "examples"

Do = Callable[..., Awaitable[Any]]
Read = Callable[..., Coroutine[Any, Any, list[int]]]


@contextmanager
def real_server(config: ServerConfig, **settings: Any) -> Iterator[str]:
    """The runtime on TinyModel, on an event loop of its own. Yields its target."""
    from inference_engine.server.run import start_server
    from tests.tiny_native import served_engine

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server", daemon=True)
    thread.start()
    engine = served_engine(**settings)
    try:
        handle = asyncio.run_coroutine_threadsafe(start_server(engine, config), loop).result(timeout=60)
        try:
            yield handle.target
        finally:
            asyncio.run_coroutine_threadsafe(handle.drain_and_stop(), loop).result(timeout=60)
    finally:
        engine.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=10)
        loop.close()


@pytest.fixture(scope="session")
def run_server() -> Callable[..., Any]:
    """`with run_server(ServerConfig(…), **engine_settings) as target:`"""
    return real_server


@pytest.fixture(scope="session")
def server_target() -> Iterator[str]:
    config = ServerConfig(bind="127.0.0.1:0", drain_seconds=1.0, busy_wait_seconds=0.5)
    with real_server(config, max_append_tokens=MAX_APPEND_TOKENS) as target:
        yield target


class Scripted(RuntimeServiceServicer):
    """Answers each RPC by the next function of its list in `script`, and keeps the requests it saw."""

    def __init__(self) -> None:
        self.script: dict[str, list[Callable[[Any, grpc.ServicerContext], Any]]] = {}
        self.seen: list[tuple[str, Any]] = []
        self.metadata: list[dict[str, Any]] = []
        self.target = ""

    def on(self, method: str, *answers: Callable[[Any, grpc.ServicerContext], Any]) -> None:
        self.script[method] = list(answers)

    def calls(self, method: str) -> list[Any]:
        return [request for name, request in self.seen if name == method]

    def _answer(self, method: str, request: Any, context: grpc.ServicerContext) -> Any:
        self.seen.append((method, request))
        self.metadata.append(dict(context.invocation_metadata()))
        return self.script[method].pop(0)(request, context)

    def CreateSession(self, request: Any, context: Any) -> Any:
        return self._answer("CreateSession", request, context)

    def AppendTokens(self, request: Any, context: Any) -> Any:
        return self._answer("AppendTokens", request, context)

    def Generate(self, request: Any, context: Any) -> Any:
        return self._answer("Generate", request, context)

    def CloseSession(self, request: Any, context: Any) -> Any:
        return self._answer("CloseSession", request, context)

    def ForkSession(self, request: Any, context: Any) -> Any:
        return self._answer("ForkSession", request, context)

    def RewindSession(self, request: Any, context: Any) -> Any:
        return self._answer("RewindSession", request, context)

    def GetSessionInfo(self, request: Any, context: Any) -> Any:
        return self._answer("GetSessionInfo", request, context)

    def GetServerInfo(self, request: Any, context: Any) -> Any:
        return self._answer("GetServerInfo", request, context)

    def ListSessions(self, request: Any, context: Any) -> Any:
        return self._answer("ListSessions", request, context)

    def ReadHistory(self, request: Any, context: Any) -> Any:
        return self._answer("ReadHistory", request, context)


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    servicer = Scripted()
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    add_RuntimeServiceServicer_to_server(servicer, server)
    servicer.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(0).wait(timeout=10)


@pytest.fixture
def explained() -> Callable[..., Callable[[Any, grpc.ServicerContext], Any]]:
    """An answer that fails as the runtime does, with ErrorInfo and whatever else is given."""
    return explained_failure


def explained_failure(
    code: grpc.StatusCode,
    reason: str,
    message: str = "as scripted",
    *,
    domain: str = "kakeya.v1",
    retry_after_seconds: float | None = None,
    **metadata: str,
) -> Callable[[Any, grpc.ServicerContext], Any]:
    status = status_pb2.Status(code=code.value[0], message=message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(domain=domain, reason=reason, metadata=metadata))
    if retry_after_seconds is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(retry_after_seconds * 1e9))
        status.details.add().Pack(retry)

    def fail(_: Any, context: grpc.ServicerContext) -> Any:
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(code, message)

    return fail


@pytest.fixture
def unexplained() -> Callable[..., Callable[[Any, grpc.ServicerContext], Any]]:
    """An answer that fails as a proxy or a broken connection does, with a code and nothing else."""

    def failure(code: grpc.StatusCode, message: str = "gone") -> Callable[[Any, grpc.ServicerContext], Any]:
        return lambda _, context: context.abort(code, message)

    return failure


# Processes and lines that break, which both clients meet by the same flows: the clients take turns in `make test`.
IN_TURN = ("test_middle.py", "test_reattach.py", "test_restart.py", "test_routes.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    cases = [item for item in items if item.path.parent == here and item.path.name in IN_TURN]
    cases = [item for item in cases if item.get_closest_marker("long") is None]
    of_one_test: dict[str, list[pytest.Item]] = {}
    for item in cases:
        if flavour_of(item):
            of_one_test.setdefault(item.nodeid.replace(flavour_of(item), "", 1), []).append(item)
    turns: dict[str, int] = {}
    for both in of_one_test.values():
        # Counted within a test, so that a part of the suite takes the turns that the whole takes. Tests differ in whose
        # turn is first: many have a single case.
        name = both[0].nodeid.partition("[")[0].rpartition("::")[2]
        turn = turns[name] = turns.get(name, -1) + 1
        taken = zlib.crc32(name.encode()) + turn + turn // 2  # out of step with parameters that alternate
        for place, item in enumerate(both):
            if place != taken % len(both):
                make_further(item)


def flavour_of(item: pytest.Item) -> str:
    return str(item.callspec.params.get("flavour", "")) if hasattr(item, "callspec") else ""


@pytest.fixture(params=["threads", "asyncio"])
def flavour(request: pytest.FixtureRequest) -> str:
    """Both clients must pass the test."""
    return str(request.param)


@pytest.fixture
def do(flavour: str) -> Do:
    """Call a method of either client and wait for it: `await do(session.append, [1, 2])`."""

    async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(function, *args, **kwargs)

    async def in_loop(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    return in_thread if flavour == "threads" else in_loop


@pytest.fixture
async def client(server_target: str, flavour: str, do: Do) -> AsyncIterator[Any]:
    """Of the real server."""
    client = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(server_target)
    yield client
    await do(client.close)


@pytest.fixture
async def session(client: Any, do: Do) -> AsyncIterator[Any]:
    session = await do(client.create_session)
    yield session
    await do(session.close)


@pytest.fixture
def read(flavour: str) -> Read:
    """The first ids of a stream, then the loop is left by `break`; or all of them: `await read(stream, 3)`."""

    async def in_loop(stream: Any, count: int | None = None) -> list[int]:
        ids: list[int] = []
        async for token_id in stream:
            ids.append(token_id)
            if len(ids) == count:
                break
        return ids

    def in_thread(stream: Any, count: int | None = None) -> list[int]:
        ids: list[int] = []
        for token_id in stream:
            ids.append(token_id)
            if len(ids) == count:
                break
        return ids

    async def threaded(stream: Any, count: int | None = None) -> list[int]:
        return await asyncio.to_thread(in_thread, stream, count)

    return threaded if flavour == "threads" else in_loop


@pytest.fixture
def unused_port() -> int:
    """A port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """An example program as a module, imported as Python finds it when the program is run."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module
