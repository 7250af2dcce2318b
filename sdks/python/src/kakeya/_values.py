"""Results of calls, as frozen values with units in their names."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kakeya._strategies import Strategy
from kakeya._strategies import from_wire as strategy_from_wire
from kakeya.v1 import runtime_pb2 as pb


class StopReason(enum.Enum):
    """Why a Generate ended."""

    MAX_TOKENS = "max_tokens"
    EOS = "eos"  # or a stop id or sequence of the request; it is emitted and stays in the history
    CANCELLED = "cancelled"
    TRUNCATED = "truncated"  # the session's length limit was reached
    CONSTRAINT = "constraint"  # the output is whole by its constraint, and nothing may follow
    UNKNOWN = "unknown"  # a reason newer than this SDK


class Mode(enum.Enum):
    """How equal the results of equal histories are."""

    BATCHED = "batched"  # equal up to rounding
    FIXED_SHAPE = "fixed-shape"  # equal to the bit
    UNKNOWN = "unknown"  # a mode newer than this SDK


class Durability(enum.Enum):
    """What a session's history survives. What a client has received of it is never lost by less."""

    NONE = "none"  # it ends with the server's process
    PROCESS = "process"  # the end of the process, however it comes
    POWER = "power"  # a loss of power as well
    UNKNOWN = "unknown"  # a kind newer than this SDK


