"""The stream of a Generate: which frames, in which order, and how it ends when it is stopped."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from inference_engine.engine import Engine
from inference_engine.server.run import ServerHandle
from kakeya.v1 import runtime_pb2 as pb
from tests.server.wire import HISTORY, Client, connected, read_rest, refused, serving, until_free
from tests.tiny import tiny_engine

FOREVER = 30_000  # tokens; minutes of work for TinyModel

KILLED_CLIENT = """
import sys
import grpc
from kakeya.v1 import runtime_pb2 as pb
target, session_id = sys.argv[1:]
call = grpc.insecure_channel(target).unary_stream("/kakeya.v1.RuntimeService/Generate")
for _ in call(pb.GenerateRequest(session_id=session_id, max_tokens=30_000).SerializeToString()):
    print("frame", flush=True)
"""


def kinds(frames: list[Any]) -> list[str]:
    return [frame.WhichOneof("payload") for frame in frames]


async def frames_of(client: Client, session_id: str, **fields: Any) -> list[Any]:
    answer: list[Any] = await client.call("Generate", pb.GenerateRequest(session_id=session_id, **fields))
    return answer


# -- frames -----------------------------------------------------------------------------------------------------------


async def test_a_request_that_asks_for_nothing_new_gets_frozen_frames_only(client: Client) -> None:
    frames = await frames_of(client, await client.open(), max_tokens=3)
    assert kinds(frames) == ["token_id", "token_id", "token_id", "done"]
    done = frames[-1].done
    assert done.stop_reason == pb.GenerateDone.STOP_REASON_MAX_TOKENS
    assert (done.generated_token_count, done.history_length, done.prefilled_token_count) == (3, 11, 8)


async def test_richer_frames_say_the_same_tokens_with_positions_and_logprobs(client: Client) -> None:
    plain = await client.generate(await client.open(), 3)
    frames = await frames_of(
        client, await client.open(), max_tokens=3, token_details=True, logprobs=True, progress=True
    )
    assert kinds(frames) == ["accepted", "progress", "token", "token", "token", "done"]
    assert frames[0].accepted.prefill_token_count == len(HISTORY)
    assert frames[1].progress.done_token_count == frames[1].progress.total_token_count == len(HISTORY)
    tokens = [frame.token for frame in frames[2:5]]
    assert [token.token_id for token in tokens] == plain
    assert [token.position for token in tokens] == [8, 9, 10]
    assert all(token.HasField("logprob") and token.logprob <= 0.0 for token in tokens)


async def test_an_end_token_is_sent_counted_and_kept(client: Client) -> None:
    tokens = await client.generate(await client.open(), 3)
    session_id = await client.open(eos_token_ids=[tokens[1]])
    frames = await frames_of(client, session_id, max_tokens=8)
    stop = tokens.index(tokens[1]) + 1
    assert [frame.token_id for frame in frames[:-1]] == tokens[:stop]
    assert frames[-1].done.stop_reason == pb.GenerateDone.STOP_REASON_EOS
    assert await client.length(session_id) == len(HISTORY) + stop


async def test_positions_that_are_lost_are_announced_before_the_first_token(client: Client) -> None:
    session_id = await client.open_endless([1, 2, 3, 4] * 40)
    frames = await frames_of(client, session_id, max_tokens=2)
    assert kinds(frames) == ["truncated", "token_id", "token_id", "done"]
    assert frames[0].truncated.dropped_token_count > 0
    assert frames[-1].done.evicted_position_count >= frames[0].truncated.dropped_token_count


async def test_a_seed_that_was_drawn_is_returned_and_repeats_the_tokens(client: Client) -> None:
    drawn = await frames_of(client, await client.open(), max_tokens=8, temperature=1.0)
    again = await frames_of(client, await client.open(), max_tokens=8, temperature=1.0, seed=drawn[-1].done.seed)
    assert [frame.token_id for frame in again[:-1]] == [frame.token_id for frame in drawn[:-1]]


# -- ends -------------------------------------------------------------------------------------------------------------


async def test_a_cancelled_generate_keeps_the_session_and_every_token_it_showed(engine: Engine, client: Client) -> None:
    session_id = await client.open_endless()
    stream = client.stream(pb.GenerateRequest(session_id=session_id, max_tokens=FOREVER))
    shown = [(await stream.read()).token_id for _ in range(5)]
    stream.cancel()
    await until_free(engine, session_id)
    length = await client.length(session_id)
    assert length >= len(HISTORY) + 5
    rest = await client.generate(session_id, 4)
    undisturbed = await client.generate(await client.open_endless(), length - len(HISTORY) + 4)
    assert undisturbed[:5] == shown
    assert undisturbed[-4:] == rest


async def test_a_client_killed_in_the_middle_leaves_a_session_that_goes_on(
    engine: Engine, server: ServerHandle, client: Client
) -> None:
    session_id = await client.open_endless()
    command = (sys.executable, "-c", KILLED_CLIENT, server.target, session_id)
    child = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert await child.stdout.readline() == b"frame\n"
    child.kill()
    await child.wait()
    await until_free(engine, session_id)
    length = await client.length(session_id)
    rest = await client.generate(session_id, 4)
    undisturbed = await client.generate(await client.open_endless(), length - len(HISTORY) + 4)
    assert undisturbed[-4:] == rest


async def test_a_deadline_while_decoding_is_typed_and_keeps_what_was_generated(client: Client) -> None:
    async def cut() -> tuple[str, list[Any], Any]:
        session_id, shown = await client.open_endless(), list[Any]()
        stream = client.stream(pb.GenerateRequest(session_id=session_id, max_tokens=FOREVER), timeout=2.0)
        return session_id, shown, await refused(read_rest(stream, into=shown))

    session_id, shown, details = await cut()
    for _ in range(3):
        if details.error_info is None:  # on a busy machine the client's own clock may be first
            session_id, shown, details = await cut()
    assert details.reason == "DEADLINE_EXCEEDED DEADLINE"
    assert details.error_info is not None
    length = int(details.error_info.metadata["history_length"])
    assert length == len(HISTORY) + len(shown) == await client.length(session_id)
    assert len(await client.generate(session_id, 4)) == 4


async def test_closing_a_session_ends_its_stream_with_session_closed(client: Client) -> None:
    session_id = await client.open_endless()
    stream = client.stream(pb.GenerateRequest(session_id=session_id, max_tokens=FOREVER))
    await stream.read()
    closed = await client.call("CloseSession", pb.CloseSessionRequest(session_id=session_id))
    details = await refused(read_rest(stream))
    assert details.reason == "ABORTED SESSION_CLOSED"
    assert closed.final_history_length > len(HISTORY)
    assert (await refused(client.length(session_id))).reason == "NOT_FOUND SESSION_NOT_FOUND"


# -- one session, several callers -------------------------------------------------------------------------------------


async def test_a_second_operation_on_a_session_waits_then_is_refused_as_busy(client: Client) -> None:
    session_id = await client.open_endless()
    stream = client.stream(pb.GenerateRequest(session_id=session_id, max_tokens=FOREVER))
    await stream.read()
    for operation in (client.append(session_id, [1]), client.generate(session_id)):
        assert (await refused(operation)).reason == "ABORTED SESSION_BUSY"
    assert (await client.info(session_id)).generating  # and facts never wait
    stream.cancel()


async def test_callers_that_give_up_waiting_for_a_session_leave_nothing_behind(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    when_free, registered = engine.when_free, []

    def counting(session_id: str, callback: Callable[[], None]) -> None:
        registered.append(session_id)
        when_free(session_id, callback)

    monkeypatch.setattr(engine, "when_free", counting)
    async with serving(engine, busy_wait_seconds=0.05) as handle, connected(handle) as client:
        session_id = await client.open_endless()
        stream = client.stream(pb.GenerateRequest(session_id=session_id, max_tokens=FOREVER))
        await stream.read()
        for _ in range(5):
            assert (await refused(client.append(session_id, [1]))).reason == "ABORTED SESSION_BUSY"
        assert registered == [session_id]
        stream.cancel()
        await until_free(engine, session_id)
        assert await client.append(session_id, [1]) == await client.length(session_id)


async def test_a_quick_engine_and_a_slow_loop_lose_no_frame() -> None:
    with tiny_engine() as engine:
        async with serving(engine) as handle, connected(handle) as client:
            sessions = [await client.open() for _ in range(12)]
            alone = await client.generate(await client.open(), 60)
            together = await asyncio.gather(*(client.generate(session_id, 60) for session_id in sessions))
            # Batched and alone are equal up to rounding, which greedy TinyModel does not show.
            assert all(tokens == alone for tokens in together)
