"""Errors in the form of chat completions: an HTTP status, and a body with message, type, param and code."""

from __future__ import annotations

import math
from typing import Any

import grpc

from inference_engine.errors import InvalidArgument, RequestError
from inference_engine.server.status import CODES, reason_of

# By `reason`: the shim's own, and those whose status differs from gRPC's, where sessions persist.
_STATUSES: dict[str, int] = {
    "BAD_JSON": 400,
    "HISTORY_LIMIT": 400,
    "RENDER_LIMIT": 400,
    "OPERATORS_ONLY": 403,
    "MODEL_NOT_FOUND": 404,
    "REQUEST_TIMEOUT": 408,
    "BODY_TOO_LARGE": 413,
    "UNSUPPORTED_MEDIA_TYPE": 415,
    "OUT_OF_MEMORY": 503,
    "SESSION_CLOSED": 503,
}
# By gRPC code. Others cannot occur in a session of one request, or are bugs of the server: 500.
_STATUSES_OF_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
}
# Reasons for which clients of chat completions expect another code.
_CODES = {
    "INVALID_ARGUMENT": None,
    "HISTORY_LIMIT": "context_length_exceeded",
    "UNAUTHENTICATED": "invalid_api_key",
    "NO_CAPACITY": "rate_limit_exceeded",
    "OVERLOADED": "rate_limit_exceeded",
    "QUOTA": "rate_limit_exceeded",
}
_RETRY_SECONDS = 1.0
_SAID_CHARACTERS = 80


def said(text: str) -> str:
    """What a client sent, as an answer repeats it: a refusal is not as long as what it refuses."""
    if len(text) <= _SAID_CHARACTERS:
        return text
    return f"{text[:_SAID_CHARACTERS]}… ({len(text)} characters)"


class UnknownModel(RequestError):
    reason = "MODEL_NOT_FOUND"

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"model: this server serves {served!r}, not {said(asked)!r}", field="model")


class OperatorsOnly(RequestError):
    reason = "OPERATORS_ONLY"

    def __init__(self, route: str) -> None:
        super().__init__(
            f"{route} is for operators: here it is served on loopback without keys only; use the port of metrics_bind"
        )


class BadJson(RequestError):
    reason = "BAD_JSON"


class BodyTooLarge(RequestError):
    reason = "BODY_TOO_LARGE"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"the body is larger than the limit of {limit_bytes} bytes (max_message_bytes); send a shorter one"
        )


class BodyTooSlow(RequestError):
    reason = "REQUEST_TIMEOUT"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the body did not arrive within {seconds:g} s; send it faster or retry")


class NotJson(RequestError):
    reason = "UNSUPPORTED_MEDIA_TYPE"

    def __init__(self) -> None:
        super().__init__("send JSON, with 'content-type: application/json'")


class RenderLimit(RequestError):
    """Rendering and encoding the messages exceeded its limit on time or memory."""

    reason = "RENDER_LIMIT"

    def __init__(self, limit_seconds: float) -> None:
        super().__init__(
            f"messages: rendering and encoding them exceeded the limit of {limit_seconds:g} s or its limit on memory; "
            "send shorter messages",
            field="messages",
            limit_seconds=f"{limit_seconds:g}",
        )


class ContextLengthExceeded(RequestError):
    """The rendered messages leave no room for an answer."""

    reason = "HISTORY_LIMIT"

    def __init__(self, prompt_tokens: int, limit_tokens: int) -> None:
        super().__init__(
            f"messages: they have at least {prompt_tokens} tokens when rendered; a session holds at most "
            f"{limit_tokens}, the answer included; send fewer or shorter messages",
            field="messages",
            prompt_tokens=prompt_tokens,
            limit_tokens=limit_tokens,
        )


def status_of(error: RequestError) -> int:
    reason = reason_of(error)
    return _STATUSES.get(reason) or _STATUSES_OF_CODES.get(CODES.get(reason, grpc.StatusCode.INTERNAL), 500)


def headers_of(error: RequestError) -> dict[str, str]:
    status = status_of(error)
    if status == 401:
        return {"www-authenticate": "Bearer"}
    if status in (429, 503):
        return {"retry-after": str(math.ceil(error.retry_after_seconds or _RETRY_SECONDS))}
    return {}


def body_of(error: RequestError) -> dict[str, Any]:
    reason, status = reason_of(error), status_of(error)
    param = error.field if isinstance(error, InvalidArgument) else error.metadata.get("field")
    return envelope(status, error.message, param=param, code=_CODES.get(reason, reason.lower()))


def envelope(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": _type_of(status), "param": param, "code": code}}


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
