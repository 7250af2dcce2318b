"""Every error the SDK raises on purpose. The second level says which side has to act.

    KakeyaError
    ├── CallerError                 the caller must fix it; the same call fails again
    │   ├── InvalidArgument         ── TokenOutOfRange, InvalidTokenIds, InvalidConstraint, RequestIdReused
    │   │                              (also ValueError)
    │   ├── SessionNotFound         ── SessionEvicted
    │   ├── SessionClosed, HistoryLengthMismatch, HistoryLimit, AppendTooLarge
    │   ├── ConstraintUnavailable, ConstraintFailed
    │   ├── StreamTakenOver, SlowConsumer, Unauthenticated
    │   ├── StateError              a client, session or stream used out of order
    │   ├── InvalidMessages, TemplateError, TokenizerError     from kakeya.tokenization
    │   └── InvalidTool, ToolFormatUnknown, ToolCallError      from kakeya.tools
    ├── RetryableError              wait (`retry_after_seconds`) and try again
    │   └── SessionBusy, NoCapacity, OutOfMemory, Overloaded, JournalFull, JournalAway, SessionElsewhere,
    │   │   Draining, EngineStalled
    ├── ServerError                 an error in the server
    │   ├── InvariantViolated, NonFiniteLogits, RestorationFailed, InternalError, ProtocolError
    │   └── HistoryBehindClient, HistoryCorrupt, ModelMismatch
    ├── DeadlineExceeded            the call took longer than its timeout      (also TimeoutError)
    └── TransportError              the network or a proxy, not the runtime
        ├── ConnectionFailed        ── TLSFailed                               (also ConnectionError)
        └── AppendUnresolved        it is unknown whether ids of an append arrived

An error the server explains is chosen by its ErrorInfo reason; a reason newer than this SDK, by its status code.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_NO_METADATA: Mapping[str, str] = MappingProxyType({})


class KakeyaError(Exception):
    """Base of all errors of the SDK.

    `code` is the gRPC status name (`"NOT_FOUND"`) and `reason` the runtime's code for the situation; both are None for
    an error found by the client. What gRPC raised is its `__context__`. `retry_after_seconds` is the wait that the
    server requested, if it did. `appended_tokens` is set by a failed `append`: how many of its ids are in the history,
    None if that cannot be known.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        reason: str | None = None,
        metadata: Mapping[str, str] = _NO_METADATA,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.metadata = dict(metadata)
        self.retry_after_seconds = retry_after_seconds
        self.appended_tokens: int | None = None
        self._was_sent = True  # False: the call was not sent, or the server did not process it
        self._was_full = False  # the connection had as many calls as the server takes on one

    def __str__(self) -> str:
        label = self.reason or self.code
        return f"{self.message} [{label}]" if label else self.message

    def _number(self, key: str) -> int | None:
        value = self.metadata.get(key, "")
        return int(value) if value.isdecimal() else None


class CallerError(KakeyaError):
    """The request is wrong, or the session is not in the state it assumes. Repeating it unchanged fails again."""


class InvalidArgument(CallerError, ValueError):
    """An argument is out of its documented range. `field` is its name."""

    @property
    def field(self) -> str | None:
        return self.metadata.get("field")


class TokenOutOfRange(InvalidArgument):
    """An id is not in the model's vocabulary. Nothing was appended."""


class InvalidTokenIds(InvalidArgument):
    """A value that is not a token id, found before anything was sent: `value`, at `index`."""

    def __init__(self, message: str, *, field: str, index: int | None, value: object) -> None:
        super().__init__(message, metadata={"field": field})
        self.index = index
        self.value = value


class InvalidConstraint(InvalidArgument):
    """The constraint cannot be compiled, permits nothing, or takes more work than the server allows."""


class RequestIdReused(InvalidArgument):
    """An earlier call with other content used this id. The SDK makes a new id for each call, so this is its own bug."""


class SessionNotFound(CallerError):
    """The session is unknown, closed, or belongs to another owner."""


class SessionEvicted(SessionNotFound):
    """The server evicted the session, for `cause`; create a new one and append its history."""

    @property
    def cause(self) -> str:
        return self.metadata.get("cause", "")


class SessionClosed(CallerError):
    """The session was closed, on this side or while the call was running."""


class HistoryLengthMismatch(CallerError):
    """The history is not as long as expected; the call changed nothing."""

    @property
    def expected(self) -> int | None:
        return self._number("expected")

    @property
    def actual(self) -> int | None:
        return self._number("actual")


class HistoryLimit(CallerError):
    """The append would exceed the session's length limit; nothing of this call's last chunk was appended."""

    @property
    def history_length(self) -> int | None:
        return self._number("history_length")

    @property
    def limit_tokens(self) -> int | None:
        return self._number("limit_tokens")


class AppendTooLarge(CallerError):
    """More ids in one request than the server takes. `Session.append` splits, so this means its limit just changed."""

    @property
    def max_append_tokens(self) -> int | None:
        return self._number("max_append_tokens")


class StreamTakenOver(CallerError):
    """Another stream of the same Generate receives its tokens from `position` on; this one has ended."""

    @property
    def position(self) -> int | None:
        return self._number("position")


class ConstraintUnavailable(CallerError):
    """The server does not know the bytes of its model's tokens, which all constraints but `Choice` need."""


class ConstraintFailed(CallerError):
    """The constraint allows no token at `position`; the tokens before are in the history."""

    @property
    def position(self) -> int | None:
        return self._number("position")


class SlowConsumer(CallerError):
    """The stream was not read for so long that the server stopped generating, at `position`. The session is kept."""

    @property
    def position(self) -> int | None:
        return self._number("position")


