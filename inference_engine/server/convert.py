"""Converts wire messages to engine values and back.

Strategies need no code here: an arm of the `Strategy` oneof is named like the strategy, its fields like the options. A
strategy without an arm is sent as text in the arm `named`. `check_strategies` finds one that does not match its arm. An
arm whose strategy is not registered belongs to a package named like it.
Checks that need only the message are made while converting; InvalidArgument has the field's name on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from inference_engine.engine.results import (
    EngineInfo,
    HistoryLength,
    HistoryPiece,
    SessionForked,
    SessionInfo,
    SessionListed,
    SessionOpened,
)
from inference_engine.errors import ConfigError, InvalidArgument, InvalidConstraint
from inference_engine.kv.strategies import STRATEGIES, make_strategy, option_types, read_strategy, strategy_names
from inference_engine.kv.strategy import KVStrategy
from inference_engine.session.history import TokenIds
from inference_engine.types import (
    MAX_SET_NUMBERS,
    Accepted,
    Bound,
    Constraint,
    ConstraintKind,
    Durability,
    Event,
    Finished,
    GenerateParams,
    Mode,
    Progress,
    Sampling,
    StopReason,
    TokenCommitted,
    TokenSet,
    TokenUsage,
    Truncated,
    check_choices,
    check_logit_bias,
    check_stop_sequences,
    check_stop_token_ids,
)
from kakeya.v1 import runtime_pb2 as pb

# Of silence before the first token.
_LEAST_HEARTBEAT_SECONDS, _MOST_HEARTBEAT_SECONDS = 0.1, 3600.0
_MODES = {Mode.BATCHED: pb.MODE_BATCHED, Mode.FIXED_SHAPE: pb.MODE_FIXED_SHAPE}
_DURABILITIES = {
    Durability.NONE: pb.DURABILITY_NONE,
    Durability.PROCESS: pb.DURABILITY_PROCESS,
    Durability.POWER: pb.DURABILITY_POWER,
}
# The arm for strategies without one of their own, and the others by name.
_NAMED = "named"
_ARMS: dict[str, Any] = {
    arm.name: arm.message_type for arm in pb.Strategy.DESCRIPTOR.oneofs_by_name["kind"].fields if arm.name != _NAMED
}
_FIELD_KINDS: dict[int, type] = {
    **dict.fromkeys(
        (
            FieldDescriptor.CPPTYPE_INT32,
            FieldDescriptor.CPPTYPE_INT64,
            FieldDescriptor.CPPTYPE_UINT32,
            FieldDescriptor.CPPTYPE_UINT64,
        ),
        int,
    ),
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_STRING: str,
}
_STOP_REASONS = {
    StopReason.MAX_TOKENS: pb.GenerateDone.STOP_REASON_MAX_TOKENS,
    StopReason.EOS: pb.GenerateDone.STOP_REASON_EOS,
    StopReason.CANCELLED: pb.GenerateDone.STOP_REASON_CANCELLED,
    StopReason.TRUNCATED: pb.GenerateDone.STOP_REASON_TRUNCATED,
    StopReason.CONSTRAINT: pb.GenerateDone.STOP_REASON_CONSTRAINT,
}


def strategy_from_wire(message: pb.Strategy) -> KVStrategy:
    """The strategy of a request. Raises InvalidArgument with the path of the invalid field."""
    arm = message.WhichOneof("kind")
    if arm is None:
        raise InvalidArgument(
            "strategy", f"no strategy that this server supports is set; it supports {', '.join(strategy_names())}"
        )
    try:
        if arm == _NAMED:
            strategy = read_strategy(message.named.name, message.named.options)
            _refuse_uncarried(strategy)
            return strategy
        if STRATEGIES.get(arm) is None and arm not in STRATEGIES.broken:
            raise InvalidArgument(
                "strategy",
                f"strategy {arm} is in the package kakeya-{arm.replace('_', '-')}, which is not installed beside this "
                f"server; it has {', '.join(strategy_names())}",
            )
        options = {
            field.name: tuple(value) if field.is_repeated else value
            for field, value in getattr(message, arm).ListFields()
        }
        return make_strategy(arm, **options)
    except InvalidArgument as error:
        raise in_strategy(error, message) from None


def in_strategy(error: InvalidArgument, given: pb.Strategy) -> InvalidArgument:
    """The same error with the option's full path on the wire instead of its name.

    An error that is not about an option of the strategy is returned as it is.
    """
    arm = given.WhichOneof("kind") or _NAMED
    if arm == _NAMED:
        path, options = f"strategy.{arm}.options", set(option_types(given.named.name))
    else:
        path, options = f"strategy.{arm}", set(_ARMS[arm].fields_by_name)
    if error.field not in options:
        return error
    rest = {key: value for key, value in error.metadata.items() if key != "field"}
    return type(error)(f"{path}.{error.field}", error.description, **rest)


def strategy_to_wire(strategy: KVStrategy) -> pb.Strategy:
    # An option that is None stays absent.
    if strategy.name not in _ARMS:
        return pb.Strategy(named=pb.NamedStrategy(name=strategy.name, options=strategy.option_texts()))
    arms: dict[str, Any] = {strategy.name: strategy.options()}
    return pb.Strategy(**arms)


def check_strategies(default: KVStrategy) -> None:
    """Raise ConfigError if a registered strategy, or the server's default, does not fit its arm on the wire.

    Strategies without an arm are sent as text, which `check_registry` has checked at the engine's start.
    """
    for name in strategy_names():
        if name == _NAMED:
            raise ConfigError(
                f"a strategy cannot be named {_NAMED}: the wire contract uses that name for strategies without an arm"
            )
        if name in _ARMS and (problem := _misfit(_ARMS[name], option_types(name))):
            raise ConfigError(f"strategy {name} does not fit its arm in the wire contract: {problem}")
    try:
        _refuse_uncarried(default)
    except InvalidArgument as error:
        raise ConfigError(f"strategy {default}: {error.message}") from None


def _misfit(arm: Descriptor, options: Mapping[str, object]) -> str | None:
    """The first option that the fields of an arm cannot carry."""
    for name in sorted(set(options) ^ set(arm.fields_by_name)):
        return f"option {name} is in one of them only"
    for name, kind in options.items():
        field = arm.fields_by_name[name]
        is_list = kind == tuple[int, ...]
        expected = int if is_list else kind
        if _FIELD_KINDS.get(field.cpp_type) is not expected or field.is_repeated != is_list:
            return f"option {name} is {kind}, its field is of another type"
        if not (field.is_repeated or field.has_presence):
            return f"the field of option {name} cannot be absent; make it optional"
    return None


def _refuse_uncarried(strategy: KVStrategy) -> None:
    """Raise InvalidArgument for a number, sent as text, that its field of the strategy's arm cannot hold."""
    if strategy.name not in _ARMS:
        return
    for name, value in strategy.options().items():
        arm: dict[str, Any] = {strategy.name: {name: value}}
        try:
            pb.Strategy(**arm)
        except ValueError:
            raise InvalidArgument(name, f"is out of the range of its field in the wire contract, got {value}") from None


