"""Who waits for what a step gives is woken once for all of it, and in time."""

from __future__ import annotations

import threading
from functools import partial

from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.scheduler.wakeups import Wakeups
from inference_engine.types import GenerateParams
from laboratory.scripted import Script, ScriptedForward, ScriptedModel
from tests.laws.variants import text
from tests.scheduler.test_fairness import SMALL


def test_equal_wakes_that_are_held_back_are_made_once_at_their_release() -> None:
    wakeups, told = Wakeups(), list[str]()

    def one() -> None:
        told.append("one")

    wakeups.hold()
    for wake in (one, lambda: told.append("other"), one):
        wakeups.wake(wake)
    assert not told
    wakeups.release()
    wakeups.release()
    assert told == ["one", "other"]


def test_what_is_told_while_nothing_is_held_back_is_told_at_once() -> None:
    wakeups, told = Wakeups(), list[int]()
    wakeups.hold()
    wakeups.release()
    for number in range(3):
        wakeups.wake(partial(told.append, number))
    assert told == [0, 1, 2]


def test_the_engine_holds_back_nothing_that_another_thread_tells() -> None:
    wakeups, told = Wakeups(), threading.Event()
    wakeups.hold()
    thread = threading.Thread(target=wakeups.wake, args=(told.set,))
    thread.start()
    thread.join(60)
    assert told.is_set()


def test_a_reader_hears_of_a_token_while_the_device_works_on_the_next_one() -> None:
    is_listening, is_told, were_told = threading.Event(), threading.Event(), list[bool]()

    def look(_: int) -> None:
        """In the middle of a step."""
        assert is_listening.wait(60)
        were_told.append(is_told.is_set())
        is_told.clear()

    forward = ScriptedForward(ScriptedModel(), Script(on_step=look))
    with Engine(forward, EngineConfig(**SMALL)) as engine:
        session = engine.create_session(limit_tokens=200).session_id
        engine.append(session, text(10))
        engine.generate(session, GenerateParams(max_tokens=20)).when_news(lambda: None, is_told.set)
        is_listening.set()
        engine.drain(60)
        assert is_told.wait(60)  # of the end
    assert len(were_told) == 20
    assert all(were_told)


def test_generates_that_run_together_wake_their_common_reader_once_a_step() -> None:
    count, tokens, may_go_on = 4, 30, threading.Event()

    def hold(_: int) -> None:
        """The first step lasts until all are there."""
        assert may_go_on.wait(60)

    forward = ScriptedForward(ScriptedModel(), Script(on_step=hold))
    rings, wakes = list[int](), list[None]()
    with Engine(forward, EngineConfig(**SMALL)) as engine:

        def wake() -> None:
            wakes.append(None)

        for number in range(count):
            session = engine.create_session(limit_tokens=200).session_id
            engine.append(session, text(10, seed=number))
            generation = engine.generate(session, GenerateParams(max_tokens=tokens))
            generation.when_news(partial(rings.append, number), wake)
        may_go_on.set()
        engine.drain(60)
    assert len(rings) > count * tokens
    assert forward.steps < 2 * tokens
    # One for each who began to listen, and one a step.
    assert len(wakes) <= count + forward.steps
