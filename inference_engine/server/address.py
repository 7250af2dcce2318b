"""Where to listen, and whether the address is reachable from other machines.

A name is resolved here, once: all its addresses are checked, and the first one is bound.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Collection
from dataclasses import dataclass

from inference_engine.config import ServerConfig
from inference_engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """A numeric address to bind. `is_loopback`: all addresses of the given name are loopback ones."""

    host: str
    port: int
    is_loopback: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def resolve_bind(setting: str, bind: str) -> Address:
    """`host:port`, `[v6]:port` or `name:port` as an Address. Port 0 lets the system choose.

    Raises ConfigError naming `setting` if it cannot be read or resolved.
    """
    host, colon, port_text = bind.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{setting} must be host:port, with an IPv6 address in brackets, got {bind!r}")
    if not colon or not host or not port_text.isascii() or not port_text.isdigit() or int(port_text) > 65535:
        raise ConfigError(f"{setting} must be host:port with a port from 0 to 65535, got {bind!r}")
    port = int(port_text)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"{setting}: {host!r} does not resolve to an address: {error}") from error
    hosts = [str(entry[4][0]) for entry in found]
    return Address(host=hosts[0], port=port, is_loopback=all(_is_loopback(each) for each in hosts))


def refuse_open_doors(bind: str, config: ServerConfig, *, has_keys: bool) -> None:
    """Beyond loopback, the server needs authentication and encryption. Raises ConfigError without."""
    has_owners = has_keys or bool(config.tls_client_ca_file)
    if not has_owners or not (config.tls_cert_file or config.allow_plaintext):
        raise ConfigError(
            f"{bind} can be reached from other machines: set both api_key_file and tls_cert_file with tls_key_file, "
            "or bind 127.0.0.1. (tls_client_ca_file, which requires client certificates, can replace the keys; set "
            "allow_plaintext if a proxy in front of this server terminates TLS.)"
        )


def names_this_machine(host: str, names: Collection[str] = ("localhost",)) -> bool:
    """Does a request's `Host`, port and brackets included, name a loopback address, or one of `names`?

    A hostile web page can resolve its own name to a loopback address (DNS rebinding); requests of the browser then
    carry that name.
    """
    name = host.lower()
    # A port is what follows the last colon, unless that is inside an IPv6 address.
    if not name.endswith("]"):
        name = name.rpartition(":")[0] or name
    try:
        return _is_loopback(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return name.removesuffix(".") in names


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def cannot_bind(setting: str, address: Address) -> ConfigError:
    """Why `address` could not be bound, found by trying again with a plain socket."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((address.host, address.port))
            trial.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return ConfigError(
                f"{setting}: {address} is already in use; stop what listens there, or choose another port (0: any)"
            )
        return ConfigError(f"{setting}: cannot listen on {address}: {error.strerror}")
    return ConfigError(f"{setting}: cannot listen on {address}")
