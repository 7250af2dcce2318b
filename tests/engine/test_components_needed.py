"""Without components of the model's keys, or an operation for them, gather chooses by bounds; what asks for components
that are not there is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference_engine.backends.base import Forward
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument, ModelMismatch
from inference_engine.kv.strategies.gather import Gather
from inference_engine.kv.strategies.restored import Restored
from inference_engine.kv.strategy import KVStrategy
from tests.kept import keeping
from tests.tiny import LATENT_BYTES, tiny_components, tiny_engine, tiny_latent
from tests.tiny import SMALL as SETTINGS
from tests.tiny_native import tiny_native

SMALL: dict[str, Any] = {"sink": 4, "window": 16}


def resolved(strategy: KVStrategy, *, forward: Forward | None = None, **settings: Any) -> str:
    """What a session of that strategy has, on TinyModel or another."""
    if forward is None:
        with tiny_engine(**settings) as engine:
            return str(engine.create_session(strategy=strategy).strategy)
    extras = {"latent": tiny_latent(), "components": tiny_components(), **settings}
    with Engine(forward, EngineConfig(**SETTINGS), **extras) as engine:
        return str(engine.create_session(strategy=strategy).strategy)


def test_gather_chooses_by_components_where_they_are_calibrated_and_fast_else_by_bounds() -> None:
    """torch has no operation for an index of keys: there it has to be asked for."""
    components = "gather:budget=1280,sink=4,window=16,scorer=components,rank=16,bits=3,run=4"
    bounds = "gather:budget=4864,block=128,sink=4,window=16,scorer=bounds"

    assert resolved(Gather(**SMALL), forward=tiny_native()) == components
    assert resolved(Gather(**SMALL), forward=tiny_native(), components=None) == bounds
    assert resolved(Gather(**SMALL)) == bounds
    assert resolved(Gather(**SMALL, scorer="components")) == components
    assert resolved(Gather(**SMALL, block=8), forward=tiny_native()) == bounds.replace("128", "8")


def test_that_components_would_be_used_is_said_once_and_to_those_who_ask_for_gather(
    caplog: pytest.LogCaptureFixture,
) -> None:
    extras: dict[str, Any] = {"latent": tiny_latent(), "components": None}
    with (
        caplog.at_level("INFO"),
        Engine(tiny_native(), EngineConfig(**SETTINGS), **extras) as engine,
    ):
        for strategy in (None, Gather(**SMALL, scorer="bounds"), Gather(**SMALL, block=8)):
            engine.create_session(strategy=strategy)
        assert "kakeya train components" not in caplog.text, "nothing would change"
        for _ in range(2):
            engine.create_session(strategy=Gather(**SMALL))
        assert caplog.text.count("kakeya train components") == 1
    caplog.clear()
    with (
        caplog.at_level("INFO"),
        Engine(tiny_native(), EngineConfig(**SETTINGS, strategy="gather:window=16"), **extras),
    ):
        assert caplog.text.count("kakeya train components") == 1, "at the start, where it is the server's strategy"
    caplog.clear()
    with caplog.at_level("INFO"), tiny_engine(strategy="gather:window=16", components=None):
        assert "kakeya train components" not in caplog.text, "torch has no operation for them"


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"components": None}, {}, "no components of this model's keys are calibrated.*mode hold or stream"),
        ({"latent": None}, {}, "no latent codec is loaded"),
        ({}, {"rank": 17}, "must be at most 16, the head size, got 17"),
        ({}, {"window": 15}, "must hold a segment of 16 tokens, got 15"),
        ({}, {"budget": 158, "awake_bytes": 5119}, "must hold the 10 tokens that one step chooses, 5120 bytes"),
    ],
)
def test_what_select_cannot_have_is_refused_at_creation(
    settings: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {**SMALL, "bytes_per_token": LATENT_BYTES, **options}
    strategy = Restored(source="latent", mode="select", **given)
    with tiny_engine(**settings) as engine, pytest.raises(InvalidArgument, match=message):
        engine.create_session(strategy=strategy)


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


@pytest.mark.parametrize(
    "strategy",
    [
        Gather(**SMALL, scorer="components"),
        Restored(**SMALL, source="latent", mode="select", bytes_per_token=LATENT_BYTES),
    ],
    ids=str,
)
def test_a_session_that_chose_by_components_is_not_continued_under_others(tmp_path: Path, strategy: KVStrategy) -> None:
    with keeping(tmp_path, make=tiny_engine) as engine:
        session = engine.create_session(strategy=strategy).session_id
        engine.append(session, list(range(40)))
    others = tiny_components(seed=1)
    changed = keeping(tmp_path, make=tiny_engine, components=others)
    with changed as engine, pytest.raises(ModelMismatch, match="components of keys"):
        engine.recall(session)
    with keeping(tmp_path, make=tiny_engine) as engine:
        engine.recall(session)
        assert engine.session_info(session).history_length == 40
