"""What a network, a proxy or a newer server does to calls, seen through both clients on a real socket."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import pytest

import kakeya
from kakeya.v1 import runtime_pb2 as pb

Do = Callable[..., Awaitable[Any]]
Answer = Callable[[Any, grpc.ServicerContext], Any]
Failure = Callable[..., Answer]

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
ATTEMPTS = 4
QUICK = kakeya.RetryPolicy(attempts=ATTEMPTS, first_delay_seconds=0.0)


def reply(message: Any) -> Answer:
    return lambda *_: message


@pytest.fixture
async def client(scripted: Any, flavour: str, do: Do) -> AsyncIterator[Any]:
    client = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(scripted.target, api_key="k1", retry=QUICK)
    yield client
    await do(client.close)


@pytest.fixture
async def session(scripted: Any, client: Any, do: Do) -> Any:
    scripted.on("CreateSession", reply(pb.CreateSessionResponse(session_id="s1")))
    scripted.on("GetServerInfo", reply(pb.GetServerInfoResponse(max_append_tokens=100, max_message_bytes=4 * 2**20)))
    return await do(client.create_session)


async def test_a_server_too_old_to_know_its_models_ends_is_named_in_the_log_once(
    scripted: Any, client: Any, do: Do, caplog: pytest.LogCaptureFixture
) -> None:
    ends = pb.CreateSessionResponse(session_id="s1", eos_token_ids=pb.TokenIds())
    old = pb.CreateSessionResponse(session_id="s2")
    scripted.on("CreateSession", *map(reply, (ends, old, old, old)))
    await do(client.create_session)
    await do(client.create_session, eos_token_ids=[])
    assert caplog.records == []
    await do(client.create_session)
    await do(client.create_session)
    assert [record.name for record in caplog.records] == ["kakeya"]
    assert "nothing ends a Generate but max_tokens" in caplog.text
    asked = [(request.model_eos_token_ids, list(request.eos_token_ids)) for request in scripted.calls("CreateSession")]
    assert asked == [(True, []), (False, []), (True, []), (True, [])]


async def test_every_call_that_changes_something_is_repeated_as_the_same_call(
    scripted: Any, client: Any, do: Do, unexplained: Failure
) -> None:
    lost = unexplained(UNAVAILABLE)
    scripted.on("CreateSession", lost, reply(pb.CreateSessionResponse(session_id="s2")))
    scripted.on("GetServerInfo", reply(pb.GetServerInfoResponse(max_append_tokens=100, max_message_bytes=4 * 2**20)))
    scripted.on("AppendTokens", lost, reply(pb.AppendTokensResponse(history_length=3)))
    scripted.on("ForkSession", lost, reply(pb.ForkSessionResponse(session_id="s3", history_length=3)))
    back = pb.RewindSessionResponse(session_id="s4", history_length=3, prefill_token_count=1)
    scripted.on("RewindSession", lost, reply(back))
    scripted.on("CloseSession", lost, reply(pb.CloseSessionResponse(final_history_length=3)))
    session = await do(client.create_session)
    assert await do(session.append, [1, 2, 3]) == 3
    fork = await do(session.fork)
    assert (fork.id, fork.history_length) == ("s3", 3)
    session = await do(session.rewind, 3)
    assert (session.id, session.history_length, session.prefill_tokens) == ("s4", 3, 1)
    assert await do(session.close) == 3
    ids = set()
    for method in ("CreateSession", "AppendTokens", "ForkSession", "RewindSession", "CloseSession"):
        first, again = scripted.calls(method)
        assert first == again
        assert len(first.request_id) == 16
        ids.add(first.request_id)
    assert len(ids) == 5


def tokens(*positions: int) -> list[pb.GenerateResponse]:
    return [pb.GenerateResponse(token=pb.TokenDetail(token_id=at + 100, position=at)) for at in positions]


def streamed(*frames: pb.GenerateResponse, then: Answer | None = None) -> Answer:
    """An answer of these frames, and then an error if one is given."""

    def answer(request: Any, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield from frames
        if then is not None:
            then(request, context)

    return answer


async def test_a_broken_stream_goes_on_behind_the_last_token_that_came(
    scripted: Any, session: Any, do: Do, unexplained: Failure, explained: Failure
) -> None:
    lost = unexplained(UNAVAILABLE)
    slow = explained(grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER", retry_after_seconds=0.0)
    done = pb.GenerateResponse(done=pb.GenerateDone(generated_token_count=4, history_length=9, replayed=True))
    scripted.on(
        "Generate",
        streamed(then=lost),
        streamed(*tokens(5, 6), then=lost),
        streamed(then=lost),
        streamed(*tokens(7), then=slow),
        streamed(*tokens(8), done),
    )
    result = await do(session.generate(4, temperature=1.0).result)
    assert result.token_ids == (105, 106, 107, 108)
    assert session.history_length == 9
    calls = scripted.calls("Generate")
    resumed = [call.resume_from if call.HasField("resume_from") else None for call in calls]
    assert resumed == [None, None, 7, 7, 8]
    for call in calls:
        call.ClearField("resume_from")
    assert all(call == calls[0] for call in calls)
    assert len(calls[0].request_id) == 16


class History:
    """Answers each Generate with one token, at the length that it names alone."""

    def __init__(self, explained: Failure, length: int) -> None:
        self.length = length
        self._explained = explained

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.expected_history_length != self.length:
            expected, actual = str(request.expected_history_length), str(self.length)
            self._explained(grpc.StatusCode.ABORTED, "HISTORY_LENGTH_MISMATCH", expected=expected, actual=actual)(
                request, context
            )
        yield from tokens(self.length)
        self.length += 1
        yield pb.GenerateResponse(done=pb.GenerateDone(generated_token_count=1, history_length=self.length))


@pytest.mark.parametrize("attempts_lost", [0, 1])
async def test_nothing_is_generated_from_a_history_that_lost_tokens(
    scripted: Any, session: Any, do: Do, explained: Failure, unexplained: Failure, attempts_lost: int
) -> None:
    """The server lost power, or goes on from a backup: what the caller believes to be in the prompt is not there."""
    scripted.on("AppendTokens", reply(pb.AppendTokensResponse(history_length=5)))
    await do(session.append, [1, 2, 3, 4, 5])
    history = History(explained, 2)
    scripted.on("Generate", *[streamed(then=unexplained(UNAVAILABLE))] * attempts_lost, history, history)
    stream = session.generate(1)
    for _ in range(2):
        with pytest.raises(kakeya.HistoryBehindClient, match="append what is missing") as caught:
            await do(stream.result)
        assert (caught.value.expected, caught.value.actual) == (5, 2)
        assert (caught.value.reason, caught.value.code) == ("HISTORY_BEHIND_CLIENT", "DATA_LOSS")
    assert (history.length, session.history_length) == (2, 2)
    # After the error the caller may go on from there.
    assert (await do(session.generate(1).result)).history_length == 3


def forked_at(length: int, explained: Failure) -> Answer:
    """Forks for a request that names this length, and no other."""

    def answer(request: Any, context: grpc.ServicerContext) -> pb.ForkSessionResponse:
        if request.expected_history_length != length:
            expected, actual = str(request.expected_history_length), str(length)
            explained(grpc.StatusCode.ABORTED, "HISTORY_LENGTH_MISMATCH", expected=expected, actual=actual)(
                request, context
            )
        return pb.ForkSessionResponse(session_id="s2", history_length=length)

    return answer


@pytest.mark.parametrize("attempts_lost", [0, 1])
async def test_a_history_that_lost_tokens_is_not_forked(
    scripted: Any, session: Any, do: Do, explained: Failure, unexplained: Failure, attempts_lost: int
) -> None:
    scripted.on("AppendTokens", reply(pb.AppendTokensResponse(history_length=5)))
    await do(session.append, [1, 2, 3, 4, 5])
    shorter = forked_at(2, explained)
    scripted.on("ForkSession", *[unexplained(UNAVAILABLE)] * attempts_lost, shorter, shorter)
    with pytest.raises(kakeya.HistoryBehindClient, match="append what is missing") as caught:
        await do(session.fork)
    assert (caught.value.expected, caught.value.actual, session.history_length) == (5, 2, 2)
    assert isinstance(caught.value.__cause__, kakeya.HistoryLengthMismatch)
    # After the error the caller may go on from there.
    assert (await do(session.fork)).history_length == 2
    assert len(scripted.calls("ForkSession")) == attempts_lost + 2


async def test_a_history_that_lost_tokens_is_not_rewound(
    scripted: Any, session: Any, do: Do, explained: Failure
) -> None:
    scripted.on("AppendTokens", reply(pb.AppendTokensResponse(history_length=5)))
    await do(session.append, [1, 2, 3, 4, 5])
    scripted.on(
        "RewindSession", explained(grpc.StatusCode.ABORTED, "HISTORY_LENGTH_MISMATCH", expected="5", actual="4")
    )
    with pytest.raises(kakeya.HistoryBehindClient):
        await do(session.rewind, 3)
    assert (session.is_closed, session.history_length) == (False, 4)


async def test_a_fork_by_a_server_that_knows_no_positions_is_closed_and_refused(
    scripted: Any, session: Any, do: Do
) -> None:
    scripted.on("AppendTokens", reply(pb.AppendTokensResponse(history_length=5)))
    await do(session.append, [1, 2, 3, 4, 5])
    scripted.on("ForkSession", reply(pb.ForkSessionResponse(session_id="s2", history_length=5)))
    scripted.on("CloseSession", reply(pb.CloseSessionResponse(final_history_length=5)))
    with pytest.raises(kakeya.ProtocolError, match="older than forks at a position"):
        await do(session.fork, at_position=3)
    assert [call.session_id for call in scripted.calls("CloseSession")] == ["s2"]


async def test_a_stream_that_gives_no_token_any_more_is_given_up(
    scripted: Any, session: Any, do: Do, unexplained: Failure
) -> None:
    lost = unexplained(UNAVAILABLE)
    scripted.on("Generate", streamed(*tokens(5), then=lost), *[streamed(then=lost)] * 3)
    stream = session.generate(4)
    for _ in range(2):
        with pytest.raises(kakeya.ConnectionFailed) as caught:
            await do(stream.result)
        assert "RpcError" not in "".join(traceback.format_exception(caught.value))
    assert stream.token_ids == (105,)
    assert len(scripted.calls("Generate")) == ATTEMPTS


async def test_a_stream_that_skips_or_doubles_a_position_is_an_error(scripted: Any, session: Any, do: Do) -> None:
    for wrong in (tokens(5, 7), tokens(5, 5)):
        scripted.on("Generate", streamed(*wrong))
        with pytest.raises(kakeya.ProtocolError, match="where 6 comes next"):
            await do(session.generate(4).result)


async def test_a_cancel_while_a_stream_waits_to_go_on_ends_it(
    scripted: Any, flavour: str, do: Do, unexplained: Failure
) -> None:
    patient = kakeya.RetryPolicy(first_delay_seconds=600.0, max_delay_seconds=600.0)
    client: Any = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(scripted.target, retry=patient)
    scripted.on("CreateSession", reply(pb.CreateSessionResponse(session_id="s1")))
    session = await do(client.create_session)
    answered = threading.Event()

    def lost(request: Any, context: grpc.ServicerContext) -> Any:
        answered.set()
        return unexplained(UNAVAILABLE)(request, context)

    scripted.on("Generate", streamed(then=lost))
    stream = session.generate(4, timeout=None)
    reading = asyncio.ensure_future(do(stream.result))
    await asyncio.to_thread(answered.wait)
    stream.cancel()
    with pytest.raises(kakeya.StateError, match="cancelled"):
        await reading
    assert len(scripted.calls("Generate")) == 1
    await do(client.close)


async def test_a_reason_newer_than_the_sdk_is_chosen_by_its_code(
    scripted: Any, session: Any, do: Do, explained: Failure
) -> None:
    for code, kind in {
        grpc.StatusCode.FAILED_PRECONDITION: kakeya.CallerError,
        grpc.StatusCode.RESOURCE_EXHAUSTED: kakeya.RetryableError,
        grpc.StatusCode.DATA_LOSS: kakeya.ServerError,
    }.items():
        scripted.on("GetSessionInfo", explained(code, "INVENTED_LATER", shape="round"))
        with pytest.raises(kind) as caught:
            await do(session.info)
        assert (caught.value.reason, caught.value.code) == ("INVENTED_LATER", code.name)
        assert caught.value.metadata == {"shape": "round"}


async def test_an_error_without_details_is_the_transports(
    scripted: Any, session: Any, do: Do, unexplained: Failure
) -> None:
    scripted.on("GetSessionInfo", unexplained(grpc.StatusCode.PERMISSION_DENIED, "oops"))
    with pytest.raises(kakeya.TransportError, match="oops") as caught:
        await do(session.info)
    assert caught.value.reason is None


@pytest.mark.parametrize("code", ["CANCELLED", "UNKNOWN", "INTERNAL", "RESOURCE_EXHAUSTED"])
async def test_a_call_that_a_middlebox_ended_is_tried_again(
    scripted: Any, session: Any, do: Do, unexplained: Failure, explained: Failure, code: str
) -> None:
    status = grpc.StatusCode[code]
    scripted.on("GetSessionInfo", unexplained(status), reply(pb.GetSessionInfoResponse(history_length=5)))
    assert (await do(session.info)).history_length == 5
    done = pb.GenerateResponse(done=pb.GenerateDone(generated_token_count=2, history_length=7))
    scripted.on("Generate", streamed(*tokens(5), then=unexplained(status)), streamed(*tokens(6), done))
    assert (await do(session.generate(2).result)).token_ids == (105, 106)
    # What the server itself says is meant.
    scripted.on("GetSessionInfo", explained(status, "INVENTED_LATER"))
    with pytest.raises(kakeya.KakeyaError):
        await do(session.info)


async def test_a_stream_without_its_last_frame_is_an_error(scripted: Any, session: Any, do: Do) -> None:
    def cut(request: Any, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(token=pb.TokenDetail(token_id=4, position=0))

    scripted.on("Generate", cut)
    stream = session.generate(2)
    with pytest.raises(kakeya.ProtocolError, match="without its last frame"):
        await do(stream.result)
    assert stream.token_ids == (4,)


async def test_a_stream_that_breaks_keeps_what_came(scripted: Any, session: Any, do: Do, explained: Failure) -> None:
    def breaks(request: Any, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(token=pb.TokenDetail(token_id=4, position=0))
        explained(grpc.StatusCode.INTERNAL, "INTERNAL", incident="abc")(request, context)

    scripted.on("Generate", breaks)
    stream = session.generate(2)
    with pytest.raises(kakeya.InternalError) as caught:
        await do(stream.result)
    assert caught.value.incident == "abc"
    assert stream.token_ids == (4,)
    assert session.history_length == 1


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a client waits between attempts, which takes ten minutes."""
    began = threading.Event()

    def long(*_: Any) -> float:
        began.set()
        return 600.0

    monkeypatch.setattr(kakeya.RetryPolicy, "delay_seconds", long)
    return began