STOP_REASONS = {
    pb.GenerateDone.STOP_REASON_MAX_TOKENS: StopReason.MAX_TOKENS,
    pb.GenerateDone.STOP_REASON_EOS: StopReason.EOS,
    pb.GenerateDone.STOP_REASON_CANCELLED: StopReason.CANCELLED,
    pb.GenerateDone.STOP_REASON_TRUNCATED: StopReason.TRUNCATED,
    pb.GenerateDone.STOP_REASON_CONSTRAINT: StopReason.CONSTRAINT,
}
MODES = {pb.MODE_BATCHED: Mode.BATCHED, pb.MODE_FIXED_SHAPE: Mode.FIXED_SHAPE}
DURABILITIES = {
    pb.DURABILITY_UNSPECIFIED: Durability.NONE,  # an older server
    pb.DURABILITY_NONE: Durability.NONE,
    pb.DURABILITY_PROCESS: Durability.PROCESS,
    pb.DURABILITY_POWER: Durability.POWER,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a Generate is from its first token.

    `queue_position` counts the Generates that were ahead when this one was accepted; prefill then runs from 0 to
    `total_tokens`.
    """

    queue_position: int
    done_tokens: int
    total_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TopLogprob:
    """A token that could have come, and its natural log-probability under the raw logits."""

    token_id: int
    logprob: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenDetail:
    """One token, its absolute position, and, if asked for, its natural log-probability under the raw logits, and those
    of the likeliest tokens in its place, the likeliest first."""

    token_id: int
    position: int
    logprob: float | None
    top_logprobs: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateResult:
    """A finished Generate: its tokens, why it stopped, what it cost and what it could read."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None  # one per token; None unless asked for
    stop_reason: StopReason
    history_length: int  # when the stream ended
    seed: int  # in force: the one given, or the one the server drew
    prefill_seconds: float
    total_seconds: float
    prefilled_tokens: int  # history computed by this Generate
    cached_tokens: int  # history whose K/V was cached
    attended_positions: int  # readable by the last token
    evicted_positions: int  # not readable by it
    restored_positions: int  # of the attended ones, those it read in a coded or restored form
    truncated_tokens: int  # positions that were unreadable already at the first token
    drafted_tokens: int  # draft tokens that were verified
    accepted_tokens: int  # how many of them were accepted
    is_degraded: bool  # the drafter failed and was not used any more; the tokens are not affected
    fits_constraint: bool | None = None  # is the output whole by its constraint? False: it was cut; None: it had none
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] | None = None  # one tuple per token; None unless asked for
    stop_sequence: int | None = None  # which of `stop_sequences` ended it; None: none did

    @property
    def generated_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionInfo:
    """Facts about a session at one moment."""

    history_length: int
    cached_tokens: int  # positions with K/V, evicted ones included; the rest of the history waits for prefill
    evicted_tokens: int
    kv_live_bytes: int  # held now
    sustained_bytes: int  # held at most between Generates
    reserved_bytes: int  # of them, reserved now; less than all: the session is granted more as it grows
    peak_bytes: int  # held at most ever
    limit_tokens: int | None  # longest history the session can reach; None: no limit
    strategy: Strategy | None  # None: of a kind newer than this SDK
    is_generating: bool
    idle_seconds: float
    failure_reason: str  # why the session failed; empty: it has not
    inv1_violations: int
    inv2_violations: int
    inv3_violations: int
    drafted_tokens: int  # draft tokens that were verified in all Generates
    accepted_tokens: int  # how many of them were accepted
    tier_live_bytes: int  # held off the device now, in the server's memory
    tier_bytes: int  # held there at most; reserved
    label: str  # as it was given when the session was made; empty: none was
    history_bytes: int  # of the server's memory that the token ids take, those shared with forks included
    is_resident: bool  # in the server's memory; if not, the next call that uses the session brings it back
    saved_tokens: int  # of the history that are safe by the session's durability; 0 with NONE
    eos_token_ids: tuple[int, ...] = ()  # end every Generate of the session
    spare_live_bytes: int = 0  # held beyond those and peak_bytes, until anything needs the memory


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSummary:
    """One session of `Client.sessions()`, at the moment its page was read."""

    id: str
    label: str
    history_length: int
    age_seconds: float  # since it was made
    idle_seconds: float  # since it was used last
    is_resident: bool  # as in SessionInfo
    is_generating: bool
    failure_reason: str  # why the session failed; empty: it has not
    strategy: Strategy | None  # None: of a kind newer than this SDK


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryPiece:
    """Consecutive tokens of a history, and how they came.

    `run_lengths`: so many of `token_ids` were appended, then so many generated, then so many appended, and so on. The
    first may be 0.
    """

    first_position: int
    token_ids: tuple[int, ...]
    run_lengths: tuple[int, ...]
    history_length: int  # of the whole, when the piece was read


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What Generates took that have ended, of sessions that closed, too."""

    prefilled_tokens: int  # history that was computed
    cached_tokens: int  # history whose K/V was cached
    generated_tokens: int
    drafted_tokens: int  # draft tokens that were verified
    accepted_tokens: int  # how many of them were accepted


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerInfo:
    """Facts about the server: its model, its limits, what it can do."""

    version: str
    model_id: str
    vocab_size: int
    trained_positions: int
    device: str
    dtype: str
    mode: Mode
    strategies: tuple[str, ...]
    default_strategy: Strategy | None  # None: of a kind newer than this SDK
    max_generate_tokens: int
    max_append_tokens: int
    max_message_bytes: int
    kv_capacity_bytes: int
    kv_reserved_bytes: int  # by your own sessions
    segment_tokens: int
    session_idle_ttl_seconds: float
    drafter: str  # the drafter of Generates that allow it; empty: none
    tier_capacity_bytes: int  # off the device, in the server's memory or in files
    tier_reserved_bytes: int  # by your own sessions
    default_limit_tokens: int | None  # of a session that asks for no limit; None: there is none
    growth_guaranteed: bool  # sessions that do not ask otherwise reserve all their memory at creation
    history_tokens_per_session: int  # the longest history a session may have, whatever its own limit; 0: no limit
    history_tokens_per_owner: int  # in all your sessions, what forks share counted once; 0: no limit
    history_tokens: int  # in your sessions now, counted so
    backend: str = ""  # what runs the model: native, torch; empty: an older server
    numerics: str = ""  # the numeric identity: within one, equal histories have equal logits
    durability: Durability = Durability.NONE  # of sessions that are made now
    eos_token_ids: tuple[int, ...] = ()  # end a turn of the model: of sessions that name no others
    shares_prefixes: bool = False  # what your sessions begin with is prefilled once; False: of forks alone
    prefix_capacity_bytes: int = 0  # of closed sessions' K/V, kept for new ones while no session needs the memory
    prefix_bytes: int = 0  # kept of your own
    recurrent_state_bytes: int = 0  # of a session, whatever its strategy and its length; part of its sustained_bytes
    usage: Usage | None = None  # of your own Generates; None: an older server


def session_info(reply: pb.GetSessionInfoResponse) -> SessionInfo:
    return SessionInfo(
        history_length=reply.history_length,
        cached_tokens=reply.cached_token_count,
        evicted_tokens=reply.evicted_token_count,
        kv_live_bytes=reply.kv_live_bytes,
        sustained_bytes=reply.sustained_bytes,
        reserved_bytes=reply.reserved_bytes,
        peak_bytes=reply.peak_bytes,
        limit_tokens=reply.limit_tokens if reply.HasField("limit_tokens") else None,
        strategy=strategy_from_wire(reply.strategy),
        is_generating=reply.generating,
        idle_seconds=reply.idle_seconds,
        failure_reason=reply.failure_reason,
        inv1_violations=reply.cache_invariant_inv1_violations,
        inv2_violations=reply.cache_invariant_inv2_violations,
        inv3_violations=reply.cache_invariant_inv3_violations,
        drafted_tokens=reply.drafted_token_count,
        accepted_tokens=reply.accepted_token_count,
        tier_live_bytes=reply.tier_live_bytes,
        tier_bytes=reply.tier_bytes,
        label=reply.client_label,
        history_bytes=reply.history_bytes,
        is_resident=reply.resident,
        saved_tokens=reply.saved_token_count,
        spare_live_bytes=reply.spare_live_bytes,
        eos_token_ids=tuple(reply.eos_token_ids),
    )


def session_summary(listed: pb.SessionSummary) -> SessionSummary:
    return SessionSummary(
        id=listed.session_id,
        label=listed.client_label,
        history_length=listed.history_length,
        age_seconds=listed.age_seconds,
        idle_seconds=listed.idle_seconds,
        is_resident=listed.resident,
        is_generating=listed.generating,
        failure_reason=listed.failure_reason,
        strategy=strategy_from_wire(listed.strategy),
    )


def history_piece(reply: pb.ReadHistoryResponse) -> HistoryPiece:
    return HistoryPiece(
        first_position=reply.first_position,
        token_ids=tuple(reply.token_ids),
        run_lengths=tuple(reply.run_lengths),
        history_length=reply.history_length,
    )


def server_info(reply: pb.GetServerInfoResponse) -> ServerInfo:
    return ServerInfo(
        version=reply.version,
        model_id=reply.model_id,
        vocab_size=reply.vocab_size,
        trained_positions=reply.trained_position_count,
        device=reply.device,
        dtype=reply.dtype,
        mode=MODES.get(reply.mode, Mode.UNKNOWN),
        strategies=tuple(reply.strategies),
        default_strategy=strategy_from_wire(reply.default_strategy),
        max_generate_tokens=reply.max_tokens_limit,
        max_append_tokens=reply.max_append_tokens,
        max_message_bytes=reply.max_message_bytes,
        kv_capacity_bytes=reply.kv_capacity_bytes,
        kv_reserved_bytes=reply.kv_reserved_bytes,
        segment_tokens=reply.segment_tokens,
        session_idle_ttl_seconds=reply.session_idle_ttl_seconds,
        drafter=reply.drafter,
        tier_capacity_bytes=reply.tier_capacity_bytes,
        tier_reserved_bytes=reply.tier_reserved_bytes,
        default_limit_tokens=reply.default_limit_tokens if reply.HasField("default_limit_tokens") else None,
        growth_guaranteed=reply.growth_guaranteed,
        history_tokens_per_session=reply.history_tokens_per_session,
        history_tokens_per_owner=reply.history_tokens_per_owner,
        history_tokens=reply.history_token_count,
        backend=reply.backend,
        numerics=reply.numerics,
        durability=DURABILITIES.get(reply.durability, Durability.UNKNOWN),
        eos_token_ids=tuple(reply.eos_token_ids),
        shares_prefixes=reply.shares_prefixes,
        prefix_capacity_bytes=reply.prefix_capacity_bytes,
        prefix_bytes=reply.prefix_bytes,
        usage=_usage(reply.usage) if reply.HasField("usage") else None,
        recurrent_state_bytes=reply.recurrent_state_bytes,
    )


def _usage(message: pb.Usage) -> Usage:
    return Usage(
        prefilled_tokens=message.prefilled_token_count,
        cached_tokens=message.cached_token_count,
        generated_tokens=message.generated_token_count,
        drafted_tokens=message.drafted_token_count,
        accepted_tokens=message.accepted_token_count,
    )
