"""Limits before authentication: the number and age of connections without an accepted call, the cost of refusals.

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
                    └──▶ dropped, and its address barred   refused far too often, or too many bytes (`ip_bans.py`)

An address is the peer's as the system reports it: behind a proxy, the proxy's. In IPv6 it is a network of 64 bits,
because one host may use any of its addresses.
"""

from __future__ import annotations

import functools
import ipaddress
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar
from urllib.parse import unquote

from inference_engine.server.auth import KeyRing

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
        if self.knows(peer):
            return False  # perhaps a proxy's, shared by several clients
        self.opened(peer)
        self._refused[peer] += 1
        return self._takes_one(address_of(peer[0])) or self._refused[peer] >= MOST_REFUSALS

    def answered(self, peer: Peer) -> bool:
        """A call that needs no key was answered on this connection. Returns whether its address has had too many."""
        return not self.knows(peer) and self._takes_one(address_of(peer[0]))

    def _takes_one(self, address: str) -> bool:
        """Take a refusal from the allowance of an address. Returns whether it had none left."""
        now = self._clock()
        allowance = self._allowances.setdefault(address, _Allowance(ADDRESS_REFUSALS, now))
        more = (now - allowance.filled_at) * ADDRESS_REFUSALS_PER_SECOND
        allowance.refusals = min(float(ADDRESS_REFUSALS), allowance.refusals + more)
        allowance.filled_at = now
        is_too_many = allowance.refusals < 1.0
        allowance.excess = allowance.excess + 1 if is_too_many else 0
        allowance.refusals = max(0.0, allowance.refusals - 1.0)
        return is_too_many

    def sent_too_much(self, peer: Peer, nbytes: int) -> bool:
        """Did an unauthenticated peer, having sent so many bytes since it became one, send too many?"""
        since = self._unauthenticated.get(address_of(peer[0]), {}).get(peer)
        return since is not None and nbytes > FIRST_BYTES + (self._clock() - since) * BYTES_PER_SECOND

    def knows(self, peer: Peer) -> bool:
        """Was a call on this connection accepted?"""
        return peer in self._known.get(address_of(peer[0]), ())

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
    return peer_at(host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") and port.isdigit() else None


def peer_at(host: str, port: int) -> Peer:
    """host: as a socket names it; an IPv4 address is one also where an IPv6 socket names it."""
    return _host(host), port


@functools.lru_cache(4096)
def _host(host: str) -> str:
    """Of all connections of an address one text, which each of them holds."""
    if ":" in host:
        address = ipaddress.IPv6Address(host.partition("%")[0])
        return str(address.ipv4_mapped or address)
    return host


@functools.lru_cache(4096)
def address_of(host: str) -> str:
    """The key for limits per address: an IPv4 address, or the /64 of an IPv6 one."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))
