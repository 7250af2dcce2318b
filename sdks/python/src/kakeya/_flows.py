"""Calls that can take more than one step, written once for threads and for asyncio.

A flow is a generator: it yields what is to be done (an RPC, a wait), is sent the reply or thrown the typed error, and
returns its result. `_sync.py` and `_async.py` only carry the steps out.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from kakeya._errors import KakeyaError, SessionNotFound
from kakeya._requests import new_request_id, new_route, route_of
from kakeya._retry import Patience
from kakeya.v1 import runtime_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """Do this RPC; send its reply or throw its error."""

    method: str
    request: Message
    timeout: float | None
    route: str | None = None  # None: the flow's


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


Step = Call | Sleep
Flow = Generator[Step, Any, T]


def repeatable(method: str, request: Message, patience: Patience) -> Flow[Any]:
    """An RPC that is safe to repeat (it changes nothing, or has a request id): retried while patience lasts."""
    attempt = 0
    while True:
        attempt += 1
        try:
            reply = yield Call(method, request, patience.remaining_seconds())
        except KakeyaError as error:
            yield from wait_or_give_up(error, attempt, patience)
        else:
            patience.answered()
            return reply


def create_session(request: pb.CreateSessionRequest, patience: Patience) -> Flow[tuple[pb.CreateSessionResponse, str]]:
    """A new session, and its route.

    The first repeat goes where the call went: its answer may be there. Beyond that a server is away, and another route
    may lead to one that is not; whichever made the session, its id has the route.
    """
    route, attempt, times_away = new_route(), 0, 0
    while True:
        attempt += 1
        try:
            reply = yield Call("CreateSession", request, patience.remaining_seconds(), route)
        except KakeyaError as error:
            yield from wait_or_give_up(error, attempt, patience)
            times_away += error.code == "UNAVAILABLE" and not error._was_full
            if times_away > 1:
                route = new_route()
        else:
            patience.answered()
            return reply, route_of(reply.session_id) or route


def close_session(session_id: str, patience: Patience) -> Flow[int | None]:
    """The final history length; None if an earlier attempt closed the session and its answer was lost for good."""
    request = pb.CloseSessionRequest(session_id=session_id, request_id=new_request_id())
    attempt, was_sent = 0, False
    while True:
        attempt += 1
        try:
            reply: pb.CloseSessionResponse = yield Call("CloseSession", request, patience.remaining_seconds())
        except SessionNotFound:
            if not was_sent:
                raise
            return None
        except KakeyaError as error:
            was_sent |= error._was_sent
            yield from wait_or_give_up(error, attempt, patience)
        else:
            return reply.final_history_length


def open_session(
    session_id: str, patience: Patience
) -> Flow[tuple[pb.CreateSessionResponse, pb.GetSessionInfoResponse]]:
    """The facts of a session as when it was made, and its state now."""
    info: pb.GetSessionInfoResponse = yield from repeatable(
        "GetSessionInfo", pb.GetSessionInfoRequest(session_id=session_id), patience
    )
    server: pb.GetServerInfoResponse = yield from repeatable("GetServerInfo", pb.GetServerInfoRequest(), patience)
    facts = pb.CreateSessionResponse(
        session_id=session_id,
        strategy=info.strategy,
        sustained_bytes=info.sustained_bytes,
        peak_bytes=info.peak_bytes,
        limit_tokens=info.limit_tokens if info.HasField("limit_tokens") else None,
        mode=server.mode,
        model_id=server.model_id,
        tier_bytes=info.tier_bytes,
        reserved_bytes=info.reserved_bytes,
        durability=server.durability,
    )
    return facts, info


def wait_or_give_up(error: KakeyaError, attempt: int, patience: Patience) -> Flow[None]:
    """Wait before the next attempt, or raise `error`."""
    delay = patience.wait_seconds(attempt, error)
    if delay is None:
        raise patience.verdict(error)
    yield Sleep(delay)
