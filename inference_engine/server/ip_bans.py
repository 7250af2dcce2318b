"""IP bans: addresses get no new connections for a while, because theirs without a key were dropped for abuse.

A caller whose connection is dropped opens the next one at once: what it sent before is parsed, decided and refused
each time, on threads that owners need too. So after a few of those the address is barred: the system itself drops its
attempts to connect, before this process sees them, by a filter on the listening sockets.

    offence ─▶ offence ─▶ offence ─▶ barred for BAR_SECONDS ─▶ free; barred again for twice as long, ─▶ …
       └── forgotten after MEMORY_SECONDS                        MOST_BAR_SECONDS at most

All ports of a server share them: an attack on one bars from each, and a key accepted at one counts at each.
Never barred are an address from which a key was accepted within TRUST_SECONDS that still is one, because owners share
it with the attacker, and this machine's usual ones, because all callers come from there through a proxy on it.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from inference_engine.server.auth import KeyRing

OFFENCES = 3
BAR_SECONDS = 10.0
MOST_BAR_SECONDS = 60.0
MEMORY_SECONDS = 120.0
TRUST_SECONDS = 3600.0
MOST_BARRED = 128  # at the same time: the system limits the memory of a filter
_MOST_REMEMBERED = 4096

NEVER_BARRED = frozenset({"127.0.0.1", "::/64"})  # as `unauthenticated.address_of` names them
# Of <linux/filter.h> and <asm-generic/socket.h>.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_NETWORK_HEADER = 0xFFF0_0000  # SKF_NET_OFF
_LOAD_WORD, _LOAD_BYTE, _AND, _JUMP, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x30, 0x54, 0x05, 0x15, 0x06
_KEEP, _DROP = 0xFFFF_FFFF, 0
_IPV4_SOURCE, _IPV6_SOURCE, _IPV6_SOURCE_LOW = 12, 8, 12

_log = logging.getLogger(__name__)

FILES = Path("/proc/self/fd") if Path("/proc/self/fd").exists() else Path("/dev/fd")


@dataclass(slots=True)
class _Offender:
    offences: int
    offended_at: float
    bars: int = 0
    barred_until: float = 0.0


class Offenders:
    """Which addresses are barred (as `unauthenticated.address_of` names them). Event loop only. clock: in seconds.

    Keys are those of `keys` as far as their file has been read: a refusal reads it before it is an offence.
    """

    def __init__(self, keys: KeyRing, clock: Callable[[], float]) -> None:
        self._keys = keys
        self._clock = clock
        self._offenders: OrderedDict[str, _Offender] = OrderedDict()  # last offended longest ago first
        # By address, when each key was last accepted, by its digest. The address of the last one is at the end.
        self._trusted: OrderedDict[str, dict[bytes, float]] = OrderedDict()

    def accepted(self, address: str, key: bytes) -> None:
        """The key of that digest was accepted from there."""
        accepted = self._trusted.setdefault(address, {})
        if key not in accepted:
            for removed in [each for each in accepted if not self._keys.opens(each)]:
                del accepted[removed]
        accepted[key] = self._clock()
        self._trusted.move_to_end(address)
        while len(self._trusted) > _MOST_REMEMBERED:
            self._trusted.popitem(last=False)

    def offended(self, address: str, *, offences: int = 1) -> bool:
        """So many offences of that address. Returns whether that bars it, which it was not before."""
        now = self._clock()
        if address in NEVER_BARRED or self._is_trusted(address, now):
            return False
        found = self._offenders.setdefault(address, _Offender(0, now))
        self._offenders.move_to_end(address)
        while len(self._offenders) > _MOST_REMEMBERED:
            self._offenders.popitem(last=False)
        if found.barred_until > now:  # its last connections
            return False
        if now - max(found.offended_at, found.barred_until) >= MEMORY_SECONDS:
            found.offences = found.bars = 0
        found.offences += offences
        found.offended_at = now
        if found.offences < OFFENCES:
            return False
        found.barred_until = now + min(MOST_BAR_SECONDS, BAR_SECONDS * 2**found.bars)
        found.bars, found.offences = min(found.bars + 1, 8), 0
        return True

    def _is_trusted(self, address: str, now: float) -> bool:
        accepted = self._trusted.get(address, {})
        return any(now - at < TRUST_SECONDS and self._keys.opens(key) for key, at in accepted.items())

    def barred(self) -> tuple[str, ...]:
        """The addresses that are barred now, the latest offenders if there are more than MOST_BARRED."""
        now = self._clock()
        found = [address for address, one in self._offenders.items() if one.barred_until > now]
        return tuple(found[-MOST_BARRED:])


class Bars:
    """Bars addresses from the ports of a server. Event loop only."""

    def __init__(self, keys: KeyRing, clock: Callable[[], float], on_bar: Callable[[], object]) -> None:
        """clock: in seconds. on_bar: called when an address is barred."""
        self._offenders = Offenders(keys, clock)
        self._on_bar = on_bar
        self._ports: list[tuple[ListenerFilter, Callable[[str], object]]] = []
        self._is_able = True

    def guard(self, port: int, drop: Callable[[str], object]) -> None:
        """Bar addresses from this port, which listens already, as well.

        drop: called with an address once it is barred, to drop its connections without a key.
        """
        self._ports.append((ListenerFilter(port), drop))

    def accepted(self, address: str, key: bytes) -> None:
        """The key of that digest was accepted from there."""
        self._offenders.accepted(address, key)

    def offended(self, address: str, *, offences: int = 1) -> None:
        if self._offenders.offended(address, offences=offences):
            self._on_bar()
            self.renew()
            for _, drop in self._ports:
                drop(address)

    def renew(self) -> None:
        """Have the system drop new connections of those that are barred now, and of no others. Call it now and then."""
        if not self._is_able:
            return
        barred = self._offenders.barred()
        try:
            for port, _ in self._ports:
                port.bar(barred)
        except OSError as error:
            self._is_able = False
            _log.warning(
                "addresses cannot be barred on this system (%s): attackers without a key are only disconnected, and "
                "may connect again",
                error.strerror,
            )


class ListenerFilter:
    """Drops what other machines send to this process's listening sockets of one port, if it comes from some addresses.

    Connections that were accepted before are not touched.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._files = tuple(int(entry.name) for entry in FILES.iterdir() if _listens(int(entry.name), port))
        self._barred: tuple[str, ...] = ()

    def bar(self, addresses: tuple[str, ...]) -> None:
        """From now on these, and no others. Raises OSError where the system has no such filters."""
        if addresses == self._barred:
            return
        program = filter_of(addresses)
        for file in self._files:
            # The port may be closed by now, and the number another file's.
            if not _listens(file, self._port):
                continue
            # A duplicate is closed at the end; the filter belongs to the socket.
            with socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=os.dup(file)) as listener:
                if addresses:
                    memory = ctypes.create_string_buffer(program, len(program))
                    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(memory))
                    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)
                else:
                    listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        self._barred = addresses


