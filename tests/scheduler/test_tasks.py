"""What other threads let the loop do between two steps: nothing of it is lost, and it counts as work."""

from __future__ import annotations

import threading

import pytest

from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.kv.memory.pool import Pool
from inference_engine.types import Event, Finished, GenerateParams
from laboratory.scripted import ScriptedForward, ScriptedModel
from tests.facade import soon
from tests.laws.variants import text
from tests.scheduler.test_fairness import SMALL

CONFIG = EngineConfig(**SMALL)


def test_a_fork_is_made_though_the_round_that_would_have_copied_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(ScriptedForward(ScriptedModel()), CONFIG) as engine:
        parent = engine.create_session(limit_tokens=200).session_id
        engine.append(parent, text(40))
        clean, has_failed = Pool.clean, threading.Event()

        def fail_once(pool: Pool, most_bytes: int) -> bool:
            if has_failed.is_set():
                return clean(pool, most_bytes)
            has_failed.set()
            raise RuntimeError("the device hiccuped")

        monkeypatch.setattr(Pool, "clean", fail_once)
        fork = engine.fork_session(parent).session_id
        assert has_failed.wait(60)
        for session in (fork, parent):
            engine.close_session(session)
        engine.drain(60)
        assert engine.info().kv_reserved_bytes == 0


def drain_waits_for(engine: Engine, may_end: threading.Event) -> None:
    """A drain goes on until what holds the engine may end, and no longer."""
    draining = threading.Thread(target=engine.drain, args=(60.0,))
    draining.start()
    draining.join(0.2)
    assert draining.is_alive()
    may_end.set()
    draining.join(60)
    assert not draining.is_alive()


def test_a_task_that_hangs_is_an_engine_that_stands_still_and_a_drain_waits_for_it() -> None:
    now = [0.0]
    with Engine(ScriptedForward(ScriptedModel()), CONFIG, clock=lambda: now[0]) as engine:
        is_running, may_end = threading.Event(), threading.Event()

        def hang() -> None:
            is_running.set()
            assert may_end.wait(60)

        soon(engine, hang)
        assert is_running.wait(60)
        now[0] += 2 * CONFIG.stall_seconds
        assert engine.is_stalled()
        drain_waits_for(engine, may_end)


def test_a_drain_waits_until_the_caller_has_received_the_end() -> None:
    is_ending, may_end = threading.Event(), threading.Event()

    def hold_the_end(event: Event) -> None:
        if isinstance(event, Finished):
            is_ending.set()
            assert may_end.wait(60)

    with Engine(ScriptedForward(ScriptedModel()), CONFIG) as engine:
        session = engine.create_session(limit_tokens=200).session_id
        engine.append(session, text(4))
        engine.generate(session, GenerateParams(max_tokens=2), listener=hold_the_end)
        assert is_ending.wait(60)
        drain_waits_for(engine, may_end)
