"""The bridge between the engine's thread and the event loop."""

import asyncio
import itertools
import threading

from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.server.stream import WOKEN_AT_ONCE, EventQueue, Feed, LoopWaker, Wakeup
from inference_engine.types import Event, Finished, GenerateParams, StopReason, TokenCommitted
from tests.facade import session_of
from tests.server.wire import HISTORY
from tests.tiny_native import served_engine

DONE = Finished(
    stop_reason=StopReason.MAX_TOKENS,
    generated_tokens=0,
    history_length=0,
    prefill_seconds=0.0,
    total_seconds=0.0,
    seed=0,
    prefilled_tokens=0,
    cached_tokens=0,
    attended_positions=0,
    evicted_positions=0,
)


async def test_every_event_of_a_racing_thread_arrives_once_and_in_order() -> None:
    count = 20_000
    queue = EventQueue(asyncio.get_running_loop())

    def produce() -> None:
        for index in range(count):
            queue.push(TokenCommitted(index, index))
        queue.push(DONE)

    thread = threading.Thread(target=produce)
    thread.start()
    received: list[Event] = []
    while DONE not in received[-1:]:
        await queue.wait()
        for event in queue.pop_all():
            received.append(event)
            if len(received) % 7 == 0:
                await asyncio.sleep(0)
    thread.join()
    assert received == [*(TokenCommitted(index, index) for index in range(count)), DONE]


async def test_many_events_cost_one_wakeup() -> None:
    queue = EventQueue(asyncio.get_running_loop())
    for index in range(100):
        queue.push(TokenCommitted(index, index))
    await queue.wait()
    assert len(list(queue.pop_all())) == 100
    waiting = asyncio.ensure_future(queue.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.push(DONE)
    await waiting
    assert list(queue.pop_all()) == [DONE]


async def test_other_calls_have_their_turn_between_many_streams_that_are_woken_together() -> None:
    loop = asyncio.get_running_loop()
    waker, woken, between = LoopWaker(loop), 0, list[int]()
    wakeups = [Wakeup(waker) for _ in range(100)]

    async def consume(wakeup: Wakeup) -> None:
        nonlocal woken
        await wakeup.wait()
        woken += 1

    def other() -> None:
        between.append(woken)
        if woken < len(wakeups):
            loop.call_soon(other)

    consumers = [asyncio.ensure_future(consume(wakeup)) for wakeup in wakeups]
    await asyncio.sleep(0)
    for wakeup in wakeups:
        wakeup.set()
    waker.wake()
    other()
    await asyncio.wait_for(asyncio.gather(*consumers), 60)
    assert max(after - before for before, after in itertools.pairwise([*between, woken])) <= WOKEN_AT_ONCE


async def test_a_feed_gives_every_event_of_a_generate_once_in_order_and_says_where_it_is() -> None:
    with served_engine() as engine:
        session = engine.create_session(strategy=SinkWindow(sink=4, window=16)).session_id
        engine.append(session, HISTORY)
        feed = Feed(engine.generate(session, GenerateParams(max_tokens=400)), LoopWaker(asyncio.get_running_loop()))
        received: list[Event] = []
        while not received or not isinstance(received[-1], Finished):
            await feed.wait()
            for event in feed.pop_all():
                received.append(event)
                if isinstance(event, TokenCommitted):
                    assert feed.position == event.position
                if len(received) % 7 == 0:
                    await asyncio.sleep(0)
        first = len(HISTORY)
        tokens = [event for event in received if isinstance(event, TokenCommitted)]
        assert [token.position for token in tokens] == list(range(first, first + 400))
        assert [token.token_id for token in tokens] == session_of(engine, session).history.ids(first).tolist()
        assert feed.position == first + 400
