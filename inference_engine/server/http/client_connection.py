"""A connection to the shim: limited in number, closed when idle, refused if it does not speak HTTP.

Connections without an accepted key are dropped first, the oldest first: see `door.py`.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from inference_engine.server.http import deprecation
from inference_engine.server.http.door import HttpDoor
from inference_engine.server.http.error_replies import envelope
from inference_engine.server.preauth_limits import Peer

_BODY = json.dumps(envelope(400, "this is not a valid HTTP request", code="bad_http")).encode()
_HEADERS = (
    (b"content-type", b"application/json"),
    (b"content-length", str(len(_BODY)).encode()),
    (b"connection", b"close"),
    *deprecation.HEADERS,
)
_LINES = (b"HTTP/1.1 400 Bad Request", *(b": ".join(header) for header in _HEADERS), b"", _BODY)
_NOT_HTTP = b"\r\n".join(_LINES)

# uvicorn has no time limit for a first request, nor for the rest of one that has begun.
HEAD_SECONDS = 20.0
# So much of further requests is read while one is answered.
_AHEAD_BYTES = 16 * 1024


class Connection(H11Protocol):
    """Closed after one to two times HEAD_SECONDS without a complete request head and without an answer in progress."""

    door: ClassVar[HttpDoor]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self._quiet_since: object = None  # the last request at the last check, if it was answered
        self._timer = self.loop.call_later(HEAD_SECONDS, self._look)
        self._peer: Peer = transport.get_extra_info("peername")[:2]
        self.door.opened(self._peer, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self.door.closed(self._peer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.door.receives(self._peer, len(data)):
            return
        if self.conn.their_state is h11.MUST_CLOSE:
            return  # what follows the last request is ignored (RFC 9112, 9.6); h11 would refuse it
        super().data_received(data)
        # uvicorn stops reading where the next request begins, and would not see that the client leaves.
        is_answering = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if is_answering and len(self.conn.trailing_data[0]) < _AHEAD_BYTES:
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP like every other error: with the envelope and the deprecation headers.

        A body may break when its request has an answer already: then there is no other one.
        """
        self.door.answers(self._peer, refuses=True)  # the connection is closed in any case
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_NOT_HTTP)
        self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            # For the application the client has left: it answers nothing more.
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def eof_received(self) -> None:
        is_cut_short = self.cycle is not None and self.cycle.more_body and self.conn.their_state is h11.SEND_BODY
        if is_cut_short and not self.transport.is_closing():
            super().data_received(b"")  # the end, which h11 refuses there; the client may still be reading

    def _look(self) -> None:
        self.door.drop_excess()
        # A transport that closes still waits for the client to read; its answer will not be completed.
        is_quiet = self.cycle is None or self.cycle.response_complete or self.transport.is_closing()
        if is_quiet and self.cycle is self._quiet_since:
            # Not `close`, which would wait for a client that does not read.
            self.transport.abort()
            return
        self._quiet_since = self.cycle if is_quiet else self
        self._timer = self.loop.call_later(HEAD_SECONDS, self._look)


class SecuredConnection(SSLProtocol):
    """The TLS layer of a `Connection`. asyncio's own begins a connection once its handshake is over; the door counts
    this one from the start, and the handshake has HEAD_SECONDS.
    """

    door: ClassVar[HttpDoor]
    connection: ClassVar[type[Connection]]
    context: ClassVar[ssl.SSLContext]

    def __init__(self, **given: Any) -> None:
        """given: as uvicorn gives it to a `Connection`."""
        # No task waits for the handshake, and its limit may be a fraction of a second: typeshed allows neither.
        waiter: Any = None
        seconds: Any = HEAD_SECONDS
        super().__init__(
            asyncio.get_running_loop(),
            self.connection(**given),
            self.context,
            waiter,
            server_side=True,
            ssl_handshake_timeout=seconds,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self._peer: Peer = transport.get_extra_info("peername")[:2]
        self.door.opened(self._peer, transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.door.closed(self._peer)
        super().connection_lost(exc)
