"""Calls that come again, and what comes of them: every token once, and nothing done twice."""

from __future__ import annotations

from typing import Any

import pytest

from inference_engine.engine import Engine
from inference_engine.logs import tag
from inference_engine.server import service
from inference_engine.server.run import ServerHandle
from kakeya.v1 import runtime_pb2 as pb
from tests.server.wire import HISTORY, Client, connected, read_rest, refused, serving, until_free

ONE = b"1" * 16
FOREVER = 30_000  # tokens; minutes of work for TinyModel


def kinds(frames: list[Any]) -> list[str]:
    return [frame.WhichOneof("payload") for frame in frames]


def token_ids(frames: list[Any]) -> list[int]:
    return [frame.token.token_id for frame in frames if frame.HasField("token")]


def asked(session_id: str, max_tokens: int, *, request_id: bytes = ONE, **fields: Any) -> pb.GenerateRequest:
    fields = {"token_details": True, **fields}
    return pb.GenerateRequest(session_id=session_id, max_tokens=max_tokens, request_id=request_id, **fields)


# -- one call, twice --------------------------------------------------------------------------------------------------


async def test_each_call_says_when_it_had_been_answered_before(client: Client) -> None:
    create = pb.CreateSessionRequest(limit_tokens=100, request_id=ONE)
    opened = [await client.call("CreateSession", create) for _ in range(2)]
    assert [answer.replayed for answer in opened] == [False, True]
    session_id = opened[0].session_id
    assert opened[1].session_id == session_id
    append = pb.AppendTokensRequest(session_id=session_id, token_ids=HISTORY, request_id=ONE)
    appended = [await client.call("AppendTokens", append) for _ in range(2)]
    assert [(answer.history_length, answer.replayed) for answer in appended] == [(8, False), (8, True)]
    streams = [await client.call("Generate", asked(session_id, 4, progress=True)) for _ in range(2)]
    assert token_ids(streams[0]) == token_ids(streams[1])
    assert [frames[-1].done.replayed for frames in streams] == [False, True]
    assert [(frames[0].accepted.first_position, frames[0].accepted.replayed) for frames in streams] == [
        (8, False),
        (8, True),
    ]
    close = pb.CloseSessionRequest(session_id=session_id, request_id=ONE, expected_history_length=12)
    closed = [await client.call("CloseSession", close) for _ in range(2)]
    assert [(answer.final_history_length, answer.replayed) for answer in closed] == [(12, False), (12, True)]


async def test_a_position_outside_a_generate_is_refused(
    engine: Engine, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    session_id = await client.open()
    assert (await refused(client.call("Generate", asked(session_id, 2, resume_from=8)))).fields == ["resume_from"]
    await client.call("Generate", asked(session_id, 2))
    for outside in (0, 7):
        details = await refused(client.call("Generate", asked(session_id, 2, resume_from=outside)))
        assert (details.reason, details.fields) == ("INVALID_ARGUMENT INVALID_ARGUMENT", ["resume_from"])
    # Tokens that the client has and the history has not: they were lost, which is no mistake of the client's.
    details = await refused(client.call("Generate", asked(session_id, 2, resume_from=11)))
    assert details.reason == "DATA_LOSS HISTORY_BEHIND_CLIENT"
    assert details.error_info is not None
    assert dict(details.error_info.metadata) == {"expected": "11", "actual": "10"}
    assert engine.metrics.histories_behind._value.get() == 1
    (line,) = [line for line in caplog.records if "tokens were lost" in line.getMessage()]
    assert vars(line)["session"] == tag(session_id)
    assert kinds(await client.call("Generate", asked(session_id, 2, resume_from=10))) == ["done"]
    assert await client.length(session_id) == len(HISTORY) + 2


@pytest.mark.parametrize(
    ("method", "request_type", "fields"),
    [
        ("AppendTokens", pb.AppendTokensRequest, {}),
        ("Generate", pb.GenerateRequest, {"max_tokens": 1}),
        ("ForkSession", pb.ForkSessionRequest, {}),
        ("RewindSession", pb.RewindSessionRequest, {"at_position": 1}),
        ("CloseSession", pb.CloseSessionRequest, {}),
    ],
)
async def test_a_client_that_expects_more_tokens_than_there_are_is_logged_and_counted(
    engine: Engine,
    client: Client,
    caplog: pytest.LogCaptureFixture,
    method: str,
    request_type: Any,
    fields: dict[str, int],
) -> None:
    """The wire has one answer for every other length; that tokens may have been lost, the operator has to learn."""
    session_id = await client.open()
    for expected, counted in ((7, 0), (9, 1)):
        request = request_type(session_id=session_id, expected_history_length=expected, **fields)
        assert (await refused(client.call(method, request))).reason == "ABORTED HISTORY_LENGTH_MISMATCH"
        assert engine.metrics.histories_behind._value.get() == counted
    (line,) = [line for line in caplog.records if "tokens were lost" in line.getMessage()]
    assert vars(line)["session"] == tag(session_id)
    assert await client.length(session_id) == len(HISTORY)


# -- a Generate that runs, or was stopped -----------------------------------------------------------------------------


async def started(client: Client, session_id: str, count: int) -> tuple[Any, list[int]]:
    """A stream that goes on and on, and its first tokens."""
    stream = client.stream(asked(session_id, FOREVER))
    return stream, [(await stream.read()).token.token_id for _ in range(count)]


async def next_tokens(stream: Any, count: int) -> list[int]:
    return [(await stream.read()).token.token_id for _ in range(count)]


async def test_a_newer_stream_takes_over_and_the_older_ones_end_stops_nothing(
    engine: Engine, server: ServerHandle, client: Client
) -> None:
    session_id = await client.open_endless()
    older, first = await started(client, session_id, 5)
    async with connected(server) as other:
        newer = other.stream(asked(session_id, FOREVER, resume_from=len(HISTORY) + 3))
        again = await next_tokens(newer, 30)
        details = await refused(read_rest(older))
        assert details.reason == "ABORTED STREAM_TAKEN_OVER"
        assert details.error_info is not None
        assert int(details.error_info.metadata["position"]) >= len(HISTORY) + 5
        again += await next_tokens(newer, 30)
        newer.cancel()
        await until_free(engine, session_id)
    undisturbed = await client.generate(await client.open_endless(), 63)
    assert first == undisturbed[:5]
    assert again == undisturbed[3:]


@pytest.mark.hostile
async def test_a_client_that_did_not_read_loses_its_generate_and_not_its_session_and_gets_the_rest(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "STALL_SECONDS", 0.2)
    # The smallest windows a client can ask for, so that a few thousand unread frames block the stream.
    narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1))
    async with serving(engine) as handle, connected(handle, options=narrow) as client:
        session_id = await client.open_endless()
        request = asked(session_id, FOREVER, logprobs=True)
        stream = client.stream(request)
        shown = [await stream.read()]
        await until_free(engine, session_id)
        details = await refused(read_rest(stream, into=shown))
        assert details.reason == "RESOURCE_EXHAUSTED SLOW_CONSUMER"
        assert details.error_info is not None
        # Where sending stopped; what was in flight then may have come since.
        assert len(HISTORY) < int(details.error_info.metadata["position"]) <= len(HISTORY) + len(shown)
        assert details.retry_info is not None  # it may come again at once
        request.resume_from = len(HISTORY) + len(shown)
        stream = client.stream(request)
        rest = await next_tokens(stream, 10)
        stream.cancel()
        await until_free(engine, session_id)
        undisturbed = await client.generate(await client.open_endless(), len(shown) + 10)
        assert token_ids(shown) + rest == undisturbed
