"""Notices an engine that stands still, says where, and gives up on it if it does not come back.

    running ──▶ stalled (health: not serving; calls: ENGINE_STALLED) ──▶ running
                   └─ for `exit_seconds` ──▶ the process ends with status EXIT_STALLED

A thread that hangs in a device's driver cannot be ended from outside, so only a new process helps.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable

from inference_engine.engine import Engine

EXIT_STALLED = 70  # EX_SOFTWARE of sysexits.h
LOOK_SECONDS = 0.5

_log = logging.getLogger(__name__)


class Watchdog:
    """Looks at an engine now and then. `clock` gives monotonic seconds."""

    def __init__(self, engine: Engine, exit_seconds: float, clock: Callable[[], float]) -> None:
        """exit_seconds: 0 for patience without end."""
        self._engine = engine
        self._exit_seconds = exit_seconds
        self._clock = clock
        self._stalled_at: float | None = None

    async def gave_up(self) -> None:
        """Returns when the engine has stood still for too long."""
        while True:
            if self.look():
                return
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> bool:
        """Has the engine stood still for too long by now?"""
        if not self._engine.is_stalled():
            if self._stalled_at is not None:
                _log.warning("the engine is back")
            self._stalled_at = None
            return False
        now = self._clock()
        if self._stalled_at is None:
            self._stalled_at = now
            self._engine.metrics.stalls.inc()
            _log.critical("the engine stands still\n%s", _where_engines_are())
        return bool(self._exit_seconds) and now - self._stalled_at >= self._exit_seconds


def _where_engines_are() -> str:
    """The stacks of the engines' threads: lines of code, no values."""
    frames = sys._current_frames()
    stacks = [
        f"{thread.name} is in:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threading.enumerate()
        if thread.name == Engine.THREAD_NAME and thread.ident in frames
    ]
    return "\n".join(stacks) or "its thread has ended"
