"""From a caller's arguments to request messages. Everything that protobuf would take wrongly is refused here."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping

from kakeya._checks import finite, flag, invalid, text, token_ids, whole_number
from kakeya._constraints import Constraint
from kakeya._strategies import Strategy
from kakeya.v1 import runtime_pb2 as pb

_UINT32 = 2**32
_UINT64 = 2**64
# The most that the server gives in one answer.
MAX_PAGE_SESSIONS = 1000
MAX_PIECE_TOKENS = 16_384
# The header by which a proxy tells sessions apart; their ids are in messages, which it does not read.
ROUTE_HEADER = "kakeya-route"
# Proxies give up a stream on which nothing comes, most of them after a minute.
HEARTBEAT_SECONDS = 15.0
_ROUTE_BYTES = 8
_WITH_ROUTE = re.compile(r"([0-9a-f]{16})\.")


def new_request_id() -> bytes:
    """What the server knows a call by when it comes again. One for each call that changes something."""
    return secrets.token_bytes(16)


def new_route() -> str:
    """What a proxy sends the calls of a session by: drawn before there is an id, so that creating it has one, too."""
    return secrets.token_hex(_ROUTE_BYTES)


def route_of(session_id: str) -> str:
    """The route that the session was made with, by which its id begins; empty if it was made without one."""
    found = _WITH_ROUTE.match(session_id)
    return found[1] if found else ""


def route_metadata(route: str) -> tuple[tuple[str, str], ...]:
    return ((ROUTE_HEADER, route),) if route else ()


def create_session(
    strategy: Strategy | None,
    eos_token_ids: Iterable[int] | None,
    limit_tokens: int | None,
    label: str,
    guaranteed: bool | None,
) -> pb.CreateSessionRequest:
    if strategy is not None and not isinstance(strategy, Strategy):
        raise invalid("strategy", f"must be a strategy such as Full() or SinkWindow(…), or None, got {strategy!r}")
    if guaranteed is not None and not isinstance(guaranteed, bool):
        raise invalid("guaranteed", f"must be True, False or None, got {guaranteed!r}")
    return pb.CreateSessionRequest(
        client_label=text(label, "label"),
        eos_token_ids=() if eos_token_ids is None else token_ids(eos_token_ids, "eos_token_ids"),
        model_eos_token_ids=True if eos_token_ids is None else None,
        strategy=None if strategy is None else strategy._to_wire(),
        limit_tokens=_optional_whole(limit_tokens, "limit_tokens"),
        request_id=new_request_id(),
        guaranteed=guaranteed,
    )


def fork_session(
    session_id: str,
    at_position: int | None,
    limit_tokens: int | None,
    label: str,
    expected_history_length: int | None,
) -> pb.ForkSessionRequest:
    return pb.ForkSessionRequest(
        session_id=session_id,
        request_id=new_request_id(),
        expected_history_length=history_length(expected_history_length),
        client_label=text(label, "label"),
        limit_tokens=_optional_whole(limit_tokens, "limit_tokens"),
        at_position=_optional_whole(at_position, "at_position"),
    )


def rewind_session(session_id: str, position: int, expected_history_length: int | None) -> pb.RewindSessionRequest:
    return pb.RewindSessionRequest(
        session_id=session_id,
        request_id=new_request_id(),
        expected_history_length=history_length(expected_history_length),
        at_position=whole_number(position, "position", below=_UINT64),
    )


def generate(
    session_id: str,
    max_tokens: int,
    *,
    seed: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    repetition_penalty: float | None,
    presence_penalty: float,
    frequency_penalty: float,
    logit_bias: Mapping[int, float] | None,
    stop_token_ids: Iterable[int],
    logprobs: bool,
    top_logprobs: int,
    on_progress: object,
    expected_history_length: int | None,
    drafting: bool,
    constraint: Constraint | None,
    stop_sequences: Iterable[Iterable[int]],
    min_tokens: int,
    allowed_token_ids: Iterable[int] | None,
    banned_token_ids: Iterable[int],
) -> pb.GenerateRequest:
    """The request for one Generate. It always asks for detailed frames, which carry the history length as it grows, and
    for a heartbeat before the first token."""
    if logit_bias is not None and not isinstance(logit_bias, Mapping):
        raise invalid("logit_bias", f"must be a mapping from token ids to numbers, got {logit_bias!r}")
    if constraint is not None and not isinstance(constraint, Constraint):
        raise invalid("constraint", f"must be a constraint such as JsonSchema(…), or None, got {constraint!r}")
    bias = dict(logit_bias or {})
    biased_ids = token_ids(list(bias), "logit_bias")
    return pb.GenerateRequest(
        session_id=session_id,
        max_tokens=whole_number(max_tokens, "max_tokens", below=_UINT32),
        seed=_optional_whole(seed, "seed"),
        temperature=_optional_finite(temperature, "temperature"),
        top_p=_optional_finite(top_p, "top_p"),
        top_k=None if top_k is None else whole_number(top_k, "top_k", below=_UINT32),
        min_p=_optional_finite(min_p, "min_p"),
        repetition_penalty=_optional_finite(repetition_penalty, "repetition_penalty"),
        presence_penalty=finite(presence_penalty, "presence_penalty"),
        frequency_penalty=finite(frequency_penalty, "frequency_penalty"),
        logit_bias={
            token_id: finite(value, f"logit_bias[{token_id}]")
            for token_id, value in zip(biased_ids, bias.values(), strict=True)
        },
        stop_token_ids=token_ids(stop_token_ids, "stop_token_ids"),
        logprobs=(flag(logprobs, "logprobs") or top_logprobs != 0) or None,
        top_logprobs=whole_number(top_logprobs, "top_logprobs", below=_UINT32),
        token_details=True,
        progress=_wants(on_progress),
        expected_history_length=history_length(expected_history_length),
        drafting=None if flag(drafting, "drafting") else False,
        request_id=new_request_id(),
        heartbeat_seconds=HEARTBEAT_SECONDS,
        constraint=None if constraint is None else constraint._to_wire(),
        stop_sequences=[
            pb.TokenIds(token_ids=token_ids(one, f"stop_sequences[{index}]"))
            for index, one in enumerate(stop_sequences)
        ],
        min_tokens=whole_number(min_tokens, "min_tokens", below=_UINT32),
        allowed_token_ids=None if allowed_token_ids is None else _token_set(allowed_token_ids, "allowed_token_ids"),
        banned_token_ids=_token_set(banned_token_ids, "banned_token_ids"),
    )


def _token_set(values: Iterable[int], field: str) -> pb.TokenSet | None:
    """The ids, neighbours as ranges. None: there are none."""
    found = pb.TokenSet()
    ids = sorted(set(token_ids(values, field)))
    start = 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or ids[place] != ids[place - 1] + 1:
            run = ids[start:place]
            found.ranges.extend([run[0], run[-1] + 1]) if len(run) > 2 else found.token_ids.extend(run)
            start = place
    return found if ids or field == "allowed_token_ids" else None


def prefill(session_id: str, *, on_progress: object, expected_history_length: int | None) -> pb.GenerateRequest:
    """The request for a Generate that prefills the history and adds nothing to it."""
    return pb.GenerateRequest(
        session_id=session_id,
        prefill_only=True,
        token_details=True,
        progress=_wants(on_progress),
        expected_history_length=history_length(expected_history_length),
        request_id=new_request_id(),
        heartbeat_seconds=HEARTBEAT_SECONDS,
    )


def list_sessions(page_size: int) -> pb.ListSessionsRequest:
    return pb.ListSessionsRequest(
        page_size=whole_number(page_size, "page_size", at_least=1, below=MAX_PAGE_SESSIONS + 1)
    )


def read_history(session_id: str, first_position: int, piece_tokens: int) -> pb.ReadHistoryRequest:
    return pb.ReadHistoryRequest(
        session_id=session_id,
        first_position=whole_number(first_position, "first_position", below=_UINT64),
        max_tokens=whole_number(piece_tokens, "piece_tokens", at_least=1, below=MAX_PIECE_TOKENS + 1),
    )


def _wants(on_progress: object) -> bool | None:
    """Are reports of progress asked for? None: no."""
    if on_progress is not None and not callable(on_progress):
        raise invalid("on_progress", f"must be a function of a Progress, or None, got {on_progress!r}")
    return None if on_progress is None else True


def session_id(value: str) -> str:
    if not isinstance(value, str) or not value:
        raise invalid("session_id", f"must be the id of a session, got {value!r}")
    return text(value, "session_id")


def history_length(value: int | None) -> int | None:
    return _optional_whole(value, "expected_history_length")


def _optional_whole(value: int | None, field: str) -> int | None:
    return None if value is None else whole_number(value, field, below=_UINT64)


def _optional_finite(value: float | None, field: str) -> float | None:
    return None if value is None else finite(value, field)
