"""What a Generate that runs to its end says, by each method of reading it, against the real server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

import kakeya
from kakeya._stream import Fold
from kakeya.v1 import runtime_pb2 as pb

Do = Callable[..., Awaitable[Any]]
Read = Callable[..., Coroutine[Any, Any, list[int]]]
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]


async def test_iterating_and_result_agree_and_the_history_grows_by_what_was_generated(
    client: Any, do: Do, read: Read
) -> None:
    one, other = await do(client.create_session), await do(client.create_session)
    for session in (one, other):
        assert await do(session.append, PROMPT) == len(PROMPT)
    iterated = await read(one.generate(10))
    result = await do(other.generate(10).result)
    assert iterated == list(result.token_ids)
    assert result.stop_reason is kakeya.StopReason.MAX_TOKENS
    assert result.generated_tokens == 10
    assert result.history_length == one.history_length == other.history_length == len(PROMPT) + 10
    assert result.prefilled_tokens + result.cached_tokens >= len(PROMPT)
    assert (await do(one.info)).history_length == len(PROMPT) + 10
    await do(one.close)
    await do(other.close)


async def test_progress_is_reported_before_the_first_token(session: Any, do: Do) -> None:
    await do(session.append, PROMPT * 4)
    reports: list[kakeya.Progress] = []
    await do(session.generate(2, on_progress=reports.append).result)
    assert reports[0].done_tokens == 0
    assert reports[-1].done_tokens == reports[-1].total_tokens > 0


def test_a_heartbeat_is_reported_only_if_something_has_changed() -> None:
    reports: list[kakeya.Progress] = []
    fold = Fold(pb.GenerateRequest(), reports.append)
    accepted = pb.GenerateResponse(accepted=pb.GenerateAccepted(queue_position=2, prefill_token_count=8))
    beats = [
        pb.GenerateResponse(progress=pb.PrefillProgress(done_token_count=done, total_token_count=total))
        for done, total in ((0, 0), (0, 8), (0, 8), (4, 8), (4, 8), (8, 8))
    ]
    for frame in (beats[0], beats[0], accepted, *beats[1:]):
        assert fold.feed(frame) is None
    assert [(each.queue_position, each.done_tokens, each.total_tokens) for each in reports] == [
        (2, 0, 8),
        (2, 4, 8),
        (2, 8, 8),
    ]


async def test_the_same_seed_gives_the_same_tokens_and_a_drawn_seed_is_reported(client: Any, do: Do) -> None:
    async def sample(seed: int | None) -> kakeya.GenerateResult:
        session = await do(client.create_session)
        await do(session.append, PROMPT)
        result: kakeya.GenerateResult = await do(session.generate(12, temperature=2.0, seed=seed).result)
        await do(session.close)
        return result

    first = await sample(None)
    again = await sample(first.seed)
    assert again.token_ids == first.token_ids
    assert again.seed == first.seed


async def test_a_stop_id_is_emitted_and_ends_the_stream(session: Any, client: Any, do: Do) -> None:
    await do(session.append, PROMPT)
    free = await do(session.generate(8).result)
    stop = free.token_ids[3]
    other = await do(client.create_session)
    await do(other.append, PROMPT)
    stopped = await do(other.generate(8, stop_token_ids=[stop]).result)
    assert stopped.stop_reason is kakeya.StopReason.EOS
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    await do(other.close)


async def test_a_stream_has_one_reader(session: Any, do: Do, read: Read) -> None:
    await do(session.append, PROMPT)
    stream = session.generate(2)
    await read(stream)
    with pytest.raises(kakeya.StateError, match="iterated already"):
        await read(stream)
    with pytest.raises(kakeya.StateError, match="iterated already"):
        stream.details()
    assert (await do(stream.result)).token_ids == stream.token_ids
    assert stream.is_finished


async def test_result_reads_what_an_iteration_left(session: Any, do: Do, flavour: str) -> None:
    await do(session.append, PROMPT)
    stream = session.generate(5)
    if flavour == "asyncio":
        tokens = aiter(stream)
        first = await anext(tokens)
    else:
        tokens = iter(stream)
        first = await asyncio.to_thread(next, tokens)
    result = await do(stream.result)
    assert result.token_ids[0] == first
    assert result.generated_tokens == 5
