"""The HTTP shim: chat completions for clients that do not use sessions yet. Deprecated, frozen, single-shot.

It runs in the server's process and event loop, on the same engine. Each request has a session of its own, which ends
with the request. What is supported and refused, and why the shim is deprecated: docs/http.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
import time
from collections.abc import Generator
from typing import Any

import uvicorn

from inference_engine.config import ServerConfig
from inference_engine.engine import Engine
from inference_engine.errors import ConfigError, RequestError
from inference_engine.server.address import Address, cannot_bind
from inference_engine.server.auth import KeyRing
from inference_engine.server.http.app import State, create_app
from inference_engine.server.http.chat_text import ChatText
from inference_engine.server.http.client_connection import HEAD_SECONDS, Connection, SecuredConnection
from inference_engine.server.http.completion import Desk, Slots
from inference_engine.server.http.door import HttpDoor
from inference_engine.server.http.turns import RequestTurns
from inference_engine.server.limits import OwnerLimits
from inference_engine.server.tls import Certificates

# How long sending answers may take once no Generate runs any more.
LEAVE_SECONDS = 5

_log = logging.getLogger(__name__)


class HttpShim:
    """A running shim."""

    def __init__(self, *, url: str, server: uvicorn.Server, sock: socket.socket, desk: Desk, state: State) -> None:
        self.url = url  # "http://127.0.0.1:8000/v1": the base URL for clients
        self._state = state
        self._server = server
        self._desk = desk
        self._serving = asyncio.create_task(server.serve(sockets=[sock]), name="http")

    def refuse_work(self) -> None:
        """From now on health returns 503 and completions are refused; requests in progress continue."""
        self._state.is_draining = True

    def give_up(self, error: RequestError) -> None:
        """End requests in progress with `error`; of a streamed answer that has begun it is the last event."""
        self.refuse_work()
        if not self._desk.given_up.done():
            self._desk.given_up.set_result(error)

    async def stop(self) -> None:
        """Let answers end, for LEAVE_SECONDS at most, and close the port."""
        self.refuse_work()
        self._server.should_exit = True
        try:
            await self._serving
        finally:
            self._desk.turns.close()
            await asyncio.to_thread(self._desk.chat.close)


async def start_http(
    engine: Engine,
    config: ServerConfig,
    address: Address,
    *,
    keys: KeyRing,
    limits: OwnerLimits,
    certificates: Certificates | None,
    chat: ChatText | None,
    door: HttpDoor,
) -> HttpShim:
    """Listen at `address`, as a part of the server that has these keys, limits and certificates.

    door: for the connections to it. Raises ConfigError if it cannot; the caller closes `chat` then.
    """
    if chat is None:
        raise ConfigError(
            "http_bind needs the model's tokenizer and chat template, but this server has none; leave http_bind unset"
        )
    engine_config = engine.info().config
    async with contextlib.AsyncExitStack() as opened:  # closed again if the start fails
        await asyncio.to_thread(chat.start)
        desk = Desk(
            engine=engine,
            chat=chat,
            limits=limits,
            slots=Slots(engine_config.max_running + engine_config.max_queued),
            turns=RequestTurns(chat.processes),
            max_body_bytes=config.max_message_bytes,
            now=time.time,
            given_up=asyncio.get_running_loop().create_future(),
        )
        state = State()
        connection: type[asyncio.Protocol] = type("Connection", (Connection,), {"door": door})
        if certificates is not None:
            given = {"context": _renewing_context(certificates), "connection": connection, "door": door}
            connection = type("SecuredConnection", (SecuredConnection,), given)
        app = create_app(desk, keys, address, state, door)
        server = _Server(_settings(app, connection))
        server.config.load()
        sock = _listen(address)
        opened.callback(sock.close)
        host, port = sock.getsockname()[:2]
        door.follow(port)
        opened.pop_all()
    bound = Address(host=host, port=port, is_loopback=address.is_loopback)
    scheme = "http" if certificates is None else "https"
    return HttpShim(url=f"{scheme}://{bound}/v1", server=server, sock=sock, desk=desk, state=state)


class _Server(uvicorn.Server):
    """Leaves signals to the process that embeds it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _settings(app: Any, connection: type[asyncio.Protocol]) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=LEAVE_SECONDS,
        # A `Connection` closes quiet ones before. By default uvicorn does after 5 s, when clients forget them, too: a
        # request sent at that moment was lost.
        timeout_keep_alive=math.ceil(2 * HEAD_SECONDS),
    )


def _renewing_context(certificates: Certificates) -> ssl.SSLContext:
    """The context that handshakes begin with; each continues with the current certificates."""

    def renew(connection: ssl.SSLObject, _server_name: str, _context: ssl.SSLContext) -> None:
        connection.context = certificates.context()

    context = certificates.context()
    context.sni_callback = renew
    return context


def _listen(address: Address) -> socket.socket:
    """A socket that already listens, so that early clients wait instead of being refused."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # By its protocol asyncio recognises TCP, and sends what is written at once. Otherwise the body of an answer on a
    # kept connection, and the first event of a stream, waits 40 ms for the client's system to acknowledge the headers.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address.host, address.port))
        sock.listen()
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise cannot_bind("http_bind", address) from error
    return sock