def params_from_wire(request: pb.GenerateRequest) -> GenerateParams:
    if request.logprobs and not request.token_details:
        raise InvalidArgument("logprobs", "requires token_details, whose frames carry them; set both")
    if request.prefill_only and request.max_tokens:
        raise InvalidArgument("max_tokens", f"must be 0 with prefill_only, got {request.max_tokens}")
    if request.prefill_only and request.HasField("constraint"):
        raise InvalidArgument("constraint", "must be absent with prefill_only, which generates nothing")
    if not request.prefill_only and not request.max_tokens:
        raise InvalidArgument("max_tokens", "must be ≥ 1, got 0; prefill_only prefills and generates nothing")
    _refuse_many(request)
    if request.HasField("heartbeat_seconds") and heartbeat_of(request) is None:
        least, most = _LEAST_HEARTBEAT_SECONDS, _MOST_HEARTBEAT_SECONDS
        given = request.heartbeat_seconds
        raise InvalidArgument("heartbeat_seconds", f"must be from {least:g} to {most:g}, got {given:g}")
    return GenerateParams(
        max_tokens=request.max_tokens,
        sampling=Sampling(
            temperature=request.temperature,
            top_p=request.top_p if request.HasField("top_p") else 1.0,
            top_k=request.top_k,
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty if request.HasField("repetition_penalty") else 1.0,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=dict(request.logit_bias),
            allowed_token_ids=_token_set_from_wire(request, "allowed_token_ids"),
            banned_token_ids=_token_set_from_wire(request, "banned_token_ids"),
            seed=request.seed if request.HasField("seed") else None,
        ),
        stop_token_ids=tuple(request.stop_token_ids),
        min_tokens=request.min_tokens,
        stop_sequences=tuple(tuple(each.token_ids) for each in request.stop_sequences),
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        expected_history_length=optional(request, "expected_history_length"),
        drafting=request.drafting if request.HasField("drafting") else True,
        constraint=_constraint_from_wire(request.constraint) if request.HasField("constraint") else None,
    )


