"""Both clients against the real server on TinyModel."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import kakeya

Do = Callable[..., Awaitable[Any]]
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
# More than any machine generates while a test runs; only a session without a limit has room for it.
LONG = 30_000


@pytest.fixture
async def client(server_target: str, flavour: str, do: Do) -> AsyncIterator[Any]:
    client = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(server_target)
    yield client
    await do(client.close)


@pytest.fixture
async def session(client: Any, do: Do) -> AsyncIterator[Any]:
    session = await do(client.create_session)
    yield session
    await do(session.close)


@pytest.fixture
async def endless(client: Any, do: Do) -> AsyncIterator[Any]:
    """A session without a length limit, with a prompt in it."""
    session = await do(client.create_session, kakeya.SinkWindow(sink=4, window=32))
    await do(session.append, PROMPT)
    yield session
    await do(session.close)


async def read(stream: Any, flavour: str, count: int | None = None) -> list[int]:
    """The first `count` ids of a stream; then the loop is left by `break`."""
    ids: list[int] = []
    if flavour == "asyncio":
        async for token_id in stream:
            ids.append(token_id)
            if len(ids) == count:
                break
        return ids

    def loop() -> None:
        for token_id in stream:
            ids.append(token_id)
            if len(ids) == count:
                break

    await asyncio.to_thread(loop)
    return ids


def long_generate(session: Any) -> tuple[Any, asyncio.Event]:
    """A Generate that does not end by itself, and an event that is set once somebody reads it and it runs."""
    began = asyncio.Event()
    loop = asyncio.get_running_loop()
    stream = session.generate(LONG, on_progress=lambda _: loop.call_soon_threadsafe(began.set))
    return stream, began


async def until_idle(session: Any, do: Do) -> Any:
    """The session's info once no Generate runs on it."""
    while True:
        info = await do(session.info)
        if not info.is_generating:
            return info


async def test_a_new_session_tells_what_it_is_made_of(client: Any, do: Do) -> None:
    session = await do(client.create_session, kakeya.SinkWindow(sink=2, window=30), label="test")
    assert session.strategy == kakeya.SinkWindow(sink=2, window=30)
    assert 0 < session.sustained_bytes <= session.peak_bytes
    assert session.limit_tokens is None
    assert session.history_length == 0
    assert session.mode in (kakeya.Mode.BATCHED, kakeya.Mode.FIXED_SHAPE)
    assert session.model_id == "tiny"
    await do(session.close)


async def test_a_full_session_has_a_limit_and_a_smaller_one_reserves_less(client: Any, do: Do) -> None:
    whole = await do(client.create_session, kakeya.Full())
    small = await do(client.create_session, kakeya.Full(), limit_tokens=64)
    assert (whole.limit_tokens, small.limit_tokens) == (512, 64)
    assert small.peak_bytes < whole.peak_bytes
    await do(whole.close)
    await do(small.close)


async def test_a_session_with_full_layers_tells_them_and_every_number_in_force(client: Any, do: Do) -> None:
    session = await do(client.create_session, kakeya.LayerWindow(full_layers=(2,), window=30))
    assert session.strategy == kakeya.LayerWindow(full_layers=(2,), sink=4, window=30)
    assert session.limit_tokens == 512
    await do(session.close)


