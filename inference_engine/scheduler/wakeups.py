"""Wakes those who read what a step gave: once for all who are woken together, and while the device is at work.

    engine's thread     settle: tokens for A, B, … │ plan of the next step │ its forward … the device works
    readers' thread                                                        └ wake: frames for A, B, …

A wake is a system call and hands the interpreter to somebody else: made for every token, it costs more than the token,
and made before the plan, readers and plan take the interpreter from each other again and again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Wake = Callable[[], object]


class Wakeups:
    """`wake` from any thread; `hold` and `release` on the engine's."""

    def __init__(self) -> None:
        self._holder: int | None = None  # the thread that keeps its wakes back
        self._kept: dict[Wake, None] = {}

    def wake(self, wake: Wake) -> None:
        """Call `wake` now; while this thread holds its wakes back, at their release, equal ones once."""
        if self._holder == threading.get_ident():
            self._kept[wake] = None
        else:
            wake()

    def hold(self) -> None:
        """From now on keep back the wakes of this thread: it settles a step, and the device will soon work again."""
        self._holder = threading.get_ident()

    def release(self) -> None:
        """Make the wakes that were kept back, and keep back no more."""
        self._holder = None
        if self._kept:
            kept, self._kept = self._kept, {}
            for wake in kept:
                wake()