def _refuse_many(request: pb.GenerateRequest) -> None:
    """Refuse more ids than are taken, before there is an object for each."""
    check_logit_bias(len(request.logit_bias))
    check_stop_token_ids(len(request.stop_token_ids))
    sequences, choices = request.stop_sequences, request.constraint.choice.choices
    check_stop_sequences(len(sequences), (len(each.token_ids) for each in sequences))
    if request.constraint.WhichOneof("kind") == ConstraintKind.CHOICE.value:
        check_choices(len(choices), (len(each.token_ids) for each in choices))


def _token_set_from_wire(request: pb.GenerateRequest, field: str) -> TokenSet | None:
    given: pb.TokenSet | None = optional(request, field)
    if given is None:
        return None
    for name, numbers in (("token_ids", given.token_ids), ("ranges", given.ranges)):
        if len(numbers) > MAX_SET_NUMBERS:
            raise InvalidArgument(f"{field}.{name}", f"at most {MAX_SET_NUMBERS} numbers, got {len(numbers)}")
    if len(given.ranges) % 2:
        raise InvalidArgument(f"{field}.ranges", f"must be pairs of ids, got {len(given.ranges)} numbers")
    return TokenSet.of(given.token_ids, given.ranges)


def _constraint_from_wire(message: pb.Constraint) -> Constraint:
    kind = message.WhichOneof("kind")
    if kind is None:
        kinds = ", ".join(one.value for one in ConstraintKind)
        raise InvalidConstraint(f"no kind that this server supports is set; it supports {kinds}")
    if kind == ConstraintKind.CHOICE.value:
        return Constraint(
            kind=ConstraintKind.CHOICE, choices=tuple(tuple(each.token_ids) for each in message.choice.choices)
        )
    return Constraint(kind=ConstraintKind(kind), source=getattr(message, kind))


def heartbeat_of(request: pb.GenerateRequest) -> float | None:
    """Most seconds for which its stream may be silent before the first token; None: any number.

    It is needed before there is a session; `params_from_wire` refuses a number that is out of range.
    """
    seconds = request.heartbeat_seconds
    return seconds if _LEAST_HEARTBEAT_SECONDS <= seconds <= _MOST_HEARTBEAT_SECONDS else None


def token_ids_from_wire(token_ids: Sequence[int]) -> TokenIds:
    """The ids of a message as an array, which protobuf copies: 65,536 take microseconds."""
    return np.array(token_ids, dtype=np.uint32)


def optional(message: Message, field: str) -> Any:
    """The value of a field with presence; None if it is absent."""
    return getattr(message, field) if message.HasField(field) else None


# Converts one event to a frame; None: the client did not request such frames. (`Failed` becomes the status.)
Framer = Callable[[Event], pb.GenerateResponse | None]


def framer_for(request: pb.GenerateRequest) -> Framer:
    """The converter for a request's events. Without optional flags it gives the frozen frame types only."""
    show_progress, show_details = request.progress, request.token_details

    def frame(event: Event) -> pb.GenerateResponse | None:
        # Tokens first: there are thousands for each other event.
        if isinstance(event, TokenCommitted):
            if not show_details:
                return pb.GenerateResponse(token_id=event.token_id)
            detail = pb.TokenDetail(token_id=event.token_id, position=event.position, logprob=event.logprob)
            if event.top_logprobs:
                ids, values = zip(*event.top_logprobs, strict=True)
                detail.top_token_ids.extend(ids)
                detail.top_logprobs.extend(values)
            return pb.GenerateResponse(token=detail)
        if isinstance(event, Finished):
            return pb.GenerateResponse(done=_done_to_wire(event))
        if isinstance(event, Truncated):
            return pb.GenerateResponse(truncated=pb.HistoryTruncated(dropped_token_count=event.dropped_tokens))
        if isinstance(event, Accepted) and show_progress:
            return pb.GenerateResponse(
                accepted=pb.GenerateAccepted(
                    queue_position=event.queue_position,
                    prefill_token_count=event.prefill_tokens,
                    first_position=event.first_position,
                    replayed=event.is_replayed,
                )
            )
        if isinstance(event, Progress) and show_progress:
            return progress_to_wire(event.done_tokens, event.total_tokens)
        return None

    return frame


