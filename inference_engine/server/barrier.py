"""What is sent to a client waits here until it is safe: one question to the journal, and one wake-up, for many calls.

event loop          wait, wait, … │ ask                                    │ 16 go on │ 16 go on …
journal's thread                  │ commit of all that was recorded until then │ wake
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence

from inference_engine.engine import Engine
from inference_engine.server.stream import WOKEN_AT_ONCE


class Barrier:
    """Event loop only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: list[asyncio.Future[None]] = []  # that came since the journal was asked last
        self._safe = deque[asyncio.Future[None]]()  # that go on, some at a time

    async def passed(self) -> None:
        """Wait until everything is safe that the engine has done until now: what is answered from here on stays true.

        Those who come in one turn of the loop are asked for together at its end, with whatever was done meanwhile.
        """
        if self._engine.is_saved():
            return
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._ask, loop)
        saved = loop.create_future()
        self._waiting.append(saved)
        await saved

    def _ask(self, loop: asyncio.AbstractEventLoop) -> None:
        asked, self._waiting = self._waiting, []

        def wake() -> None:
            # The loop is closed only when the process ends.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._go_on, loop, asked)

        self._engine.when_saved(wake)

    def _go_on(self, loop: asyncio.AbstractEventLoop, asked: Sequence[asyncio.Future[None]]) -> None:
        if not self._safe:
            loop.call_soon(self._let_go, loop)
        self._safe.extend(asked)

    def _let_go(self, loop: asyncio.AbstractEventLoop) -> None:
        """Between so many of them other calls have their turn."""
        for _ in range(min(WOKEN_AT_ONCE, len(self._safe))):
            if not (waiter := self._safe.popleft()).done():  # its call may be over
                waiter.set_result(None)
        if self._safe:
            loop.call_soon(self._let_go, loop)
