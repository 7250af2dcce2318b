"""Stopping a Generate that would go on, against the real server: it ends, and what came is kept."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest

import kakeya

Do = Callable[..., Awaitable[Any]]
Read = Callable[..., Coroutine[Any, Any, list[int]]]
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
# More than any machine generates while a test runs; only a session without a limit has room for it.
LONG = 30_000


@pytest.fixture
async def endless(client: Any, do: Do) -> AsyncIterator[Any]:
    """A session without a length limit, with a prompt in it."""
    session = await do(client.create_session, kakeya.SinkWindow(sink=4, window=32))
    await do(session.append, PROMPT)
    yield session
    await do(session.close)


def long_generate(session: Any) -> tuple[Any, asyncio.Event]:
    """A Generate that does not end by itself, and an event that is set once it is read and runs."""
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


async def test_leaving_the_loop_stops_the_generation_and_keeps_what_came(endless: Any, do: Do, read: Read) -> None:
    stream = endless.generate(LONG)
    ids = await read(stream, 3)
    info = await until_idle(endless, do)
    assert list(stream.token_ids) == ids
    assert len(PROMPT) + 3 <= info.history_length < len(PROMPT) + LONG
    with pytest.raises(kakeya.StateError, match="cancelled after 3 tokens"):
        await do(stream.result)


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


async def test_dropping_a_stream_stops_the_generation(endless: Any, do: Do) -> None:
    stream = endless.generate(LONG)
    del stream
    gc.collect()
    info = await until_idle(endless, do)
    assert info.history_length < len(PROMPT) + LONG


async def test_an_error_in_the_progress_callback_stops_the_generation(endless: Any, do: Do) -> None:
    def refuse(progress: kakeya.Progress) -> None:
        raise RuntimeError("mine")

    stream = endless.generate(LONG, on_progress=refuse)
    for _ in range(2):  # it is what became of the stream, however often that is asked for
        with pytest.raises(RuntimeError, match="mine"):
            await do(stream.result)
    assert "failed" in repr(stream)
    assert not stream.is_finished
    await until_idle(endless, do)


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


async def test_a_session_that_is_busy_is_worth_a_retry(endless: Any, do: Do) -> None:
    stream = endless.generate(LONG)
    with pytest.raises(kakeya.SessionBusy) as caught:
        await do(endless.append, [1])
    assert isinstance(caught.value, kakeya.RetryableError)
    assert caught.value.appended_tokens == 0
    stream.cancel()
    assert await do(endless.append, [1]) == endless.history_length


async def test_closing_a_session_ends_its_stream_as_closed(endless: Any, do: Do, read: Read) -> None:
    stream, began = long_generate(endless)
    reading = asyncio.create_task(read(stream))
    await began.wait()
    await do(endless.close)
    with pytest.raises(kakeya.SessionClosed):
        await reading
    with pytest.raises(kakeya.SessionClosed):
        await do(stream.result)


async def test_a_client_closed_during_a_call_says_so(server_target: str, do: Do, flavour: str, read: Read) -> None:
    client = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(server_target)
    session = await do(client.create_session, kakeya.SinkWindow(sink=4, window=32))
    await do(session.append, PROMPT)
    stream, began = long_generate(session)
    reading = asyncio.create_task(read(stream))
    await began.wait()
    await do(client.close)
    with pytest.raises(kakeya.StateError, match="closed while"):
        await reading
    with pytest.raises(kakeya.StateError, match="is closed"):
        await do(session.info)
