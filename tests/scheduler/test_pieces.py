"""Prefills cut for a device that is at its best with so many tokens: which are cut, and that no output changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any
from unittest.mock import patch

import pytest

from inference_engine.backends.base import Forward, Result, Step
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.config import EngineConfig
from inference_engine.decode.verifier import Block, Verifier
from inference_engine.engine import Engine
from inference_engine.kernels.ops import DeviceOps
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from inference_engine.scheduler.batching import Batching
from inference_engine.scheduler.step_time import CHUNK_SECONDS
from inference_engine.types import Finished, GenerateParams, Mode, StopReason
from laboratory.scripted import ScriptedForward, ScriptedModel
from tests.facade import standing_still
from tests.laws.variants import drain, each_way, generate, same, text
from tests.tiny import (
    SMALL,
    tiny_components,
    tiny_engine,
    tiny_f_theta,
    tiny_forward,
    tiny_forward_on,
    tiny_hybrid,
    tiny_latent,
)
from tests.tiny_native import tiny_native, tiny_native_hybrid

AT_ONCE = 24  # not a multiple of a segment


TOGETHER = DeviceOps(attends_together=True)  # the reference, as if it were a kernel


@lru_cache(maxsize=2)
def whole_model(windowed: bool) -> TorchForward:
    return tiny_forward_on("cpu", windowed=windowed, ops=TOGETHER)


class Pieces(TorchForward):
    """TinyModel on a device that says what it is at its best with; notes the tokens of each step."""

    def __init__(
        self, at_once: int | None, *, windowed: bool = True, busy: int | None = None, positions: int = 4096
    ) -> None:
        whole = whole_model(windowed)
        super().__init__(whole.seam, whole.facts, whole.device, ops=TOGETHER)
        self._at_once, self._busy, self._positions, self.windowed = at_once, busy, positions, windowed
        self.steps: list[int] = []

    def open(
        self, geometry: Geometry, capacity_bytes: int, *, address_bytes: int = 0, tap_layers: tuple[int, ...] = ()
    ) -> KVContext:
        context = super().open(geometry, capacity_bytes, address_bytes=address_bytes, tap_layers=tap_layers)
        return replace(
            context,
            most_tokens_at_once=self._at_once,
            busy_tokens=self._busy,
            most_positions_in_pieces=self._positions,
        )

    def run(self, step: Step) -> Result:
        self.steps.append(step.plan.query_count)
        return super().run(step)


def engine_on(forward: Pieces, **settings: Any) -> Engine:
    windowed, config = forward.windowed, EngineConfig(**{**SMALL, **settings})
    latent, components = tiny_latent(windowed=windowed), tiny_components(windowed=windowed)
    return Engine(forward, config, latent=latent, components=components, f_theta=tiny_f_theta(windowed=windowed))


def opened(engine: Engine, strategy: KVStrategy, length: int = 110, seed: int = 0) -> str:
    session = engine.create_session(strategy=strategy).session_id
    engine.append(session, text(length, seed=seed))
    return session


@each_way
def test_a_prefill_in_pieces_gives_what_a_whole_one_does(strategy: KVStrategy) -> None:
    runs = []
    for at_once in (None, AT_ONCE):
        with engine_on(Pieces(at_once, windowed=False)) as engine:
            session = opened(engine, strategy)
            turns = generate(engine, session, 6)
            engine.append(session, text(50, seed=1))
            runs.append(turns + generate(engine, session, 6))
    whole, pieces = runs
    assert same(whole, pieces, Mode.BATCHED)


def test_prefills_are_cut_and_share_steps_that_are_no_longer_than_is_best() -> None:
    forward = Pieces(AT_ONCE, windowed=False)
    with engine_on(forward) as engine:
        sessions = [opened(engine, Full(), length, length) for length in (70, 10, 12)]
        with standing_still(engine):  # so that all are there before the first begins
            running = [engine.generate(session, GenerateParams(max_tokens=4)) for session in sessions]
        for generation in running:
            drain(generation)
    assert max(forward.steps) == AT_ONCE
    assert sum(forward.steps) >= 70 + 10 + 12


class Slow(ScriptedForward):
    """Under a clock that its layers move: `token_seconds` for each token, times `load` of that step's number.

    At `stop_at` the Generate is cancelled.
    """

    LAYERS = 20

    def __init__(
        self, token_seconds: float, mode: Mode = Mode.BATCHED, *, load: Callable[[int], float] = lambda _: 1.0
    ) -> None:
        super().__init__(ScriptedModel(), trained_positions=4096, mode=mode)
        self._token_seconds, self._load = token_seconds, load
        self.now, self.stop_at = 0.0, math.inf
        self.stop: Callable[[], None] = lambda: None
        self.steps_seconds: list[float] = []

    def run(self, step: Step) -> Result:
        result = super().run(step)
        seconds = (0.01 + self._token_seconds * len(step.token_ids)) * self._load(len(self.steps_seconds))
        self.steps_seconds.append(seconds)
        for _ in range(self.LAYERS):
            step.plan.require_wanted()
            if self.now <= self.stop_at < self.now + seconds / self.LAYERS:
                self.stop()
            self.now += seconds / self.LAYERS
        return result


SLOW_STRATEGIES = [Full(), SinkWindow(sink=4, window=64)]


def slow_engine(forward: Slow) -> Engine:
    config = EngineConfig(kv_bytes=2**26, tier_bytes=2**24, stall_seconds=1e6)
    return Engine(forward, config, clock=lambda: forward.now)


@pytest.mark.parametrize("mode", Mode, ids=str)
@pytest.mark.parametrize("strategy", SLOW_STRATEGIES, ids=str)
def test_how_long_a_token_takes_changes_how_a_prefill_is_cut_and_no_token(strategy: KVStrategy, mode: Mode) -> None:
    generated, steps = [], []
    for token_seconds in (1e-6, 0.003, 0.02):
        forward = Slow(token_seconds, mode)
        with slow_engine(forward) as engine:
            session = opened(engine, strategy, 1500)
            generated.append(generate(engine, session, 12))
            engine.append(session, text(700, seed=1))
            generated[-1] += generate(engine, session, 12)
        steps.append(len(forward.steps_seconds))
        assert max(forward.steps_seconds[1:]) <= max(CHUNK_SECONDS, 16 * token_seconds) + 0.01
    assert generated[0] == generated[1] == generated[2]
    assert steps[0] < steps[1] < steps[2]


BUSIER = {
    "as busy as before": lambda _: 1.0,
    "twice as busy, by turns": lambda step: 1.0 + (step % 3 == 2),
    "anything up to twice as busy": lambda step: 1.0 + (step * 0.6180339) % 1.0,
    "ten times as busy since a step ago": lambda step: 1.0 if step < 40 else 10.0,
}


# Others wait for a step of a page of tokens at least, and it takes as long as such a step did before.
CANCELLED = [
    *((0, token_seconds, load) for token_seconds in (0.02, 0.2) for load in BUSIER),
    *((1, token_seconds, load) for token_seconds in (0.003, 0.015) for load in list(BUSIER)[:3]),
]


@pytest.mark.parametrize(("beside", "token_seconds", "load"), CANCELLED)
def test_a_cancel_in_prefill_takes_effect_within_half_a_second(beside: int, token_seconds: float, load: str) -> None:
    """beside: sessions that decode meanwhile."""
    forward = Slow(token_seconds, load=BUSIER[load])
    with slow_engine(forward) as engine:
        others = [engine.generate(opened(engine, Full(), 8, 1), GenerateParams(max_tokens=2000)) for _ in range(beside)]
        session = opened(engine, Full(), 3000)
        forward.stop_at = forward.now + 8.0
        with standing_still(engine):
            began = forward.now
            generation = engine.generate(session, GenerateParams(max_tokens=4))
            forward.stop = generation.cancel
        events = list(generation)
        for other in others:
            other.cancel()
    assert isinstance(events[-1], Finished) and events[-1].stop_reason is StopReason.CANCELLED
    assert events[-1].generated_tokens == 0
    # Others go on until this thread reads the clock: how long it took is in its own end.
    assert 0 <= began + events[-1].total_seconds - forward.stop_at <= 0.53


@pytest.mark.parametrize("load", list(BUSIER.values())[:3], ids=list(BUSIER)[:3])
def test_chunks_whose_time_varies_become_no_longer_than_half_a_second(load: Callable[[int], float]) -> None:
    """What a step takes without its tokens was once estimated from steps that vary, and chunks grew by the estimate."""
    forward = Slow(0.001, load=load)
    with slow_engine(forward) as engine:
        other = engine.generate(opened(engine, Full(), 8, 1), GenerateParams(max_tokens=2000))
        for turn in range(6):
            generate(engine, opened(engine, Full(), 3000, turn), 3)
        other.cancel()
    assert max(forward.steps_seconds) <= 2 * CHUNK_SECONDS + 0.02


EXECUTORS: dict[str, Callable[..., Forward]] = {
    "torch": tiny_forward,
    "torch, recurrent": tiny_hybrid,
    "native": tiny_native,
    "native, by views": partial(tiny_native, attends_together=False),
    "native, recurrent": tiny_native_hybrid,
}


@pytest.mark.parametrize("asked", [1, 3])
@pytest.mark.parametrize("make", EXECUTORS.values(), ids=EXECUTORS)
def test_a_prefill_that_is_cancelled_within_a_step_leaves_its_session_as_it_was(
    make: Callable[..., Forward], asked: int
) -> None:
    """asked: how often the step asks whether it is wanted, before it is not."""
    stop: list[Callable[[], None]] = []
    ended: list[int] = []

    def on_step(step: Step) -> None:
        is_wanted = step.plan.is_wanted
        if not stop or is_wanted is None:
            return
        calls = 0

        def is_wanted_still() -> bool:
            nonlocal calls
            calls += 1
            if calls == asked:
                stop.pop()()
            if not is_wanted():
                ended.append(calls)
                return False
            return True

        step.plan.is_wanted = is_wanted_still

    with tiny_engine(make=make, on_step=on_step, kv_bytes=2**24) as engine:
        session = opened(engine, Full(), 50)
        turns = [generate(engine, session, 4)]
        engine.append(session, text(90, seed=2))
        with standing_still(engine):
            generation = engine.generate(session, GenerateParams(max_tokens=4))
            stop.append(generation.cancel)
        events = list(generation)
        assert ended == [asked]
        assert isinstance(events[-1], Finished) and events[-1].stop_reason is StopReason.CANCELLED
        assert events[-1].generated_tokens == events[-1].prefilled_tokens == 0
        turns.append(generate(engine, session, 8))
        fresh = opened(engine, Full(), 50)
        others = [generate(engine, fresh, 4)]
        engine.append(fresh, text(90, seed=2))
        others.append(generate(engine, fresh, 8))
    assert all(same(*pair, Mode.BATCHED) for pair in zip(turns, others, strict=True))


def test_a_step_that_others_need_goes_on_without_one_that_has_stopped() -> None:
    forward = Slow(0.02)
    with slow_engine(forward) as engine:
        sessions = [opened(engine, Full(), 300, seed) for seed in range(2)]
        forward.stop_at = forward.now + 1.0
        with standing_still(engine):
            running = [engine.generate(session, GenerateParams(max_tokens=4)) for session in sessions]
            forward.stop = running[0].cancel
        ends = [event for each in running for event in each if isinstance(event, Finished)]
    assert [end.stop_reason for end in ends] == [StopReason.CANCELLED, StopReason.MAX_TOKENS]
    assert ends[1].prefilled_tokens == 300


def test_a_prefill_that_keeps_the_device_busy_is_not_cut() -> None:
    forward = Pieces(AT_ONCE, windowed=False, busy=40)
    with engine_on(forward) as engine:
        session = opened(engine, Full(), 110)
        generate(engine, session, 1)
        assert forward.steps == [64, 46]
        generate(engine, opened(engine, Full(), 39), 1)
        assert forward.steps[2:] == [24, 15]


@pytest.mark.parametrize(("device", "known"), [("cpu", [24, 24, 24, 6]), ("cuda", [])], ids=["cpu", "gpu"])
def test_the_pace_is_learned_from_steps_that_were_waited_for(device: str, known: list[int]) -> None:
    """On a GPU the last piece waits for those before it, too: what it took says nothing of its own tokens."""
    forward = Pieces(AT_ONCE, windowed=False)
    seen: list[int] = []
    waits = Verifier.waits

    def took(_batching: Batching, tokens: int, _seconds: float, *, is_decoding: bool) -> None:
        seen.append(tokens)

    def as_on(verifier: Verifier, blocks: list[Block]) -> bool:
        with patch.object(verifier, "_is_in_step", device == "cpu"):
            return waits(verifier, blocks)

    with patch.object(Batching, "took", took), patch.object(Verifier, "waits", as_on), engine_on(forward) as engine:
        generate(engine, opened(engine, Full(), 78), 1)
        assert seen == known
        generate(engine, opened(engine, Full(), 10), 2)
        assert seen == [*known, 10, 1]
