"""Calls that wait until what they say is safe: a question for many, none goes on before its answer, and none waits for
what others say."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import cast

import pytest

from inference_engine.errors import SessionElsewhere
from inference_engine.server.durable_gate import DurableGate
from inference_engine.server.stream import WOKEN_AT_ONCE
from inference_engine.session.journal import SAFE, Journal, Receipt


class Unsafe:
    """What a gate knows of a journal. Nothing is safe until a test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[Callable[[], object], Receipt]] = []
        self.is_full = self.is_away = False
        self._numbers = itertools.count(1)
        self.shown = SAFE  # that the sessions are this server's

    def proof(self) -> Receipt:
        return self.shown

    def record(self) -> Receipt:
        return Receipt(next(self._numbers))

    def on_saved(self, callback: Callable[[], object], receipt: Receipt) -> None:
        self.asked.append((callback, receipt))

    def answer(self, *safe: Receipt) -> None:
        """Call back what was asked, on a thread as the journal's, with these safe now."""
        for receipt in safe:
            receipt.is_safe = True
        asked, self.asked = self.asked, []
        thread = threading.Thread(target=lambda: [callback() for callback, _ in asked])
        thread.start()
        thread.join()


async def a_turn() -> None:
    """Whatever is ready runs, and what becomes ready by that."""
    for _ in range(4):
        await asyncio.sleep(0)


def waiting(unsafe: Unsafe, *receipts: Receipt) -> tuple[DurableGate, list[asyncio.Task[bool]]]:
    gate = DurableGate(cast(Journal, unsafe))
    return gate, [asyncio.ensure_future(gate.synced(receipt)) for receipt in receipts]


async def test_calls_that_wait_for_one_thing_ask_once_and_go_on_when_it_is_safe() -> None:
    unsafe = Unsafe()
    receipt = unsafe.record()
    _, calls = waiting(unsafe, *[receipt] * 100)
    await a_turn()
    assert len(unsafe.asked) == 1
    assert not any(call.done() for call in calls)
    unsafe.answer(receipt)
    assert all(await asyncio.gather(*calls))


async def test_what_is_safe_and_what_says_nothing_go_on_at_once() -> None:
    unsafe = Unsafe()
    _, calls = waiting(unsafe, SAFE, Receipt(7, is_safe=True))
    await a_turn()
    assert [call.result() for call in calls] == [True, True]
    assert not unsafe.asked


async def test_a_call_that_was_refused_goes_on_and_knows_it() -> None:
    unsafe = Unsafe()
    receipt = unsafe.record()
    _, (call,) = waiting(unsafe, receipt)
    await a_turn()
    receipt.is_refused = True
    unsafe.answer()
    assert not await call


async def test_on_a_full_disk_those_go_on_that_can_do_without_and_the_others_wait() -> None:
    unsafe = Unsafe()
    receipt = unsafe.record()
    gate, (stream,) = waiting(unsafe, receipt)
    read = asyncio.ensure_future(gate.synced(receipt, unless_full=True))
    await a_turn()
    assert not read.done()
    unsafe.is_full = True
    unsafe.answer()
    assert not await read
    assert not await gate.synced(receipt, unless_full=True), "it would be known at once"
    await a_turn()
    assert not stream.done()
    unsafe.is_full = False
    unsafe.answer(receipt)
    assert await stream


async def test_a_list_goes_on_after_its_time_and_knows_that_not_all_is_safe() -> None:
    unsafe = Unsafe()
    receipt = unsafe.record()
    gate, (stream,) = waiting(unsafe, receipt)
    assert not await gate.synced(receipt, most_seconds=0.01)
    assert not stream.done()
    unsafe.answer(receipt)
    assert await stream


async def test_calls_of_many_commits_that_come_together_go_on_some_at_a_time_too() -> None:
    unsafe = Unsafe()
    receipts = [unsafe.record() for _ in range(10 * WOKEN_AT_ONCE)]
    _, calls = waiting(unsafe, *receipts)
    await a_turn()
    unsafe.answer(*receipts)
    most, before = 0, 0
    while before < len(calls):
        await asyncio.sleep(0)
        done = sum(call.done() for call in calls)
        most, before = max(most, done - before), done
    assert most <= 2 * WOKEN_AT_ONCE, "of one turn, and of those that end in the next"


async def test_what_is_safe_waits_for_the_proof_that_the_session_is_still_here() -> None:
    unsafe = Unsafe()
    unsafe.shown = unsafe.record()
    gate, (answer,) = waiting(unsafe, Receipt(is_safe=True))
    look = asyncio.ensure_future(gate.proved())
    await a_turn()
    assert not answer.done() and not look.done()
    proof, unsafe.shown = unsafe.shown, SAFE
    unsafe.answer(proof)
    assert await answer
    await look
    unsafe.shown = unsafe.record()
    gate, (answer,) = waiting(unsafe, Receipt(is_safe=True))
    look = asyncio.ensure_future(gate.proved())
    await a_turn()
    unsafe.shown.is_refused = unsafe.shown.is_lost = True
    unsafe.answer()
    with pytest.raises(SessionElsewhere):
        await answer
    await look  # it has left memory, and is looked for in the journal
