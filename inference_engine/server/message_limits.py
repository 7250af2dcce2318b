"""Message limits: a call's message is read after its headers are accepted, within size, time and number of readers.

The headers decide on a call: its owner, whether the owner may call now, and how large the message may be. Only then is
the message read. While it does not arrive, the call counts among the owner's calls, for MESSAGE_SECONDS at most.

    headers ──▶ owner ──▶ rate and number of calls ──▶ message (bytes, seconds) ──▶ parsed ──▶ the call
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import grpc

from inference_engine.types import MAX_CONSTRAINT_BYTES

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

# Every method but AppendTokens: a Generate with 1,024 biases and 64 stop ids takes half of it, without its constraint.
MESSAGE_BYTES = 32 * 1024
GENERATE_BYTES = MESSAGE_BYTES + MAX_CONSTRAINT_BYTES
# The largest append: five bytes at most for each id, the session's id, the request's.
BYTES_PER_TOKEN_ID = 5
APPEND_ENVELOPE_BYTES = 4 * 1024
# Up to twice as many ids are parsed and counted, so that the sender gets APPEND_TOO_LARGE.
APPEND_SLACK = 2
MESSAGE_SECONDS = 30.0
# Messages read at the same time: of callers without a key, and of one owner. Until it is read, a message stays with its
# sender, except for what the HTTP/2 stream's window lets through.
OPEN_READERS = 16
OWNER_READERS = 64


class TransportError(Exception):
    """An error of the message itself. Like all errors of the transport, it has no details."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class MessageLimits:
    """How large the message of each method may be. max_append_tokens: ids in one append."""

    def __init__(self, *, max_append_tokens: int, max_message_bytes: int) -> None:
        needed = max_append_tokens * BYTES_PER_TOKEN_ID + APPEND_ENVELOPE_BYTES
        # What clients are promised, and what the transport accepts at all.
        self.promised_bytes = min(max_message_bytes, max(GENERATE_BYTES, needed))
        self.largest_bytes = min(max_message_bytes, max(GENERATE_BYTES, needed * APPEND_SLACK))
        self._generate_bytes = min(max_message_bytes, GENERATE_BYTES)
        self._other_bytes = min(max_message_bytes, MESSAGE_BYTES)

    def of(self, method: str) -> int:
        """method: its full path."""
        if method.endswith("/AppendTokens"):
            return self.largest_bytes
        return self._generate_bytes if method.endswith("/Generate") else self._other_bytes


class OpenReaders:
    """Readers of messages from callers without a key. Beyond the limit, the one that has waited longest gives up.

    A client that sends its message at once is read at once, so the longest wait is a stalled client's. Event loop only.
    """

    def __init__(self, most: int = OPEN_READERS) -> None:
        self._most = most
        self._waiting: deque[asyncio.Timeout] = deque()

    @contextmanager
    def one(self, scope: asyncio.Timeout) -> Iterator[None]:
        """Around one reading, inside its `scope`, which expires when it has to give up."""
        self._waiting.append(scope)
        if len(self._waiting) > self._most:
            self._waiting.popleft().reschedule(asyncio.get_running_loop().time())
        try:
            yield
        finally:
            if scope in self._waiting:
                self._waiting.remove(scope)


class OwnerReaders:
    """Each owner reads OWNER_READERS messages at a time; further ones wait. Event loop only."""

    def __init__(self, most: int = OWNER_READERS) -> None:
        self._most = most
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def one(self, owner: str) -> AsyncIterator[None]:
        """Around one reading; waits for its turn."""
        turns = self._turns.get(owner)
        if turns is None:
            turns = self._turns[owner] = asyncio.Semaphore(self._most)
        self._users[owner] += 1
        try:
            async with turns:
                yield
        finally:
            self._users[owner] -= 1
            if not self._users[owner]:
                del self._users[owner], self._turns[owner]


async def read_message(context: Context, limit_bytes: int, seconds: float, readers: OpenReaders | None = None) -> bytes:
    """The call's one message. Raises TransportError if it is missing, too large or too late."""
    try:
        async with asyncio.timeout(seconds) as scope:
            if readers is None:
                raw: Any = await context.read()
            else:
                with readers.one(scope):
                    raw = await context.read()
    except TimeoutError:
        raise TransportError(
            grpc.StatusCode.DEADLINE_EXCEEDED, f"the message of the call did not arrive within {seconds:g} s"
        ) from None
    if not isinstance(raw, bytes):
        raise TransportError(grpc.StatusCode.INVALID_ARGUMENT, "the call ended without a message")
    if len(raw) > limit_bytes:
        raise TransportError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"the message has {len(raw)} bytes; this method takes {limit_bytes} at most",
        )
    return raw
