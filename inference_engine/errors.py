"""Every error the runtime raises on purpose, as one tree.

    KakeyaError
    ├── ConfigError          the operator's settings
    ├── ModelError           weights or an architecture we will not run
    │   └── NonFiniteRows    what they give cannot be kept
    ├── BackendError         the device cannot keep a promise (quanta, memory)
    └── RequestError         the caller's request, or what befell it; has a wire `reason`
        ├── InvalidArgument ── TokenOutOfRange, RequestIdReused
        ├── SessionNotFound ── SessionEvicted
        ├── SessionBusy, HistoryLengthMismatch, SessionClosed, StreamTakenOver
        ├── HistoryLimit, AppendTooLarge, NoCapacity, Overloaded, QuotaExceeded
        ├── Draining, EngineStalled, OutOfMemory, DeadlineExceeded, Unauthenticated
        ├── InvariantViolated, NonFiniteLogits, RestorationFailed
        └── InternalError

Each says what was wrong, the value, and the way out. `server/status.py` alone turns them into gRPC statuses.
"""

from __future__ import annotations

from typing import ClassVar


class KakeyaError(Exception):
    """Base of every error below."""


class ConfigError(KakeyaError):
    """A setting is missing, unknown or out of range."""


class ModelError(KakeyaError):
    """A model folder is missing, damaged, tampered with, unsafe, or of a kind we cannot serve rightly."""


class NonFiniteEntries(ModelError):
    """Rows that are coded, or come back from their codes, hold NaN or infinity.

    `layer` and `part` ("keys" or "values") say where.
    """

    def __init__(self, layer: int, part: str, *, come_back: bool = False) -> None:
        entries, why = (
            ("that come back", "the codec gave them, these rows cannot be read")
            if come_back
            else ("to be encoded", "the model overflowed, these rows cannot be kept")
        )
        super().__init__(f"layer {layer}: {part} {entries} hold NaN or infinity; {why}")
        self.layer = layer
        self.part = part


class BackendError(KakeyaError):
    """The device cannot do what was asked of it."""


class RequestError(KakeyaError):
    """An error that belongs to one request. `reason` and `metadata` travel to the client as ErrorInfo."""

    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, retry_after_seconds: float | None = None, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_seconds = retry_after_seconds
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidArgument(RequestError):
    """An argument is out of its documented range. `field` is its name on the wire."""

    reason = "INVALID_ARGUMENT"

    def __init__(self, field: str, message: str, **metadata: object) -> None:
        super().__init__(f"{field}: {message}")
        self.metadata = {"field": field, **{key: str(value) for key, value in metadata.items()}}
        self.field = field
        self.description = message


class TokenOutOfRange(InvalidArgument):
    reason = "TOKEN_OUT_OF_RANGE"


class RequestIdReused(InvalidArgument):
    """A retry has to say what the first call said."""

    reason = "REQUEST_ID_REUSED"

    def __init__(self) -> None:
        super().__init__(
            "request_id", "a call with this id and another content was made before; nothing was done. Make up a new id"
        )


class SessionNotFound(RequestError):
    """Unknown, closed, or somebody else's: the three are told apart nowhere."""

    reason = "SESSION_NOT_FOUND"

    def __init__(self) -> None:
        super().__init__("no such session; create one with CreateSession")


class SessionEvicted(RequestError):
    reason = "SESSION_EVICTED"

    def __init__(self, cause: str) -> None:
        super().__init__(f"the session was evicted ({cause}); create a new one and append its history", cause=cause)


class SessionBusy(RequestError):
    reason = "SESSION_BUSY"

    def __init__(self, waited_seconds: float) -> None:
        super().__init__(
            f"another operation is running on the session and did not end within {waited_seconds:g} s; retry later",
        )


class HistoryLengthMismatch(RequestError):
    reason = "HISTORY_LENGTH_MISMATCH"

    def __init__(self, expected: int, actual: int) -> None:
        super().__init__(
            f"expected_history_length is {expected}, the history has {actual} tokens; nothing was changed",
            expected=expected,
            actual=actual,
        )


class SessionClosed(RequestError):
    reason = "SESSION_CLOSED"

    def __init__(self) -> None:
        super().__init__("the session was closed while this call was running")


