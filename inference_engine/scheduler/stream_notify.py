"""Notification of stream readers after a step: one for all readers on a thread, and while the device is at work.

Where a journal keeps sessions, they come once the step is safe, from the journal's thread, which is asked for a commit
when they would be made.

    engine's thread     settle: tokens for A, B, … │ plan of the next step │ its forward … the device works
    readers' thread                                                        └ wake: frames for A, B, …

A wake-up is a system call and lets another thread take the interpreter lock. One for every token would cost more than
the token; one before the plan would make readers and plan compete for the lock, as the journal's thread would.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial

Wake = Callable[[], object]

logger = logging.getLogger(__name__)


class StreamNotifier:
    """`wake` and `call` from any thread; `hold` and `release` on the engine's."""

    def __init__(
        self, after: Callable[[Wake], None] | None = None, request_sync: Callable[[], None] | None = None
    ) -> None:
        """after: makes a wake-up once all that was recorded until now may be sent; None: it may be sent at once.

        request_sync: asks for the commit of a step that wakes no reader.
        """
        self._after = after
        self._request_sync = request_sync
        self._holder: int | None = None  # the thread whose wake-ups are held back
        self._calls: dict[Wake, None] = {}  # come before those kept
        self._kept: dict[Wake, None] = {}

    def wake(self, wake: Wake) -> None:
        """Call `wake` now, or on `release` if this thread holds its wake-ups back; equal ones are called once."""
        if self._holder == threading.get_ident():
            self._kept[wake] = None
        else:
            wake()

    def call(self, callback: Wake, wake: Wake | None) -> None:
        """Where they wait for a sync: as `wake`, with `callback` before it.

        Both when the step is safe: what `callback` sets before could be looked at, found empty, and never be set again.
        All callbacks come before the first wake-up, so that the thread that it wakes finds all that is to be read.
        """
        if self._holder == threading.get_ident():
            self._calls[callback] = None
            if wake is not None:
                self._kept[wake] = None
        else:
            assert self._after is not None
            self._after(callback if wake is None else partial(_make, (callback, wake)))

    @property
    def waits_for_sync(self) -> bool:
        """Are they delivered only after the journal has synced?"""
        return self._after is not None

    def hold(self) -> None:
        """Hold back the wake-ups of this thread from now on: it settles a step, and the device will soon be busy."""
        self._holder = threading.get_ident()

    def release(self) -> None:
        """Make the wake-ups that were held back, and hold back no more."""
        was_held, self._holder = self._holder is not None, None
        if self._kept or self._calls:
            kept, self._calls, self._kept = (*self._calls, *self._kept), {}, {}
            if self._after is None:
                _make(kept)
            else:
                self._after(partial(_make, kept))
        elif was_held and self._request_sync is not None:
            self._request_sync()


def _make(wakes: Iterable[Wake]) -> None:
    for wake in wakes:
        try:
            wake()
        except Exception:
            logger.exception("a wake-up failed")  # the others are of other readers
