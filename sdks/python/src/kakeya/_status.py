"""From a failed RPC to one of our errors: by ErrorInfo reason, else by status code."""

from __future__ import annotations

import re
from typing import cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kakeya import _errors as errors

DOMAIN = "kakeya.v1"

# How gRPC begins what it says of a call for which it found no connection, so that it never left.
_NOT_CONNECTED = ("failed to connect to all addresses", "DNS resolution failed", "errors resolving")
_NEVER_REACHED = (
    "; this client has not reached it yet: check host and port, and that a server runs there (kakeya serve)"
)
# How gRPC says that an answer came, in HTTP/1.
_HTTP1_SIGN = "http1.x server"
_HTTP1 = (
    "what answers there speaks HTTP/1, no gRPC; give the address at which `kakeya serve` says that it is ready, "
    "not its port for chat completions or metrics"
)
# HTTP/2 calls it REFUSED_STREAM (RFC 9113, section 8.7): the server did not process the call, it may be retried.
_REFUSED_STREAM = "Received RST_STREAM with error code 7"
_CERTIFICATE = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:]+)")
_TLS_SIGNS = {
    "Hostname Verification Check failed": "its certificate is for another name than this target's",
    "WRONG_VERSION_NUMBER": "it does not speak TLS; leave out tls, or ask for a port that does",
    "Failed to create security handshaker": "the key in tls cannot be used, or is not its certificate's",
}

_BY_REASON: dict[str, type[errors.KakeyaError]] = {
    "INVALID_ARGUMENT": errors.InvalidArgument,
    "TOKEN_OUT_OF_RANGE": errors.TokenOutOfRange,
    "INVALID_CONSTRAINT": errors.InvalidConstraint,
    "CONSTRAINT_UNAVAILABLE": errors.ConstraintUnavailable,
    "CONSTRAINT_FAILED": errors.ConstraintFailed,
    "REQUEST_ID_REUSED": errors.RequestIdReused,
    "SESSION_NOT_FOUND": errors.SessionNotFound,
    "SESSION_EVICTED": errors.SessionEvicted,
    "SESSION_CLOSED": errors.SessionClosed,
    "HISTORY_LENGTH_MISMATCH": errors.HistoryLengthMismatch,
    "HISTORY_BEHIND_CLIENT": errors.HistoryBehindClient,
    "HISTORY_LIMIT": errors.HistoryLimit,
    "APPEND_TOO_LARGE": errors.AppendTooLarge,
    "SLOW_CONSUMER": errors.SlowConsumer,
    "STREAM_TAKEN_OVER": errors.StreamTakenOver,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "SESSION_BUSY": errors.SessionBusy,
    "NO_CAPACITY": errors.NoCapacity,
    "OVERLOADED": errors.Overloaded,
    "QUOTA": errors.QuotaExceeded,
    "DRAINING": errors.Draining,
    "ENGINE_STALLED": errors.EngineStalled,
    "JOURNAL_FULL": errors.JournalFull,
    "JOURNAL_AWAY": errors.JournalAway,
    "SESSION_ELSEWHERE": errors.SessionElsewhere,
    "OUT_OF_MEMORY": errors.OutOfMemory,
    "INV1": errors.InvariantViolated,
    "INV2": errors.InvariantViolated,
    "INV3": errors.InvariantViolated,
    "NON_FINITE_LOGITS": errors.NonFiniteLogits,
    "RESTORATION_FAILED": errors.RestorationFailed,
    "HISTORY_CORRUPT": errors.HistoryCorrupt,
    "MODEL_MISMATCH": errors.ModelMismatch,
    "INTERNAL": errors.InternalError,
    "DEADLINE": errors.DeadlineExceeded,
}

# A reason this SDK does not know yet still says, by its code, whose turn it is.
_BY_CODE: dict[grpc.StatusCode, type[errors.KakeyaError]] = {
    grpc.StatusCode.ABORTED: errors.RetryableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.RetryableError,
    grpc.StatusCode.UNAVAILABLE: errors.RetryableError,
    grpc.StatusCode.INTERNAL: errors.ServerError,
    grpc.StatusCode.UNKNOWN: errors.ServerError,
    grpc.StatusCode.DATA_LOSS: errors.ServerError,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.TransportError,
}