def progress_to_wire(done_tokens: int = 0, total_tokens: int = 0) -> pb.GenerateResponse:
    """0 of 0: the Generate has not been accepted yet."""
    return pb.GenerateResponse(
        progress=pb.PrefillProgress(done_token_count=done_tokens, total_token_count=total_tokens)
    )


def _done_to_wire(event: Finished) -> pb.GenerateDone:
    return pb.GenerateDone(
        stop_reason=_STOP_REASONS[event.stop_reason],
        generated_token_count=event.generated_tokens,
        prefill_duration_seconds=event.prefill_seconds,
        total_duration_seconds=event.total_seconds,
        seed=event.seed,
        prefilled_token_count=event.prefilled_tokens,
        cached_token_count=event.cached_tokens,
        attended_position_count=event.attended_positions,
        evicted_position_count=event.evicted_positions,
        history_length=event.history_length,
        restored_position_count=event.restored_positions,
        drafted_token_count=event.drafted_tokens,
        accepted_token_count=event.accepted_tokens,
        degraded=event.is_degraded,
        replayed=event.is_replayed,
        fits_constraint=event.fits_constraint,
        stop_sequence=event.stop_sequence,
    )


def opened_to_wire(
    opened: SessionOpened, *, mode: Mode, model_id: str, durability: Durability
) -> pb.CreateSessionResponse:
    return pb.CreateSessionResponse(
        session_id=opened.session_id,
        strategy=strategy_to_wire(opened.strategy),
        sustained_bytes=opened.bound.sustained_bytes,
        peak_bytes=opened.bound.peak_bytes,
        limit_tokens=opened.limit_tokens,
        mode=_MODES[mode],
        model_id=model_id,
        tier_bytes=opened.bound.tier_bytes,
        replayed=opened.is_replayed,
        reserved_bytes=opened.reserved_bytes,
        durability=_DURABILITIES[durability],
        eos_token_ids=None if opened.eos_token_ids is None else pb.TokenIds(token_ids=opened.eos_token_ids),
    )


def appended_to_wire(length: HistoryLength) -> pb.AppendTokensResponse:
    return pb.AppendTokensResponse(history_length=length.tokens, replayed=length.is_replayed)


def closed_to_wire(length: HistoryLength) -> pb.CloseSessionResponse:
    return pb.CloseSessionResponse(final_history_length=length.tokens, replayed=length.is_replayed)


Begun = TypeVar("Begun", pb.ForkSessionResponse, pb.RewindSessionResponse)


def forked_to_wire(
    response: type[Begun], forked: SessionForked, *, mode: Mode, model_id: str, durability: Durability
) -> Begun:
    """Of a fork, or of a session that went back: both responses have the same fields."""
    return response(
        session_id=forked.session_id,
        history_length=forked.history_length,
        strategy=strategy_to_wire(forked.strategy),
        sustained_bytes=forked.bound.sustained_bytes,
        peak_bytes=forked.bound.peak_bytes,
        limit_tokens=forked.limit_tokens,
        tier_bytes=forked.bound.tier_bytes,
        mode=_MODES[mode],
        model_id=model_id,
        shared_bytes=forked.shared_bytes,
        replayed=forked.is_replayed,
        reserved_bytes=forked.reserved_bytes,
        durability=_DURABILITIES[durability],
        prefill_token_count=forked.prefill_tokens,
    )