async def test_a_tiered_session_tells_what_it_holds_off_the_device(client: Any, do: Do) -> None:
    tiered = kakeya.Tiered(block=4, sink=0, window=20, budget=40, resident_tokens=20)
    session = await do(client.create_session, tiered)
    assert session.strategy == tiered
    for _ in range(5):
        await do(session.append, PROMPT * (40 // len(PROMPT)))
    await do(session.generate(4).result)
    info = await do(session.info)
    assert 0 < info.tier_live_bytes <= info.tier_bytes == session.tier_bytes
    server = await do(client.server_info)
    assert session.tier_bytes <= server.tier_reserved_bytes <= server.tier_capacity_bytes
    await do(session.close)


async def test_a_layer_that_the_model_does_not_have_is_refused_by_the_fields_name(client: Any, do: Do) -> None:
    with pytest.raises(kakeya.InvalidArgument, match="3 layers") as caught:
        await do(client.create_session, kakeya.LayerWindow(full_layers=(2, 7), window=30))
    assert caught.value.field == "strategy.layer_window.full_layers"


async def test_a_result_accounts_for_every_position(session: Any, do: Do) -> None:
    await do(session.append, PROMPT)
    result = await do(session.generate(4).result)
    assert (result.evicted_positions, result.restored_positions) == (0, 0)
    assert result.attended_positions == result.history_length - 1


async def test_server_info_has_the_model_and_the_limits(client: Any, do: Do) -> None:
    info = await do(client.server_info)
    assert (info.model_id, info.vocab_size, info.trained_positions) == ("tiny", 128, 512)
    assert {"full", "sink_window", "layer_window"} <= set(info.strategies)
    assert info.default_strategy == kakeya.Full()
    assert info.max_append_tokens == 40


async def test_iterating_and_result_agree_and_the_history_grows_by_what_was_generated(
    client: Any, do: Do, flavour: str
) -> None:
    one, other = await do(client.create_session), await do(client.create_session)
    for session in (one, other):
        assert await do(session.append, PROMPT) == len(PROMPT)
    iterated = await read(one.generate(10), flavour)
    result = await do(other.generate(10).result)
    assert iterated == list(result.token_ids)
    assert result.stop_reason is kakeya.StopReason.MAX_TOKENS
    assert result.generated_tokens == 10
    assert result.history_length == one.history_length == other.history_length == len(PROMPT) + 10
    assert result.prefilled_tokens + result.cached_tokens >= len(PROMPT)
    assert (await do(one.info)).history_length == len(PROMPT) + 10
    await do(one.close)
    await do(other.close)


async def test_details_have_absolute_positions_and_logprobs(session: Any, do: Do, flavour: str) -> None:
    await do(session.append, PROMPT)
    stream = session.generate(5, logprobs=True)
    details: list[kakeya.TokenDetail] = []
    if flavour == "asyncio":
        details.extend([detail async for detail in stream.details()])
    else:
        details.extend(await asyncio.to_thread(lambda: list(stream.details())))
    assert [detail.position for detail in details] == list(range(len(PROMPT), len(PROMPT) + 5))
    assert all(detail.logprob is not None and detail.logprob <= 0 for detail in details)
    result = await do(stream.result)
    assert result.logprobs == tuple(detail.logprob for detail in details)
    assert result.token_ids == tuple(detail.token_id for detail in details)


async def test_progress_is_reported_before_the_first_token(session: Any, do: Do) -> None:
    await do(session.append, PROMPT * 4)
    reports: list[kakeya.Progress] = []
    await do(session.generate(2, on_progress=reports.append).result)
    assert reports[0].done_tokens == 0
    assert reports[-1].done_tokens == reports[-1].total_tokens > 0


async def test_the_same_seed_gives_the_same_tokens_and_a_drawn_one_is_told(client: Any, do: Do) -> None:
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


async def test_a_long_append_is_split_and_arrives_whole(session: Any, client: Any, do: Do) -> None:
    ids = [n * 7 % 128 for n in range(123)]  # four requests of at most 40
    assert await do(session.append, ids) == 123
    by_hand = await do(client.create_session)
    for start in range(0, 123, 40):
        await do(by_hand.append, ids[start : start + 40])
    assert (await do(session.generate(6).result)).token_ids == (await do(by_hand.generate(6).result)).token_ids
    await do(by_hand.close)


async def test_a_long_append_that_meets_a_bad_id_says_how_many_arrived(session: Any, do: Do) -> None:
    ids = [1] * 100
    ids[90] = 128  # just outside the vocabulary, in the third request
    with pytest.raises(kakeya.TokenOutOfRange) as caught:
        await do(session.append, ids)
    assert caught.value.appended_tokens == 80
    assert session.history_length == 80
    assert await do(session.append, ids[80:90]) == 90


async def test_an_append_past_the_limit_says_how_many_arrived(client: Any, do: Do) -> None:
    session = await do(client.create_session, limit_tokens=64)
    with pytest.raises(kakeya.HistoryLimit) as caught:
        await do(session.append, [1] * 100)
    assert caught.value.appended_tokens == 40
    assert caught.value.limit_tokens == 64
    assert (await do(session.info)).history_length == 40
    await do(session.close)


async def test_reaching_the_limit_ends_a_generate_as_truncated(client: Any, do: Do) -> None:
    session = await do(client.create_session, limit_tokens=20)
    await do(session.append, PROMPT)
    result = await do(session.generate(100).result)
    assert result.stop_reason is kakeya.StopReason.TRUNCATED
    assert result.history_length == 20
    await do(session.close)


async def test_a_wrong_expected_length_changes_nothing(session: Any, do: Do) -> None:
    await do(session.append, PROMPT)
    with pytest.raises(kakeya.HistoryLengthMismatch) as caught:
        await do(session.append, [1], expected_history_length=3)
    assert (caught.value.expected, caught.value.actual) == (3, len(PROMPT))
    assert caught.value.appended_tokens == 0
    with pytest.raises(kakeya.HistoryLengthMismatch):
        await do(session.generate(1, expected_history_length=3).result)
    assert (await do(session.info)).history_length == len(PROMPT)


async def test_leaving_the_loop_stops_the_generation_and_keeps_what_came(endless: Any, do: Do, flavour: str) -> None:
    stream = endless.generate(LONG)
    ids = await read(stream, flavour, 3)
    info = await until_idle(endless, do)
    assert list(stream.token_ids) == ids
    assert len(PROMPT) + 3 <= info.history_length < len(PROMPT) + LONG
    with pytest.raises(kakeya.StateError, match="cancelled after 3 tokens"):
        await do(stream.result)


async def test_after_a_cancelled_stream_ids_go_to_the_end_of_the_history(endless: Any, do: Do, flavour: str) -> None:
    """The server may have committed more than was read: what the SDK knows of the length lags, and the append lands."""
    await read(endless.generate(LONG), flavour, 2)
    length = await do(endless.append, [1, 2, 3])
    assert length >= len(PROMPT) + 2 + 3
    assert length == endless.history_length == (await do(endless.info)).history_length


async def test_leaving_a_streams_with_stops_the_generation(endless: Any, do: Do, flavour: str) -> None:
    if flavour == "asyncio":
        async with endless.generate(LONG) as stream:
            tokens = aiter(stream)
            await anext(tokens)
    else:
        with endless.generate(LONG) as stream:
            tokens = iter(stream)
            await asyncio.to_thread(next, tokens)
    await until_idle(endless, do)
    assert not stream.is_finished


async def test_cancel_ends_an_iteration_quietly(endless: Any, do: Do, flavour: str) -> None:
    stream, began = long_generate(endless)
    reading = asyncio.create_task(read(stream, flavour))
    await began.wait()
    stream.cancel()
    ids = await reading
    assert list(stream.token_ids)[: len(ids)] == ids
    stream.cancel()
    await do(stream.close)


async def test_dropping_a_stream_stops_the_generation(endless: Any, do: Do) -> None:
    stream = endless.generate(LONG)
    del stream
    gc.collect()
    info = await until_idle(endless, do)
    assert info.history_length < len(PROMPT) + LONG


async def test_cancelling_the_task_that_reads_stops_the_generation(server_target: str) -> None:
    endless = kakeya.SinkWindow(sink=4, window=32)
    async with kakeya.AsyncClient(server_target) as client, await client.create_session(endless) as session:
        await session.append(PROMPT)
        stream, began = long_generate(session)
        reading = asyncio.create_task(stream.result())
        await began.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        while (await session.info()).is_generating:
            pass


async def test_an_error_in_the_progress_callback_stops_the_generation(endless: Any, do: Do) -> None:
    def refuse(progress: kakeya.Progress) -> None:
        raise RuntimeError("mine")

    stream = endless.generate(LONG, on_progress=refuse)
    with pytest.raises(RuntimeError, match="mine"):
        await do(stream.result)
    await until_idle(endless, do)


async def test_a_stream_has_one_reader(session: Any, do: Do, flavour: str) -> None:
    await do(session.append, PROMPT)
    stream = session.generate(2)
    await read(stream, flavour)
    with pytest.raises(kakeya.StateError, match="iterated already"):
        await read(stream, flavour)
    with pytest.raises(kakeya.StateError, match="iterated already"):
        stream.details()
    assert (await do(stream.result)).token_ids == stream.token_ids
    assert stream.is_finished


async def test_a_stream_read_by_result_cannot_be_iterated(session: Any, do: Do, flavour: str) -> None:
    await do(session.append, PROMPT)
    stream = session.generate(2)
    await do(stream.result)
    assert (await do(stream.result)).generated_tokens == 2
    with pytest.raises(kakeya.StateError, match="nothing left"):
        await read(stream, flavour)


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


async def test_closing_a_session_is_idempotent_and_final(client: Any, do: Do) -> None:
    session = await do(client.create_session)
    await do(session.append, PROMPT)
    assert await do(session.close) == len(PROMPT)
    assert await do(session.close) == len(PROMPT)
    assert session.is_closed
    with pytest.raises(kakeya.SessionClosed):
        await do(session.append, [1])
    with pytest.raises(kakeya.SessionClosed):
        session.generate(1)


async def test_closing_a_session_ends_its_stream_as_closed(endless: Any, do: Do, flavour: str) -> None:
    stream, began = long_generate(endless)
    reading = asyncio.create_task(read(stream, flavour))
    await began.wait()
    await do(endless.close)
    with pytest.raises(kakeya.SessionClosed):
        await reading
    with pytest.raises(kakeya.SessionClosed):
        await do(stream.result)


async def test_a_sessions_with_closes_it_and_does_not_hide_what_went_wrong(client: Any, do: Do, flavour: str) -> None:
    session = await do(client.create_session)

    async def use() -> None:
        if flavour == "asyncio":
            async with session:
                raise RuntimeError("mine")
        with session:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        await use()
    assert session.is_closed


async def test_a_session_that_is_busy_is_worth_a_retry(endless: Any, do: Do) -> None:
    stream = endless.generate(LONG)
    with pytest.raises(kakeya.SessionBusy) as caught:
        await do(endless.append, [1])
    assert isinstance(caught.value, kakeya.RetryableError)
    assert caught.value.appended_tokens == 0
    stream.cancel()
    assert await do(endless.append, [1]) == endless.history_length


async def test_what_the_server_refuses_names_the_field(session: Any, do: Do) -> None:
    await do(session.append, PROMPT)
    refused: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": -1.0},
        "top_p": {"top_p": 0.0},
        "repetition_penalty": {"repetition_penalty": 0},
        "max_tokens": {"max_tokens": 0},
    }
    for field, arguments in refused.items():
        with pytest.raises(kakeya.InvalidArgument) as caught:
            await do(session.generate(**{"max_tokens": 1, **arguments}).result)
        assert caught.value.field == field
        assert caught.value.reason == "INVALID_ARGUMENT"


async def test_what_would_not_survive_the_wire_is_refused_before_it(session: Any, do: Do) -> None:
    for arguments in (
        {"temperature": math.nan},
        {"top_p": math.inf},
        {"min_p": 1e300},
        {"max_tokens": 2**32},
        {"max_tokens": 1.0},
        {"seed": -1},
        {"seed": 2**64},
        {"top_k": True},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": {-1: 1.0}},
        {"stop_token_ids": [2**32]},
        {"timeout": 0},
        {"expected_history_length": -1},
    ):
        with pytest.raises(kakeya.InvalidArgument) as caught:
            session.generate(**{"max_tokens": 1, **arguments})
        assert caught.value.field is not None
    with pytest.raises(kakeya.InvalidTokenIds):
        await do(session.append, [1, -1])
    assert (await do(session.info)).history_length == 0


async def test_a_deadline_ends_the_call_and_keeps_the_session(endless: Any, do: Do) -> None:
    stream = endless.generate(LONG, timeout=0.2)
    with pytest.raises(kakeya.DeadlineExceeded) as caught:
        await do(stream.result)
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(kakeya.DeadlineExceeded):
        await do(stream.result)
    info = await until_idle(endless, do)
    assert info.history_length >= len(PROMPT) + len(stream.token_ids)
    assert await do(endless.append, [1]) == info.history_length + 1


async def test_nobody_answers_at_a_closed_port(do: Do, flavour: str, unused_port: int) -> None:
    client = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(f"127.0.0.1:{unused_port}")
    with pytest.raises(kakeya.ConnectionFailed, match=str(unused_port)) as caught:
        await do(client.create_session)
    assert isinstance(caught.value, ConnectionError)
    await do(client.close)


async def test_a_client_closed_during_a_call_says_so(server_target: str, do: Do, flavour: str) -> None:
    client = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(server_target)
    session = await do(client.create_session, kakeya.SinkWindow(sink=4, window=32))
    await do(session.append, PROMPT)
    stream, began = long_generate(session)
    reading = asyncio.create_task(read(stream, flavour))
    await began.wait()
    await do(client.close)
    with pytest.raises(kakeya.StateError, match="closed while"):
        await reading
    with pytest.raises(kakeya.StateError, match="is closed"):
        await do(session.info)


async def test_an_asyncio_generate_needs_a_running_loop(server_target: str) -> None:
    async with kakeya.AsyncClient(server_target) as client, await client.create_session() as session:
        with pytest.raises(kakeya.StateError, match="no event loop"):
            await asyncio.to_thread(session.generate, 1)


def test_an_asyncio_client_stays_with_its_loop(server_target: str) -> None:
    client = kakeya.AsyncClient(server_target)

    async def first() -> None:
        await client.server_info()

    asyncio.run(first())
    with pytest.raises(kakeya.StateError, match="another event loop"):
        asyncio.run(first())
