"""How gRPC reaches a target: on this machine, by itself, or through the proxy that the environment names.

gRPC reads grpc_proxy, https_proxy and http_proxy, whichever is set first, for encrypted and plain connections alike,
and no_grpc_proxy, else no_proxy, for names that it reaches without. Names in capitals mean nothing to it. Where the
first that is set is empty, or no URL of http, it uses no proxy, whatever the others are. Source:
src/core/handshaker/http_connect/http_proxy_mapper.cc of gRPC.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from contextlib import suppress
from typing import TypeAlias

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
_PROXY = re.compile(r"http://(?:[^@/]*@)?([^/?#@]+)(?![^/?#])", re.IGNORECASE)
_LIST = re.compile(r"(ipv[46]:)(.+,.+)")
_UNIX = re.compile(r"unix(-abstract)?:.+")
_TARGET = re.compile(
    r"(?P<scheme>(dns:///|dns:|ipv4:|ipv6:)?) (\[(?P<v6>[^\]]+)\] | (?P<name>[^/:,\[\]]+)) (?P<port>(:\d+)?)",
    re.VERBOSE,
)
# What the system takes for an IPv4 address: one to four numbers, in decimal, octal (0…) or hexadecimal (0x…).
_NUMBERS = re.compile(r"(0x[0-9a-f]*|\d+)(\.(0x[0-9a-f]*|\d+)){0,3}")

_Numeric: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


def spelled_out(target: str) -> str:
    """`target` with a name of this machine in the spelling that gRPC resolves by itself, not by asking for it."""
    parts = _TARGET.fullmatch(target)
    if parts is None or parts["name"] is None or not is_this_machine(target):
        return target
    name = _plain(parts["name"])
    return f"{parts['scheme']}{_numeric(name) or name}{parts['port']}"


def is_this_machine(target: str) -> bool:
    """Does what is sent to `target` stay on this machine? An unspecified address, as of a target, is this machine."""
    if _UNIX.fullmatch(target) is not None:
        return True
    if (several := _LIST.fullmatch(target)) is not None:
        return all(is_this_machine(f"{several[1]}{each}") for each in several[2].split(","))
    if (parts := _TARGET.fullmatch(target)) is None:
        return False
    host = _plain(parts["v6"] or parts["name"])
    if (address := _numeric(host)) is None:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback or (mapped or address).is_unspecified


def proxy_note(target: str) -> str:
    """What an error says of the proxy that gRPC uses for `target`, but for its password; empty if it uses none."""
    variable = next((name for name in _PROXIES if name in os.environ), "")
    proxy = _PROXY.match(os.environ.get(variable, ""))
    if proxy is None or is_this_machine(target):
        return ""
    parts = _TARGET.fullmatch(target)
    host = (parts["v6"] or parts["name"]) if parts is not None else target
    exceptions = next((name for name in _EXCEPTIONS if name in os.environ), _EXCEPTIONS[-1])
    if any(_excepts(entry.strip(), host) for entry in os.environ.get(exceptions, "").split(",")):
        return ""
    # Of several addresses gRPC finds no host to look up there.
    way_out = f"add {host} to {exceptions}" if parts is not None else "set grpc_proxy to nothing"
    return (
        f"; the call goes through the proxy {proxy[1]}, which the environment names in {variable}: to go without it, "
        f"{way_out}"
    )


def _plain(host: str) -> str:
    return host.lower().removesuffix(".")


def _numeric(host: str) -> _Numeric | None:
    with suppress(ValueError):
        return ipaddress.ip_address(host)
    if _NUMBERS.fullmatch(host) is not None:
        with suppress(OSError):
            return ipaddress.IPv4Address(socket.inet_aton(host))
    return None


def _excepts(entry: str, host: str) -> bool:
    """Is `host` reached without a proxy by this entry: the end of a name, or a network?"""
    if entry and host.lower().endswith(entry.lower()):
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    return False