class Unauthenticated(CallerError):
    """The API key is missing or wrong."""


class StateError(CallerError):
    """A client, session or stream was used out of order; the message says which.

    An `append` whose client was closed while a request of it was under way raises it, with `appended_tokens` None.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self._was_sent = False  # but where the client was closed meanwhile


class InvalidMessages(CallerError, ValueError):
    """Chat messages that cannot be rendered. `path` is the invalid part, such as `messages[2].content[0]`."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


class TemplateError(CallerError):
    """The tokenizer's chat template does not support the request."""


class TokenizerError(CallerError):
    """The tokenizer cannot be found or loaded, or is not the served model's."""


class InvalidTool(CallerError, ValueError):
    """A tool that has no valid name, schema or function. `path` is the invalid part, such as `add.parameters.a`."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


class ToolFormatUnknown(TemplateError):
    """The chat template writes no tool calls that can be read again; name a format."""


class ToolCallError(CallerError):
    """What the model wrote is no whole tool call.

    `text` is what it wrote of it, `parts` what was read before it and not given out yet.
    """

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text
        self.parts: tuple[object, ...] = ()


class RetryableError(KakeyaError):
    """Nothing was changed; the same call can succeed later."""


class SessionBusy(RetryableError):
    """Another operation is running on the session, and did not end while the server waited."""


class NoCapacity(RetryableError):
    """The server does not have enough free memory for the session's reservation now."""


class Overloaded(RetryableError):
    """The server's queue is full."""


class QuotaExceeded(RetryableError):
    """The owner has reached the server's limit per owner on sessions, bytes of K/V, tokens of history or waiting
    Generates; `quota` says which. Waiting helps if `retry_after_seconds` is set; else close sessions."""

    @property
    def quota(self) -> str | None:
        return self.metadata.get("quota")


class Draining(RetryableError):
    """The server is shutting down."""


class EngineStalled(RetryableError):
    """The server's engine has stalled. It may recover; if not, the server ends."""


class OutOfMemory(RetryableError):
    """The device ran out of memory during the call. The session and its history are kept."""


class JournalFull(RetryableError):
    """The disk that the server keeps sessions on is full. Nothing was lost, and this call changed nothing.

    Sessions can be read, and closed: that makes room for others.
    """


class JournalAway(RetryableError):
    """What the server keeps sessions in cannot be reached for now; nothing that it had answered is lost.

    `is_pending`: whether this call counts is open until then, and the same call again does nothing twice; else it
    changed nothing.
    """

    @property
    def is_pending(self) -> bool:
        return self.metadata.get("pending") == "true"


class SessionElsewhere(RetryableError):
    """Another server has the session, and lets go of it: the same call again finds it.

    `is_pending`: the call was done where it was, and whether it counts is open; the same call again does nothing twice.
    Else it changed nothing.
    """

    @property
    def is_pending(self) -> bool:
        return self.metadata.get("pending") == "true"


class ServerError(KakeyaError):
    """An error in the server."""


class InvariantViolated(ServerError):
    """The session's cache and history disagreed; it has failed, create a new one. `kind` is INV1, INV2 or INV3."""

    @property
    def kind(self) -> str:
        return self.reason or ""


class NonFiniteLogits(ServerError):
    """The model produced NaN or infinity; nothing was sampled."""


class RestorationFailed(ServerError):
    """KV entries outside the exact window could not be restored; the history is kept."""


class HistoryBehindClient(ServerError):
    """The history has `actual` tokens, and this side has been given tokens up to `expected`: the server lost some."""

    @property
    def expected(self) -> int | None:
        return self._number("expected")

    @property
    def actual(self) -> int | None:
        return self._number("actual")


class HistoryCorrupt(ServerError):
    """What the server keeps of this session on disk is damaged; other sessions are not concerned."""


class ModelMismatch(ServerError):
    """The session was made under a model or settings that the server does not run now; it is kept until it does."""


class InternalError(ServerError):
    """A bug in the server. `incident` identifies it in the server's log."""

    @property
    def incident(self) -> str:
        return self.metadata.get("incident", "")


class ProtocolError(ServerError):
    """The server's answer breaks the wire contract."""


class DeadlineExceeded(KakeyaError, TimeoutError):
    """The call took longer than its timeout. The session and everything committed are kept."""


class TransportError(KakeyaError):
    """The call failed outside the runtime: the error carries no details from the server."""


class ConnectionFailed(TransportError, ConnectionError):
    """The server could not be reached, or the connection broke."""


class TLSFailed(ConnectionFailed):
    """A certificate is not accepted, or only one side speaks TLS. The same call fails again, so it is not retried."""


class AppendUnresolved(TransportError):
    """It is unknown whether ids of an append are in the history; `__cause__` is the error.

    `pending_tokens` ids were to follow the first `history_length` tokens of the history. In any case the
    session's next append does not duplicate them: it expects the length known before.
    """

    def __init__(self, cause: KakeyaError, *, history_length: int, pending_tokens: int) -> None:
        super().__init__(
            f"{cause.message}; it is unknown whether {pending_tokens} ids for position {history_length} arrived. The "
            f"next append insists on a history of {history_length} tokens: if they arrived, it is refused with "
            "HistoryLengthMismatch, whose `actual` is the length, and the one after that goes there. info() returns "
            "the length, too",
            code=cause.code,
            reason=cause.reason,
            metadata=cause.metadata,
            retry_after_seconds=cause.retry_after_seconds,
        )
        self.history_length = history_length
        self.pending_tokens = pending_tokens
