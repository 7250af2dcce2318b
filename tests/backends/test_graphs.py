"""Which steps are run as graphs; what a recording itself does takes a GPU and is tried there by the laws."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.backends import graphs, torch_forward
from inference_engine.backends.pinned import Landing, Numbers
from inference_engine.backends.recording import GraphMemory
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.kernels.flash3 import FlashChunks
from inference_engine.kernels.ops import DeviceOps
from inference_engine.kernels.ragged_attention import attend_ragged
from inference_engine.kernels.reads import BlockRead, ReadRecord
from inference_engine.kv.memory.pool import Pool
from inference_engine.kv.plan import StepPlan
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.gather import Gather
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import GenerateParams, Sampling, TokenCommitted
from tests.facade import context_of, forward_of, standing_still
from tests.kernels.test_long_chunks import fake_forward
from tests.laws.variants import text
from tests.tiny import SMALL, tiny_engine, tiny_forward_on

SEGMENT = SMALL["segment_tokens"]
GATHER = Gather(scorer="bounds", sink=16, window=160, block=16, budget=224)


def step(pool: Pool, *records: ReadRecord, tokens: int) -> Any:
    positions = np.arange(tokens)
    plan = SimpleNamespace(
        pool=pool,
        query_count=tokens,
        has_chunks=False,
        records=records,
        reads_upto=tokens,
        is_numbers_only=True,
        positions=positions,
    )
    return SimpleNamespace(plan=plan, tap_layers=(), logit_queries=[0])


class Eager:
    """A recording that computes each time: of what CUDA's does, all but that it is recorded."""

    def __init__(
        self, idle: Numbers, device: torch.device, compute: Callable[[Tensor], Any], memory: GraphMemory
    ) -> None:
        self._count, self._compute, self.memory = len(idle), compute, memory

    def run(self, *parts: Numbers, fed: Tensor | None = None, given: object = None) -> Any:
        numbers = torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]))
        assert len(numbers) == self._count
        if fed is not None:
            numbers[: len(fed)] = fed
        with patch.object(self.memory, "cut", lambda between: between(given)):
            return self._compute(numbers)


class Now:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=1.2, top_k=30, top_p=0.9, seed=3)],
    ids=["greedy", "sampled", "ranked"],
)
def test_recorded_steps_of_any_number_of_sessions_decode_what_unrecorded_ones_do(
    monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    monkeypatch.setattr(graphs, "Recording", Eager)
    landing = partial(Landing, allocate=partial(torch.empty, dtype=torch.float32), now=lambda _device: Now())
    monkeypatch.setattr(torch_forward, "Landing", landing)
    prompts = [text(SEGMENT + 3 * number, seed=number) for number in range(5)]  # a recording is made for 4, and for 6

    def decoded(sessions: int, *, is_recorded: bool) -> list[list[int]]:
        forward = tiny_forward_on("cpu", ops=DeviceOps(attends_together=True), records_graphs=is_recorded)
        with Engine(forward, EngineConfig(**SMALL, overlap="on")) as engine:
            opened = [engine.create_session().session_id for _ in range(sessions)]
            for session, prompt in zip(opened, prompts, strict=False):
                engine.append(session, prompt)
            params = GenerateParams(max_tokens=2 * SEGMENT, sampling=sampling)
            with standing_still(engine):
                running = [engine.generate(session, params) for session in opened]
            return [[event.token_id for event in each if isinstance(event, TokenCommitted)] for each in running]

    for sessions in (1, 4, 5):
        assert decoded(sessions, is_recorded=True) == decoded(sessions, is_recorded=False)


@pytest.mark.parametrize("is_within", [False, True], ids=["between", "within"])
@pytest.mark.parametrize("strategy", [Full(), GATHER], ids=["full", "gather"])
def test_long_chunks_read_by_views_between_the_graphs_of_their_step_or_within_it(
    monkeypatch: pytest.MonkeyPatch, strategy: KVStrategy, is_within: bool
) -> None:
    """Of two sessions' turns in one step, beside one that decodes. Under `gather` generated tokens choose."""
    cut: list[tuple[int, int]] = []
    within: list[int] = []
    monkeypatch.setitem(
        sys.modules, "fa3_fwd_interface", SimpleNamespace(fa3_fwd_cuda=SimpleNamespace(fwd=fake_forward))
    )

    class Counted(FlashChunks):
        def attend(self, layer: int, queries: Tensor, *others: Any) -> Tensor:
            within.append(len(queries))
            return super().attend(layer, queries, *others)

    monkeypatch.setattr(graphs, "Recording", Eager)
    landing = partial(Landing, allocate=partial(torch.empty, dtype=torch.float32), now=lambda _device: Now())
    monkeypatch.setattr(torch_forward, "Landing", landing)
    read_views = StepPlan.read_views

    def counted(plan: StepPlan, layer: int, queries: Tensor, *others: Any) -> None:
        cut.append((layer, plan.query_count))
        read_views(plan, layer, queries, *others)

    monkeypatch.setattr(StepPlan, "read_views", counted)

    def said(long_reads: int | None, *, is_recorded: bool = True) -> list[list[int]]:
        attend_chunks = Counted if is_within else None
        ops = DeviceOps(attends_together=True, long_reads=long_reads, attend_chunks=attend_chunks)
        forward = tiny_forward_on("cpu", ops=ops, is_listed=True, records_graphs=is_recorded)
        config = EngineConfig(**{**SMALL, "step_tokens": 480, "segment_tokens": 160}, overlap="on")
        with Engine(forward, config) as engine:
            sessions = [engine.create_session(strategy=strategy).session_id for _ in range(3)]
            found: list[list[int]] = []
            for turn, asked in enumerate((sessions, sessions, sessions[:1])):
                for number, session in enumerate(asked):
                    engine.append(session, text(20 if number == 2 else 140 + (turn == 0), seed=10 * turn + number))
                with standing_still(engine):
                    running = [engine.generate(session, GenerateParams(max_tokens=20)) for session in asked]
                found += [[event.token_id for event in each if isinstance(event, TokenCommitted)] for each in running]
            return found

    expected = said(None)
    assert not cut
    assert said(140 * 200, is_recorded=False) == expected and not cut
    assert said(140 * 200) == expected
    # Two turns beside a third session, then one alone. Under `gather` the second turn's first token, which chooses, is
    # too far behind for a recording.
    found = {count for _, count in cut}
    if is_within:
        assert not cut and set(within) == ({384, 160} if strategy == Full() else {160})
    else:
        assert not within and found == ({2 * 141 + 21, 141} if strategy == Full() else {141})


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
        assert recorded.can_run(step(context.pool, tokens=2))
        assert not recorded.can_run(step(context.pool, BlockRead(blocks=9), tokens=2))
        assert not recorded.can_run(step(context.pool, BlockRead(blocks=9), tokens=2))
        assert len(tried) == at_start + 1
        is_full = False
        assert recorded.can_run(step(context.pool, BlockRead(blocks=9), tokens=8))
