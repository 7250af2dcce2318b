"""Every error the runtime raises on purpose, as one tree.

    KakeyaError
    ├── ConfigError          the operator's settings
    ├── ModelError           weights or an architecture that is refused
    │   └── NonFiniteEntries keys or values hold NaN or infinity
    ├── BackendError         the device cannot do what is required (quanta, memory)
    │   ├── NotNative        the native backend does not run this model here
    │   └── NotOnMlx         MLX does not run this model here
    └── RequestError         one request; has a wire `reason`
        ├── InvalidArgument ── TokenOutOfRange, RequestIdReused, InvalidConstraint
        ├── ConstraintUnavailable, ConstraintFailed
        ├── SessionNotFound ── SessionEvicted
        ├── SessionBusy, HistoryLengthMismatch, HistoryBehindClient, SessionClosed, StreamTakenOver
        ├── HistoryLimit, AppendTooLarge, NoCapacity, Overloaded, QuotaExceeded
        ├── Draining, EngineStalled, OutOfMemory, JournalFull, JournalAway, SessionElsewhere, DeadlineExceeded,
        │   Unauthenticated
        ├── InvariantViolated, NonFiniteLogits, RestorationFailed, HistoryCorrupt, ModelMismatch
        └── InternalError

Each message states the problem, the value and the remedy. Only `server/status.py` turns them into gRPC statuses.
"""

from __future__ import annotations

import logging
from typing import ClassVar


