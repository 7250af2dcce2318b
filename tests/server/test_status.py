"""Every error has one status, and it arrives whole."""

import re
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from inference_engine import errors
from inference_engine.engine import Engine
from inference_engine.errors import RequestError
from inference_engine.server.status import CODES, SlowConsumer, reason_of
from kakeya.v1 import runtime_pb2 as pb
from tests.server.wire import Client, Details, refused

EXAMPLES = {
    "NOT_FOUND SESSION_NOT_FOUND": errors.SessionNotFound(),
    "NOT_FOUND SESSION_EVICTED": errors.SessionEvicted("ttl"),
    "INVALID_ARGUMENT TOKEN_OUT_OF_RANGE": errors.TokenOutOfRange("token_ids", "id 200 is too large"),
    "INVALID_ARGUMENT INVALID_ARGUMENT": errors.InvalidArgument("top_p", "must be in (0, 1], got 2"),
    "INVALID_ARGUMENT INVALID_CONSTRAINT": errors.InvalidConstraint("regex: it permits nothing"),
    "FAILED_PRECONDITION CONSTRAINT_UNAVAILABLE": errors.ConstraintUnavailable("the model has no tokenizer.json"),
    "FAILED_PRECONDITION CONSTRAINT_FAILED": errors.ConstraintFailed("no token spells what has to follow", 7),
    "RESOURCE_EXHAUSTED APPEND_TOO_LARGE": errors.AppendTooLarge(7, 5),
    "INVALID_ARGUMENT REQUEST_ID_REUSED": errors.RequestIdReused(""),
    "ABORTED STREAM_TAKEN_OVER": errors.StreamTakenOver(12),
    "ABORTED SESSION_BUSY": errors.SessionBusy(2.0),
    "ABORTED SESSION_CLOSED": errors.SessionClosed(),
    "ABORTED HISTORY_LENGTH_MISMATCH": errors.HistoryLengthMismatch(3, 5),
    "DATA_LOSS HISTORY_BEHIND_CLIENT": errors.HistoryBehindClient(5, 3),
    "RESOURCE_EXHAUSTED NO_CAPACITY": errors.NoCapacity("no room", retry_after_seconds=1.5),
    "DATA_LOSS HISTORY_CORRUPT": errors.HistoryCorrupt(7),
    "FAILED_PRECONDITION MODEL_MISMATCH": errors.ModelMismatch("segment_tokens", 64, 128),
    "RESOURCE_EXHAUSTED JOURNAL_FULL": errors.JournalFull(),
    "UNAVAILABLE JOURNAL_AWAY": errors.JournalAway(is_pending=True),
    "UNAVAILABLE SESSION_ELSEWHERE": errors.SessionElsewhere(is_pending=True),
    "RESOURCE_EXHAUSTED OVERLOADED": errors.Overloaded("the queue is full", retry_after_seconds=0.25),
    "RESOURCE_EXHAUSTED QUOTA": errors.QuotaExceeded("max_sessions_per_owner", 3, "too many", retry_after_seconds=1.0),
    "RESOURCE_EXHAUSTED HISTORY_LIMIT": errors.HistoryLimit(500, 20, 512),
    "RESOURCE_EXHAUSTED SLOW_CONSUMER": SlowConsumer(30.0, 40),
    "UNAUTHENTICATED UNAUTHENTICATED": errors.Unauthenticated(),
    "UNAVAILABLE DRAINING": errors.Draining(),
    "UNAVAILABLE ENGINE_STALLED": errors.EngineStalled(),
    "RESOURCE_EXHAUSTED OUT_OF_MEMORY": errors.OutOfMemory(),
    "FAILED_PRECONDITION INV1": errors.InvariantViolated("INV1", "3 positions of 2"),
    "FAILED_PRECONDITION INV2": errors.InvariantViolated("INV2", "went back"),
    "FAILED_PRECONDITION INV3": errors.InvariantViolated("INV3", "splits differ"),
    "INTERNAL NON_FINITE_LOGITS": errors.NonFiniteLogits(12),
    "INTERNAL RESTORATION_FAILED": errors.RestorationFailed(ValueError("codes of another codec")),
    "DEADLINE_EXCEEDED DEADLINE": errors.DeadlineExceeded(40),
    "INTERNAL INTERNAL": errors.InternalError("c0ffee"),
}


def kinds(base: type[RequestError] = RequestError) -> Iterator[type[RequestError]]:
    """Those that gRPC may have to report; the HTTP shim has more of its own."""
    for kind in base.__subclasses__():
        if not kind.__module__.startswith("inference_engine.server.http"):
            yield kind
            yield from kinds(kind)


async def info_refused(client: Client) -> Details:
    return await refused(client.call("GetSessionInfo", pb.GetSessionInfoRequest(session_id="any")))


def test_every_kind_of_request_error_has_an_example_here_and_a_code() -> None:
    assert {type(error) for error in EXAMPLES.values()} == set(kinds())
    assert {reason_of(error) for error in EXAMPLES.values()} <= set(CODES)


async def test_an_error_arrives_with_its_code_reason_metadata_and_hints(
    engine: Engine, client: Client, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    for expected, error in EXAMPLES.items():
        with subtests.test(expected):
            with monkeypatch.context() as patch:
                patch.setattr(engine, "session_info", Mock(side_effect=error))
                details = await info_refused(client)

            assert details.reason == expected
            # A busy session is waited for, as long as the setting says.
            assert re.sub(r"within 0\.2\S* s", "within 2 s", details.text) == error.message
            assert details.error_info is not None
            assert details.error_info.domain == "kakeya.v1"
            assert dict(details.error_info.metadata) == error.metadata
            assert details.fields == ([error.field] if isinstance(error, errors.InvalidArgument) else [])
            delay = details.retry_info.retry_delay.ToNanoseconds() / 1e9 if details.retry_info else None
            assert delay == error.retry_after_seconds


async def test_a_bug_of_ours_shows_an_incident_id_and_the_log_has_the_rest(
    engine: Engine, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise KeyError("secret-detail-of-the-implementation")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "session_info", fail)
        details = await info_refused(client)

    assert details.reason == "INTERNAL INTERNAL"
    assert details.error_info is not None
    incident = details.error_info.metadata["incident"]
    assert details.text == f"internal error, incident {incident}"
    record = next(record for record in caplog.records if incident in record.getMessage())
    assert record.exc_info is not None
    assert "secret-detail" in str(record.exc_info[1])
