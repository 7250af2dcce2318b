"""A reader that waits for tokens is notified once a step, and in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.kernels.ops import DeviceOps
from inference_engine.scheduler.batching import Batching
from inference_engine.scheduler.loop import Scheduler
from inference_engine.scheduler.stream_notify import StreamNotifier
from inference_engine.session.sqlite_journal import SQLiteJournal
from inference_engine.types import GenerateParams
from laboratory.scripted import Script, ScriptedForward, ScriptedModel
from tests.facade import on_the_engines_thread, session_of
from tests.kept import sqlite_journal
from tests.laws.variants import text
from tests.scheduler.test_fairness import SMALL
from tests.tiny import SMALL as TINY
from tests.tiny import tiny_forward_on


def test_equal_wakes_that_are_held_back_are_made_once_at_their_release() -> None:
    notifier, reported = StreamNotifier(), list[str]()

    def one() -> None:
        reported.append("one")

    notifier.hold()
    for wake in (one, lambda: reported.append("other"), one):
        notifier.wake(wake)
    assert not reported
    notifier.release()
    notifier.release()
    assert reported == ["one", "other"]


def test_late_ones_of_a_step_come_together_and_wake_a_thread_when_all_is_set_that_it_reads() -> None:
    waiting, made = list[Callable[[], object]](), list[str]()
    notifier = StreamNotifier(waiting.append)

    def wake() -> None:
        made.append("wake")

    notifier.hold()
    for number in range(3):
        notifier.call(partial(made.append, f"set {number}"), wake)
    assert not waiting
    notifier.release()
    (made_late,) = waiting
    assert not made
    made_late()
    assert made == ["set 0", "set 1", "set 2", "wake"]


def test_a_reader_receives_a_token_while_the_device_works_on_the_next_one() -> None:
    is_listening, is_reported, were_reported = threading.Event(), threading.Event(), list[bool]()

    def look(_: int) -> None:
        """In the middle of a step."""
        assert is_listening.wait(60)
        were_reported.append(is_reported.is_set())
        is_reported.clear()

    forward = ScriptedForward(ScriptedModel(), Script(on_step=look))
    with Engine(forward, EngineConfig(**SMALL)) as engine:
        session = engine.create_session(limit_tokens=200).session_id
        engine.append(session, text(10))
        engine.generate(session, GenerateParams(max_tokens=20)).when_readable(lambda: None, is_reported.set)
        is_listening.set()
        engine.drain(60)
        assert is_reported.wait(60)  # of the end
    assert len(were_reported) == 20
    assert all(were_reported)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_steps_commit_is_asked_for_once_while_the_device_is_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_read: bool
) -> None:
    """The journal's thread needs the interpreter, as the plan of the next step does, which no stream may wait for."""
    seen, may_go_on = list[str](), threading.Event()

    def asks(name: str) -> None:
        real = getattr(SQLiteJournal, name)

        def ask(journal: SQLiteJournal, *arguments: Any) -> None:
            if threading.current_thread().name == Scheduler.THREAD_NAME:
                seen.append("asked")
            real(journal, *arguments)

        monkeypatch.setattr(SQLiteJournal, name, ask)

    def choose(batching: Batching, requests: Any) -> Any:
        seen.append("planned")
        return real_choose(batching, requests)

    def look(_: int) -> None:
        assert may_go_on.wait(60)
        seen.append("computed")

    real_choose = Batching.choose
    asks("on_saved")
    asks("request_sync")
    monkeypatch.setattr(Batching, "choose", choose)
    forward = ScriptedForward(ScriptedModel(), Script(on_step=look))
    journal = sqlite_journal(tmp_path / "state")
    with Engine(forward, EngineConfig(**SMALL, state_dir=str(tmp_path / "state")), journal=journal) as engine:
        session = engine.create_session(limit_tokens=200).session_id
        engine.append(session, text(10))
        generation = engine.generate(session, GenerateParams(max_tokens=20))
        if is_read:
            generation.when_readable(lambda: None, lambda: None)
        may_go_on.set()
        engine.drain(60)
    first = seen.index("computed")
    assert seen[first + 1 : first + 1 + 3 * 18] == ["planned", "asked", "computed"] * 18


def test_a_step_that_lands_is_asked_to_be_made_safe_before_what_it_lands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, state = sqlite_journal(tmp_path / "state"), str(tmp_path / "state")
    config = EngineConfig(**{**TINY, "overlap": "on", "state_dir": state, "hibernate": "never"})
    forward = tiny_forward_on("cpu", ops=DeviceOps(attends_together=True))
    lengths, asked, found = [lambda: 0], list[int](), list[tuple[int, int]]()

    def noted(name: str) -> None:
        real = getattr(journal, name)

        def ask(*given: Any) -> None:
            asked.append(lengths[0]())
            real(*given)

        monkeypatch.setattr(journal, name, ask)

    noted("request_sync")
    noted("on_saved")
    with Engine(forward, config, journal=journal) as engine:
        session = engine.create_session(limit_tokens=500).session_id
        lengths[0] = session_of(engine, session).history.__len__
        engine.append(session, text(10))
        generation = engine.generate(session, GenerateParams(max_tokens=450))
        events = iter(generation)
        for _ in range(20):
            next(events)
            on_the_engines_thread(engine, lambda: found.append((asked[-1], lengths[0]())))
        generation.cancel()
        list(events)
    assert all(last == length for last, length in found), found


def test_a_wake_up_that_fails_keeps_no_other_from_its_reader(caplog: pytest.LogCaptureFixture) -> None:
    notifier, reported = StreamNotifier(), list[str]()

    def fail() -> None:
        raise ValueError("of an embedder")

    notifier.hold()
    notifier.wake(fail)
    notifier.wake(lambda: reported.append("one"))
    notifier.release()
    assert reported == ["one"] and "of an embedder" in caplog.text


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
            generation.when_readable(partial(rings.append, number), wake)
        may_go_on.set()
        engine.drain(60)
    assert len(rings) > count * tokens
    assert forward.steps < 2 * tokens
    # One for each that began to listen, and one a step.
    assert len(wakes) <= count + forward.steps
