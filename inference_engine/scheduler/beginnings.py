"""How a Generate begins: its session is woken, and only then it runs; how long it waited is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from inference_engine.decode.sampling import Sampler
from inference_engine.errors import NoCapacity, RestorationFailed
from inference_engine.metrics import EngineMetrics
from inference_engine.scheduler.endings import Endings
from inference_engine.scheduler.news import News
from inference_engine.scheduler.request import Request, RequestState
from inference_engine.session.session import Session
from inference_engine.types import Failed, StopReason

logger = logging.getLogger(__name__)


class Beginnings:
    """Engine's thread. `enter` moves a request from those that wait to those that run."""

    def __init__(
        self,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        endings: Endings,
        news: News,
        enter: Callable[[Request], None],
        *,
        vocab_size: int,
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._endings = endings
        self._news = news
        self._enter = enter
        self._vocab_size = vocab_size

    def begin(self, request: Request, running: Iterable[Request]) -> None:
        """Let it run, or end it. It goes on waiting if there is no room to wake now and some of `running` give room."""
        session = request.session
        needed = len(session.history) + request.params.max_tokens
        began = self._clock()
        if session.kv.takes_room:
            self._news.release()  # to wake may take a while
        try:
            is_awake = session.kv.wake(needed)
        except RestorationFailed as failed:
            logger.exception("a session could not wake", extra=request.about)
            self._endings.end(request, Failed(failed))
            return
        if not is_awake:
            if any(other.session.kv.takes_room for other in running):
                return  # they give room back when they end
            self._endings.end(request, Failed(_no_room_to_wake(session, needed)))
            return
        request.move(RequestState.RUNNING)
        self._enter(request)
        request.started_at = request.token_at = self._clock()
        if session.kv.takes_room:
            self._metrics.wake_seconds.observe(request.started_at - began)
            request.trace.enter("wake", ago_seconds=request.started_at - began)
        self._metrics.queue_seconds.observe(began - request.accepted_at)
        request.trace.enter("prefill")
        request.prefill_tokens = request.pending_tokens
        request.cached_tokens = session.kv.length
        if session.limit_tokens is not None and len(session.history) >= session.limit_tokens:
            self._endings.end(request, request.finished(StopReason.TRUNCATED, self._clock()))
            return
        self._metrics.prefill_tokens.observe(request.prefill_tokens)
        sampling = request.params.sampling
        seen = session.history.seen(self._vocab_size) if sampling.reads_history else None
        request.sampler = Sampler.start(sampling, request.seed, seen, self._vocab_size, session.kv.context.device)


def _no_room_to_wake(session: Session, tokens: int) -> NoCapacity:
    pool = session.kv.context.pool
    return NoCapacity(
        f"restoring the session's rows for {tokens} tokens needs up to "
        f"{session.kv.bound.peak_bytes - session.kv.bound.sustained_bytes} bytes of K/V, and of the server's "
        f"{pool.capacity_bytes} not so many are free now. Close sessions, or ask for fewer max_tokens",
        retry_after_seconds=1.0,
        capacity_bytes=pool.capacity_bytes,
    )