class StreamTakenOver(RequestError):
    """A newer call with the request id of a Generate has its stream now."""

    reason = "STREAM_TAKEN_OVER"

    def __init__(self, position: int) -> None:
        super().__init__(
            f"another call attached to this Generate and gets its tokens; this stream ended before position {position}",
            position=position,
        )


class HistoryLimit(RequestError):
    reason = "HISTORY_LIMIT"

    def __init__(self, length: int, adding: int, limit: int, *, setting: str = "") -> None:
        """setting: the operator's, which is the limit; "": it is the session's own."""
        bound, advice = f"the session's limit of {limit}", ""
        if setting:
            bound = f"the {limit} tokens that this server lets one session have"
            advice = f". Go on in a new session, or have the operator raise {setting}"
        super().__init__(
            f"{length} tokens and {adding} more would pass {bound}; nothing was appended{advice}",
            history_length=length,
            limit_tokens=limit,
        )
        if setting:
            self.metadata["setting"] = setting


class AppendTooLarge(RequestError):
    reason = "APPEND_TOO_LARGE"

    def __init__(self, count: int, limit: int) -> None:
        super().__init__(
            f"{count} token ids in one append, at most {limit} are taken; send them in several", max_append_tokens=limit
        )


class NoCapacity(RequestError):
    reason = "NO_CAPACITY"


class Overloaded(RequestError):
    reason = "OVERLOADED"


class QuotaExceeded(RequestError):
    """The owner has as much as the operator lets one owner have; what others have does not matter.

    quota: the setting that says so. Waiting helps where `retry_after_seconds` is there; else closing sessions.
    """

    reason = "QUOTA"

    def __init__(self, quota: str, limit: int, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds, quota=quota, limit=limit)


class Draining(RequestError):
    reason = "DRAINING"

    def __init__(self) -> None:
        super().__init__("the server is shutting down; retry against another or later", retry_after_seconds=5.0)


class EngineStalled(RequestError):
    """The engine's thread has stood still for too long. It may come back; if not, the process ends."""

    reason = "ENGINE_STALLED"

    def __init__(self) -> None:
        super().__init__("the engine stands still; retry against another server or later", retry_after_seconds=5.0)


class OutOfMemory(RequestError):
    """The device ran out of memory in a step. The rows of its sessions were dropped, their histories are kept."""

    reason = "OUT_OF_MEMORY"

    def __init__(self) -> None:
        super().__init__(
            "the device had no memory for this step; the session's history is kept and its rows are computed again: "
            "retry later",
            retry_after_seconds=1.0,
        )


class DeadlineExceeded(RequestError):
    reason = "DEADLINE"

    def __init__(self, history_length: int) -> None:
        super().__init__(
            f"the deadline passed; the session and its {history_length} tokens are kept", history_length=history_length
        )


class Unauthenticated(RequestError):
    reason = "UNAUTHENTICATED"

    def __init__(self) -> None:
        super().__init__("send one valid 'authorization: Bearer <key>' header")


class InvariantViolated(RequestError):
    """The cache and the history disagree. The session is failed and its memory freed; its history is lost."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}; create a new session", kind=kind)
        self.kind = kind


class NonFiniteLogits(RequestError):
    reason = "NON_FINITE_LOGITS"

    def __init__(self, position: int) -> None:
        super().__init__(
            f"the model gave NaN or infinity for position {position}; nothing was sampled", position=position
        )


class RestorationFailed(RequestError):
    """Rows that had left the exact window could not be kept or brought back. The history is kept.

    The text says what the system said of a file or a disk, or which rows were not finite, and no more; the log has the
    rest of `cause`.
    """

    reason = "RESTORATION_FAILED"

    def __init__(self, cause: BaseException) -> None:
        reported = ""
        if isinstance(cause, OSError) and cause.strerror:
            reported = f": {cause.strerror}"
        elif isinstance(cause, NonFiniteEntries):
            reported = f": {cause}"
        super().__init__(
            f"the session's evicted rows could not be restored{reported}. The history is kept; generate again, or go "
            "on with it in a session of another strategy"
        )


class InternalError(RequestError):
    """A bug of ours. The text shows an incident id only; the log has the rest."""

    reason = "INTERNAL"

    def __init__(self, incident: str) -> None:
        super().__init__(f"internal error, incident {incident}", incident=incident)
