"""Drops connections of the gRPC port, as `preauth_limits.py` decides, and has addresses barred."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import time
from collections.abc import Callable, Collection, Mapping

from inference_engine.server.ip_bans import FILES, OFFENCES, Bars, received_bytes
from inference_engine.server.preauth_limits import (
    Peer,
    UnauthenticatedPeers,
    address_of,
    peer_at,
    peer_of,
)

# How often gRPC's connections are scanned: without unauthenticated peers, and with.
CALM_SECONDS, BUSY_SECONDS = 1.0, 0.25
# The share of one thread's time that scans may take; and the longest scan that the event loop may wait for.
LOOKING_SHARE = 0.05
QUICK_SECONDS = 0.003
# A peer that is refused too often waits for each refusal. Meanwhile its call counts among the calls of its connection,
# and gRPC refuses further ones cheaply. A connection is dropped when too many wait.
REFUSAL_SECONDS = 1.0
MOST_WAITING = 512
# How long calls of a dropped connection may still come out of gRPC's queue.
DROPPED_SECONDS = 5.0


class GrpcDoor:
    """Drops connections of a gRPC server, which has no interface for closing them.

    They are found among the open files of this process: sockets whose local port is the server's. One is dropped by
    shutting its socket down; gRPC then sees a closed connection. Addresses that go on nevertheless are barred.
    """

    def __init__(
        self,
        unauthenticated: UnauthenticatedPeers,
        on_drop: Callable[[int], object],
        clock: Callable[[], float],
        bars: Bars,
    ) -> None:
        """on_drop: called with the number of dropped connections. clock: that of `unauthenticated`."""
        self._unauthenticated = unauthenticated
        self._clock = clock
        self._on_drop = on_drop
        self._bars = bars
        self._port = 0
        self._files: Mapping[Peer, int] = {}
        self._seen: dict[int, tuple[int, Peer | None]] = {}  # by descriptor: its inode and its peer
        self._to_drop: set[Peer] = set()
        self._looking_seconds = 0.0  # CPU time of the last scan
        self._waiting = 0  # calls that wait for their refusal
        self._dropped: dict[Peer, float] = {}  # and when: gRPC may still have calls of theirs in its queue
        self._was_known: set[Peer] = set()  # at the last scan
        self._sent_before: dict[Peer, int] = {}  # bytes, by peers whose keys were removed: sent while they were known
        self._wake = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    def follow(self, port: int) -> None:
        """Watch the connections of this port until `stop`."""
        self._port = port
        self._bars.guard(port, lambda address: self._drop(self._unauthenticated.of_address(address)))
        self._looking = asyncio.create_task(self._keep_looking(), name="door")

    def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    def accepted(self, peer: str, key: bytes) -> None:
        """A call was accepted, from gRPC's `peer`, with the key of that digest."""
        found = peer_of(peer)
        if found is not None:
            self._unauthenticated.accepted(found, key)
            self._bars.accepted(address_of(found[0]), key)

    async def refused(self, peer: str) -> None:
        """Returns when the refusal may be sent."""
        found = peer_of(peer)
        if found is None or not self._unauthenticated.refused(found):
            return
        if self._unauthenticated.takes_excess(address_of(found[0])):
            self._bars.offended(address_of(found[0]), offences=OFFENCES)
        if self._waiting < MOST_WAITING:
            self._waiting += 1
            try:
                await asyncio.sleep(REFUSAL_SECONDS)
            except asyncio.CancelledError:
                # A cancelled call makes room for another one on its connection, so waiting would not slow the peer
                # down.
                self._drop_offender(found)
                raise
            finally:
                self._waiting -= 1
        else:
            self._drop_offender(found)

    def has_dropped(self, peer: str) -> bool:
        """Was the peer's connection dropped while this call was queued?"""
        return bool(self._dropped) and peer_of(peer) in self._dropped

    def _drop_offender(self, peer: Peer) -> None:
        """Once for each connection, of which hundreds of calls may be waiting."""
        if peer not in self._dropped and peer not in self._to_drop:
            self._drop_soon(peer)
            self._bars.offended(address_of(peer[0]))

    def _drop_soon(self, peer: Peer) -> None:
        """Drop a connection that may be newer than the last scan."""
        # Until it is dropped, each of its calls is refused, which takes longer than a scan.
        if peer not in self._files and self._looking_seconds <= QUICK_SECONDS:
            with contextlib.suppress(OSError):
                self._files = self._find()
                if peer not in self._files:  # closed by the other side
                    self._unauthenticated.closed(peer)
                    self._dropped[peer] = self._clock()
                    return
        self._drop((peer,))

    def _drop(self, peers: Collection[Peer]) -> None:
        dropped = 0
        for peer in peers:
            file = self._files.get(peer)
            if file is not None and _shut(file, peer, self._port):
                self._to_drop.discard(peer)
                self._unauthenticated.closed(peer)
                self._dropped[peer] = self._clock()
                dropped += 1
            else:
                self._to_drop.add(peer)
                self._wake.set()
        if dropped:
            self._on_drop(dropped)

    async def _keep_looking(self) -> None:
        while True:
            began = self._clock()
            # Without a free descriptor the files cannot be listed; they can again when one is closed.
            with contextlib.suppress(OSError):
                await self._look(began)
            await asyncio.sleep(min(self._looking_seconds / LOOKING_SHARE, CALM_SECONDS))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BUSY_SECONDS if len(self._unauthenticated) else CALM_SECONDS):
                    await self._wake.wait()
            self._wake.clear()

    async def _look(self, began: float) -> None:
        unauthenticated = tuple(self._unauthenticated.since())
        files, received = await asyncio.to_thread(self._find_and_count, unauthenticated)
        self._dropped = {peer: since for peer, since in self._dropped.items() if began - since < DROPPED_SECONDS}
        for peer in files:
            self._unauthenticated.opened(peer)
        for peer in self._unauthenticated.here_before(began):
            if peer not in files:
                self._unauthenticated.closed(peer)
        self._files = files
        wanted, self._to_drop = self._to_drop, set()
        self._drop([peer for peer in wanted if peer in files])
        self._drop(self._unauthenticated.to_drop())
        self._drop_talkers(received)
        self._bars.renew()

    def _drop_talkers(self, received: Mapping[Peer, int]) -> None:
        """Drop those without a key that have sent too much. received: bytes, of the unauthenticated peers."""
        still = self._unauthenticated.since()
        for peer, nbytes in received.items():
            if peer in self._was_known:
                self._sent_before[peer] = nbytes
            sent = nbytes - self._sent_before.get(peer, 0)
            if self._unauthenticated.sent_too_much(peer, sent):
                self._drop((peer,))
                self._bars.offended(address_of(peer[0]), offences=OFFENCES)
        self._sent_before = {peer: sent for peer, sent in self._sent_before.items() if peer in still}
        self._was_known = self._files.keys() - still.keys()

    def _find_and_count(self, unauthenticated: Collection[Peer]) -> tuple[dict[Peer, int], dict[Peer, int]]:
        """As `_find`, and the bytes that those peers have sent so far."""
        files = self._find()
        counts = {peer: received_bytes(files[peer]) for peer in unauthenticated if peer in files}
        return files, {peer: count for peer, count in counts.items() if count is not None}

    def _find(self) -> dict[Peer, int]:
        """The connections of the server's port, and their descriptors. Any thread."""
        began = time.thread_time()
        seen: dict[int, tuple[int, Peer | None]] = {}
        for entry in FILES.iterdir():
            file = int(entry.name)
            with contextlib.suppress(OSError):
                facts = os.fstat(file)
                before = self._seen.get(file)
                if not stat.S_ISSOCK(facts.st_mode):
                    continue
                if before is not None and before[0] == facts.st_ino and before[1] is not None:
                    seen[file] = before
                else:
                    # A socket that was not connected may be now.
                    seen[file] = facts.st_ino, _peer_of(file, self._port)
        self._seen = seen
        self._looking_seconds = time.thread_time() - began
        return {peer: file for file, (_, peer) in seen.items() if peer is not None}


def _peer_of(file: int, port: int) -> Peer | None:
    """The peer of a socket whose local port is `port`; None for every other socket.

    Raises OSError for a socket that is not connected.
    """
    at = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=file)
    try:
        own, other = at.getsockname(), at.getpeername()
    finally:
        at.detach()
    # Names of Unix sockets are not pairs.
    if not isinstance(own, tuple) or own[1] != port:
        return None
    return peer_at(other[0], other[1])


def _shut(file: int, peer: Peer, port: int) -> bool:
    """Shut the connection down, if the descriptor still belongs to it."""
    # A duplicate: gRPC may close its descriptor meanwhile, and the system may reuse the number for another file.
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=os.dup(file)) as connection,
    ):
        if _peer_of(connection.fileno(), port) == peer:
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False
