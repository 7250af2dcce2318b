"""The bridge from the engine's thread to one client's stream, with backpressure.

    engine thread ── set, set, … wake ──▶ event loop ── read ──▶ frames

One wake-up of the event loop serves all streams with new events, and may carry many events of each. A Feed buffers no
events: those that its client has not read stay in the session's history, so a slow client costs no memory and never
blocks the engine. An EventQueue buffers what is pushed to it: at most `max_tokens` of one Generate, and a report for
each prefill chunk.

A client that stops reading first fills the transport's buffers (thousands of frames); then a write stalls, and `Stall`
detects it. A proxy gives up a stream on which nothing comes; a `Heartbeat` keeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, Self, TypeVar

from inference_engine.engine.generation import Generation
from inference_engine.scheduler.transcript import AT_ONCE
from inference_engine.types import Event, TokenCommitted

# Each stream that is woken has a frame to write. Between so many of them other calls have their turn: those of an owner
# with a hundred streams must not keep the loop to themselves.
WOKEN_AT_ONCE = 16

Frame = TypeVar("Frame")


class LoopWaker:
    """Delivers the wake-ups of one event loop, many at a time. `wake` may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: deque[Wakeup] = deque()
        self._is_waking = False

    def wake(self) -> None:
        """Have the loop deliver the wake-ups that were set."""
        if self._pending and not self._is_waking:
            self._is_waking = True
            # The loop is closed only when the process ends, and then nothing is left to deliver.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Cleared first, so that a wake-up set after the last one was delivered schedules another delivery.
        self._is_waking = False
        woken = 0
        while self._pending and woken < WOKEN_AT_ONCE:
            woken += self._pending.popleft()._deliver()
        if self._pending and not self._is_waking:
            self._is_waking = True
            self._loop.call_soon(self._deliver)


class Wakeup:
    """Notifies one consumer on the loop, once for everything since it last looked. Set from any thread."""

    def __init__(self, waker: LoopWaker) -> None:
        self._waker = waker
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Call once there is something to read. It is delivered by the next `LoopWaker.wake`."""
        if not self._is_set:
            self._is_set = True
            self._waker._pending.append(self)

    async def wait(self) -> None:
        """Wait until it is set, and clear it. Call this before reading: what comes later sets it again."""
        if not self._is_set:
            self._waiter = self._waker._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False

    def _deliver(self) -> bool:
        """Returns whether a reader was waiting."""
        if not self._is_set or self._waiter is None or self._waiter.done():
            return False
        self._waiter.set_result(None)
        return True


class Feed:
    """The events of a Generation. Single consumer, on the waker's loop."""

    def __init__(self, generation: Generation, waker: LoopWaker) -> None:
        self._generation = generation
        self._wakeup = Wakeup(waker)
        self.position = generation.position  # of the token that is being sent, or comes next
        generation.when_readable(self._wakeup.set, waker.wake)

    async def wait(self) -> None:
        """Until there may be something to pop."""
        await self._wakeup.wait()

    def pop_all(self) -> Iterator[Event]:
        """The events so far. Those that arrive while they are consumed come with the next call, without waiting."""
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
            # Events that came meanwhile have set the wake-up: reading again each time costs a quarter of a token.
            is_more = len(events) >= AT_ONCE


class EventQueue:
    """Single producer on any thread, single consumer on `loop`. Needs no lock: append and popleft are atomic."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._events: deque[Event] = deque()
        self._waker = LoopWaker(loop)
        self._wakeup = Wakeup(self._waker)

    def push(self, event: Event) -> None:
        """Any thread. Returns at once and never raises."""
        self._events.append(event)
        self._wakeup.set()
        self._waker.wake()

    async def wait(self) -> None:
        """Until there may be something to pop."""
        await self._wakeup.wait()

    def pop_all(self) -> Iterator[Event]:
        """As `Feed.pop_all`."""
        while self._events:
            yield self._events.popleft()


class Heartbeat(Generic[Frame]):
    """Writes a frame whenever nothing was written for `seconds`, until it is stopped. On the running loop.

    What else is written meanwhile goes through `write`, so that two writes never overlap.
    """

    def __init__(self, write: Callable[[Frame], Awaitable[object]], frame: Frame, seconds: float) -> None:
        self.frame = frame  # the next one; may be replaced
        self._write = write
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._written_at = self._loop.time()
        self._writing = asyncio.Lock()
        self._beating = self._loop.create_task(self._beat())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._beating.cancel()
        await asyncio.wait((self._beating,))
        if not self._beating.cancelled():
            self._beating.exception()  # the client is gone, which the call itself learns

    async def write(self, frame: Frame) -> None:
        async with self._writing:
            await self._write(frame)
            self._written_at = self._loop.time()

    async def stop(self) -> None:
        """No more frames of its own; one that is being written is complete."""
        async with self._writing:
            self._beating.cancel()

    async def _beat(self) -> None:
        while True:
            if (left := self._written_at + self._seconds - self._loop.time()) > 0:
                await asyncio.sleep(left)
            else:
                await self.write(self.frame)


class Stall:
    """Calls `on_stall` once if a write has been waiting for `limit_seconds` or more.

    It has one timer for each stream, not for each write: the timer checks every `limit_seconds`, so a stall is
    detected after one to two limits.
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
