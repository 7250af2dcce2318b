"""HTTP/2 by hand: frames that no library would send, and as much of HPACK as headers take.

Blocking, one socket a connection, every wait bounded.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, TypeAlias

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(6, 10)
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
CANCEL = 8
WAIT_SECONDS = 20.0

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def message_start(size: int) -> bytes:
    """The five bytes with which gRPC begins a message of that size."""
    return struct.pack(">BI", 0, size)


def message(raw: bytes) -> bytes:
    return message_start(len(raw)) + raw


def integer(value: int, bits: int, first: int = 0) -> bytes:
    """HPACK's integers, with `first` in the bits above the prefix."""
    most = 2**bits - 1
    if value < most:
        return bytes((first | value,))
    out, value = bytearray((first | most,)), value - most
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def literal(name: bytes, value: bytes, *, indexed: bool = False) -> bytes:
    """A header as it is; `indexed` puts it into the table of the other side, where it is number 62."""
    return (b"\x40" if indexed else b"\x00") + b"".join(integer(len(part), 7) + part for part in (name, value))


def call_headers(method: str, extra: Headers = ()) -> bytes:
    """What begins a gRPC call."""
    headers = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", method.encode()),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *extra,
    )
    return b"".join(literal(name, value) for name, value in headers)


class Connection:
    """One connection to a server. What the other side says is read by `frames`."""

    source: ClassVar[str | None] = None  # the address of this side, of all that are opened from now on

    def __init__(self, target: str, *, greet: bool = True, settings: bytes = b"") -> None:
        """greet: send the preface. settings: pairs of two bytes and four, as they go into the frame."""
        host, _, port = target.rpartition(":")
        source = None if self.source is None else (self.source, 0)
        self.socket = socket.create_connection((host, int(port)), timeout=WAIT_SECONDS, source_address=source)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""
        self._next = 1
        if greet:
            self.send(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(SETTINGS, ACK, 0))

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Also for a thread that is reading."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def send(self, raw: bytes) -> None:
        self.socket.sendall(raw)

    def try_send(self, raw: bytes) -> bool:
        """False once the other side is gone."""
        try:
            self.socket.sendall(raw)
        except OSError:
            return False
        return True

    def begin(self, method: str, headers: Headers = (), *, ends: bool = False) -> int:
        """Send the headers of a call. Returns its stream."""
        stream, self._next = self._next, self._next + 2
        flags = END_HEADERS | (END_STREAM if ends else 0)
        self.send(frame(HEADERS, flags, stream, call_headers(method, headers)))
        return stream

    def frames(self, timeout: float = WAIT_SECONDS) -> Iterator[Frame]:
        """Until the other side closes the connection, or says nothing for that long."""
        self.socket.settimeout(timeout)
        with contextlib.suppress(TimeoutError, ConnectionError):
            while True:
                while len(self._read) >= 9 and len(self._read) >= 9 + (size := int.from_bytes(self._read[:3])):
                    kind, flags, stream = struct.unpack(">BBI", self._read[3:9])
                    payload, self._read = self._read[9 : 9 + size], self._read[9 + size :]
                    yield Frame(kind, flags, stream & 0x7FFFFFFF, payload)
                more = self.socket.recv(65536)
                if not more:
                    return
                self._read += more

    def is_closed(self, timeout: float = 0.01) -> bool:
        """Has the other side closed it? What it sent before is thrown away."""
        self.socket.settimeout(timeout)
        try:
            while self.socket.recv(65536):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True
