"""Wake-ups of readers after a step: one for all readers on a thread, and while the device is at work.

Where a journal keeps sessions, they come once the step is safe, from the journal's thread.

    engine's thread     settle: tokens for A, B, … │ plan of the next step │ its forward … the device works
    readers' thread                                                        └ wake: frames for A, B, …

A wake-up is a system call and lets another thread take the interpreter lock. One for every token would cost more than
the token; one before the plan would make readers and plan compete for the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial

Wake = Callable[[], object]


class Wakeups:
    """`wake` from any thread; `hold` and `release` on the engine's."""

    def __init__(self, after: Callable[[Wake], None] | None = None) -> None:
        """after: makes a wake-up once all that was recorded until now may be sent; None: it may be sent at once."""
        self._after = after
        self._holder: int | None = None  # the thread whose wake-ups are held back
        self._kept: dict[Wake, None] = {}
        self._kept_calls: dict[Wake, None] = {}  # that come before those

    def wake(self, wake: Wake) -> None:
        """Call `wake` now, or on `release` if this thread holds its wake-ups back; equal ones are called once."""
        if self._holder == threading.get_ident():
            self._kept[wake] = None
        elif self._after is None:
            wake()
        else:
            self._after(wake)

    def call(self, callback: Wake, wake: Wake | None) -> None:
        """As `wake`, and `callback` then too, before it: for wake-ups that are late.

        Together: what `callback` sets before the step is safe could be looked at, found empty, and never be set again.
        Of those held back, all callbacks come first: a thread that is woken by the first finds all that is to be read.
        """
        if self._holder == threading.get_ident():
            self._kept_calls[callback] = None
            if wake is not None:
                self._kept[wake] = None
        else:
            assert self._after is not None
            self._after(callback if wake is None else partial(_call, (callback, wake)))

    @property
    def are_late(self) -> bool:
        """Do they wait until what was recorded is safe?"""
        return self._after is not None

    def hold(self) -> None:
        """Hold back the wake-ups of this thread from now on: it settles a step, and the device will soon be busy."""
        self._holder = threading.get_ident()

    def release(self) -> None:
        """Make the wake-ups that were held back, and hold back no more."""
        self._holder = None
        if self._kept or self._kept_calls:
            kept, self._kept, self._kept_calls = (*self._kept_calls, *self._kept), {}, {}
            if self._after is None:
                _call(kept)
            else:
                self._after(partial(_call, kept))


def _call(callbacks: Iterable[Wake]) -> None:
    for callback in callbacks:
        callback()
