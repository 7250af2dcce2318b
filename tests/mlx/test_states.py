"""Recurrent states on MLX: after whole chunks, and the entries of the tokens since, however these come."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.backends.base import Step
from inference_engine.backends.mlx.step_states import _solved
from inference_engine.kv.parts.open_chunk import OpenChunkStates
from inference_engine.kv.plan import StepPlan
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.types import Mode
from tests import tiny
from tests.facade import drop_entries, forward_of
from tests.further import off_metal
from tests.laws.drafters import Wrong
from tests.laws.variants import engine_for, generate, text
from tests.mlx.tiny import tiny_mlx
from tests.native.test_forward import Sessions, ids_of
from tests.tiny import DELTA, MAMBA
from tests.tiny_native import run_on

EACH_HYBRID = pytest.mark.parametrize("hybrid", [DELTA, MAMBA])


def states(sessions: Sessions, index: int = 0) -> Tensor:
    part = sessions.sessions[index].states
    assert isinstance(part, OpenChunkStates)
    return part.committed.memory.clone().view(torch.float32)


@EACH_HYBRID
def test_logits_and_states_do_not_depend_on_how_tokens_come(hybrid: str) -> None:
    """In one step, one by one, in steps that end within a chunk and after it, beside others, behind wrong drafts."""
    forward, ids = tiny_mlx(hybrid=hybrid), ids_of(150)
    alone = Sessions(forward, Full())
    expected, kept = alone.logits(0, ids, []), states(alone)

    def check(found: Tensor, others: Sessions, index: int = 0) -> None:
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(states(others, index), kept, atol=2e-4, rtol=2e-4)

    for cuts in (range(1, 150), [1, 17, 20, 33, 34, 97, 105, 110, 126]):
        again = Sessions(forward, Full())
        check(again.logits(0, ids, cuts), again)
    crowd, found = Sessions(forward, Full(), Full(), Full()), []
    for first, end in ((0, 3), (3, 50), (50, 51), (51, 60), (60, 150)):
        result, parts = crowd.step((0, ids_of(8, first)), (1, ids[first:end]), (2, ids_of(2, first + 1)))
        found.append(result.logits[parts[1]])
    check(torch.cat(found), crowd, 1)


def test_a_rejected_draft_leaves_no_byte() -> None:
    forward, ids = tiny_mlx(hybrid=DELTA), ids_of(30)
    sessions, plain = Sessions(forward, Full()), Sessions(forward, Full())
    session = sessions.sessions[0]
    for at in range(30):
        plain.step((0, ids[at : at + 1]))
        session.stage(9)
        context = sessions.context
        plan = StepPlan([session], context.geometry, context.pool, mask_dtype=torch.float32, ops=context.ops)
        forward.run(Step(np.array([ids[at], *ids_of(8, at)]), plan, range(9)))
        session.commit(at + 1)
        # The order of a product's sums is that of the step's tokens; where nothing was written, both are zero.
        torch.testing.assert_close(states(sessions), states(plain), atol=1e-5, rtol=1e-5)
        assert torch.equal(states(sessions) == 0, states(plain) == 0)


@pytest.mark.parametrize("strategy", [Full(), off_metal(SinkWindow(sink=3, window=40))], ids=str)
@EACH_HYBRID
def test_drafts_forks_and_dropped_sessions_give_the_tokens_of_torch(
    hybrid: str, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoken(**settings: Any) -> list[Any]:
        with engine_for(Mode.BATCHED, **settings) as engine:
            names.append(forward_of(engine).facts.backend)
            session = engine.create_session(strategy=strategy).session_id
            engine.append(session, text()[:90])
            first = generate(engine, session, 12)
            fork = engine.fork_session(session).session_id
            drop_entries(engine, session)
            engine.append(session, text(20, seed=3))
            return first + generate(engine, session, 6) + generate(engine, fork, 6)

    names: list[str] = []
    run_on(lambda **given: tiny.tiny_forward_on("cpu", seed=given.get("seed", 0), hybrid=hybrid), monkeypatch)
    expected = [token for token, _ in spoken()]
    run_on(lambda **given: tiny_mlx(seed=given.get("seed", 0), hybrid=hybrid), monkeypatch)
    monkeypatch.setitem(tiny.SMALL, "kv_bytes", 12 * 2**20)
    assert [token for token, _ in spoken()] == expected
    assert [token for token, _ in spoken(drafter=Wrong())] == expected
    assert names[1:] == ["mlx", "mlx"]


@pytest.mark.parametrize("count", [1, 2, 5, 8, 13, 64])
def test_tokens_that_are_all_alike_and_forget_nothing_are_solved(count: int) -> None:
    """Powers of the whole would be as large as 10 ** 18."""
    before = np.tril(np.ones((count, count), np.float32), -1)
    values = np.random.default_rng(count).standard_normal((count, 16)).astype(np.float32)
    found = np.array(_solved(mx.array(before[None, None]), mx.array(values[None, None])))[0, 0]
    expected = np.linalg.solve(np.eye(count) + before.astype(np.float64), values)
    assert np.abs(found - expected).max() < 1e-4
