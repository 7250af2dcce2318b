"""The server's address: target, TLS, key, and the options shared by both kinds of channel."""

from __future__ import annotations

import os
import re
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc

from kakeya._checks import invalid
from kakeya._reach import is_this_machine, proxy_note, spelled_out

# A connection that is dead is found out within a call's default timeout, with time to make another. The server lets
# clients ping once in 2 s.
KEEPALIVE_SECONDS = 10
KEEPALIVE_ANSWER_SECONDS = 10
# The largest reply is a few kilobytes; appends are cut to what the server says it takes.
MAX_REPLY_BYTES = 4 * 2**20

OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_SECONDS * 1000),
    # gRPC also pings to measure bandwidth. Until such a ping is answered, keepalive waits, a minute by default.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_ANSWER_SECONDS * 1000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),  # a long prefill is silent; pings go on
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.max_send_message_length", -1),
    # Reconnect soon after a server restarts: until the next attempt to connect, gRPC fails each call at once.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
# gRPC would ask the proxy of the environment (http_proxy) to connect to this machine, too: to its own, in the clear.
_LOOPBACK_OPTIONS = [*OPTIONS, ("grpc.enable_http_proxy", 0)]

_URL = re.compile(r"(?:https?|grpcs?|tcp)://", re.IGNORECASE)
# The head of a key, unless lines behind it say that it is encrypted.
_PLAIN_KEY = re.compile(rb"-----BEGIN (?:[A-Z]+ )?(?<!ENCRYPTED )PRIVATE KEY-----(?!\s*Proc-Type: 4,ENCRYPTED)")
# A name or an IPv4 address alone, and what gRPC takes for a name in IPv6.
_NO_PORT = re.compile(r"[^:/]+ | \[[^\]]*\]", re.VERBOSE)


# In a list of addresses there are several. What belongs to IPv6 has four digits at most.
_PORT = re.compile(r":(\d+)(?=,|$)")
_MOST_PORT = 65535

_Pem: TypeAlias = "bytes | str | os.PathLike[str] | None"


@dataclass(frozen=True, kw_only=True, slots=True)
class TLS:
    """Certificates for an encrypted connection, each as PEM bytes or as the path of a PEM file.

    Without `root_certificates` the server is checked against gRPC's own list of authorities. `certificate` and `key`
    come together, for a server that asks its clients for one.
    """

    root_certificates: bytes | str | os.PathLike[str] | None = None
    certificate: bytes | str | os.PathLike[str] | None = None
    key: bytes | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise invalid("tls", "needs both certificate and key; only one of them is given")


@dataclass(frozen=True, slots=True)
class Address:
    """A checked target with what opens a channel to it.

    `target` is as it was given, `reached` as gRPC gets it. `proxy_note` is what an error says of a proxy in between.
    """

    target: str
    reached: str
    credentials: grpc.ChannelCredentials | None
    metadata: tuple[tuple[str, str], ...]
    options: list[tuple[str, int]]
    proxy_note: str
    has_certificate: bool = False


def address(target: str, api_key: str | None, tls: TLS | bool) -> Address:
    """Check the pieces, and read certificate files and check them. Raises InvalidArgument; an unreadable file raises
    OSError.

    A key would cross an unencrypted connection in the clear, so it is refused for a target beyond this machine.
    """
    if not isinstance(target, str) or not target.strip():
        raise invalid("target", f"must be an address such as '127.0.0.1:50051', got {target!r}")
    encrypted, is_loopback = tls is not False, is_this_machine(target)
    if _URL.match(target) is not None:
        raise invalid("target", f"must be host and port alone, such as '127.0.0.1:50051', got {target!r}")
    if not encrypted and _NO_PORT.fullmatch(target) is not None:
        # gRPC would ask port 443, where TLS is spoken.
        raise invalid("target", f"must have a port, such as '127.0.0.1:50051', got {target!r}")
    if not target.startswith("unix") and any(int(port) > _MOST_PORT for port in _PORT.findall(target)):
        # gRPC would ask another port, without a word.
        raise invalid("target", f"must have ports up to {_MOST_PORT}, such as '127.0.0.1:50051', got {target!r}")
    if not isinstance(tls, bool | TLS):
        raise invalid("tls", f"must be True, False or TLS(…), got {tls!r}")
    if api_key is not None:
        # What HTTP/2 lets into a header.
        if not isinstance(api_key, str) or not api_key or not api_key.isascii() or not api_key.isprintable():
            raise invalid("api_key", f"must be a string of printable ASCII characters{_spaces(api_key)}")
        if not encrypted and not is_loopback:
            raise invalid("api_key", f"would travel to {target} unencrypted; pass tls=True or tls=TLS(…) as well")
    return Address(
        target,
        spelled_out(target),
        _credentials(TLS() if tls is True else tls) if tls is not False else None,
        () if api_key is None else (("authorization", f"Bearer {api_key}"),),
        _LOOPBACK_OPTIONS if is_loopback else OPTIONS,
        proxy_note(target),
        has_certificate=isinstance(tls, TLS) and tls.certificate is not None,
    )


def _spaces(api_key: object) -> str:
    """What is wrong with a key that was read from a file as it is; of the key itself nothing is said."""
    if isinstance(api_key, str) and api_key != (stripped := api_key.strip()) and stripped:
        return "; it begins or ends with a blank or a line break: api_key.strip() is without"
    return ""


def _credentials(tls: TLS) -> grpc.ChannelCredentials:
    """gRPC would report PEM that is none with the first call, as a connection that failed, and log lines of its own."""
    roots, certificate, key = _pem(tls.root_certificates), _pem(tls.certificate), _pem(tls.key)
    for name, source, pem in (
        ("root_certificates", tls.root_certificates, roots),
        ("certificate", tls.certificate, certificate),
    ):
        if pem is not None and not _has_certificate(pem):
            raise invalid("tls", f"{name} must hold a certificate in PEM format, and {_shown(source)} has none")
    if key is not None and _PLAIN_KEY.search(key) is None:
        raise invalid("tls", f"key must hold an unencrypted key in PEM format, and {_shown(tls.key)} has none")
    if not _belong_together(tls.certificate, tls.key):
        raise invalid("tls", f"key must be that of the certificate, and {_shown(tls.key)} has another")
    return grpc.ssl_channel_credentials(root_certificates=roots, private_key=key, certificate_chain=certificate)


def _has_certificate(pem: bytes) -> bool:
    """Can at least one be read? That is as many as gRPC needs."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with suppress(ssl.SSLError, ValueError):
        # Text around the blocks, such as an authority's name, is in any alphabet.
        context.load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    return context.cert_store_stats()["x509"] > 0


def _belong_together(certificate: _Pem, key: _Pem) -> bool:
    """Can be said of files; of bytes gRPC says it with the first call."""
    if certificate is None or key is None or isinstance(certificate, bytes) or isinstance(key, bytes):
        return True
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, password=lambda: b"")
    except ssl.SSLError as error:  # of other reasons some are none for gRPC, such as a short key
        return error.reason != "KEY_VALUES_MISMATCH"
    return True


def _shown(source: _Pem) -> str:
    """The path of a file; of the bytes themselves nothing is said."""
    return "what was given" if source is None or isinstance(source, bytes) else str(source)


def _pem(source: _Pem) -> bytes | None:
    return source if source is None or isinstance(source, bytes) else Path(source).read_bytes()
