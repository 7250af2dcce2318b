"""Every error the SDK raises on purpose. The second level says whose turn it is.

    KakeyaError
    ├── CallerError                 yours to fix; the same call fails again
    │   ├── InvalidArgument         ── TokenOutOfRange, InvalidTokenIds, RequestIdReused   (also ValueError)
    │   ├── SessionNotFound         ── SessionEvicted
    │   ├── SessionClosed, HistoryLengthMismatch, HistoryLimit, AppendTooLarge
    │   ├── StreamTakenOver, SlowConsumer, Unauthenticated
    │   ├── StateError              a client, session or stream used out of order
    │   └── InvalidMessages, TemplateError, TokenizerError     from kakeya.tokenization
    ├── RetryableError              wait (`retry_after_seconds`) and try again
    │   └── SessionBusy, NoCapacity, OutOfMemory, Overloaded, Draining, EngineStalled
    ├── ServerError                 the server's fault
    │   └── InvariantViolated, NonFiniteLogits, RestorationFailed, InternalError, ProtocolError
    ├── DeadlineExceeded            the call took longer than its timeout      (also TimeoutError)
    └── TransportError              the network or a proxy, not the runtime
        ├── ConnectionFailed        ── TLSFailed                               (also ConnectionError)
        └── AppendUnresolved        nobody can tell whether ids of an append arrived

An error the server explains is chosen by its ErrorInfo reason; a reason newer than this SDK, by its status code.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_NO_METADATA: Mapping[str, str] = MappingProxyType({})


class KakeyaError(Exception):
    """Base of all errors of the SDK.

    `code` is the gRPC status name (`"NOT_FOUND"`) and `reason` the runtime's word for the situation; both are None for
    an error found on this side of the wire. `retry_after_seconds` is the wait the server asked for, if it did.
    `appended_tokens` is set by a failed `append`: how many of its ids are in the history, None if that cannot be known.
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
        self._was_sent = True  # False: the call never left this side, or the server did not process it
        self._was_full = False  # the connection had as many calls as the server takes on one

    def __str__(self) -> str:
        label = self.reason or self.code
        return f"{self.message} [{label}]" if label else self.message

    def _number(self, key: str) -> int | None:
        value = self.metadata.get(key, "")
        return int(value) if value.isdecimal() else None


class CallerError(KakeyaError):
    """The request is at fault, or the caller's picture of the session. Repeating it unchanged fails again."""


class InvalidArgument(CallerError, ValueError):
    """An argument is out of its documented range. `field` is its name."""

    @property
    def field(self) -> str | None:
        return self.metadata.get("field")


class TokenOutOfRange(InvalidArgument):
    """An id is not in the model's vocabulary. Nothing was appended."""


class InvalidTokenIds(InvalidArgument):
    """Something that is not a token id, found before anything was sent. `index` and `value` say where and what."""

    def __init__(self, message: str, *, field: str, index: int | None, value: object) -> None:
        super().__init__(message, metadata={"field": field})
        self.index = index
        self.value = value


class RequestIdReused(InvalidArgument):
    """The server knows another call by this id. The SDK makes up a new one for each, so this is its own mistake."""


class SessionNotFound(CallerError):
    """The session is unknown, closed, or somebody else's."""


class SessionEvicted(SessionNotFound):
    """The server took the session away; create a new one and append its history. `cause` says why."""

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
    """The append would pass the session's length limit; nothing of this call's last chunk was appended."""

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
    """Another stream of the same Generate gets its tokens from `position` on; this one has ended."""

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
    """A client, session or stream was used in an order that makes no sense; the message says which.

    An `append` whose client was closed while a request of it was under way raises it, with `appended_tokens` None.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self._was_sent = False  # but where the client was closed meanwhile


class InvalidMessages(CallerError, ValueError):
    """Chat messages that cannot be rendered. `path` points at the culprit, such as `messages[2].content[0]`."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


class TemplateError(CallerError):
    """The tokenizer's chat template cannot be used in the way that was asked."""


class TokenizerError(CallerError):
    """The tokenizer cannot be loaded."""


class RetryableError(KakeyaError):
    """Nothing was changed; the same call can succeed later."""


class SessionBusy(RetryableError):
    """Another operation is running on the session, and did not end while the server waited."""


class NoCapacity(RetryableError):
    """The server has no room for the session's reservation now."""


class Overloaded(RetryableError):
    """The server's queue is full."""


class QuotaExceeded(RetryableError):
    """The caller has as many sessions, bytes of K/V, tokens of history or waiting Generates as the server lets one
    have; `quota` says which. Waiting helps where `retry_after_seconds` is there; else close sessions."""

    @property
    def quota(self) -> str | None:
        return self.metadata.get("quota")


class Draining(RetryableError):
    """The server is shutting down."""


class EngineStalled(RetryableError):
    """The server's engine stands still. It may come back; if not, the server ends."""


class OutOfMemory(RetryableError):
    """The device ran out of memory during the call. The session and its history are kept."""


class ServerError(KakeyaError):
    """The server is at fault."""


class InvariantViolated(ServerError):
    """The session's cache and history disagreed; it is failed, create a new one. `kind` is INV1, INV2 or INV3."""

    @property
    def kind(self) -> str:
        return self.reason or ""


class NonFiniteLogits(ServerError):
    """The model produced NaN or infinity; nothing was sampled."""


class RestorationFailed(ServerError):
    """Rows that had left the exact window could not be brought back; the history is kept."""


class InternalError(ServerError):
    """A bug of the server. `incident` finds it in the server's log."""

    @property
    def incident(self) -> str:
        return self.metadata.get("incident", "")


class ProtocolError(ServerError):
    """The server's answer breaks the wire contract."""


class DeadlineExceeded(KakeyaError, TimeoutError):
    """The call took longer than its timeout. The session and everything committed are kept."""


class TransportError(KakeyaError):
    """The call failed outside the runtime: no explanation of the runtime's came with it."""


class ConnectionFailed(TransportError, ConnectionError):
    """The server could not be reached, or the connection broke."""


class TLSFailed(ConnectionFailed):
    """A certificate is not accepted, or only one side speaks TLS. The same call fails again, so it is not retried."""


class AppendUnresolved(TransportError):
    """Nobody can tell whether ids of an append are in the history; `__cause__` is what went wrong.

    `pending_tokens` ids were to follow the first `history_length` tokens of the history. Whatever became of them, the
    session's next append does not double them: it insists on the length known before.
    """

    def __init__(self, cause: KakeyaError, *, history_length: int, pending_tokens: int) -> None:
        super().__init__(
            f"{cause.message}; nobody can tell whether {pending_tokens} ids for position {history_length} arrived: "
            "info() tells the length of the history",
            code=cause.code,
            reason=cause.reason,
            metadata=cause.metadata,
            retry_after_seconds=cause.retry_after_seconds,
        )
        self.history_length = history_length
        self.pending_tokens = pending_tokens
