"""Detects what no call can report: a stalled engine, one without its ranks, a journal that cannot be written, and
weights that are overwritten.

    running ──▶ stalled (health: not serving; calls: ENGINE_STALLED) ──▶ running
       │           └─ for `exit_seconds` ──▶ the process ends with status EXIT_STALLED
       ├─ a rank of the model ends ──▶ the process ends with status EXIT_STALLED
       ├─ the journal fails ──▶ the process ends with status EXIT_JOURNAL
       └─ weights written to ──▶ the process ends with status EXIT_SPOILED

A thread that hangs in a device's driver cannot be ended from outside, so only a new process helps. An engine that
continues with changed weights would give wrong tokens without an error.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from inference_engine.engine import Engine
from inference_engine.errors import Draining, EngineStalled, RequestError
from inference_engine.models.mapped import MappedWeights

EXIT_STALLED = 70  # EX_SOFTWARE of sysexits.h
EXIT_SPOILED = 74  # EX_IOERR
EXIT_JOURNAL = 75  # EX_TEMPFAIL: a restart reads what is safe
LOOK_SECONDS = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GaveUp:
    """Why the process has to end, with which status, and the error that running calls end with."""

    text: str
    status: int
    error: RequestError


class Watchdog:
    """Checks an engine and its weights every LOOK_SECONDS. `clock` gives monotonic seconds."""

    def __init__(
        self,
        engine: Engine,
        exit_seconds: float,
        clock: Callable[[], float],
        weights: MappedWeights | None = None,
    ) -> None:
        """exit_seconds: how long the engine may stall before the process ends; 0: no limit."""
        self._weights = weights
        self._engine = engine
        self._exit_seconds = exit_seconds
        self._clock = clock
        self._stalled_at: float | None = None

    async def gave_up(self) -> GaveUp:
        """Returns when the engine has stalled for too long or can run no more steps, its journal has failed, or its
        weights were changed."""
        while True:
            if self._weights is not None and (what := self._weights.spoiled()) is not None:
                text = (
                    f"{what} while the model is served: its tokens would be wrong; restart the server with intact files"
                )
                return GaveUp(text, EXIT_SPOILED, Draining())
            if failure := self._engine.journal.failure:
                return GaveUp(f"sessions cannot be kept any more: {failure}", EXIT_JOURNAL, Draining())
            if failure := self._engine.forward_failure:
                return GaveUp(f"no more steps can run: {failure}", EXIT_STALLED, EngineStalled())
            if self.look():
                return GaveUp("the engine did not recover", EXIT_STALLED, EngineStalled())
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> bool:
        """Has the engine stalled for too long?"""
        if not self._engine.is_stalled():
            if self._stalled_at is not None:
                _log.warning("the engine has recovered")
            self._stalled_at = None
            return False
        now = self._clock()
        if self._stalled_at is None:
            self._stalled_at = now
            self._engine.metrics.stalls.inc()
            _log.critical("the engine has stalled\n%s", _where_engines_are())
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
