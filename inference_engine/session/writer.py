"""The journal's thread: takes what was recorded, commits it in one transaction, and then confirms it.

    engine's thread    record A, B, … │ kick │ plan, forward of the next step …
    this thread                              │ commit A, B, … │ call back what waited for them

Confirmations wait for the disk, the engine does not. What can be done later comes a moment after them: those who were
called back run first, and need the interpreter for that. While the disk is full everything waits, and is committed once
there is space. Any other error is final: what the disk has is not known then, so nothing is confirmed, and the process
has to end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from inference_engine.metrics import EngineMetrics
from inference_engine.session.journal import Saved

logger = logging.getLogger(__name__)

Change = tuple[Callable[..., None], tuple[Any, ...]]
Callback = Callable[[], object]

_IDLE_SECONDS = (
    1.0  # changes that no callback waits for are committed after so long; between two looks at what is untidy
)
_LOOK_SECONDS = 0.05  # between two looks at whether a commit can still come
_QUIET_SECONDS = 0.002  # between callbacks and what is known to be untidy
_LAST_SECONDS = 1.0  # of tidying when the server stops: the next start has less to read
_MOST_UNTIDY = 8  # commits, if there are always callbacks
_FULL_SECONDS = 0.25  # between two attempts on a full disk
_MOST_WAITING = 20_000  # changes: a step of 128 streams is 128


class DiskFull(Exception):
    """There is no space; nothing was changed, and the same changes may be committed later."""


class Writer:
    """Any thread records and asks; `commit` and `tidy` are called on the writer's own.

    commit: applies changes, all or none, and makes them safe; raises DiskFull. tidy: does deferred work for some
    milliseconds. is_tidy: says whether there is none. tidies_at_the_end: until then a stop waits, for a moment.
    """

    THREAD_NAME = "kakeya-journal"

    def __init__(
        self,
        commit: Callable[[Sequence[Change]], None],
        tidy: Callable[[], None],
        is_tidy: Callable[[], bool],
        metrics: EngineMetrics,
        *,
        tidies_at_the_end: bool = True,
    ) -> None:
        self._tidies_at_the_end = tidies_at_the_end
        self._commit = commit
        self._tidy = tidy
        self._is_tidy = is_tidy
        self._metrics = metrics
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._changes: list[Change] = []
        self._confirmed: list[tuple[Saved, int]] = []  # what is safe with them
        self._callbacks: deque[tuple[int, Callback]] = deque()
        self._recorded = self._saved = 0  # units
        self._is_kicked = self._is_stopping = False
        self.is_full = False
        self.failure = ""
        self._thread = threading.Thread(target=self._run, name=self.THREAD_NAME, daemon=True)
        self._thread.start()

    def record(self, changes: Sequence[Change], confirmed: Sequence[tuple[Saved, int]] = ()) -> None:
        """Queue changes that belong together. confirmed: token counts that are safe with them."""
        with self._lock:
            self._changes += changes
            self._confirmed += confirmed
            self._recorded += 1

    def say(self, callback: Callback) -> None:
        with self._lock:
            is_now = self.is_saved
            if not is_now:
                self._callbacks.append((self._recorded, callback))
                self._wake.notify()
        if is_now:
            callback()

    def kick(self) -> None:
        with self._lock:
            self._is_kicked = True
            self._wake.notify()

    @property
    def is_saved(self) -> bool:
        return self._saved == self._recorded

    @property
    def waiting(self) -> int:
        """Changes that are not safe yet."""
        return len(self._changes)

    def is_behind(self) -> bool:
        return self.is_full or bool(self.failure) or len(self._changes) > _MOST_WAITING

    def flush(self, seconds: float) -> bool:
        """Wait until all that was recorded until now is safe, at most so long. Is it?"""
        done, ends = threading.Event(), time.monotonic() + seconds
        self.say(done.set)
        while not done.wait(_LOOK_SECONDS):
            if self.failure or time.monotonic() > ends:
                return False
        return True

    def stop(self) -> None:
        """Commit what is recorded, tidy for a moment, and end the thread."""
        with self._lock:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join()

    # -- its thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        has_more, commits = False, 0  # since it was tidied
        while True:
            with self._lock:
                self._wait(_QUIET_SECONDS if has_more else _IDLE_SECONDS)
                is_over = self._is_stopping and not self._changes and not self._callbacks
                changes, self._changes = self._changes, []
                confirmed, self._confirmed = self._confirmed, []
                recorded, self._is_kicked = self._recorded, False
            try:
                if is_over:
                    self._tidy_at_the_end()
                    return
                if changes:
                    self._write(changes)
                    commits += 1
                has_called, has_room = self._confirm(confirmed, recorded), True
                is_time = (not has_called and not self._changes) or commits >= _MOST_UNTIDY
                if is_time and not self._is_stopping:
                    commits, has_room = 0, self._has_tidied()
                has_more = has_room and not self._is_tidy()
            except DiskFull:  # the server stops, and there is no room for what is recorded, or for tidying
                return
            except Exception as error:
                logger.critical("the journal cannot be written any more", exc_info=error)
                self.failure = f"{type(error).__name__}: {error}"
                return

    def _has_tidied(self) -> bool:
        """False if the disk is full: that can wait."""
        try:
            self._tidy()
        except DiskFull:
            return False
        return True

    def _tidy_at_the_end(self) -> None:
        if not self._tidies_at_the_end:
            return
        ends = time.monotonic() + _LAST_SECONDS
        while not self._is_tidy() and time.monotonic() < ends:
            self._tidy()

    def _wait(self, most_seconds: float) -> None:
        """Until a step was recorded, or a callback waits for a commit. Called with the lock held."""
        while not self._is_stopping and not self._is_kicked and not self._callbacks:
            if not self._wake.wait(most_seconds):
                return

    def _write(self, changes: Sequence[Change]) -> None:
        began = time.perf_counter()
        while True:
            try:
                self._commit(changes)
            except DiskFull:
                if not self.is_full:
                    logger.error("the disk of the journal is full: nothing is confirmed until there is space")
                self.is_full = True
                self._metrics.journal_full.set(1)
                with self._lock:
                    if self._is_stopping:
                        raise
                    self._wake.wait(_FULL_SECONDS)
            else:
                break
        if self.is_full:
            logger.warning("the disk of the journal has space again")
            self.is_full = False
            self._metrics.journal_full.set(0)
        self._metrics.journal_commit_seconds.observe(time.perf_counter() - began)
        self._metrics.journal_changes.inc(len(changes))

    def _confirm(self, confirmed: Sequence[tuple[Saved, int]], recorded: int) -> bool:
        """Returns whether anything waited for it."""
        for saved, tokens in confirmed:
            saved.tokens = tokens
        ready: list[Callback] = []
        with self._lock:
            self._saved = recorded
            while self._callbacks and self._callbacks[0][0] <= recorded:
                ready.append(self._callbacks.popleft()[1])
        for callback in ready:
            try:
                callback()
            except Exception:
                logger.exception("a callback after a commit failed")
        return bool(ready)
