"""Statistics of an engine at this moment, for the gauges."""

from __future__ import annotations

from collections import Counter

from inference_engine.kv.context import KVContext
from inference_engine.metrics import EngineStatistics
from inference_engine.scheduler.loop import Scheduler
from inference_engine.scheduler.request import RequestState
from inference_engine.session.capacity import orphaned_bytes
from inference_engine.session.session import Holder, Session
from inference_engine.session.store import SessionStore


def collect_statistics(store: SessionStore, scheduler: Scheduler, context: KVContext, now: float) -> EngineStatistics:
    """Any thread. Sessions may change state while they are counted; each is counted once."""
    requests = scheduler.requests()
    generating = {
        request.session: _state(request.state is RequestState.QUEUED, is_prefilling=request.is_prefilling)
        for request in requests
    }
    sessions: Counter[tuple[str, str]] = Counter()
    kv_bytes: Counter[str] = Counter()
    tier_bytes, history = 0, store.held_history()
    for session in store.sessions():
        sessions[session.kv.strategy.name, generating.get(session) or _at_rest(session)] += 1
        kv_bytes.update(session.live_kinds)
        tier_bytes += session.tier_live_bytes
    waiting = sum(state == "queued" for state in generating.values())
    return EngineStatistics(
        sessions=sessions,
        kv_bytes=kv_bytes,
        kv_reserved_bytes=context.pool.reserved_bytes,
        kv_capacity_bytes=context.pool.capacity_bytes,
        kv_spare_bytes=context.pool.rooms.nbytes,
        kv_kept_for_forks_bytes=orphaned_bytes(store.sessions()),
        tier_bytes=tier_bytes,
        tier_reserved_bytes=context.tier.reserved_bytes,
        history_tokens=history.tokens,
        history_bytes=history.nbytes,
        remembered_replies=store.remembered_replies(),
        waiting=waiting,
        running=len(generating) - waiting,
        beat_age_seconds=max(0.0, now - scheduler.beat_at) if requests else 0.0,
    )


def _state(is_queued: bool, *, is_prefilling: bool) -> str:
    return "queued" if is_queued else "prefilling" if is_prefilling else "decoding"


def _at_rest(session: Session) -> str:
    if session.failure_reason:
        return "failed"
    if session.operation is Holder.APPEND:
        return "appending"
    return "dropped" if session.kv.is_dropped else "idle"
