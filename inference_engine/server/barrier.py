"""What is sent to a client waits here until it is safe: one question to the journal, and one wake-up, for many calls.

event loop          wait, wait, … │ ask                                    │ 16 go on │ 16 go on …
journal's thread                  │ commit of all that was recorded until then │ wake
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from inference_engine.engine import Engine
from inference_engine.server.stream import WOKEN_AT_ONCE


class Barrier:
    """Event loop only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: list[asyncio.Future[None]] = []  # that came since the journal was asked last

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
        asked, self._waiting = deque(self._waiting), []

        def wake() -> None:
            # The loop is closed only when the process ends.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_let_go, loop, asked)

        self._engine.when_saved(wake)


def _let_go(loop: asyncio.AbstractEventLoop, saved: deque[asyncio.Future[None]]) -> None:
    """Between so many of them other calls have their turn."""
    for _ in range(min(WOKEN_AT_ONCE, len(saved))):
        if not (waiter := saved.popleft()).done():  # its call may be over
            waiter.set_result(None)
    if saved:
        loop.call_soon(_let_go, loop, saved)
