"""Owners side by side, through the engine on the scripted model: one that floods it takes nothing from the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.engine.generation import Generation
from inference_engine.errors import Overloaded
from inference_engine.types import Event, Failed, Finished, GenerateParams, Mode, Progress, TokenCommitted
from laboratory.scripted import Script, ScriptedForward, ScriptedModel
from tests.further import further
from tests.laws.variants import drain, each_mode, text, tokens

PROMPT = 40
SMALL: dict[str, Any] = {
    "page_tokens": 4,
    "segment_tokens": 16,
    "step_tokens": 64,
    "kv_bytes": 2**26,
    "tier_bytes": 2**24,
}


def engine_on(forward: ScriptedForward, **settings: object) -> Engine:
    return Engine(forward, EngineConfig(**{**SMALL, **settings}))


def opened(engine: Engine, owner: str, length: int = PROMPT, seed: int = 0) -> str:
    session = engine.create_session(owner=owner, limit_tokens=200).session_id
    engine.append(session, text(length, seed=seed), owner=owner)
    return session


def asked(engine: Engine, owner: str, count: int = 20, **options: object) -> Generation:
    return engine.generate(opened(engine, owner), GenerateParams(max_tokens=count), owner=owner, **options)  # type: ignore[arg-type]


@contextmanager
def held(engine: Engine, owner: str = "a") -> Iterator[None]:
    """A Generate of `owner` runs, and the engine's thread stands still in it."""
    is_held, may_go = threading.Event(), threading.Event()

    def hold(event: Event) -> None:
        if isinstance(event, TokenCommitted):
            is_held.set()
            assert may_go.wait(60)

    asked(engine, owner, 1, listener=hold)
    assert is_held.wait(60)
    try:
        yield
    finally:
        may_go.set()


@pytest.mark.parametrize("max_running", [8, further(128)])
def test_a_hundred_generates_of_one_owner_delay_the_only_one_of_another_by_a_step(max_running: int) -> None:
    forward = ScriptedForward(ScriptedModel())
    first_at: list[int] = []

    def receive(event: Event) -> None:
        if isinstance(event, TokenCommitted):
            first_at.append(forward.steps)

    with engine_on(forward, max_running=max_running, max_batch=8) as engine:
        flood = [asked(engine, "a", 30) for _ in range(99)]
        with held(engine):
            began = forward.steps
            asked(engine, "b", 3, listener=receive)
        for generation in flood:
            drain(generation)
    # A prompt of 40 is three segments of 16, beside those that decode; between two of them one of the flood's may go.
    assert first_at[0] - began <= 2 * 3
    assert first_at[2] - first_at[0] <= 2 * 2


def test_one_owners_generates_run_at_most_as_many_at_a_time_as_its_quota_says() -> None:
    running, most = 0, 0

    def receive(event: Event) -> None:
        nonlocal running, most
        if isinstance(event, Progress) and event.done_tokens <= SMALL["segment_tokens"]:
            running += 1
            most = max(most, running)
        if isinstance(event, Finished | Failed):
            running -= 1
            if not running:
                over.set()

    over = threading.Event()
    with engine_on(ScriptedForward(ScriptedModel()), max_running_per_owner=2, step_tokens=16) as engine:
        with held(engine, "b"):
            for _ in range(6):
                asked(engine, "a", 5, listener=receive)
        engine.drain(60)
    assert over.is_set()
    assert most == 2


def test_a_queue_that_one_owner_filled_still_takes_anothers_even_share() -> None:
    with engine_on(ScriptedForward(ScriptedModel()), max_running=1, max_queued=6) as engine:
        with held(engine):
            waiting = [asked(engine, "a") for _ in range(6)]
            with pytest.raises(Overloaded):
                asked(engine, "a")
            waiting += [asked(engine, "b") for _ in range(3)]
            with pytest.raises(Overloaded):
                asked(engine, "b")
            waiting += [asked(engine, "c") for _ in range(2)]
            with pytest.raises(Overloaded):
                asked(engine, "c")
        assert all(len(tokens(drain(generation))) == 20 for generation in waiting)


@each_mode
@pytest.mark.parametrize("seconds", [1e-6, 0.003, 10.0], ids="{} s".format)
def test_pieces_of_a_prefill_sized_to_a_target_change_no_token(mode: Mode, seconds: float) -> None:
    def say(**targets: float) -> list[list[tuple[int, float | None]]]:
        forward = ScriptedForward(ScriptedModel(), Script(token_seconds=2e-5), mode=mode)
        with engine_on(forward, **targets) as engine:
            together = [asked(engine, "a", 40)]
            together += [
                engine.generate(opened(engine, "b", 130, seed), GenerateParams(max_tokens=9), owner="b")
                for seed in range(3)
            ]
            return [tokens(drain(generation)) for generation in together]

    expected = say()
    assert say(inter_token_target_seconds=seconds, first_token_target_seconds=seconds) == expected
