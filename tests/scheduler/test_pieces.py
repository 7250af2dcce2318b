"""Prefills cut for a device that is at its best with so many tokens: which are cut, and that no output changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import pytest

from inference_engine.backends.base import Result, Step
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
from tests.tiny import SMALL, tiny_components, tiny_forward_on, tiny_latent

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
    return Engine(forward, config, latent=latent, components=components)


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
    """Under a clock that its steps move: `token_seconds` for each token. At `stop_at` the Generate is cancelled."""

    def __init__(self, token_seconds: float, mode: Mode = Mode.BATCHED) -> None:
        super().__init__(ScriptedModel(), trained_positions=4096, mode=mode)
        self._token_seconds = token_seconds
        self.now, self.stop_at = 0.0, math.inf
        self.stop: Callable[[], None] = lambda: None
        self.steps_seconds: list[float] = []

    def run(self, step: Step) -> Result:
        result = super().run(step)
        seconds = 0.01 + self._token_seconds * len(step.token_ids)
        if self.now <= self.stop_at < self.now + seconds:
            self.stop()
        self.now += seconds
        self.steps_seconds.append(seconds)
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
        assert max(forward.steps_seconds[1:]) <= CHUNK_SECONDS + 0.01
    assert generated[0] == generated[1] == generated[2]
    assert steps[0] < steps[1] < steps[2]


@pytest.mark.parametrize("token_seconds", [0.003, 0.02, 0.04])
@pytest.mark.parametrize("beside", [0, 1])
def test_a_cancel_in_prefill_takes_effect_within_a_chunk_of_half_a_second(token_seconds: float, beside: int) -> None:
    """beside: sessions that decode meanwhile."""
    forward = Slow(token_seconds)
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
    assert 0 <= began + events[-1].total_seconds - forward.stop_at <= 1.05 * CHUNK_SECONDS


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

    def took(_batching: Batching, tokens: int, _seconds: float) -> None:
        seen.append(tokens)

    def as_on(verifier: Verifier, blocks: list[Block]) -> bool:
        with patch.object(verifier, "_is_in_step", device == "cpu"):
            return waits(verifier, blocks)

    with patch.object(Batching, "took", took), patch.object(Verifier, "waits", as_on), engine_on(forward) as engine:
        generate(engine, opened(engine, Full(), 78), 1)
        assert seen == known
        generate(engine, opened(engine, Full(), 10), 2)
        assert seen == [*known, 10, 1]
