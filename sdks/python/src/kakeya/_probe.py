"""Why a server that accepts connections ends them unanswered: does one side speak TLS where the other does not?

gRPC only reports "Socket closed" then. A separate handshake, in which nothing is sent, finds out.
"""

from __future__ import annotations

import enum
import re
import socket
import ssl

PROBE_SECONDS = 2.0

_HOST_AND_PORT = re.compile(r"(?:dns:///|dns:|ipv4:|ipv6:)?(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^/:\[\]]+)):(?P<port>\d+)")


def tls_mismatch(target: str, *, is_encrypted: bool, has_certificate: bool) -> tuple[str, bool] | None:
    """A description of the mismatch, and whether it is certain.

    None if nothing was found, or the target is no host and port.
    """
    if (parts := _HOST_AND_PORT.fullmatch(target)) is None or (is_encrypted and has_certificate):
        return None
    try:
        with socket.create_connection((parts["v6"] or parts["host"], int(parts["port"])), PROBE_SECONDS) as line:
            met = _shake_hands(line)
    except OSError:
        return None
    if not is_encrypted and met is not _Met.NO_TLS:
        return "it speaks TLS, and this client does not; give tls=True or tls=TLS(…)", True
    if is_encrypted and met is _Met.ASKED_FOR_A_CERTIFICATE:
        return "it asks its clients for a certificate; tls=TLS(certificate=…, key=…) gives one", True
    if is_encrypted and met is _Met.LEFT:
        # gRPC's own servers do this if a certificate is missing; other servers may have other reasons.
        return (
            "it ends the connection after the handshake; if it asks its clients for a certificate, "
            "tls=TLS(certificate=…, key=…) gives one"
        ), False
    return None


class _Met(enum.Enum):
    """How a server reacted to a handshake without a certificate."""

    NO_TLS = enum.auto()
    TLS = enum.auto()
    ASKED_FOR_A_CERTIFICATE = enum.auto()
    LEFT = enum.auto()


def _shake_hands(line: socket.socket) -> _Met:
    # Nothing is sent or trusted over this connection, so the peer need not be verified.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    met = _Met.NO_TLS
    try:
        with context.wrap_socket(line) as secured:
            met = _Met.TLS
            # An HTTP/2 server speaks first; one that requires a certificate sends an alert, or closes the connection.
            return met if secured.recv(1) else _Met.LEFT
    except ssl.SSLError as error:
        reason = error.reason or ""
        if "CERTIFICATE_REQUIRED" in reason or "HANDSHAKE_FAILURE" in reason:
            return _Met.ASKED_FOR_A_CERTIFICATE
        return _Met.TLS if "ALERT" in reason else met
    except OSError:
        return met
