"""Drops connections of the HTTP port, as `server/preauth_limits.py` decides, and has addresses barred."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from inference_engine.server.ip_bans import OFFENCES, Bars
from inference_engine.server.preauth_limits import Peer, UnauthenticatedPeers, address_of


class HttpDoor:
    """The connections of one HTTP port. Event loop only."""

    def __init__(
        self, unauthenticated: UnauthenticatedPeers, bars: Bars, *, most: int, on_drop: Callable[[], object]
    ) -> None:
        """most: connections; one more replaces an unauthenticated peer's, or is closed at once. on_drop: called for
        each that is dropped.
        """
        self._unauthenticated = unauthenticated
        self._bars = bars
        self._most = most
        self._on_drop = on_drop
        self._open: dict[Peer, asyncio.Transport] = {}
        self._sent: dict[Peer, int] = {}  # bytes, by unauthenticated peers since they became that

    def follow(self, port: int) -> None:
        """Bar addresses from this port, which listens already."""
        self._bars.guard(port, lambda address: self._drop(*self._unauthenticated.of_address(address)))

    def opened(self, peer: Peer, transport: asyncio.Transport) -> None:
        """Also again, with the transport above the first one."""
        self._open[peer] = transport
        if len(self._open) > self._most:
            self._drop(self._unauthenticated.oldest() or peer)
        self._unauthenticated.opened(peer)
        self.drop_excess()

    def closed(self, peer: Peer) -> None:
        self._unauthenticated.closed(peer)
        self._open.pop(peer, None)
        self._sent.pop(peer, None)

    def accepted(self, peer: Peer, key: bytes) -> None:
        """A request on this connection was accepted, with the key of that digest."""
        self._unauthenticated.accepted(peer, key)
        self._bars.accepted(address_of(peer[0]), key)

    def answers(self, peer: Peer, *, refuses: bool) -> bool:
        """A request on this connection is answered. Returns whether the connection is to be closed with the answer.

        refuses: because it has no key. Others count too, because they need no key.
        """
        is_too_many = self._unauthenticated.refused if refuses else self._unauthenticated.answered
        if not is_too_many(peer):
            return False
        address = address_of(peer[0])
        if self._unauthenticated.takes_excess(address):
            self._bars.offended(address, offences=OFFENCES)
        return True

    def receives(self, peer: Peer, nbytes: int) -> bool:
        """Is what this connection sends to be read? What it sent before has been decided."""
        if self._unauthenticated.knows(peer):
            self._sent.pop(peer, None)
            return True
        sent = self._sent.get(peer, 0)
        if self._unauthenticated.sent_too_much(peer, sent):
            self._bars.offended(address_of(peer[0]), offences=OFFENCES)
            self._drop(peer)
            return False
        if peer not in self._open:  # dropped, and not yet gone
            return False
        self._sent[peer] = sent + nbytes
        return True

    def drop_excess(self) -> None:
        """Drop those that are too many, or have been here for too long."""
        self._drop(*self._unauthenticated.to_drop())

    def _drop(self, *peers: Peer) -> None:
        for peer in peers:
            transport = self._open.get(peer)
            self.closed(peer)
            if transport is not None:
                transport.abort()
                self._on_drop()
