"""The bridge from the engine's thread to one client's stream.

    engine thread ── push ──▶ deque ──▶ batch ── event loop ──▶ frames

One wakeup of the loop may carry many events. The deque needs no lock (append and popleft are atomic) and cannot outgrow
the request: a Generate reports at most `max_tokens` tokens and one progress report per prefill chunk.

A client that stops reading fills the transport's own buffers (thousands of frames) and then one write stalls; `Stall`
notices that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from inference_engine.types import Event


class EventQueue:
    """Single producer on any thread, single consumer on `loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[Event] = deque()
        self._ready = asyncio.Event()
        self._is_signalled = False

    def push(self, event: Event) -> None:
        """Any thread. Returns at once and never raises."""
        self._events.append(event)
        # Appended before the flag is read, cleared before the deque is read: whoever comes second sees the other.
        if not self._is_signalled:
            self._is_signalled = True
            # The loop is closed only when the process ends, and then nobody listens.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ready.set)

    async def wait(self) -> None:
        """Until there may be something to pop."""
        await self._ready.wait()
        self._ready.clear()

    def pop_all(self) -> Iterator[Event]:
        """What is there, and what comes while it is being consumed: a busy producer costs no wakeups."""
        while True:
            while self._events:
                yield self._events.popleft()
            self._is_signalled = False
            if not self._events:
                return
            self._is_signalled = True


class Stall:
    """Calls `on_stall` once if a write has been waiting for `limit_seconds` or more.

    One timer a stream instead of one a write: it looks `limit_seconds` after the last look, so a stall is noticed
    after one to two limits.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_seconds: float, on_stall: Callable[[], object]) -> None:
        self._loop = loop
        self._limit_seconds = limit_seconds
        self._on_stall = on_stall
        self.is_stalled = False
        self._is_writing = False
        self._writes = 0
        self._seen_writes = -1
        self._timer = loop.call_later(limit_seconds, self._look)

    def begin_write(self) -> None:
        self._is_writing = True
        self._writes += 1

    def end_write(self) -> None:
        self._is_writing = False

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._is_writing and self._writes == self._seen_writes:
            self.is_stalled = True
            self._on_stall()
            return
        self._seen_writes = self._writes
        self._timer = self._loop.call_later(self._limit_seconds, self._look)
