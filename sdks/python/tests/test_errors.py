"""The tree says whose turn it is, and each class carries the facts of its situation."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

import kakeya
from kakeya._status import from_rpc_error

EVERY_REASON = {
    "INVALID_ARGUMENT": ("INVALID_ARGUMENT", kakeya.InvalidArgument, kakeya.CallerError),
    "TOKEN_OUT_OF_RANGE": ("INVALID_ARGUMENT", kakeya.TokenOutOfRange, kakeya.CallerError),
    "REQUEST_ID_REUSED": ("INVALID_ARGUMENT", kakeya.RequestIdReused, kakeya.InvalidArgument),
    "INVALID_CONSTRAINT": ("INVALID_ARGUMENT", kakeya.InvalidConstraint, kakeya.InvalidArgument),
    "CONSTRAINT_UNAVAILABLE": ("FAILED_PRECONDITION", kakeya.ConstraintUnavailable, kakeya.CallerError),
    "CONSTRAINT_FAILED": ("FAILED_PRECONDITION", kakeya.ConstraintFailed, kakeya.CallerError),
    "SESSION_NOT_FOUND": ("NOT_FOUND", kakeya.SessionNotFound, kakeya.CallerError),
    "SESSION_EVICTED": ("NOT_FOUND", kakeya.SessionEvicted, kakeya.CallerError),
    "SESSION_CLOSED": ("ABORTED", kakeya.SessionClosed, kakeya.CallerError),
    "HISTORY_LENGTH_MISMATCH": ("ABORTED", kakeya.HistoryLengthMismatch, kakeya.CallerError),
    "HISTORY_BEHIND_CLIENT": ("DATA_LOSS", kakeya.HistoryBehindClient, kakeya.ServerError),
    "HISTORY_CORRUPT": ("DATA_LOSS", kakeya.HistoryCorrupt, kakeya.ServerError),
    "MODEL_MISMATCH": ("FAILED_PRECONDITION", kakeya.ModelMismatch, kakeya.ServerError),
    "JOURNAL_FULL": ("RESOURCE_EXHAUSTED", kakeya.JournalFull, kakeya.RetryableError),
    "JOURNAL_AWAY": ("UNAVAILABLE", kakeya.JournalAway, kakeya.RetryableError),
    "SESSION_ELSEWHERE": ("UNAVAILABLE", kakeya.SessionElsewhere, kakeya.RetryableError),
    "HISTORY_LIMIT": ("RESOURCE_EXHAUSTED", kakeya.HistoryLimit, kakeya.CallerError),
    "APPEND_TOO_LARGE": ("RESOURCE_EXHAUSTED", kakeya.AppendTooLarge, kakeya.CallerError),
    "STREAM_TAKEN_OVER": ("ABORTED", kakeya.StreamTakenOver, kakeya.CallerError),
    "SLOW_CONSUMER": ("RESOURCE_EXHAUSTED", kakeya.SlowConsumer, kakeya.CallerError),
    "UNAUTHENTICATED": ("UNAUTHENTICATED", kakeya.Unauthenticated, kakeya.CallerError),
    "SESSION_BUSY": ("ABORTED", kakeya.SessionBusy, kakeya.RetryableError),
    "NO_CAPACITY": ("RESOURCE_EXHAUSTED", kakeya.NoCapacity, kakeya.RetryableError),
    "OVERLOADED": ("RESOURCE_EXHAUSTED", kakeya.Overloaded, kakeya.RetryableError),
    "QUOTA": ("RESOURCE_EXHAUSTED", kakeya.QuotaExceeded, kakeya.RetryableError),
    "DRAINING": ("UNAVAILABLE", kakeya.Draining, kakeya.RetryableError),
    "ENGINE_STALLED": ("UNAVAILABLE", kakeya.EngineStalled, kakeya.RetryableError),
    "OUT_OF_MEMORY": ("RESOURCE_EXHAUSTED", kakeya.OutOfMemory, kakeya.RetryableError),
    "INV1": ("FAILED_PRECONDITION", kakeya.InvariantViolated, kakeya.ServerError),
    "INV2": ("FAILED_PRECONDITION", kakeya.InvariantViolated, kakeya.ServerError),
    "INV3": ("FAILED_PRECONDITION", kakeya.InvariantViolated, kakeya.ServerError),
    "NON_FINITE_LOGITS": ("INTERNAL", kakeya.NonFiniteLogits, kakeya.ServerError),
    "INTERNAL": ("INTERNAL", kakeya.InternalError, kakeya.ServerError),
    "RESTORATION_FAILED": ("INTERNAL", kakeya.RestorationFailed, kakeya.ServerError),
    "DEADLINE": ("DEADLINE_EXCEEDED", kakeya.DeadlineExceeded, TimeoutError),
}


class Failed(grpc.RpcError):
    """An RPC that failed with the status of `failure`, as grpc would raise it."""

    def __init__(self, code: grpc.StatusCode, details: str, trailers: tuple[tuple[str, bytes], ...] = ()) -> None:
        self._facts = code, details, trailers

    def code(self) -> grpc.StatusCode:
        return self._facts[0]

    def details(self) -> str:
        return self._facts[1]

    def trailing_metadata(self) -> Any:
        return self._facts[2]


def server_failure(error: Exception) -> Failed:
    """As the runtime's own server puts `error` on the wire."""
    from inference_engine.errors import RequestError
    from inference_engine.server.status import code_of, to_trailers

    assert isinstance(error, RequestError)
    return Failed(code_of(error), error.message, to_trailers(error))


