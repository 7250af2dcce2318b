"""The stream of a Generate: which frames, in which order, and how it ends when it is stopped."""

from collections.abc import Callable
from typing import Any

import pytest

from inference_engine.engine import Engine
from kakeya.v1 import runtime_pb2 as pb
from tests.server.wire import HISTORY, Client, connected, read_rest, refused, serving, until_free

FOREVER = 30_000  # tokens; minutes of work for TinyModel


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


# -- one session, several callers -------------------------------------------------------------------------------------


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
        assert (await client.info(session_id)).generating  # and facts never wait
        stream.cancel()
        await until_free(engine, session_id)
        assert await client.append(session_id, [1]) == await client.length(session_id)
