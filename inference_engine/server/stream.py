"""The bridge from the engine's thread to one client's stream.

    engine thread ── ring ──▶ event loop ── read ──▶ frames

One wakeup of the loop may carry many events. A Feed holds none: what its client has not taken yet stays where the
engine keeps it, in the session's history, so that a slow client costs no memory and the engine waits for nobody. An
EventQueue holds those that are pushed to it, at most `max_tokens` of one Generate and a report for each prefill chunk.

A client that stops reading fills the transport's own buffers (thousands of frames) and then one write stalls; `Stall`
notices that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from inference_engine.generation import Generation
from inference_engine.types import Event, TokenCommitted


class Feed:
    """The events of a Generation. Single consumer on `loop`."""

    def __init__(self, generation: Generation, loop: asyncio.AbstractEventLoop) -> None:
        self._generation = generation
        self._bell = _Bell(loop)
        self.position = generation.position  # of the token that is being sent, or comes next
        generation.when_news(self._bell.ring)

    async def wait(self) -> None:
        """Until there may be something to pop."""
        await self._bell.wait()

    def pop_all(self) -> Iterator[Event]:
        """What is there, and what comes while it is being consumed: a busy producer costs no wakeups."""
        while True:
            while events := self._generation.read():
                yield from self._placed(events)
            self._bell.is_rung = False
            if not (events := self._generation.read()):
                return
            self._bell.is_rung = True
            yield from self._placed(events)

    def _placed(self, events: list[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, TokenCommitted):
                self.position = event.position
                yield event
                self.position += 1
            else:
                yield event


class EventQueue:
    """Single producer on any thread, single consumer on `loop`. Needs no lock: append and popleft are atomic."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._events: deque[Event] = deque()
        self._bell = _Bell(loop)

    def push(self, event: Event) -> None:
        """Any thread. Returns at once and never raises."""
        self._events.append(event)
        self._bell.ring()

    async def wait(self) -> None:
        """Until there may be something to pop."""
        await self._bell.wait()

    def pop_all(self) -> Iterator[Event]:
        """As `Feed.pop_all`."""
        while True:
            while self._events:
                yield self._events.popleft()
            self._bell.is_rung = False
            if not self._events:
                return
            self._bell.is_rung = True


class _Bell:
    """Wakes the consumer once for all that has come since it last looked."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready = asyncio.Event()
        self.is_rung = False

    def ring(self) -> None:
        # Rung after there is something, reset before the consumer looks again: whoever comes second sees the other.
        if not self.is_rung:
            self.is_rung = True
            # The loop is closed only when the process ends, and then nobody listens.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ready.set)

    async def wait(self) -> None:
        await self._ready.wait()
        self._ready.clear()


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