def counted(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class KakeyaError(Exception):
    """Base of all errors below."""


class ConfigError(KakeyaError):
    """A setting is missing, unknown or out of range."""


class ModelError(KakeyaError):
    """A model folder is missing, damaged, tampered with, unsafe, or of a kind that cannot be served correctly."""


class NonFiniteEntries(ModelError):
    """KV entries to be encoded, or decoded ones, hold NaN or infinity: in `layer`, in `part` ("keys", "values", or
    "keys and values")."""

    def __init__(self, layer: int, part: str, *, come_back: bool = False) -> None:
        """come_back: the entries were decoded; else they are about to be encoded."""
        state, why = (
            ("decoded by the codec", "these KV entries cannot be read")
            if come_back
            else ("to be encoded", "the model overflowed and these KV entries cannot be stored")
        )
        super().__init__(f"layer {layer}: {part} {state} hold NaN or infinity; {why}")
        self.layer = layer
        self.part = part


class BackendError(KakeyaError):
    """The device cannot do what was asked of it."""


class NotNative(BackendError):
    """The native backend does not run this model with these settings here. The torch backend may.

    level: at which the reason is logged when torch takes over.
    """

    def __init__(self, message: str, *, level: int = logging.INFO) -> None:
        super().__init__(message)
        self.level = level


class NotOnMlx(BackendError):
    """MLX does not run this model with these settings here. Other backends may."""


class RequestError(KakeyaError):
    """An error that belongs to one request. `reason` and `metadata` travel to the client as ErrorInfo.

    reveals_session: it may say something of a session, so it has to wait until that is safe on disk. session_id: which,
    if the call names none. is_behind: the client has tokens that the history has not.
    """

    reason: ClassVar[str] = "INTERNAL"
    reveals_session: ClassVar[bool] = True
    session_id: str = ""
    is_behind: bool = False

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
    """A retry must have the same content as the first call with its request id."""

    reason = "REQUEST_ID_REUSED"

    def __init__(self, session_id: str) -> None:
        """session_id: of the earlier call."""
        super().__init__(
            "request_id", "an earlier call used this id with other content; nothing was done. Use a new id"
        )
        self.session_id = session_id


class InvalidConstraint(InvalidArgument):
    """A constraint that cannot be compiled, permits nothing, or is larger or dearer than the server allows."""

    reason = "INVALID_CONSTRAINT"

    def __init__(self, message: str) -> None:
        super().__init__("constraint", message)


class ConstraintUnavailable(RequestError):
    """The server does not know the bytes of its model's tokens, which all constraints but a choice of ids need."""

    reason = "CONSTRAINT_UNAVAILABLE"
    reveals_session = False

    def __init__(self, why: str) -> None:
        super().__init__(
            f"this server cannot constrain output by its text: {why}; a choice of id lists needs no tokenizer, or "
            "generate without a constraint"
        )


class ConstraintFailed(RequestError):
    """A Generate cannot go on under its constraint. Its tokens so far are kept."""

    reason = "CONSTRAINT_FAILED"

    def __init__(self, why: str, position: int) -> None:
        super().__init__(
            f"the constraint allows no token at position {position}: {why}. The tokens before are in the history; "
            "generate with a simpler constraint, or without one",
            position=position,
        )


class SessionNotFound(RequestError):
    """The session is unknown, closed, or another owner's; the error does not say which of the three."""

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

    def __init__(self, expected: int, actual: int, *, session_id: str = "") -> None:
        super().__init__(
            f"expected_history_length is {expected}, the history has {counted(actual, 'token')}; nothing was changed",
            expected=expected,
            actual=actual,
        )
        self.session_id = session_id
        self.is_behind = expected > actual


class HistoryBehindClient(RequestError):
    """The client has tokens that the history has not: the server lost what it had sent, or the client is mistaken."""

    reason = "HISTORY_BEHIND_CLIENT"
    is_behind = True

    def __init__(self, expected: int, actual: int, *, session_id: str = "") -> None:
        super().__init__(
            f"resume_from is {expected}, and the history has {counted(actual, 'token')} only: the server has lost "
            "tokens, or the position is wrong. Nothing was changed; append what is missing, or go on from where the "
            "history ends",
            expected=expected,
            actual=actual,
        )
        self.session_id = session_id


class SessionClosed(RequestError):
    reason = "SESSION_CLOSED"

    def __init__(self) -> None:
        super().__init__("the session was closed while this call was running")


class StreamTakenOver(RequestError):
    """A newer call with the same request id has taken over the stream of the Generate."""

    reason = "STREAM_TAKEN_OVER"

    def __init__(self, position: int) -> None:
        super().__init__(
            f"another call attached to this Generate and receives its tokens; this stream ended before position "
            f"{position}",
            position=position,
        )


class HistoryLimit(RequestError):
    reason = "HISTORY_LIMIT"

    def __init__(self, length: int, adding: int, limit: int, *, setting: str = "") -> None:
        """setting: the name of the server setting that is the limit; "": the session's own limit."""
        bound = f"the session's limit of {limit}"
        advice = "; continue in a session with a larger limit_tokens, where the model has one; sink_window has no limit"
        if setting:
            bound = f"the {limit} tokens that this server allows in one session"
            advice = f"; continue in a new session, or ask the operator to raise {setting}"
        super().__init__(
            f"the history has {counted(length, 'token')}; {adding} more would exceed {bound}; nothing was appended"
            f"{advice}",
            history_length=length,
            limit_tokens=limit,
        )
        if setting:
            self.metadata["setting"] = setting


class AppendTooLarge(RequestError):
    reason = "APPEND_TOO_LARGE"

    def __init__(self, count: int, limit: int) -> None:
        super().__init__(
            f"{counted(count, 'token id')} in one append; the limit is {limit}: split them over several appends",
            max_append_tokens=limit,
        )


class NoCapacity(RequestError):
    reason = "NO_CAPACITY"


class Overloaded(RequestError):
    reason = "OVERLOADED"
    reveals_session = False


class QuotaExceeded(RequestError):
    """The owner has reached a limit per owner that the operator set. Other owners have no part in it.

    quota: the name of the setting. If `retry_after_seconds` is set, waiting helps; otherwise, closing sessions does.
    """

    reason = "QUOTA"

    def __init__(self, quota: str, limit: int, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds, quota=quota, limit=limit)


class Draining(RequestError):
    reason = "DRAINING"
    reveals_session = False

    def __init__(self) -> None:
        super().__init__("the server is shutting down; retry later or on another server", retry_after_seconds=5.0)


class EngineStalled(RequestError):
    """The engine's thread has made no progress for too long. It may recover; if not, the process ends."""

    reason = "ENGINE_STALLED"
    reveals_session = False

    def __init__(self) -> None:
        super().__init__("the engine has stalled; retry later or on another server", retry_after_seconds=5.0)


class OutOfMemory(RequestError):
    """The device ran out of memory in a step. Its sessions lost their KV entries and keep their histories."""

    reason = "OUT_OF_MEMORY"

    def __init__(self) -> None:
        super().__init__(
            "the device ran out of memory in this step; the session's history is kept and its KV entries will be "
            "recomputed; retry later",
            retry_after_seconds=1.0,
        )


class JournalFull(RequestError):
    """The disk of the journal is full. Nothing was lost, and nothing was changed.

    can_close: sessions can be closed all the same; False: the reserve for that is used up.
    """

    reason = "JOURNAL_FULL"
    reveals_session = False

    def __init__(self, *, can_close: bool = True) -> None:
        advice = (
            "Close sessions that are not needed, which makes room for others; or retry once the operator has freed "
            "space on it"
            if can_close
            else "Its reserve for closing sessions is used up, too: retry once the operator has freed space on it"
        )
        super().__init__(
            f"the disk that the server keeps sessions on is full, and nothing was changed. {advice}",
            retry_after_seconds=5.0,
        )


class JournalAway(RequestError):
    """The journal cannot be reached for now. Nothing is lost: what was answered is safe in it.

    is_pending: the call is done here, and is safe once the journal is there again, or lost with this process; else it
    changed nothing.
    """

    reason = "JOURNAL_AWAY"
    reveals_session = False

    def __init__(self, *, is_pending: bool = False) -> None:
        known = (
            "whether this call counts is open until it can: repeat it with the same request_id, which does nothing "
            "twice, or ask for the session's length then"
            if is_pending
            else "nothing was changed; retry soon"
        )
        super().__init__(
            f"what the server keeps sessions in cannot be reached now, and {known}",
            retry_after_seconds=1.0,
            pending=str(is_pending).lower(),
        )


class SessionElsewhere(RequestError):
    """Another server has the session, or took it over from this one, and goes on with it.

    is_pending: the call was done here, and whether it counts was not known when the session was taken over; else it
    changed nothing.
    """

    reason = "SESSION_ELSEWHERE"
    reveals_session = False

    def __init__(self, *, is_pending: bool = False) -> None:
        known = (
            "whether this call counts is open: repeat it with the same request_id, which does nothing twice"
            if is_pending
            else "nothing was changed"
        )
        super().__init__(
            f"another server has the session, and lets go of it when it is asked for here; {known}. Retry soon",
            retry_after_seconds=0.03,
            pending=str(is_pending).lower(),
        )


class DeadlineExceeded(RequestError):
    reason = "DEADLINE"

    def __init__(self, history_length: int) -> None:
        super().__init__(
            f"the deadline passed; the session and its history of {counted(history_length, 'token')} are kept",
            history_length=history_length,
        )


class Unauthenticated(RequestError):
    reason = "UNAUTHENTICATED"
    reveals_session = False

    def __init__(self) -> None:
        super().__init__(
            "no valid key: send one in the header 'authorization: Bearer <key>', which an SDK's api_key and kakeya's "
            "--api-key-file make"
        )


class InvariantViolated(RequestError):
    """The cache and the history disagree. The session is failed and its memory freed.

    Its history is lost, unless a journal keeps it: then the session begins anew from its records.
    """

    def __init__(self, kind: str, message: str, *, remedy: str = "create a new session") -> None:
        super().__init__(f"{kind}: {message}; {remedy}", kind=kind)
        self.kind = kind
        self._what = message

    def kept(self) -> InvariantViolated:
        """The same error for a session whose history is kept."""
        return InvariantViolated(self.kind, self._what, remedy="the history is kept, generate again")


class NonFiniteLogits(RequestError):
    reason = "NON_FINITE_LOGITS"

    def __init__(self, position: int) -> None:
        super().__init__(
            f"the model's logits for position {position} hold NaN or infinity; nothing was sampled. The history is "
            "kept: generate again. If that ends here, too, K or V may be too large for the float16 that the server "
            "keeps them in: kv_dtype=bfloat16 has their range",
            position=position,
        )


class RestorationFailed(RequestError):
    """KV entries outside the exact window could not be stored or restored. The history is kept.

    The message has the system's error text for a file or disk, or which entries were not finite, and nothing else of
    `cause`; the log has the rest.
    """

    reason = "RESTORATION_FAILED"

    def __init__(self, cause: BaseException) -> None:
        reported = ""
        if isinstance(cause, OSError) and cause.strerror:
            reported = f": {cause.strerror}"
        elif isinstance(cause, NonFiniteEntries):
            reported = f": {cause}"
        super().__init__(
            f"the session's evicted KV entries could not be restored{reported}. The history is kept: generate again, "
            "or append it to a session with another strategy"
        )


class HistoryCorrupt(RequestError):
    """The records of a session on disk are damaged. Other sessions are not concerned."""

    reason = "HISTORY_CORRUPT"

    def __init__(self, position: int) -> None:
        super().__init__(
            f"the session's history on disk is damaged from position {position} on, and the session cannot be used. "
            "The operator can restore the state folder from a backup; otherwise create a new session",
            position=position,
        )


class ModelMismatch(RequestError):
    """A session on disk was made under settings that decide its tokens, and these are other ones."""

    reason = "MODEL_MISMATCH"

    def __init__(self, what: str, recorded: object, running: object) -> None:
        super().__init__(
            f"the session was made with {what} {recorded}, and this server runs with {running}: its tokens would "
            "change. It is kept, and can be used when the server runs as before",
            setting=what,
            recorded=recorded,
            running=running,
        )


class InternalError(RequestError):
    """A bug in the server. The message has an incident id only; the log has the rest."""

    reason = "INTERNAL"

    def __init__(self, incident: str) -> None:
        super().__init__(f"internal error, incident {incident}", incident=incident)
