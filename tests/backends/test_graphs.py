"""Which steps are run as graphs; what a recording itself does takes a GPU and is tried there by the laws."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inference_engine.backends import graphs
from inference_engine.backends.recording import GraphMemory
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.kernels.components import ChosenBy, IndexShape
from inference_engine.kernels.ragged_attention import attend_ragged
from inference_engine.kv.memory.pool import Pool
from tests.facade import context_of, forward_of
from tests.tiny import tiny_engine


def step(pool: Pool, *, tokens: int, selects: bool, chosen_by: tuple[ChosenBy, ...] = ()) -> Any:
    positions = np.arange(tokens)
    plan = SimpleNamespace(
        pool=pool,
        query_count=tokens,
        selects=selects,
        chosen_by=chosen_by,
        archived=None,
        reads_offloaded=False,
        is_numbers_only=True,
        positions=positions,
    )
    return SimpleNamespace(plan=plan, tap_layers=(), logit_queries=[0])


def test_steps_that_cannot_be_recorded_while_serving_are_run_without_and_tried_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    is_full = False

    class NoMemory:
        def __init__(self, idle: np.ndarray[Any, Any], *_: object) -> None:
            tried.append(len(idle))
            if is_full:
                raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(graphs, "Recording", NoMemory)
    with tiny_engine() as engine:
        context, forward = context_of(engine), forward_of(engine)
        assert isinstance(forward, TorchForward)
        memory = GraphMemory()
        recorded = graphs.StepGraphs(forward.seam, context.geometry, context.pool, attend_ragged, memory=memory)
        is_full = True
        at_start = len(tried)
        assert recorded.can_run(step(context.pool, tokens=2, selects=False))
        assert not recorded.can_run(step(context.pool, tokens=2, selects=True))
        assert not recorded.can_run(step(context.pool, tokens=2, selects=True))
        assert len(tried) == at_start + 1
        is_full = False
        assert recorded.can_run(step(context.pool, tokens=8, selects=True))


def test_kinds_that_clients_choose_are_few_at_a_time_and_those_in_use_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[int] = []

    class Made:
        def __init__(self, idle: np.ndarray[Any, Any], *_: object) -> None:
            made.append(len(idle))

    monkeypatch.setattr(graphs, "Recording", Made)
    monkeypatch.setattr(graphs, "MOST_KINDS", 2)
    monkeypatch.setattr(graphs, "STALE_LOOKS", 5)
    with tiny_engine() as engine:
        context, forward = context_of(engine), forward_of(engine)
        assert isinstance(forward, TorchForward)
        recorded = graphs.StepGraphs(forward.seam, context.geometry, context.pool, attend_ragged, memory=GraphMemory())

        def can_run(budget: int) -> bool:
            by = ChosenBy(shape=IndexShape(rank=8, bits=3, run=1), restored=budget)
            return recorded.can_run(step(context.pool, tokens=1, selects=False, chosen_by=(by,)))

        at_start = len(made)
        assert can_run(10) and can_run(20)
        assert not can_run(30) and can_run(10) and can_run(20), "a third one replaces what is in use"
        assert caplog.text.count("others run unrecorded") == 1
        assert len(made) == at_start + 2
        assert any(can_run(30) for _ in range(20) if can_run(10)), "what nothing uses stays"  # 20 leaves
        assert len(made) == at_start + 3 and can_run(10) and len(made) == at_start + 3
        assert recorded.can_run(step(context.pool, tokens=1, selects=False)), "what was recorded at the start stays"
