"""Results of engine calls: facts about a session and about the engine, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from inference_engine.config import EngineConfig
from inference_engine.kv.strategy import KVStrategy
from inference_engine.session.session import Operation, Session
from inference_engine.types import Bound, Mode, ModelFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOpened:
    """A new session and its guarantees. `limit_tokens` None: its history has no limit.

    bound: the most memory it may hold. reserved_bytes: the part of its sustained bytes that is reserved already.
    """

    session_id: str
    strategy: KVStrategy
    bound: Bound
    limit_tokens: int | None
    reserved_bytes: int
    is_replayed: bool = False  # an earlier call with the same request id made it


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionForked(SessionOpened):
    """As SessionOpened, for a fork, which begins with the history of its parent.

    shared_bytes: bytes of K/V that it reads in the parent's memory; its own bound does not include them.
    is_replayed: an earlier call with the same request id made it.
    """

    history_length: int
    shared_bytes: int
    is_replayed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryLength:
    """The history length of a session, after an append or a close."""

    tokens: int
    is_replayed: bool = False  # an earlier call with the same request id did it


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionInfo:
    """Facts about a session; a failed one answers too, with its `failure_reason`.

    history_bytes: memory of its token ids, including the journal's and those shared with forks.
    """

    history_length: int
    history_bytes: int
    cached_tokens: int
    evicted_tokens: int
    kv_live_bytes: int
    tier_live_bytes: int
    bound: Bound
    reserved_bytes: int
    strategy: KVStrategy
    limit_tokens: int | None
    inv1_violations: int
    inv2_violations: int
    inv3_violations: int
    drafted_tokens: int
    accepted_tokens: int
    idle_seconds: float
    failure_reason: str
    is_generating: bool
    label: str

    @staticmethod
    def of(session: Session, *, now: float, history_bytes: int) -> SessionInfo:
        """now: on the clock of `session.used_at`."""
        return SessionInfo(
            history_length=len(session.history),
            history_bytes=history_bytes,
            cached_tokens=session.cached_tokens,
            evicted_tokens=session.evicted_tokens,
            kv_live_bytes=session.live_bytes,
            tier_live_bytes=session.tier_live_bytes,
            bound=session.kv.bound,
            reserved_bytes=session.kv.reserved.sustained_bytes,
            strategy=session.kv.strategy,
            limit_tokens=session.limit_tokens,
            inv1_violations=session.violations.inv1,
            inv2_violations=session.violations.inv2,
            inv3_violations=session.violations.inv3,
            drafted_tokens=session.drafted_tokens,
            accepted_tokens=session.accepted_tokens,
            idle_seconds=max(0.0, now - session.used_at),
            failure_reason=session.failure_reason,
            is_generating=session.operation is Operation.GENERATE,
            label=session.label,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    facts: ModelFacts
    mode: Mode
    strategies: tuple[str, ...]
    default_strategy: KVStrategy
    limit_tokens: int | None  # the longest history under it; None: there is no end
    default_limit_tokens: int | None  # of a session that asks for no limit
    growth_is_guaranteed: bool  # sessions that do not ask otherwise reserve all their memory at creation
    kv_capacity_bytes: int
    kv_reserved_bytes: int
    tier_capacity_bytes: int
    tier_reserved_bytes: int
    drafter: str  # "": there is none
    config: EngineConfig