def filter_of(addresses: Iterable[str]) -> bytes:
    """A classic BPF program that keeps every packet but those from these addresses: IPv4 ones, and networks of IPv6.

    Eight bytes an instruction, as `struct sock_filter`.
    """
    ipv4: list[bytes] = []
    ipv6: list[bytes] = []
    for text in addresses:
        network = ipaddress.ip_network(text)
        words = struct.unpack(f">{len(network.network_address.packed) // 4}I", network.network_address.packed)
        if network.version == 4:
            ipv4 += [_instruction(_JUMP_IF_EQUAL, words[0], otherwise=1), _instruction(_RETURN, _DROP)]
        else:  # the first 64 bits
            ipv6 += [
                _instruction(_LOAD_WORD, _NETWORK_HEADER + _IPV6_SOURCE),
                _instruction(_JUMP_IF_EQUAL, words[0], otherwise=3),
                _instruction(_LOAD_WORD, _NETWORK_HEADER + _IPV6_SOURCE_LOW),
                _instruction(_JUMP_IF_EQUAL, words[1], otherwise=1),
                _instruction(_RETURN, _DROP),
            ]
    keep = _instruction(_RETURN, _KEEP)
    ipv4 = [_instruction(_LOAD_WORD, _NETWORK_HEADER + _IPV4_SOURCE), *ipv4, keep]
    version = [
        _instruction(_LOAD_BYTE, _NETWORK_HEADER),
        _instruction(_AND, 0xF0),
        _instruction(_JUMP_IF_EQUAL, 0x60, otherwise=1),
        _instruction(_JUMP, len(ipv4)),
    ]
    return b"".join((*version, *ipv4, *ipv6, keep))


def _instruction(code: int, value: int, *, otherwise: int = 0) -> bytes:
    """otherwise: how many instructions a comparison that fails skips."""
    return struct.pack("=HBBI", code, 0, otherwise, value)


def _listens(file: int, port: int) -> bool:
    """Is that descriptor one of a socket that listens on that port?"""
    try:
        at = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=file)
    except OSError:  # another kind of file, or one that is closed by now
        return False
    try:
        name = at.getsockname()
        listens = at.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        return False
    finally:
        at.detach()
    # Names of Unix sockets are not pairs.
    return bool(listens) and isinstance(name, tuple) and name[1] == port


def received_bytes(file: int) -> int | None:
    """How many bytes the other side of a TCP connection has sent so far; None where the system does not say."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        connection = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=file)
    except OSError:  # closed by now, and another file
        return None
    try:
        facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return None
    finally:
        connection.detach()
    return None if len(facts) < _TCP_INFO_BYTES else int(struct.unpack_from("=Q", facts, _RECEIVED_AT)[0])


# `tcpi_bytes_received` of <linux/tcp.h>.
_RECEIVED_AT = 128
_TCP_INFO_BYTES = _RECEIVED_AT + 8
