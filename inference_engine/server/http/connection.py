"""A connection to the shim: limited in number, closed when idle, refused if it does not speak HTTP.

Connections without an accepted key are dropped first, the oldest first: see `server/unauthenticated.py`.
"""

from __future__ import annotations

import asyncio
import json
from typing import ClassVar

from prometheus_client import Counter
from uvicorn.protocols.http.h11_impl import H11Protocol

from inference_engine.server.http import deprecation
from inference_engine.server.http.errors import envelope
from inference_engine.server.unauthenticated import Peer, UnauthenticatedPeers

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


class Connection(H11Protocol):
    """Closed after one to two times HEAD_SECONDS without a complete request head and without an answer in progress."""

    most: ClassVar[int]  # connections; one more replaces an unauthenticated peer's, or is closed at once
    unauthenticated: ClassVar[UnauthenticatedPeers]
    by_peer: ClassVar[dict[Peer, Connection]]
    dropped: ClassVar[Counter]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._quiet_since: object = None  # the last request at the last check, if it was answered
        self._timer = self.loop.call_later(HEAD_SECONDS, self._look)
        self._peer: Peer = transport.get_extra_info("peername")[:2]
        self.by_peer[self._peer] = self
        if len(self.connections) > self.most:
            self._drop(self.unauthenticated.oldest() or self._peer)
        self.unauthenticated.opened(self._peer)
        self._drop(*self.unauthenticated.to_drop())

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self.unauthenticated.closed(self._peer)
        self.by_peer.pop(self._peer, None)
        super().connection_lost(exc)

    def _drop(self, *peers: Peer) -> None:
        for peer in peers:
            self.unauthenticated.closed(peer)
            connection = self.by_peer.pop(peer, None)
            if connection is not None:
                connection.transport.abort()
                self.dropped.inc()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP like every other error: with the envelope and the deprecation headers."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_NOT_HTTP)
        self.transport.close()

    def _look(self) -> None:
        self._drop(*self.unauthenticated.to_drop())
        is_quiet = self.cycle is None or self.cycle.response_complete
        if is_quiet and self.cycle is self._quiet_since:
            # Not `close`, which would wait for a client that does not read.
            self.transport.abort()
            return
        self._quiet_since = self.cycle if is_quiet else self
        self._timer = self.loop.call_later(HEAD_SECONDS, self._look)
