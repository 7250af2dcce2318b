"""The bridge from the engine's thread to one client's stream.

    engine thread ── ring, ring, … wake ──▶ event loop ── read ──▶ frames

One wakeup of the loop serves every stream that a step has something for, and may carry many events of each. A Feed
holds none: what its client has not taken yet stays where the engine keeps it, in the session's history, so that a slow
client costs no memory and the engine waits for nobody. An EventQueue holds those that are pushed to it, at most
`max_tokens` of one Generate and a report for each prefill chunk.

A client that stops reading fills the transport's own buffers (thousands of frames) and then one write stalls; `Stall`
notices that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from inference_engine.engine.generation import Generation
from inference_engine.scheduler.transcript import AT_ONCE
from inference_engine.types import Event, TokenCommitted


class Bells:
    """The bells of one event loop, which are heard together. `wake` from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rung: deque[Bell] = deque()
        self._is_waking = False

    def wake(self) -> None:
        """Let the loop hear the bells that were rung."""
        if self._rung and not self._is_waking:
            self._is_waking = True
            # The loop is closed only when the process ends, and then nobody listens.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
        # First, so that whoever rings after the last bell was heard wakes the loop again.
        self._is_waking = False
        while self._rung:
            self._rung.popleft()._hear()


class Bell:
    """Tells a consumer on the loop once of all that has come since it last looked. Rung from any thread."""

    def __init__(self, bells: Bells) -> None:
        self._bells = bells
        self._is_rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """To be rung once there is something, and heard when `Bells.wake` is called."""
        if not self._is_rung:
            self._is_rung = True
            self._bells._rung.append(self)

    async def wait(self) -> None:
        """Until it is heard. Whoever rings it from now on rings again: to be called before one looks."""
        if not self._is_rung:
            self._waiter = self._bells._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_rung = False

    def _hear(self) -> None:
        if self._is_rung and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Feed:
    """The events of a Generation. Single consumer, on the bells' loop."""

    def __init__(self, generation: Generation, bells: Bells) -> None:
        self._generation = generation
        self._bell = Bell(bells)
        self.position = generation.position  # of the token that is being sent, or comes next
        generation.when_news(self._bell.ring, bells.wake)

    async def wait(self) -> None:
        """Until there may be something to pop."""
        await self._bell.wait()

    def pop_all(self) -> Iterator[Event]:
        """What is there. What comes while it is being consumed is there at once the next time."""
        is_more = True
        while is_more:
            events = self._generation.read()
            for event in events:
                if isinstance(event, TokenCommitted):
                    self.position = event.position
                    yield event
                    self.position += 1
                else:
                    yield event
            # Of what came meanwhile the bell was rung: to look again each time costs a quarter of what a token does.
            is_more = len(events) >= AT_ONCE


class EventQueue:
    """Single producer on any thread, single consumer on `loop`. Needs no lock: append and popleft are atomic."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._events: deque[Event] = deque()
        self._bells = Bells(loop)
        self._bell = Bell(self._bells)

    def push(self, event: Event) -> None:
        """Any thread. Returns at once and never raises."""
        self._events.append(event)
        self._bell.ring()
        self._bells.wake()

    async def wait(self) -> None:
        """Until there may be something to pop."""
        await self._bell.wait()

    def pop_all(self) -> Iterator[Event]:
        """As `Feed.pop_all`."""
        while self._events:
            yield self._events.popleft()


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
