"""Fair scheduling of rendering: owners take places in turn, so that slow texts delay only their owner.

    places     two processes; one owner uses all but one of them at the same time
    waiting    each owner has its own queue, of bounded length; a free place goes to the owner that waited longest
    slow       owners with a text that took longer than a second share all but one of the places, for a minute, so
               one place is always left for the others, whatever the number of slow owners

Event loop only; the work runs in threads.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from inference_engine.errors import Overloaded

MAX_WAITING = 64
MAX_WAIT_SECONDS = 20.0
_RETRY_SECONDS = 1.0
# A typical conversation takes milliseconds, the longest some tenths of a second.
SLOW_SECONDS = 1.0
SLOW_FOR_SECONDS = 60.0

T = TypeVar("T")


class RequestTurns:
    """max_waiting: waiting requests of one owner. max_wait_seconds: how long each may wait."""

    def __init__(
        self,
        places: int,
        *,
        max_waiting: int = MAX_WAITING,
        max_wait_seconds: float = MAX_WAIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._free = list(range(places))
        self._most = max(1, places - 1)
        self._max_waiting = max_waiting
        self._max_wait_seconds = max_wait_seconds
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._slow_until: dict[str, float] = {}
        self._waiting: OrderedDict[str, deque[asyncio.Future[int]]] = OrderedDict()
        self._threads = ThreadPoolExecutor(places, "chat-text")

    async def run(self, owner: str, work: Callable[[int], T]) -> T:
        """Run `work` with its place, which it keeps until it ends, even if the caller is cancelled.

        Raises Overloaded if the owner has too many waiting, or waited too long; else what `work` does.
        """
        place = await self._take(owner)
        began = self._clock()
        try:
            working = asyncio.get_running_loop().run_in_executor(self._threads, work, place)
        except BaseException:
            self._give_back(owner, place)
            raise

        def end(done: asyncio.Future[T]) -> None:
            if not done.cancelled():
                done.exception()  # retrieved, also if the caller was cancelled
            now = self._clock()
            if now - began > SLOW_SECONDS:
                self._slow_until[owner] = now + SLOW_FOR_SECONDS
            self._give_back(owner, place)

        working.add_done_callback(end)
        return await asyncio.shield(working)

    def close(self) -> None:
        """Running work ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _take(self, owner: str) -> int:
        queue = self._waiting.setdefault(owner, deque())
        if len(queue) >= self._max_waiting:
            raise Overloaded(
                f"{len(queue)} of your requests already wait to be rendered, the limit of one owner; retry later",
                retry_after_seconds=_RETRY_SECONDS,
            )
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._deal()
        try:
            async with asyncio.timeout(self._max_wait_seconds):
                return await turn
        except TimeoutError:
            self._leave(owner, turn)
            raise Overloaded(
                f"your earlier requests were not rendered within {self._max_wait_seconds:g} s; retry later",
                retry_after_seconds=_RETRY_SECONDS,
            ) from None
        except BaseException:
            self._leave(owner, turn)
            raise

    def _leave(self, owner: str, turn: asyncio.Future[int]) -> None:
        """The caller was cancelled; a place that its turn got meanwhile goes to the next one."""
        if turn.done() and not turn.cancelled():
            self._give_back(owner, turn.result())
            return
        queue = self._waiting.get(owner, deque())
        if turn in queue:
            queue.remove(turn)
        if not queue:
            self._waiting.pop(owner, None)

    def _give_back(self, owner: str, place: int) -> None:
        self._free.append(place)
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        self._deal()

    def _deal(self) -> None:
        while self._free:
            owner = next(filter(self._may_run, self._waiting), None)
            if owner is None:
                return
            queue = self._waiting[owner]
            turn = queue.popleft()
            # To the end of the queue of owners, or out of it until the owner's next request.
            self._waiting.move_to_end(owner)
            if not queue:
                del self._waiting[owner]
            if not turn.done():
                self._running[owner] += 1
                turn.set_result(self._free.pop())

    def _may_run(self, owner: str) -> bool:
        if self._running[owner] >= self._most:
            return False
        if not self._is_slow(owner):
            return True
        return sum(count for other, count in self._running.items() if self._is_slow(other)) < self._most

    def _is_slow(self, owner: str) -> bool:
        if owner in self._slow_until and self._slow_until[owner] <= self._clock():
            del self._slow_until[owner]
        return owner in self._slow_until
