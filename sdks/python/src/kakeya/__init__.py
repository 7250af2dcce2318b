"""The Python SDK of the Kakeya runtime: sessions with one model, over gRPC, in raw token ids.

    from kakeya import Client, SinkWindow

    with Client("127.0.0.1:50051") as client, client.create_session(strategy=SinkWindow(window=1024)) as session:
        session.append(prompt_token_ids)
        for token_id in session.generate(256):
            ...

Names are looked up on first use, so that the server, which needs the stubs in `kakeya.v1` alone, never loads a client.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kakeya._async import AsyncClient, AsyncGenerateStream, AsyncSession
    from kakeya._channel import TLS
    from kakeya._constraints import Choice, Constraint, JsonSchema, Lark, Regex
    from kakeya._errors import (
        AppendTooLarge,
        AppendUnresolved,
        CallerError,
        ConnectionFailed,
        ConstraintFailed,
        ConstraintUnavailable,
        DeadlineExceeded,
        Draining,
        EngineStalled,
        HistoryBehindClient,
        HistoryCorrupt,
        HistoryLengthMismatch,
        HistoryLimit,
        InternalError,
        InvalidArgument,
        InvalidConstraint,
        InvalidMessages,
        InvalidTokenIds,
        InvalidTool,
        InvariantViolated,
        JournalAway,
        JournalFull,
        KakeyaError,
        ModelMismatch,
        NoCapacity,
        NonFiniteLogits,
        OutOfMemory,
        Overloaded,
        ProtocolError,
        QuotaExceeded,
        RequestIdReused,
        RestorationFailed,
        RetryableError,
        ServerError,
        SessionBusy,
        SessionClosed,
        SessionElsewhere,
        SessionEvicted,
        SessionNotFound,
        SlowConsumer,
        StateError,
        StreamTakenOver,
        TemplateError,
        TLSFailed,
        TokenizerError,
        TokenOutOfRange,
        ToolCallError,
        ToolFormatUnknown,
        TransportError,
        Unauthenticated,
    )
    from kakeya._retry import RetryPolicy
    from kakeya._strategies import Full, Gather, LayerWindow, Mac, Named, Restored, SinkWindow, Strategy, Tiered
    from kakeya._sync import Client, GenerateStream, Session
    from kakeya._text import AsyncTextStream, TextResult, TextStream
    from kakeya._thinking import Thought
    from kakeya._values import (
        Durability,
        GenerateResult,
        HistoryPiece,
        Mode,
        Progress,
        ServerInfo,
        SessionInfo,
        SessionSummary,
        StopReason,
        TokenDetail,
        TopLogprob,
        Usage,
    )

__all__ = [
    "TLS",
    "AppendTooLarge",
    "AppendUnresolved",
    "AsyncClient",
    "AsyncGenerateStream",
    "AsyncSession",
    "AsyncTextStream",
    "CallerError",
    "Choice",
    "Client",
    "ConnectionFailed",
    "Constraint",
    "ConstraintFailed",
    "ConstraintUnavailable",
    "DeadlineExceeded",
    "Draining",
    "Durability",
    "EngineStalled",
    "Full",
    "Gather",
    "GenerateResult",
    "GenerateStream",
    "HistoryBehindClient",
    "HistoryCorrupt",
    "HistoryLengthMismatch",
    "HistoryLimit",
    "HistoryPiece",
    "InternalError",
    "InvalidArgument",
    "InvalidConstraint",
    "InvalidMessages",
    "InvalidTokenIds",
    "InvalidTool",
    "InvariantViolated",
    "JournalAway",
    "JournalFull",
    "JsonSchema",
    "KakeyaError",
    "Lark",
    "LayerWindow",
    "Mac",
    "Mode",
    "ModelMismatch",
    "Named",
    "NoCapacity",
    "NonFiniteLogits",
    "OutOfMemory",
    "Overloaded",
    "Progress",
    "ProtocolError",
    "QuotaExceeded",
    "Regex",
    "RequestIdReused",
    "RestorationFailed",
    "Restored",
    "RetryPolicy",
    "RetryableError",
    "ServerError",
    "ServerInfo",
    "Session",
    "SessionBusy",
    "SessionClosed",
    "SessionElsewhere",
    "SessionEvicted",
    "SessionInfo",
    "SessionNotFound",
    "SessionSummary",
    "SinkWindow",
    "SlowConsumer",
    "StateError",
    "StopReason",
    "Strategy",
    "StreamTakenOver",
    "TLSFailed",
    "TemplateError",
    "TextResult",
    "TextStream",
    "Thought",
    "Tiered",
    "TokenDetail",
    "TokenOutOfRange",
    "TokenizerError",
    "ToolCallError",
    "ToolFormatUnknown",
    "TopLogprob",
    "TransportError",
    "Unauthenticated",
    "Usage",
]

_HOME = {
    "_async": ("AsyncClient", "AsyncGenerateStream", "AsyncSession"),
    "_channel": ("TLS",),
    "_constraints": ("Choice", "Constraint", "JsonSchema", "Lark", "Regex"),
    "_retry": ("RetryPolicy",),
    "_strategies": ("Full", "Gather", "LayerWindow", "Mac", "Named", "Restored", "SinkWindow", "Strategy", "Tiered"),
    "_sync": ("Client", "GenerateStream", "Session"),
    "_text": ("AsyncTextStream", "TextResult", "TextStream"),
    "_thinking": ("Thought",),
    "_values": (
        "Durability",
        "GenerateResult",
        "HistoryPiece",
        "Mode",
        "Progress",
        "ServerInfo",
        "SessionInfo",
        "SessionSummary",
        "StopReason",
        "TokenDetail",
        "TopLogprob",
        "Usage",
    ),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return metadata.version("kakeya")
    if name not in __all__:
        raise AttributeError(f"module 'kakeya' has no attribute {name!r}")
    value = getattr(import_module(f"kakeya.{_MODULE.get(name, '_errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
