"""What TOVA keeps: by hand on the model's own attention, and the needle that a window of equal size loses."""

from __future__ import annotations

import pytest
import torch

from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument
from inference_engine.kv.parts.scored import Candidates
from inference_engine.kv.strategies import STRATEGIES, make_strategy, parse_strategy
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Mode
from kakeya_tova import LastAttention, Tova
from tests.laws.variants import LENGTH, generate, same, text
from tests.tiny_native import served_engine


def test_it_is_there_once_it_is_installed_and_its_options_are_checked() -> None:
    assert STRATEGIES.package("tova").startswith("kakeya-tova ")
    assert parse_strategy("tova:budget=7") == Tova(budget=7)
    with pytest.raises(InvalidArgument, match=r"budget.* must be ≥ 1, got 0"):
        make_strategy("tova", budget=0)


def test_an_entry_that_the_last_query_points_at_has_the_highest_score() -> None:
    keys = torch.eye(8)[:4].expand(2, 3, 4, 8).transpose(1, 2)  # [layers, n, Hkv, D], each KV head the same keys
    query = torch.zeros(2, 6, 8)
    query[0, :, 2] = query[1, :, 1] = 9.0
    candidates = Candidates(keys=keys, values=keys, query=query, scaling=1.0, softcap=None)
    scores = LastAttention().scores(candidates)
    assert scores.shape == (2, 3, 4)
    assert scores.argmax(dim=-1).tolist() == [[2] * 3, [1] * 3]


@pytest.mark.parametrize("mode", Mode)
def test_a_budget_for_everything_equals_full_and_a_smaller_one_differs(mode: Mode) -> None:
    """Sums are taken in another order, so equality is up to rounding in both modes."""
    with served_engine(mode=mode, windowed=False) as engine:
        full, wide, narrow = (
            generate(engine, opened(engine, strategy))
            for strategy in (
                Full(),
                Tova(budget=LENGTH, window=40),
                Tova(budget=24, window=16),
            )
        )
    assert same(wide, full, Mode.BATCHED)
    assert not same(narrow, full, Mode.BATCHED)


def opened(engine: Engine, strategy: KVStrategy) -> str:
    session = engine.create_session(strategy=strategy).session_id
    engine.append(session, text())
    return session
