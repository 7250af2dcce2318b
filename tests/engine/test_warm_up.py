"""The prompt that a device computes before its first call."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from inference_engine.backends.base import Result, Step
from inference_engine.decode.verifier import Verifier
from inference_engine.engine.warm_up import warm_up
from inference_engine.kv.strategies.full import Full
from tests.facade import context_of, forward_of, on_the_engines_thread, steps_run_by
from tests.laws.variants import all_strategies
from tests.tiny import tiny_engine


def test_warming_up_computes_a_prompts_own_chunks_and_gives_the_memory_back(subtests: pytest.Subtests) -> None:
    step_tokens = 48
    strategies = {strategy.name: strategy for strategy in all_strategies()}.values()
    with tiny_engine() as engine:
        forward, context = forward_of(engine), context_of(engine)
        run = forward.run
        for strategy in strategies:
            counts: list[int] = []

            def counted(step: Step, counts: list[int] = counts) -> Result:
                counts.append(len(step.token_ids))
                return run(step)

            with subtests.test(str(strategy)), steps_run_by(engine, counted):
                verifier = Verifier(forward, context)
                on_the_engines_thread(engine, partial(warm_up, verifier, strategy, 500, step_tokens))
                assert sum(counts) == 2 * step_tokens + step_tokens // 3, "unless a step failed"
                assert counts == sorted(counts, reverse=True), "full ones first"
                assert context.pool.reserved_bytes == 0


def test_a_device_without_memory_for_a_long_prompt_is_named_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    def out_of_memory(_: Step) -> Result:
        raise torch.OutOfMemoryError

    with tiny_engine() as engine:
        verifier = Verifier(forward_of(engine), context_of(engine))
        with steps_run_by(engine, out_of_memory):
            on_the_engines_thread(engine, partial(warm_up, verifier, Full(), 500, 48))
        assert context_of(engine).pool.reserved_bytes == 0
    assert "a prompt of 112 tokens, in steps of 48" in caplog.text and "step_tokens" in caplog.text
