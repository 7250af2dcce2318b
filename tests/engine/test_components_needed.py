"""Without components of the model's keys gather chooses by bounds, and what asks for them is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference_engine.errors import InvalidArgument, ModelMismatch
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategies.gather import Gather
from tests.kept import keeping
from tests.tiny import tiny_components, tiny_engine

SMALL: dict[str, Any] = {"sink": 4, "window": 16}


def test_gather_chooses_by_components_where_the_models_are_calibrated_else_by_bounds() -> None:
    with tiny_engine() as engine, tiny_engine(components=None) as without:
        calibrated, plain = (each.create_session(strategy=Gather(**SMALL)).strategy for each in (engine, without))
        blocks = engine.create_session(strategy=Gather(**SMALL, block=8)).strategy

    assert str(calibrated) == "gather:budget=1280,sink=4,window=16,scorer=components,rank=16,bits=3,run=4"
    assert str(plain) == "gather:budget=4864,block=128,sink=4,window=16,scorer=bounds"
    assert str(blocks) == "gather:budget=4864,block=8,sink=4,window=16,scorer=bounds"


@pytest.mark.parametrize(
    ("components", "options", "message"),
    [
        (None, {}, "no components of this model's keys are calibrated.*kakeya train components"),
        ({1: tiny_components()[1]}, {}, r"cover layers \(1,\), this model needs 2"),
        (tiny_components(), {"rank": 17}, "must be at most 16, the head size, got 17"),
        (tiny_components(), {"budget": 20}, "must hold the sink, the window and the tile of the index, 148 entries"),
    ],
)
def test_what_cannot_be_had_of_components_is_refused_at_creation(
    components: object, options: dict[str, Any], message: str
) -> None:
    with tiny_engine(components=components) as engine, pytest.raises(InvalidArgument, match=message):
        engine.create_session(strategy=Gather(**SMALL, scorer="components", **options))


def test_options_of_the_other_scorer_are_refused() -> None:
    for options, refused in (("scorer=components,block=16", "block"), ("scorer=bounds,rank=8", "rank")):
        with pytest.raises(Exception, match=f"{refused} has no meaning with scorer|no meaning with scorer"):
            parse_strategy(f"gather:{options}")


def test_a_session_that_chose_by_components_is_not_continued_under_others(tmp_path: Path) -> None:
    with keeping(tmp_path, make=tiny_engine) as engine:
        session = engine.create_session(strategy=Gather(**SMALL, scorer="components")).session_id
        engine.append(session, list(range(40)))
    others = tiny_components(seed=1)
    changed = keeping(tmp_path, make=tiny_engine, components=others)
    with changed as engine, pytest.raises(ModelMismatch, match="the components of keys"):
        engine.recall(session)
    with keeping(tmp_path, make=tiny_engine) as engine:
        engine.recall(session)
        assert engine.session_info(session).history_length == 40
