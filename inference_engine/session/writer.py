"""The journal's thread (group commit): commits what was recorded in one transaction, one fsync, and confirms it.

    engine's thread    record A, B, … │ request_sync │ plan, forward of the next step …
    this thread                                      │ commit A, B, … │ call back what waited for them

Confirmations wait for the disk, the engine does not. What can be done later comes a moment after them: those who were
called back run first, and need the interpreter for that.

    the disk is full    undo what was not answered │ commit the rest from the reserve │ and what is recorded
                        meanwhile, such as sessions that are closed │ until there is room again

    it is away          call back what waits │ commit the same changes again, until they are safe: nothing is undone

    others have it      all that is recorded is lost, and so are the sessions in memory │ go on with new ones

Any other error is final: what the disk has is not known then, so nothing is confirmed, and the process has to end.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from inference_engine.logs import unexplained
from inference_engine.metrics import EngineMetrics
from inference_engine.session.journal import SAFE, Receipt, Saved

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
_AWAY_SECONDS = 0.25  # between two attempts to reach a journal that is away
_MOST_WAITING = 20_000  # changes: a step of 128 streams is 128


class DiskFull(Exception):
    """There is no space; nothing was changed, and the same changes may be committed later."""


class Away(Exception):
    """The journal cannot be reached for now, and whether the changes were made may not be known.

    The next commit has the same ones: the journal finds out whether it has them, and makes them once.
    """


class Lost(Exception):
    """Other servers have taken over this one's sessions: what is recorded and not committed never will be."""


@dataclass(slots=True, eq=False)
class Unit(Receipt):
    """Changes that are kept together or not at all.

    confirmed: token counts that are safe with them. refuse: undoes in memory what was recorded, since the disk has no
    space for it; False if it is too late for that. replaced: what was recorded of the same session before.
    """

    changes: list[Change] = field(default_factory=list)
    confirmed: list[tuple[Saved, int]] = field(default_factory=list)
    refuse: Callable[[], bool] | None = None
    replaced: Receipt = SAFE

    def settle(self, *, is_safe: bool, is_lost: bool = False) -> None:
        self.is_safe, self.is_refused, self.is_lost = is_safe, not is_safe, is_lost
        self.changes, self.confirmed, self.refuse, self.replaced = [], [], None, SAFE


