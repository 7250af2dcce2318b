"""Generates that arrive: whether one more may wait, and how long that would be.

The holder of the scheduler's lock calls this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from inference_engine.config import EngineConfig
from inference_engine.errors import Overloaded, QuotaExceeded
from inference_engine.metrics import EngineMetrics
from inference_engine.scheduler.policy import may_join, places
from inference_engine.scheduler.request import Request
from inference_engine.scheduler.step_time import EndPace
from inference_engine.scheduler.ttft_prediction import Room, TTFTPredictor

_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 0.05, 60.0


class Arrivals:
    """Knows what steps and waits took so far. Requests are given to each call: the scheduler has them."""

    def __init__(self, config: EngineConfig, metrics: EngineMetrics, clock: Callable[[], float]) -> None:
        self._config, self._metrics, self._clock = config, metrics, clock
        self._pace = EndPace()
        room = Room(
            max_running=config.max_running,
            max_running_per_owner=config.max_running_per_owner,
            max_batch=config.max_batch,
            segment_tokens=config.segment_tokens,
        )
        self._ttft = TTFTPredictor(room, config.max_first_token_seconds)
        self.stepped, self.answered = self._ttft.stepped, self._ttft.answered

    def places_ahead(self, owner: str, running: Iterable[Request], queued: Iterable[Request]) -> int:
        """Generates of the owner that wait or run. Raises Overloaded or QuotaExceeded if one more may not wait."""
        config = self._config
        runs, waiting = by_owner(running), by_owner(queued)
        most = config.max_queued_per_owner
        free = places(owner, runs, most=config.max_running, most_per_owner=config.max_running_per_owner)
        if most and waiting[owner] >= most + free:
            self._metrics.refused.labels("owner_queue").inc()
            raise QuotaExceeded(
                "max_queued_per_owner",
                most,
                f"{waiting[owner]} Generates of yours are waiting, as many as one owner's may; retry later",
                retry_after_seconds=self._seconds_until_next(waiting),
            )
        room = config.max_queued + max(0, config.max_running - runs.total())
        if not may_join(owner, waiting, most=room):
            self._metrics.refused.labels("queue").inc()
            raise Overloaded(
                f"{waiting.total()} Generates are waiting already; retry later",
                retry_after_seconds=self._seconds_until_next(waiting),
            )
        return waiting[owner] + runs[owner]

    def foresee(
        self,
        request: Request,
        running: Collection[Request],
        queued: Iterable[Request],
        *,
        changes: int,
        is_alone: bool,
        refuse_late: bool,
    ) -> None:
        """Predict its wait. Raises Overloaded if that is too long because of other owners, but never for an owner's
        only Generate. changes: as of `TTFTPredictor.predict`."""
        if not self._config.max_first_token_seconds:
            return
        request.predicted = self._ttft.predict(request, running, queued, changes=changes)
        if request.predicted is None:
            return
        lateness = self._ttft.lateness(self._clock())
        wait = request.predicted.counted * lateness
        limit = self._ttft.longest_seconds(len(running), lateness)
        self._metrics.predicted_wait_seconds.observe(request.predicted.wait * lateness)
        if refuse_late and wait > limit and not is_alone:
            self._metrics.refused.labels("first_token").inc()
            raise Overloaded(
                f"this Generate would wait {wait:.1f} s, for other owners' too, before its first token, and the server "
                f"allows {limit:.3g} s; retry later",
                retry_after_seconds=min(max(wait - limit, _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS),
            )

    def ended(self, request: Request) -> None:
        """It gave its place back."""
        self._ttft.ended(request)
        self._pace.ended(self._clock())

    def _seconds_until_next(self, waiting: Counter[str]) -> float:
        """When one more Generate of an owner will have begun: owners take turns."""
        return self._pace.seconds_for(len(waiting), self._clock())


def by_owner(requests: Iterable[Request]) -> Counter[str]:
    return Counter(request.session.owner for request in requests)
