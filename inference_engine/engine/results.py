"""Results of engine calls: facts about a session and about the engine, as frozen values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inference_engine.config import EngineConfig
from inference_engine.kv.strategy import KVStrategy
from inference_engine.session.history import Marks, TokenIds
from inference_engine.session.journal import SessionEntry, TokensRecord
from inference_engine.session.session import Holder, Session, Violations
from inference_engine.types import Bound, Durability, Mark, Mode, ModelFacts


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
    # In ascending order. None: the reply is one that an older program has kept.
    eos_token_ids: tuple[int, ...] | None = None
    is_replayed: bool = False  # an earlier call with the same request id made it

    @staticmethod
    def of(session: Session) -> SessionOpened:
        return SessionOpened(**_guarantees(session))


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionForked(SessionOpened):
    """As SessionOpened, for a session that begins with tokens of another: a fork, or one that went back.

    shared_bytes: bytes of K/V that it reads in another's memory; its own bound does not include them.
    prefill_tokens: how many tokens its first Generate prefills, if nothing is appended before; at most so many if it is
    read from a copy in a file, of which some strategies see only then what they can have, or if another session that
    begins alike was prefilled meanwhile. None: the reply is one that an older program has kept.
    is_replayed: an earlier call with the same request id made it.
    """

    history_length: int
    shared_bytes: int
    prefill_tokens: int | None = None
    is_replayed: bool = False

    @staticmethod
    def of(session: Session, found: int = 0) -> SessionForked:
        """found: so many of its first tokens have K/V in a copy."""
        length = len(session.history)
        return SessionForked(
            **_guarantees(session),
            history_length=length,
            shared_bytes=session.kv.shared_bytes,
            prefill_tokens=session.kv.pending(length, found=found),
        )


def _guarantees(session: Session) -> dict[str, Any]:
    return {
        "session_id": session.session_id,
        "strategy": session.kv.strategy,
        "bound": session.kv.bound,
        "limit_tokens": session.limit_tokens,
        "reserved_bytes": session.kv.reserved.sustained_bytes,
        "eos_token_ids": tuple(sorted(session.eos_token_ids)),
    }


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
    spare_live_bytes: int  # beyond those and the bound, of what is free
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
    is_resident: bool  # its K/V has memory; else it is computed again when it is needed
    saved_tokens: int  # of the history, kept by the journal; 0 without one that keeps sessions
    label: str
    eos_token_ids: tuple[int, ...]  # in ascending order

    @staticmethod
    def of(session: Session, *, now: float, history_bytes: int, is_kept: bool, saved_only: bool) -> SessionInfo:
        """now: on the clock of `session.used_at`. saved_only: of the history, what is safe."""
        length = session.saved_length if saved_only else len(session.history)
        return SessionInfo(
            history_length=length,
            history_bytes=history_bytes,
            cached_tokens=min(session.cached_tokens, length),
            evicted_tokens=session.evicted_tokens,
            kv_live_bytes=session.live_bytes,
            spare_live_bytes=session.kv.spare_bytes,
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
            is_generating=session.operation is Holder.GENERATE,
            is_resident=not session.kv.is_dropped,
            saved_tokens=session.saved_length if is_kept else 0,
            label=session.label,
            eos_token_ids=tuple(sorted(session.eos_token_ids)),
        )

    @staticmethod
    def kept(
        entry: SessionEntry, strategy: KVStrategy, *, bound: Bound, violations: Violations, idle_seconds: float
    ) -> SessionInfo:
        """Of a session that is in the journal only. bound: that it would have in memory."""
        return SessionInfo(
            history_length=entry.history_length,
            history_bytes=0,
            cached_tokens=0,
            evicted_tokens=0,
            kv_live_bytes=0,
            spare_live_bytes=0,
            tier_live_bytes=0,
            bound=bound,
            reserved_bytes=0,
            strategy=strategy,
            limit_tokens=entry.record.limit_tokens,
            inv1_violations=violations.inv1,
            inv2_violations=violations.inv2,
            inv3_violations=violations.inv3,
            drafted_tokens=0,
            accepted_tokens=0,
            idle_seconds=max(0.0, idle_seconds),
            failure_reason="",
            is_generating=False,
            is_resident=False,
            saved_tokens=entry.history_length,
            label=entry.record.label,
            eos_token_ids=entry.record.eos_token_ids,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionListed:
    """What a list of sessions says of one."""

    session_id: str
    label: str
    history_length: int
    age_seconds: float
    idle_seconds: float
    is_resident: bool
    is_generating: bool
    failure_reason: str
    strategy: KVStrategy

    @staticmethod
    def of(session: Session, *, now: float, today: float) -> SessionListed:
        """now: on the clock of `session.used_at`; today: seconds since 1970."""
        return SessionListed(
            session_id=session.session_id,
            label=session.label,
            history_length=session.saved_length,
            age_seconds=max(0.0, today - session.created_at),
            idle_seconds=max(0.0, now - session.used_at),
            is_resident=not session.kv.is_dropped,
            is_generating=session.operation is Holder.GENERATE,
            failure_reason=session.failure_reason,
            strategy=session.kv.strategy,
        )

    @staticmethod
    def kept(entry: SessionEntry, strategy: KVStrategy, *, today: float, idle_seconds: float) -> SessionListed:
        """Of a session that is in the journal only."""
        return SessionListed(
            session_id=entry.record.session_id,
            label=entry.record.label,
            history_length=entry.history_length,
            age_seconds=max(0.0, today - entry.record.created_at),
            idle_seconds=max(0.0, idle_seconds),
            is_resident=False,
            is_generating=False,
            failure_reason="",
            strategy=strategy,
        )


@dataclass(frozen=True, slots=True)
class HistoryPiece:
    """Token ids of a history from the position `first` on, their marks, and the length of the whole history."""

    first: int
    token_ids: TokenIds
    marks: Marks
    history_length: int

    @staticmethod
    def kept(first: int, records: Sequence[TokensRecord], history_length: int) -> HistoryPiece:
        ids = [np.zeros(0, dtype=np.uint32), *(record.token_ids for record in records)]
        marks = [np.full(len(record.token_ids), record.mark, dtype=np.uint8) for record in records]
        return HistoryPiece(
            first, np.concatenate(ids), np.concatenate([np.zeros(0, dtype=np.uint8), *marks]), history_length
        )

    def run_lengths(self) -> list[int]:
        """How many of the ids were appended, then generated, then appended, and so on; the first may be 0."""
        if not len(self.marks):
            return []
        edges = np.flatnonzero(np.diff(self.marks)) + 1
        runs: list[int] = np.diff(edges, prepend=0, append=len(self.marks)).tolist()
        return runs if self.marks[0] == Mark.APPENDED else [0, *runs]


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
    prefix_capacity_bytes: int
    recurrent_state_bytes: int  # of a session, whatever its strategy; part of its bound
    tier_capacity_bytes: int
    tier_reserved_bytes: int
    drafter: str  # "": there is none
    end_ids: tuple[int, ...]  # end a turn by the model's files, in ascending order
    config: EngineConfig
    durability: Durability = Durability.NONE