class Writer:
    """Any thread records and asks; the functions it is given are called on the writer's own.

    commit: applies changes, all or none, and makes them safe; raises DiskFull, Away or Lost. tidy: does deferred work
    for some milliseconds; raises them, too. is_tidy: says whether there is none. make_room: gives up the reserve.
    has_room: takes it back if there is room for it again; raises DiskFull if not even a row can be written.
    tidies_at_the_end: until then a stop waits, for a moment. is_full: the disk, at the start. lose: called with a
    function that settles all that is recorded as lost; lets the sessions leave memory together with that, and begins
    anew.
    """

    THREAD_NAME = "kakeya-journal"

    def __init__(
        self,
        commit: Callable[[Sequence[Change]], None],
        tidy: Callable[[], None],
        is_tidy: Callable[[], bool],
        metrics: EngineMetrics,
        *,
        make_room: Callable[[], None] = lambda: None,
        has_room: Callable[[], bool] = lambda: True,
        tidies_at_the_end: bool = True,
        is_full: bool = False,
        lose: Callable[[Callback], object] = lambda settle: settle(),
    ) -> None:
        self._tidies_at_the_end = tidies_at_the_end
        self._commit = commit
        self._tidy = tidy
        self._is_tidy = is_tidy
        self._make_room = make_room
        self._has_room = has_room
        self._lose = lose
        self._metrics = metrics
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._units: list[Unit] = []
        # A heap of what waits for the unit of a number: the number, an order, whether it waits for that unit's fate.
        self._callbacks: list[tuple[int, int, bool, Callback]] = []
        self._order = itertools.count()
        self._recorded = self._saved = 0  # units
        self._waiting = 0  # changes that are not safe
        self._is_sync_requested = self._is_stopping = False
        self.is_full = is_full
        self.is_stuck = False  # full, and not even what is recorded can be written
        self.is_away = False
        self.failure = ""
        self._thread = threading.Thread(target=self._run, name=self.THREAD_NAME, daemon=True)
        self._thread.start()

    def record(self, unit: Unit) -> None:
        """Queue a unit behind those that were recorded before."""
        with self._lock:
            self._recorded += 1
            unit.number = self._recorded
            self._units.append(unit)
            self._waiting += len(unit.changes)

    def on_saved(self, callback: Callback, receipt: Receipt | None = None) -> None:
        """Call back once all is safe that was recorded until now; of a receipt, once it is safe or refused, and each
        time when there is no space for it, or the journal is away."""
        with self._lock:
            # One without a number is just being recorded.
            number = self._recorded if receipt is None else receipt.number or self._recorded + 1
            is_now = number <= self._saved if receipt is None else receipt.is_safe or receipt.is_refused
            if not is_now:
                heapq.heappush(self._callbacks, (number, next(self._order), receipt is not None, callback))
                self._wake.notify()
        if is_now:
            callback()

    def request_sync(self) -> None:
        with self._lock:
            self._is_sync_requested = True
            self._wake.notify()

    def is_behind(self) -> bool:
        return self.is_full or self.is_away or bool(self.failure) or self._waiting > _MOST_WAITING

    def flush(self, seconds: float, receipt: Receipt | None = None) -> bool:
        """Wait until all that was recorded until now is safe, or a receipt, at most so long. Is it?

        Of a receipt it is known at once that there is no space for it, or that the journal is away.
        """
        ends = time.monotonic() + seconds
        while True:
            done = threading.Event()
            self.on_saved(done.set, receipt)
            while not done.wait(_LOOK_SECONDS):
                if self.failure or time.monotonic() > ends:
                    return False
            if receipt is None or receipt.is_safe:
                return True
            if receipt.is_refused or self.is_full or self.is_away:
                return False

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
                if not self.is_full:  # as it may be at the start
                    self._wait(_QUIET_SECONDS if has_more else _IDLE_SECONDS)
                is_over = self._is_stopping and not self._units and not self._callbacks
                units, self._units = self._units, []
                self._is_sync_requested = False
            try:
                if is_over:
                    self._tidy_at_the_end()
                    return
                has_called = self._write(units)
                commits += bool(units)
                has_room = True
                is_time = (not has_called and not self._units) or commits >= _MOST_UNTIDY
                if is_time and not self._is_stopping:
                    commits, has_room = 0, self._has_tidied()
                has_more = has_room and not self._is_tidy()
            except (DiskFull, Away, Lost):  # the server stops, and what is recorded, or tidying, has to wait for longer
                return
            except Exception as error:
                logger.critical("the journal cannot be written any more: %s", error, exc_info=unexplained(error))
                self.failure = f"{type(error).__name__}: {error}"
                return

    def _has_tidied(self) -> bool:
        """False if it cannot be done now: that can wait."""
        try:
            self._tidy()
        except (DiskFull, Away):
            return False
        except Lost as lost:
            self._give_up([], lost)
        return True

    def _tidy_at_the_end(self) -> None:
        if not self._tidies_at_the_end:
            return
        ends = time.monotonic() + _LAST_SECONDS
        while not self._is_tidy() and time.monotonic() < ends:
            self._tidy()

    def _wait(self, most_seconds: float) -> None:
        """Until a step was recorded, or a callback waits for a commit. Called with the lock held."""
        while not self._is_stopping and not self._is_sync_requested and not self._callbacks:
            if not self._wake.wait(most_seconds):
                return

    def _write(self, units: list[Unit]) -> bool:
        """Commit them, however long the disk is full. Returns whether anything waited for it."""
        if self.is_full:
            return self._outlast(units)
        if not units:
            return self._call_back([])
        try:
            self._commit_units(units)
        except DiskFull:
            return self._outlast(units)
        return self._call_back([])

    def _outlast(self, units: list[Unit]) -> bool:
        """The disk is full: go on from the reserve until there is room. Raises DiskFull if the writer stops before."""
        logger.error("the disk of the journal is full: sessions can be read and closed, and all else waits for space")
        self.is_full, has_called = True, False
        self._metrics.journal_full.set(1)
        units = _without_refused(units)
        self._make_room()
        while not self._has_recovered(units):
            self.is_stuck = bool(units)
            has_called |= self._call_back(units)
            with self._lock:
                if self._is_stopping and (units or not self._units):
                    raise DiskFull
                self._wake.wait_for(lambda: self._units or self._is_stopping, _FULL_SECONDS)
                came, self._units = self._units, []
            units += _without_refused(came)
        self.is_full = self.is_stuck = False
        self._metrics.journal_full.set(0)
        logger.warning("the disk of the journal has space again")
        return has_called | self._call_back([])

    def _has_recovered(self, units: list[Unit]) -> bool:
        """Commit what waits, of which nothing is left in `units` then. Is there room for more?"""
        try:
            if units:
                self._commit_units(units)
                units.clear()
            return self._has_room()
        except DiskFull:
            return False
        except Away:
            if self._is_stopping:
                raise
            return False
        except Lost as lost:
            self._give_up([], lost)
            return False

    def _commit_units(self, units: Sequence[Unit]) -> None:
        began = time.perf_counter()
        changes = [change for unit in units for change in unit.changes]
        try:
            try:
                self._commit(changes)
            except Away as away:
                self._until_back(units, changes, away)
        except Lost as lost:
            self._give_up(units, lost)
            return
        self._metrics.journal_commit_seconds.observe(time.perf_counter() - began)
        self._metrics.journal_changes.inc(len(changes))
        for unit in units:
            if not unit.is_lost:
                for saved, tokens in unit.confirmed:
                    saved.tokens = tokens
                unit.settle(is_safe=True)

    def _give_up(self, units: Sequence[Unit], lost: Lost) -> None:
        """Of what was taken, `units` are not safe, and never will be."""
        logger.error("other servers have taken over the sessions of this one, which goes on without them: %s", lost)

        def settle() -> None:
            with self._lock:
                came, self._units = self._units, []
            for unit in (*units, *came):
                unit.settle(is_safe=False, is_lost=True)

        self.is_away = True  # until it has begun anew
        self._metrics.journal_away.set(1)
        self._metrics.journal_lost.inc()
        try:
            self._lose(settle)
        finally:
            self.is_away = False
            self._metrics.journal_away.set(0)

    def _until_back(self, units: Sequence[Unit], changes: Sequence[Change], away: Away) -> None:
        """Commit the same changes until the journal is there again. Raises Away if the writer stops before."""
        logger.error("the journal cannot be reached: what would change it, or has to read it, waits: %s", away)
        self.is_away = True
        self._metrics.journal_away.set(1)
        while self.is_away:
            self._call_back(units)
            with self._lock:
                self._wake.wait_for(lambda: self._is_stopping, _AWAY_SECONDS)
            try:
                self._commit(changes)
                self.is_away = False
            except Away:
                if self._is_stopping:
                    raise
            except DiskFull:
                self.is_away = False
                raise
            finally:
                self._metrics.journal_away.set(int(self.is_away))
        logger.warning("the journal is there again")

    def _call_back(self, left: Sequence[Unit]) -> bool:
        """All but `left` is settled of what was taken. Returns whether anything waited for it."""
        with self._lock:
            first = (left or self._units)[:1]
            self._saved = first[0].number - 1 if first else self._recorded
            self._waiting = sum(len(unit.changes) for unit in (*left, *self._units))
            ready: list[Callback] = []
            while self._callbacks and self._callbacks[0][0] <= self._saved:
                ready.append(heapq.heappop(self._callbacks)[-1])
            if left:  # those that want to know that it cannot be safe now
                ready += [callback for *_, is_of_receipt, callback in self._callbacks if is_of_receipt]
                self._callbacks = [waiting for waiting in self._callbacks if not waiting[2]]
                heapq.heapify(self._callbacks)
        for callback in ready:
            try:
                callback()
            except Exception:
                logger.exception("a callback after a commit failed")
        return bool(ready)


def _without_refused(units: Sequence[Unit]) -> list[Unit]:
    """Refuse those that can be undone, the last one first, since what comes later may build on what came before."""
    kept = []
    for unit in reversed(units):
        if unit.refuse is not None and unit.refuse():
            unit.settle(is_safe=False)
        else:
            kept.append(unit)
    return kept[::-1]
