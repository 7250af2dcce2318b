"""Calls that wait until what they say is safe: one question for many, and none goes on before its answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import cast

from inference_engine.engine import Engine
from inference_engine.server.barrier import Barrier
from inference_engine.server.stream import WOKEN_AT_ONCE


class Unsafe:
    """What a barrier knows of an engine. Nothing is safe until the callbacks are called."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], object]] = []

    def is_saved(self) -> bool:
        return False

    def when_saved(self, callback: Callable[[], object]) -> None:
        self.callbacks.append(callback)

    def becomes_safe(self) -> None:
        """What was asked for first, on a thread as the journal's."""
        thread = threading.Thread(target=self.callbacks.pop(0))
        thread.start()
        thread.join()


async def a_turn() -> None:
    """Whatever is ready runs, and what becomes ready by that."""
    for _ in range(3):
        await asyncio.sleep(0)


def waiting(unsafe: Unsafe, count: int) -> tuple[Barrier, list[asyncio.Task[None]]]:
    barrier = Barrier(cast(Engine, unsafe))
    return barrier, [asyncio.ensure_future(barrier.passed()) for _ in range(count)]


async def test_calls_that_wait_at_the_same_time_ask_once_and_go_on_when_the_answer_comes() -> None:
    unsafe = Unsafe()
    _, calls = waiting(unsafe, 100)
    await a_turn()
    assert len(unsafe.callbacks) == 1
    assert not any(call.done() for call in calls)
    unsafe.becomes_safe()
    await asyncio.gather(*calls)


async def test_a_call_that_comes_after_the_question_waits_for_an_answer_of_its_own() -> None:
    unsafe = Unsafe()
    barrier, (first,) = waiting(unsafe, 1)
    await a_turn()
    second = asyncio.ensure_future(barrier.passed())
    await a_turn()
    assert len(unsafe.callbacks) == 2
    unsafe.becomes_safe()
    await first
    await a_turn()
    assert not second.done(), "what it says was recorded after the question"
    unsafe.becomes_safe()
    await second


async def test_a_call_that_is_over_meanwhile_holds_no_other_up() -> None:
    unsafe = Unsafe()
    _, (gone, other) = waiting(unsafe, 2)
    await a_turn()
    gone.cancel()
    await a_turn()
    unsafe.becomes_safe()
    await other
    assert gone.cancelled()


async def test_what_becomes_ready_while_many_go_on_does_not_wait_for_the_last_of_them() -> None:
    unsafe, gone_on, seen = Unsafe(), list[int](), list[int]()
    barrier = Barrier(cast(Engine, unsafe))
    loop = asyncio.get_running_loop()

    async def go_on(number: int) -> None:
        await barrier.passed()
        if not gone_on:
            loop.call_soon(lambda: seen.append(len(gone_on)))
        gone_on.append(number)

    calls = [asyncio.ensure_future(go_on(number)) for number in range(4 * WOKEN_AT_ONCE)]
    await a_turn()
    unsafe.becomes_safe()
    await asyncio.gather(*calls)
    assert seen[0] <= 2 * WOKEN_AT_ONCE


async def test_calls_of_many_questions_go_on_some_at_a_time_too() -> None:
    unsafe = Unsafe()
    barrier = Barrier(cast(Engine, unsafe))
    calls = list[asyncio.Task[None]]()
    for _ in range(10 * WOKEN_AT_ONCE):
        calls.append(asyncio.ensure_future(barrier.passed()))
        await a_turn()
    assert len(unsafe.callbacks) == len(calls), "each came in a turn of its own"
    while unsafe.callbacks:
        unsafe.becomes_safe()
    most, before = 0, 0
    while before < len(calls):
        await asyncio.sleep(0)
        done = sum(call.done() for call in calls)
        most, before = max(most, done - before), done
    assert most <= 2 * WOKEN_AT_ONCE, "of one turn, and of those that end in the next"
