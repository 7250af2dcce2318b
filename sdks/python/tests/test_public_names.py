"""What is public, and that asking for the wire contract alone loads nothing else."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import kakeya
import kakeya.tokenization
import kakeya.tools

PUBLIC = """
AppendTooLarge AppendUnresolved AsyncClient AsyncGenerateStream AsyncSession AsyncTextStream CallerError Choice Client
ConnectionFailed Constraint ConstraintFailed ConstraintUnavailable DeadlineExceeded Draining Durability EngineStalled
Full Gather GenerateResult GenerateStream HistoryBehindClient HistoryCorrupt HistoryLengthMismatch HistoryLimit
HistoryPiece InternalError InvalidArgument InvalidConstraint InvalidMessages InvalidTokenIds InvalidTool
InvariantViolated JournalAway JournalFull JsonSchema KakeyaError Lark LayerWindow Mac Mode ModelMismatch Named
NoCapacity NonFiniteLogits OutOfMemory Overloaded Progress ProtocolError QuotaExceeded Regex RequestIdReused
RestorationFailed Restored RetryPolicy RetryableError ServerError ServerInfo Session SessionBusy SessionClosed
SessionElsewhere SessionEvicted SessionInfo SessionNotFound SessionSummary SinkWindow SlowConsumer StateError StopReason
Strategy StreamTakenOver TLS TLSFailed TemplateError TextResult TextStream Thought Tiered TokenDetail TokenOutOfRange
TokenizerError ToolCallError ToolFormatUnknown TopLogprob TransportError Unauthenticated Usage
"""


def test_the_public_names_are_these() -> None:
    assert sorted(kakeya.__all__) == sorted(PUBLIC.split())
    for name in kakeya.__all__:
        assert getattr(kakeya, name).__name__ == name
        assert name in dir(kakeya)


def test_the_public_names_of_tokenization_are_these() -> None:
    assert kakeya.tokenization.__all__ == [
        "ChatTokenizer",
        "ReplyText",
        "StopStrings",
        "end_of_turn_ids",
        "from_openai_messages",
        "load_tokenizer",
        "tokens_for_chat",
        "tokens_for_next_turn",
    ]


def test_the_public_names_of_tools_are_these() -> None:
    assert kakeya.tools.__all__ == [
        "FieldSyntax",
        "TextPart",
        "Tool",
        "ToolCall",
        "ToolCallParser",
        "ToolCallPart",
        "ToolFormat",
        "ToolResult",
        "Tools",
        "ToolsTurn",
        "tool_from",
    ]


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("kakeya", ["grpc", "google.protobuf", "kakeya._sync", "kakeya._errors"]),
        ("kakeya.v1.runtime_pb2", ["grpc", "kakeya._sync", "kakeya._async", "kakeya._errors"]),
        ("kakeya.tokenization", ["grpc", "transformers", "jinja2", "torch"]),
        ("kakeya.tools", ["grpc", "transformers", "jinja2", "torch"]),
        ("kakeya._sync", ["torch", "numpy", "transformers", "inference_engine"]),
    ],
)
def test_importing_one_part_leaves_the_others_alone(imported: str, absent: list[str]) -> None:
    check = f"import sys, {imported}; print(*[name for name in {absent!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60)
    assert loaded.stdout.split() == []


@pytest.mark.parametrize(
    ("blocking", "asynchronous"),
    [
        (kakeya.Client, kakeya.AsyncClient),
        (kakeya.Session, kakeya.AsyncSession),
        (kakeya.GenerateStream, kakeya.AsyncGenerateStream),
    ],
    ids=lambda kind: kind.__name__,
)
def test_both_clients_have_the_same_methods_with_the_same_parameters(blocking: type, asynchronous: type) -> None:
    def methods(kind: type) -> dict[str, list[inspect.Parameter]]:
        return {
            name: [
                parameter.replace(annotation=inspect.Parameter.empty)
                for parameter in inspect.signature(member).parameters.values()
            ]
            for name, member in inspect.getmembers(kind)
            if callable(member) and (not name.startswith("_") or name == "__init__")
        }

    ours, theirs = methods(blocking), methods(asynchronous)
    assert ours == theirs


def test_every_public_method_is_documented() -> None:
    for name in kakeya.__all__:
        kind = getattr(kakeya, name)
        assert kind.__doc__, name
        for member_name, member in inspect.getmembers(kind, inspect.isfunction):
            if not member_name.startswith("_"):
                assert inspect.getdoc(member), f"{name}.{member_name}"
