"""The one place where errors become gRPC statuses, by one table from reason to code.

Each status carries google.rpc.Status: always ErrorInfo, RetryInfo if waiting helps, BadRequest for bad arguments.
"""

from __future__ import annotations

import logging
import secrets

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from inference_engine.errors import Draining, InternalError, InvalidArgument, InvariantViolated, RequestError

DOMAIN = "kakeya.v1"
DETAILS_KEY = "grpc-status-details-bin"

CODES: dict[str, grpc.StatusCode] = {
    "SESSION_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "SESSION_EVICTED": grpc.StatusCode.NOT_FOUND,
    "TOKEN_OUT_OF_RANGE": grpc.StatusCode.INVALID_ARGUMENT,
    "INVALID_ARGUMENT": grpc.StatusCode.INVALID_ARGUMENT,
    "INVALID_CONSTRAINT": grpc.StatusCode.INVALID_ARGUMENT,
    "CONSTRAINT_UNAVAILABLE": grpc.StatusCode.FAILED_PRECONDITION,
    "CONSTRAINT_FAILED": grpc.StatusCode.FAILED_PRECONDITION,
    "REQUEST_ID_REUSED": grpc.StatusCode.INVALID_ARGUMENT,
    "APPEND_TOO_LARGE": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "SESSION_BUSY": grpc.StatusCode.ABORTED,
    "SESSION_CLOSED": grpc.StatusCode.ABORTED,
    "STREAM_TAKEN_OVER": grpc.StatusCode.ABORTED,
    "HISTORY_LENGTH_MISMATCH": grpc.StatusCode.ABORTED,
    "HISTORY_BEHIND_CLIENT": grpc.StatusCode.DATA_LOSS,
    "NO_CAPACITY": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "OVERLOADED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "QUOTA": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "HISTORY_LIMIT": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "SLOW_CONSUMER": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
    "DRAINING": grpc.StatusCode.UNAVAILABLE,
    "ENGINE_STALLED": grpc.StatusCode.UNAVAILABLE,
    "JOURNAL_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "JOURNAL_AWAY": grpc.StatusCode.UNAVAILABLE,
    "SESSION_ELSEWHERE": grpc.StatusCode.UNAVAILABLE,
    "OUT_OF_MEMORY": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "INV1": grpc.StatusCode.FAILED_PRECONDITION,
    "INV2": grpc.StatusCode.FAILED_PRECONDITION,
    "INV3": grpc.StatusCode.FAILED_PRECONDITION,
    "NON_FINITE_LOGITS": grpc.StatusCode.INTERNAL,
    "RESTORATION_FAILED": grpc.StatusCode.INTERNAL,
    "HISTORY_CORRUPT": grpc.StatusCode.DATA_LOSS,
    "MODEL_MISMATCH": grpc.StatusCode.FAILED_PRECONDITION,
    "DEADLINE": grpc.StatusCode.DEADLINE_EXCEEDED,
    "INTERNAL": grpc.StatusCode.INTERNAL,
}

ELSEWHERE_SECONDS = 0.1  # until a repeat may reach another server

_log = logging.getLogger(__name__)


class SlowConsumer(RequestError):
    """The client did not read its stream; the server cancelled the Generate.

    position: of the token whose frame was being sent.
    """

    reason = "SLOW_CONSUMER"

    def __init__(self, stalled_seconds: float, position: int) -> None:
        super().__init__(
            f"the stream was not read for {stalled_seconds:g} s, so the Generate was cancelled at position {position}; "
            "the session is kept: send the same request_id again with resume_from, or read the session's length with "
            "GetSessionInfo and generate again",
            retry_after_seconds=0.0,
            stalled_seconds=f"{stalled_seconds:g}",
            position=position,
        )


def as_request_error(error: BaseException, method: str) -> RequestError:
    """The error itself if it is a RequestError. Any other one is a bug: it is logged with its traceback under a new
    incident id, and the client gets the id only."""
    if isinstance(error, RequestError):
        return error
    incident = secrets.token_hex(8)
    _log.error("incident %s in %s", incident, method, exc_info=error)
    return InternalError(incident)


def code_of(error: RequestError) -> grpc.StatusCode:
    return CODES[reason_of(error)]


def reason_of(error: RequestError) -> str:
    """The code that clients branch on."""
    return error.kind if isinstance(error, InvariantViolated) else error.reason


def to_trailers(error: RequestError, *, has_others: bool = False) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata with the rich status, as google.rpc defines it.

    has_others: other servers have the sessions of one that drains, so its clients need not wait for its restart.
    """
    retry_after_seconds = error.retry_after_seconds
    if has_others and isinstance(error, Draining):
        retry_after_seconds = ELSEWHERE_SECONDS
    status = status_pb2.Status(code=code_of(error).value[0], message=error.message)
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(domain=DOMAIN, reason=reason_of(error), metadata=error.metadata)
    )
    if retry_after_seconds is not None:
        delay = Duration()
        delay.FromNanoseconds(int(retry_after_seconds * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.description)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    return ((DETAILS_KEY, status.SerializeToString()),)
