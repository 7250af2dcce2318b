"""The same cases on models that compute: streams equal solo streams, no token is foreign, accounting is exact.

TinyModel has a short form of each in `make test`; the small real model has them in `make test-long`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import get_state_machine_test

from inference_engine.backends.base import Forward
from inference_engine.compose import open_backend
from inference_engine.config import EngineConfig, ModelConfig, resolve
from inference_engine.engine import Engine
from inference_engine.kv.strategies import make_strategy
from inference_engine.kv.strategy import KVStrategy
from inference_engine.session.journal import MemoryJournal
from inference_engine.types import Mode
from laboratory.scripted import Script
from tests.facade import in_mode
from tests.further import further
from tests.load.alone import Alone, AloneSolo
from tests.load.calls import Calls
from tests.load.cancels import Cancels
from tests.load.counted import CountedForward
from tests.load.population import Population, World, limits
from tests.tiny import SMALL, tiny_forward_on

TINY, REAL = "tiny", "smollm2-135m"
MODELS = [further(TINY), pytest.param(REAL, marks=[pytest.mark.long, pytest.mark.real_model])]
INTERLEAVINGS = {TINY: 4, REAL: 20}
CANCELS = {TINY: 25, REAL: 40}
SEQUENCES = {TINY: 8, REAL: 4}
STRATEGIES: tuple[KVStrategy, ...] = (
    make_strategy("full"),
    make_strategy("sink_window", sink=2, window=20),
    make_strategy("layer_window", sink=4, window=16, full_layers=(1,)),
    make_strategy("restored", sink=4, window=16),
    make_strategy("gather", block=4, sink=4, window=16, budget=32),
    make_strategy("full", codec="int8", exact_window=16),
    make_strategy("sink_window", sink=2, window=44, codec="int8", exact_window=9),
)


def forward(model: str, mode: Mode = Mode.FIXED_SHAPE) -> Forward:
    """One of its own: two engines run at a time."""
    return in_mode(
        tiny_forward_on("cpu") if model == TINY else open_backend(resolve(ModelConfig, {"model": REAL})), mode
    )


def engine_on(forward: Forward, **settings: Any) -> Engine:
    extras = {name: settings.pop(name) for name in ("clock", "journal") if name in settings}
    return Engine(forward, EngineConfig(**{**SMALL, "kv_bytes": 2**30, **settings}), **extras)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("model", "mode"),
    [
        further(TINY, Mode.BATCHED),
        further(TINY, Mode.FIXED_SHAPE),
        pytest.param(REAL, Mode.FIXED_SHAPE, marks=[pytest.mark.long, pytest.mark.real_model]),
    ],
    ids=["tiny-batched", "tiny-fixed-shape", "smollm2"],
)
def test_interleaved_sessions_of_every_strategy_get_the_tokens_they_get_alone(model: str, mode: Mode) -> None:
    judged, journal, rng = forward(model, mode), MemoryJournal(), np.random.default_rng(7)
    size = judged.facts.vocab_size
    world = World(owners=3, sessions=4, vocab_size=size, known=(), replayed=STRATEGIES, replayed_share=1.0)
    with (
        engine_on(judged, journal=journal, **limits(world)) as engine,
        engine_on(forward(model, mode)) as alone,
    ):
        population = Population(engine, journal, alone, world=world)
        population.fill(rng)
        for _ in range(INTERLEAVINGS[model]):
            population.interleave(rng)
    counts = population.counts
    assert counts.replayed > 3 * INTERLEAVINGS[model]
    assert min(counts.cancelled, counts.evicted) > 0


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("model", MODELS)
def test_cancels_at_random_instants_stop_within_a_step_on_a_model_that_computes(model: str) -> None:
    script, journal, rng = Script(), MemoryJournal(), np.random.default_rng(3)
    with (
        engine_on(CountedForward(forward(model), script), journal=journal) as engine,
        engine_on(forward(model)) as alone,
    ):
        cancels = Cancels(engine, script, alone=Alone(alone, journal))
        while cancels.count < CANCELS[model]:
            cancels.round(rng)
    assert cancels.before_the_first > 0
    assert cancels.tokens > CANCELS[model] // 2


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("model", MODELS)
def test_sequences_of_calls_leave_histories_that_the_model_allows(model: str) -> None:
    judged, other = forward(model), forward(model)
    with engine_on(other) as alone:

        class RealCalls(Calls):
            def engine(self, **settings: Any) -> Engine:
                return engine_on(judged, **settings)

            def solo(self, strategy: KVStrategy) -> AloneSolo:
                return AloneSolo(alone, strategy)

        few = settings(
            max_examples=SEQUENCES[model],
            stateful_step_count=40,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        RealCalls.seen.clear()
        get_state_machine_test(RealCalls, settings=few)()
    ended = {method for method, reason in RealCalls.seen if reason == "OK"}
    assert {"CreateSession", "AppendTokens", "Generate", "CloseSession"} <= ended
