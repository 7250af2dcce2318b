"""Stopped and taken up again = undisturbed, over every registered strategy and both modes."""

from __future__ import annotations

import numpy as np

from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Finished, GenerateParams, Mode, StopReason
from tests.engine.sessions import opened
from tests.engine.test_retries import ONE, SAMPLED, history, stopped_after
from tests.laws.variants import MODES, drain, each_strategy_with, engine_for, generate, same, tokens


@each_strategy_with(mode=MODES)
def test_a_generate_stopped_again_and_again_gives_what_an_undisturbed_one_gives(
    strategy: KVStrategy, mode: Mode
) -> None:
    params = GenerateParams(max_tokens=16, sampling=SAMPLED, logprobs=True)
    rng = np.random.default_rng(3)
    with engine_for(mode) as engine:
        calm = opened(engine, 45, strategy=strategy)
        expected = tokens(drain(engine.generate(calm, params)))
        session = opened(engine, 45, strategy=strategy)
        done = 0
        while (left := 16 - done) > 4:
            at = 1 + int(rng.integers(left - 3))
            last = stopped_after(engine, session, params, at, lambda generation: generation.cancel())
            assert isinstance(last, Finished)
            assert last.stop_reason is StopReason.CANCELLED
            done += at
            assert last.generated_tokens == done
        events = drain(engine.generate(session, params, request_id=ONE, wait_seconds=30))
        reported = tokens(events)
        assert len(reported) == 16
        assert same(reported, expected, mode)
        assert history(engine, session) == history(engine, calm)
        end = events[-1]
        assert isinstance(end, Finished)
        assert (end.stop_reason, end.generated_tokens, end.is_replayed) == (StopReason.MAX_TOKENS, 16, True)
        # And the next turn goes on from there as if nothing had been.
        assert same(generate(engine, session, 5), generate(engine, calm, 5), mode)