async def test_closing_a_client_ends_the_wait_of_a_stream_and_is_its_error(
    scripted: Any, flavour: str, do: Do, unexplained: Failure, waiting: threading.Event
) -> None:
    patient = kakeya.RetryPolicy(patience_seconds=600.0)
    client: Any = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(scripted.target, retry=patient)
    scripted.on("CreateSession", reply(pb.CreateSessionResponse(session_id="s1")))
    session = await do(client.create_session)
    scripted.on("Generate", streamed(then=unexplained(UNAVAILABLE)))
    stream = session.generate(4, timeout=None)
    reading = asyncio.ensure_future(do(stream.result))
    await asyncio.to_thread(waiting.wait)
    await do(client.close)
    with pytest.raises(kakeya.StateError, match="closed while the call was running"):
        await asyncio.wait_for(reading, 60)
    with pytest.raises(kakeya.StateError, match="closed while the call was running"):
        await do(stream.result)
    assert len(scripted.calls("Generate")) == 1


async def test_an_append_under_way_when_its_client_is_closed_does_not_claim_that_nothing_arrived(
    scripted: Any, client: Any, session: Any, do: Do
) -> None:
    arrived, is_over = threading.Event(), threading.Event()

    def silent(*_: Any) -> pb.AppendTokensResponse:
        arrived.set()
        is_over.wait(60)
        return pb.AppendTokensResponse(history_length=2)

    scripted.on("AppendTokens", silent)
    appending = asyncio.ensure_future(do(session.append, [1, 2], timeout=None))
    await asyncio.to_thread(arrived.wait)
    await do(client.close)
    with pytest.raises(kakeya.StateError, match="closed while the call was running") as caught:
        await asyncio.wait_for(appending, 60)
    is_over.set()
    assert caught.value.appended_tokens is None


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        ("RESOURCE_EXHAUSTED", "SERVER: Received message larger than max (5 vs. 4)", kakeya.CallerError),
        ("RESOURCE_EXHAUSTED", "gRPC message exceeds maximum size 4: 5", kakeya.CallerError),
        ("RESOURCE_EXHAUSTED", "the message has 5 bytes; this method takes 4 at most", kakeya.CallerError),
        ("INTERNAL", "Exception deserializing request!", kakeya.CallerError),
        ("INTERNAL", "Exception serializing response!", kakeya.ServerError),
    ],
)
async def test_what_fails_alike_each_time_is_sent_once(
    scripted: Any, session: Any, do: Do, unexplained: Failure, code: str, message: str, kind: type[kakeya.KakeyaError]
) -> None:
    scripted.on("GetSessionInfo", *[unexplained(grpc.StatusCode[code], message)] * ATTEMPTS)
    with pytest.raises(kind) as caught:
        await do(session.info)
    assert caught.value.code == code
    assert message in str(caught.value)
    assert len(scripted.calls("GetSessionInfo")) == 1


async def test_an_http_server_in_place_of_ours_is_named_as_such(flavour: str, do: Do) -> None:
    server = await asyncio.start_server(_answer_http, "127.0.0.1", 0)
    async with server:
        target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        once = kakeya.RetryPolicy(attempts=1)
        client = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(target, retry=once)
        with pytest.raises(kakeya.ConnectionFailed, match="speaks HTTP/1"):
            await do(client.server_info)
        await do(client.close)


async def _answer_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1000)
    writer.write(b"HTTP/1.1 421 Misdirected Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    await writer.drain()
    writer.close()
