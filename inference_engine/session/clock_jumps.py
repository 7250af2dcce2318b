"""Jumps of the clock on the wall, by which what is kept is known to be old after a restart."""

from __future__ import annotations

import time
from collections.abc import Callable

_LEAST_SECONDS = 60.0  # clocks run differently, and are read one after the other


def even_clock() -> float:
    """Seconds, also of those that the machine slept. No jumps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class ClockJumps:
    """Of a clock that is set, as of a machine that starts without the date: what is kept is not old by that.

    even_clock: None: it is never set.
    """

    def __init__(self, wall_clock: Callable[[], float], even_clock: Callable[[], float] | None) -> None:
        self._wall_clock, self._even_clock = wall_clock, even_clock or wall_clock
        self._wall, self._even = wall_clock(), self._even_clock()  # when they were compared last
        self._ahead, self._jumped_at = 0.0, 0.0

    def ahead(self, seconds: float) -> float:
        """How much of what the clock says has not passed, for what is deleted after `seconds`: 0 once as many have
        passed since it was set. Being set back deletes nothing sooner."""
        wall, even = self._wall_clock(), self._even_clock()
        jump = (wall - self._wall) - (even - self._even)
        self._wall, self._even = wall, even
        if abs(jump) > _LEAST_SECONDS:
            self._ahead, self._jumped_at = max(0.0, self._ahead + jump), even
        return self._ahead if even - self._jumped_at < seconds else 0.0