def session_info_to_wire(info: SessionInfo) -> pb.GetSessionInfoResponse:
    return pb.GetSessionInfoResponse(
        history_length=info.history_length,
        kv_live_bytes=info.kv_live_bytes,
        cache_invariant_inv1_violations=info.inv1_violations,
        cache_invariant_inv2_violations=info.inv2_violations,
        cache_invariant_inv3_violations=info.inv3_violations,
        idle_seconds=info.idle_seconds,
        cached_token_count=info.cached_tokens,
        evicted_token_count=info.evicted_tokens,
        strategy=strategy_to_wire(info.strategy),
        sustained_bytes=info.bound.sustained_bytes,
        peak_bytes=info.bound.peak_bytes,
        limit_tokens=info.limit_tokens,
        failure_reason=info.failure_reason,
        generating=info.is_generating,
        tier_live_bytes=info.tier_live_bytes,
        tier_bytes=info.bound.tier_bytes,
        drafted_token_count=info.drafted_tokens,
        accepted_token_count=info.accepted_tokens,
        client_label=info.label,
        reserved_bytes=info.reserved_bytes,
        history_bytes=info.history_bytes,
        resident=info.is_resident,
        saved_token_count=info.saved_tokens,
        spare_live_bytes=info.spare_live_bytes,
        eos_token_ids=info.eos_token_ids,
    )


def list_to_wire(listed: Sequence[SessionListed], *, most: int) -> pb.ListSessionsResponse:
    """most: that were asked for. A full page may have another after it."""
    sessions = [
        pb.SessionSummary(
            session_id=one.session_id,
            client_label=one.label,
            history_length=one.history_length,
            age_seconds=one.age_seconds,
            idle_seconds=one.idle_seconds,
            resident=one.is_resident,
            generating=one.is_generating,
            failure_reason=one.failure_reason,
            strategy=strategy_to_wire(one.strategy),
        )
        for one in listed
    ]
    is_full = len(sessions) >= most
    return pb.ListSessionsResponse(sessions=sessions, next_page_token=sessions[-1].session_id if is_full else "")


def history_to_wire(piece: HistoryPiece) -> pb.ReadHistoryResponse:
    return pb.ReadHistoryResponse(
        first_position=piece.first,
        token_ids=piece.token_ids.tolist(),
        history_length=piece.history_length,
        run_lengths=piece.run_lengths(),
    )


def server_info_to_wire(
    info: EngineInfo,
    own: Bound,
    *,
    prefix_bytes: int,
    history_tokens: int,
    usage: TokenUsage,
    version: str,
    max_message_bytes: int,
) -> pb.GetServerInfoResponse:
    """own: bytes reserved by the caller's sessions; prefix_bytes: kept of those that closed. history_tokens: tokens in
    their histories.
    """
    return pb.GetServerInfoResponse(
        version=version,
        model_id=info.facts.model_id,
        vocab_size=info.facts.vocab_size,
        trained_position_count=info.facts.trained_positions,
        device=info.facts.device,
        dtype=info.facts.dtype,
        mode=_MODES[info.mode],
        strategies=info.strategies,
        default_strategy=strategy_to_wire(info.default_strategy),
        max_tokens_limit=info.config.max_generate_tokens,
        max_append_tokens=info.config.max_append_tokens,
        max_message_bytes=max_message_bytes,
        kv_capacity_bytes=info.kv_capacity_bytes,
        kv_reserved_bytes=own.sustained_bytes,
        tier_capacity_bytes=info.tier_capacity_bytes,
        tier_reserved_bytes=own.tier_bytes,
        segment_tokens=info.config.segment_tokens,
        session_idle_ttl_seconds=info.config.session_idle_ttl_seconds,
        drafter=info.drafter,
        default_limit_tokens=info.default_limit_tokens,
        growth_guaranteed=info.growth_is_guaranteed,
        shares_prefixes=info.config.share_prefixes == "owner",
        prefix_capacity_bytes=info.prefix_capacity_bytes,
        prefix_bytes=prefix_bytes,
        usage=pb.Usage(
            prefilled_token_count=usage.prefilled_tokens,
            cached_token_count=usage.cached_tokens,
            generated_token_count=usage.generated_tokens,
            drafted_token_count=usage.drafted_tokens,
            accepted_token_count=usage.accepted_tokens,
        ),
        recurrent_state_bytes=info.recurrent_state_bytes,
        backend=info.facts.backend,
        numerics=info.facts.numerics,
        history_tokens_per_session=info.config.history_tokens_per_session,
        history_tokens_per_owner=info.config.history_tokens_per_owner,
        history_token_count=history_tokens,
        durability=_DURABILITIES[info.durability],
        eos_token_ids=info.end_ids,
    )