def test_every_reason_the_server_can_give_has_its_class() -> None:
    from inference_engine.server.status import CODES

    assert set(CODES) == set(EVERY_REASON)
    assert {reason: code.name for reason, code in CODES.items()} == {r: e[0] for r, e in EVERY_REASON.items()}


def test_a_reason_becomes_its_class(subtests: pytest.Subtests) -> None:
    from google.rpc import error_details_pb2, status_pb2

    for reason, (code_name, kind, turn) in EVERY_REASON.items():
        with subtests.test(reason):
            code = grpc.StatusCode[code_name]
            status = status_pb2.Status(code=code.value[0], message="so it is")
            status.details.add().Pack(error_details_pb2.ErrorInfo(domain="kakeya.v1", reason=reason))
            error = from_rpc_error(
                Failed(code, "so it is", (("grpc-status-details-bin", status.SerializeToString()),)), "here"
            )
            assert type(error) is kind
            assert isinstance(error, turn)
            assert str(error) == f"so it is [{reason}]"
            assert (error.code, error.reason) == (code_name, reason)


def test_the_facts_of_an_error_are_attributes() -> None:
    from inference_engine import errors

    mismatch = from_rpc_error(server_failure(errors.HistoryLengthMismatch(3, 5)), "here")
    assert isinstance(mismatch, kakeya.HistoryLengthMismatch)
    assert (mismatch.expected, mismatch.actual) == (3, 5)

    limit = from_rpc_error(server_failure(errors.HistoryLimit(10, 7, 12)), "here")
    assert isinstance(limit, kakeya.HistoryLimit)
    assert (limit.history_length, limit.limit_tokens) == (10, 12)

    large = from_rpc_error(server_failure(errors.AppendTooLarge(9, 4)), "here")
    assert isinstance(large, kakeya.AppendTooLarge)
    assert large.max_append_tokens == 4

    evicted = from_rpc_error(server_failure(errors.SessionEvicted("idle")), "here")
    assert isinstance(evicted, kakeya.SessionEvicted)
    assert evicted.cause == "idle"
    assert isinstance(evicted, kakeya.SessionNotFound)

    bug = from_rpc_error(server_failure(errors.InternalError("abc")), "here")
    assert isinstance(bug, kakeya.InternalError)
    assert bug.incident == "abc"

    broken = from_rpc_error(server_failure(errors.InvariantViolated("INV2", "positions decreased")), "here")
    assert isinstance(broken, kakeya.InvariantViolated)
    assert broken.kind == "INV2"

    from inference_engine.server.status import SlowConsumer

    for sent in (errors.StreamTakenOver(17), SlowConsumer(30.0, 17)):
        stopped = from_rpc_error(server_failure(sent), "here")
        assert isinstance(stopped, kakeya.StreamTakenOver | kakeya.SlowConsumer)
        assert stopped.position == 17

    argument = from_rpc_error(server_failure(errors.InvalidArgument("top_p", "must be in (0, 1], got 2")), "here")
    assert isinstance(argument, kakeya.InvalidArgument)
    assert isinstance(argument, ValueError)
    assert argument.field == "top_p"


def test_the_wait_the_server_asks_for_is_kept() -> None:
    from inference_engine import errors

    draining = from_rpc_error(server_failure(errors.Draining()), "here")
    assert draining.retry_after_seconds == 5.0


def test_builtin_bases_let_plain_handlers_catch() -> None:
    assert issubclass(kakeya.DeadlineExceeded, TimeoutError)
    assert issubclass(kakeya.ConnectionFailed, ConnectionError)
    assert issubclass(kakeya.InvalidTokenIds, ValueError)
    assert issubclass(kakeya.InvalidMessages, ValueError)