# Without our ErrorInfo it was gRPC itself, on either side, or something in between.
_UNEXPLAINED: dict[grpc.StatusCode, tuple[type[errors.KakeyaError], str]] = {
    grpc.StatusCode.UNAVAILABLE: (errors.ConnectionFailed, "no connection to {target}"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (errors.DeadlineExceeded, "no answer from {target} within the timeout"),
}


# What fails alike each time, in the words of gRPC's cores, its Go and Java, and of our server.
_FINAL: tuple[tuple[grpc.StatusCode, re.Pattern[str], type[errors.KakeyaError], str], ...] = (
    (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        re.compile("larger than (?:max|configured)|exceeds maximum size|this method takes"),
        errors.CallerError,
        "the message is too large for {target}",
    ),
    (
        grpc.StatusCode.INTERNAL,
        re.compile("^Exception (?:de)?serializing request|^serialize binary"),
        errors.CallerError,
        "the request is no message for {target}",
    ),
    (
        grpc.StatusCode.INTERNAL,
        re.compile("^Exception (?:de)?serializing response|^parse binary"),
        errors.ServerError,
        "the answer cannot be read, from {target}",
    ),
)


def from_rpc_error(
    error: grpc.RpcError, target: str, *, is_reached: bool = True, proxy_note: str = ""
) -> errors.KakeyaError:
    """The typed error for a failed RPC, sync or asyncio. Never raises: details it cannot read count as none.

    `is_reached`: the client has reached this target before. `proxy_note`: of `_reach.proxy_note`, for calls that have
    no answer.
    """
    call = cast("grpc.Call", error)  # whatever grpc raises also answers code(), details(), trailing_metadata()
    code = call.code()
    message = call.details() or f"the call ended with {code.name}"
    info, retry_after_seconds = _details(call)
    if info is None:
        return _unexplained(code, message, target, is_reached=is_reached, proxy_note=proxy_note)
    kind = _BY_REASON.get(info.reason) or _BY_CODE.get(code, errors.CallerError)
    return kind(
        message,
        code=code.name,
        reason=info.reason,
        metadata=dict(info.metadata),
        retry_after_seconds=retry_after_seconds,
    )


def cause_of(explained: errors.KakeyaError, error: grpc.RpcError) -> grpc.RpcError | None:
    """What tracebacks show above an error: gRPC's own, where the message is no more than what that says.

    Elsewhere it is in `__context__`, which they do not show.
    """
    return error if type(explained) is errors.TransportError else None


def _unexplained(
    code: grpc.StatusCode, message: str, target: str, *, is_reached: bool, proxy_note: str
) -> errors.KakeyaError:
    if _REFUSED_STREAM in message:
        failure: errors.KakeyaError = errors.ConnectionFailed(
            f"{target} takes no more calls on this connection than there are; end some, or open another client",
            code=grpc.StatusCode.UNAVAILABLE.name,
        )
        failure._was_full, failure._was_sent = True, False
        return failure
    for final, sign, final_kind, situation in _FINAL:
        if code is final and sign.search(message) is not None:
            return final_kind(f"{situation.format(target=target)}: {message}", code=code.name)
    was_sent = not message.startswith(_NOT_CONNECTED)
    if not was_sent and _HTTP1_SIGN in message:
        message = _HTTP1
    if code is grpc.StatusCode.UNAVAILABLE and (problem := _tls_problem(message)) is not None:
        failure = errors.TLSFailed(f"no connection to {target}: {problem}{proxy_note}", code=code.name)
    else:
        kind, situation = _UNEXPLAINED.get(code, (errors.TransportError, "the call failed at {target}"))
        advice = "" if is_reached or was_sent or message is _HTTP1 else _NEVER_REACHED
        if code is grpc.StatusCode.UNAVAILABLE or (code is grpc.StatusCode.DEADLINE_EXCEEDED and not is_reached):
            advice = proxy_note or advice
        failure = kind(f"{situation.format(target=target)}: {message}{advice}", code=code.name)
    failure._was_sent = was_sent
    return failure


def _tls_problem(message: str) -> str | None:
    """What is wrong with keys and certificates, by gRPC's message; None if it names nothing of that kind."""
    if (found := _CERTIFICATE.search(message)) is not None:
        return f"its certificate is not accepted: {found[1]}; tls=TLS(root_certificates=…) names its authority"
    if (problem := next((problem for sign, problem in _TLS_SIGNS.items() if sign in message), None)) is not None:
        return problem
    return message if "SSL_ERROR_SSL" in message else None


def _details(call: grpc.Call) -> tuple[error_details_pb2.ErrorInfo | None, float | None]:
    """Our ErrorInfo and the wait of RetryInfo, where the status has them."""
    try:
        status: status_pb2.Status | None = rpc_status.from_call(call)
    except (ValueError, DecodeError):  # a status that contradicts itself, or no status at all
        return None, None
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    found, retry_after_seconds = False, None
    try:
        for detail in status.details if status is not None else ():
            if not found and detail.Unpack(info):
                found = info.domain == DOMAIN
            elif detail.Unpack(retry):
                # Not as a timedelta, which has no place for every delay that a message can say.
                retry_after_seconds = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    except (ValueError, DecodeError):
        return None, None
    return (info, retry_after_seconds) if found else (None, None)
