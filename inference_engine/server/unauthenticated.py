"""Limits on connections without an accepted call: their number, their age and the cost of their refusals.

A connection is an unauthenticated peer until a call on it is accepted. From then on it is known, and stays open until
the client closes it. If all keys that were accepted on it are removed, it is a new unauthenticated peer again. Only
unauthenticated peers are dropped, the oldest first: a client with a key is known milliseconds after it connects.

    connects ──▶ unauthenticated peer ──▶ known                        a call was accepted
                    │  ▲        │
                    │  └────────┘                          its keys were removed
                    ├──▶ dropped                           one of more than KEPT of its address, after PATIENCE_SECONDS
                    ├──▶ dropped                           too many of its address, or in all, the oldest first
                    ├──▶ waits for each further refusal    refused too often; dropped if too many wait, or if one
                    │                                      cancels its call to make another at once
                    └──▶ dropped, and its address barred   refused far too often, or too many bytes (`barring.py`)

An address is the peer's as the system reports it: behind a proxy, the proxy's. In IPv6 it is a network of 64 bits,
because one host may use any of its addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar
from urllib.parse import unquote

from inference_engine.server.auth import KeyRing
from inference_engine.server.barring import FILES, OFFENCES, ListenerFilter, Offenders, received_bytes

Peer: TypeAlias = tuple[str, int]  # address and port of the other side

PATIENCE_SECONDS = 20.0
KEPT = 16  # of each address, without a time limit: health probes have no key
MOST_OF_ADDRESS = 128
MOST_REFUSALS = 16  # on one connection
# On all unauthenticated connections of one address together; beyond that, one refusal is too many.
ADDRESS_REFUSALS = 128
ADDRESS_REFUSALS_PER_SECOND = 16.0
# Refusals beyond that, until the address is barred.
MOST_EXCESS = 256
# What an unauthenticated peer may send: the headers of as many calls as a connection may have, and what flow control
# lets through of their messages; then so much a second. More bars its address.
FIRST_BYTES, BYTES_PER_SECOND = 256 * 1024, 4 * 1024
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


_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Allowance:
    refusals: float
    filled_at: float
    excess: int = 0  # refusals beyond it since it was last enough


@dataclass(slots=True)
class _Known:
    since: float
    keys: set[bytes]  # digests of those accepted on it: several where a proxy shares it among owners


class UnauthenticatedPeers:
    """The connections of one port. Event loop only. `clock` gives monotonic seconds."""

    def __init__(self, keys: KeyRing, *, most: int, most_of_address: int, clock: Callable[[], float]) -> None:
        """most: connections to the port. most_of_address: known ones included; 0: no limit."""
        self._keys = keys
        self._key_changes = keys.changes()
        self._most = max(1, most // 2)
        self._most_of_address = most_of_address
        self._clock = clock
        # By address (see `address_of`), the oldest first, with the time since which they are unauthenticated.
        self._unauthenticated: dict[str, dict[Peer, float]] = {}
        self._known: dict[str, dict[Peer, _Known]] = {}
        self._refused: Counter[Peer] = Counter()
        self._allowances: dict[str, _Allowance] = {}

    def __len__(self) -> int:
        """The number of unauthenticated peers; known ones do not count."""
        return sum(map(len, self._unauthenticated.values()))

    def since(self) -> dict[Peer, float]:
        """The unauthenticated peers, and when they became that."""
        return {peer: since for of_address in self._unauthenticated.values() for peer, since in of_address.items()}

    def of_address(self, address: str) -> list[Peer]:
        """The unauthenticated peers of an address."""
        return list(self._unauthenticated.get(address, ()))

    def takes_excess(self, address: str) -> bool:
        """Was that address refused far too often? True once; then it is counted anew."""
        allowance = self._allowances.get(address)
        if allowance is None or allowance.excess < MOST_EXCESS:
            return False
        allowance.excess = 0
        return True

    def opened(self, peer: Peer) -> None:
        """Idempotent."""
        address = address_of(peer[0])
        if peer not in self._known.get(address, ()):
            self._unauthenticated.setdefault(address, {}).setdefault(peer, self._clock())

    def closed(self, peer: Peer) -> None:
        address = address_of(peer[0])
        self._refused.pop(peer, None)
        _remove(self._unauthenticated, address, peer)
        _remove(self._known, address, peer)

    def accepted(self, peer: Peer, key: bytes) -> None:
        """A call on this connection was accepted, with the key of that digest."""
        if not self._keys.opens(key):  # removed since the call was accepted
            return
        address = address_of(peer[0])
        known = self._known.get(address, {}).get(peer)
        if known is not None:
            known.keys.add(key)
            return
        since = self._unauthenticated.get(address, {}).get(peer)
        self.closed(peer)
        self._known.setdefault(address, {})[peer] = _Known(self._clock() if since is None else since, {key})

    def refused(self, peer: Peer) -> bool:
        """A call on this connection was refused. Returns whether that happened too often."""
        self._forget_keys()
        address = address_of(peer[0])
        if peer in self._known.get(address, ()):
            return False  # perhaps a proxy's, shared by several clients
        self.opened(peer)
        self._refused[peer] += 1
        now = self._clock()
        allowance = self._allowances.setdefault(address, _Allowance(ADDRESS_REFUSALS, now))
        more = (now - allowance.filled_at) * ADDRESS_REFUSALS_PER_SECOND
        allowance.refusals = min(float(ADDRESS_REFUSALS), allowance.refusals + more)
        allowance.filled_at = now
        is_too_many = allowance.refusals < 1.0
        allowance.excess = allowance.excess + 1 if is_too_many else 0
        allowance.refusals = max(0.0, allowance.refusals - 1.0)
        return is_too_many or self._refused[peer] >= MOST_REFUSALS

    def here_before(self, began: float) -> list[Peer]:
        """Connections opened before that time, known ones included."""
        unauthenticated = [
            peer for of_address in self._unauthenticated.values() for peer, since in of_address.items() if since < began
        ]
        known = [
            peer for of_address in self._known.values() for peer, known in of_address.items() if known.since < began
        ]
        return unauthenticated + known

    def to_drop(self) -> list[Peer]:
        """Connections to drop: beyond a limit, or unauthenticated for too long.

        The caller must call `closed` for each.
        """
        self._forget_keys()
        now = self._clock()
        self._forget_allowances(now)
        dropped: dict[Peer, None] = {}
        for address, unauthenticated in self._unauthenticated.items():
            aged = list(unauthenticated)
            dropped.update(dict.fromkeys(aged[: max(0, len(aged) - MOST_OF_ADDRESS)]))
            dropped.update(
                dict.fromkeys(
                    peer for peer in aged[: max(0, len(aged) - KEPT)] if now - unauthenticated[peer] >= PATIENCE_SECONDS
                )
            )
            dropped.update(dict.fromkeys(self._too_many_of(address, aged)))
        for address in self._known:
            if address not in self._unauthenticated:
                dropped.update(dict.fromkeys(self._too_many_of(address, [])))
        rest = sorted(
            (since, peer)
            for unauthenticated in self._unauthenticated.values()
            for peer, since in unauthenticated.items()
            if peer not in dropped
        )
        dropped.update(dict.fromkeys(peer for _, peer in rest[: max(0, len(rest) - self._most)]))
        return list(dropped)

    def oldest(self) -> Peer | None:
        """The unauthenticated peer that has been connected for longest."""
        ages = [
            (since, peer)
            for unauthenticated in self._unauthenticated.values()
            for peer, since in unauthenticated.items()
        ]
        return min(ages)[1] if ages else None

    def _too_many_of(self, address: str, unauthenticated: list[Peer]) -> list[Peer]:
        """The peers beyond the limit of one address: unauthenticated ones first, then the newest known ones."""
        if not self._most_of_address:
            return []
        known = self._known.get(address, {})
        excess = len(unauthenticated) + len(known) - self._most_of_address
        if excess <= 0:
            return []
        newest = sorted(known, key=lambda peer: known[peer].since, reverse=True)
        return (unauthenticated + newest)[:excess]

    def _forget_keys(self) -> None:
        """Forget removed keys. A connection without another accepted key is an unauthenticated peer again."""
        changes = self._keys.changes()
        if changes == self._key_changes:
            return
        self._key_changes = changes
        for of_address in tuple(self._known.values()):
            for peer, known in tuple(of_address.items()):
                known.keys = set(filter(self._keys.opens, known.keys))
                if not known.keys:
                    self.closed(peer)
                    self.opened(peer)

    def _forget_allowances(self, now: float) -> None:
        """Forget allowances that are full again, because the number of addresses has no limit."""
        whole = ADDRESS_REFUSALS / ADDRESS_REFUSALS_PER_SECOND
        for address in [each for each, old in self._allowances.items() if now - old.filled_at >= whole]:
            del self._allowances[address]


_Entry = TypeVar("_Entry")


def _remove(connections: dict[str, dict[Peer, _Entry]], address: str, peer: Peer) -> None:
    of_address = connections.get(address, {})
    of_address.pop(peer, None)
    if not of_address:
        connections.pop(address, None)


@functools.lru_cache(4096)
def peer_of(text: str) -> Peer | None:
    """Parses gRPC's peer names: `ipv4:10.0.0.7:5123`, `ipv6:%5B::1%5D:5123`. None for one without an address."""
    kind, _, rest = unquote(text).partition(":")
    host, _, port = rest.rpartition(":")
    return _peer(host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") and port.isdigit() else None


def _peer(host: str, port: int) -> Peer:
    if ":" in host:
        address = ipaddress.IPv6Address(host.partition("%")[0])
        host = str(address.ipv4_mapped or address)
    return host, port


@functools.lru_cache(4096)
def address_of(host: str) -> str:
    """The key for limits per address: an IPv4 address, or the /64 of an IPv6 one."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


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
        on_bar: Callable[[], object],
    ) -> None:
        """on_drop: called with the number of dropped connections. clock: that of `unauthenticated`. on_bar: called
        when an address is barred.
        """
        self._unauthenticated = unauthenticated
        self._clock = clock
        self._on_drop = on_drop
        self._on_bar = on_bar
        self._port = 0
        self._files: Mapping[Peer, int] = {}
        self._seen: dict[int, tuple[int, Peer | None]] = {}  # by descriptor: its inode and its peer
        self._to_drop: set[Peer] = set()
        self._looking_seconds = 0.0  # CPU time of the last scan
        self._waiting = 0  # calls that wait for their refusal
        self._dropped: dict[Peer, float] = {}  # and when: gRPC may still have calls of theirs in its queue
        self._offenders = Offenders(clock)
        self._filter: ListenerFilter | None = None
        self._was_known: set[Peer] = set()  # at the last scan
        self._sent_before: dict[Peer, int] = {}  # bytes, by peers whose keys were removed: sent while they were known
        self._wake = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    def follow(self, port: int) -> None:
        """Watch the connections of this port until `stop`."""
        self._port = port
        self._filter = ListenerFilter(port)
        self._looking = asyncio.create_task(self._keep_looking(), name="door")

    def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    def accepted(self, peer: str, key: bytes) -> None:
        """A call was accepted, from gRPC's `peer`, with the key of that digest."""
        found = peer_of(peer)
        if found is not None:
            self._unauthenticated.accepted(found, key)
            self._offenders.accepted(address_of(found[0]))

    async def refused(self, peer: str) -> None:
        """Returns when the refusal may be sent."""
        found = peer_of(peer)
        if found is None or not self._unauthenticated.refused(found):
            return
        if self._unauthenticated.takes_excess(address_of(found[0])):
            self._offended(found, offences=OFFENCES)
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
        if peer not in self._dropped:
            self._drop_soon(peer)
            self._dropped.setdefault(peer, self._clock())
            self._offended(peer)

    def _offended(self, peer: Peer, *, offences: int = 1) -> None:
        address = address_of(peer[0])
        if self._offenders.offended(address, offences=offences):
            self._on_bar()
            self._bar()
            self._drop(self._unauthenticated.of_address(address))

    def _bar(self) -> None:
        """Have the system drop new connections of those that are barred now, and of no others."""
        if self._filter is None:
            return
        try:
            self._filter.bar(self._offenders.barred())
        except OSError as error:
            self._filter = None
            _log.warning(
                "addresses cannot be barred on this system (%s): who attacks without a key is only disconnected, and "
                "may connect again",
                error.strerror,
            )

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
        since = self._unauthenticated.since()
        files, received = await asyncio.to_thread(self._find_and_count, tuple(since))
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
        self._drop_talkers(since, received)
        self._bar()

    def _drop_talkers(self, since: Mapping[Peer, float], received: Mapping[Peer, int]) -> None:
        """Drop those without a key that have sent too much. since, received: of the unauthenticated peers."""
        now, still = self._clock(), self._unauthenticated.since()
        for peer, nbytes in received.items():
            if peer in self._was_known:
                self._sent_before[peer] = nbytes
            sent = nbytes - self._sent_before.get(peer, 0)
            if peer in still and sent > FIRST_BYTES + (now - since[peer]) * BYTES_PER_SECOND:
                self._drop((peer,))
                self._offended(peer, offences=OFFENCES)
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
                is_same = before is not None and before[0] == facts.st_ino
                # A socket that was not connected may be now: check it again.
                peer = before[1] if is_same and before is not None else None
                seen[file] = (facts.st_ino, peer or _peer_at(file, self._port))
        self._seen = seen
        self._looking_seconds = time.thread_time() - began
        return {peer: file for file, (_, peer) in seen.items() if peer is not None}


def _peer_at(file: int, port: int) -> Peer | None:
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
    return _peer(other[0], other[1])


def _shut(file: int, peer: Peer, port: int) -> bool:
    """Shut the connection down, if the descriptor still belongs to it."""
    # A duplicate: gRPC may close its descriptor meanwhile, and the system may reuse the number for another file.
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=os.dup(file)) as connection,
    ):
        if _peer_at(connection.fileno(), port) == peer:
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False
