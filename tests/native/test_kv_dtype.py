"""The settings of the native backend: what kv_dtype makes of K and V, and that torch refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference_engine.compose import open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import NonFiniteLogits, RestorationFailed
from inference_engine.kv.strategy import KVStrategy
from inference_engine.native.library import KVType
from inference_engine.types import GenerateParams
from tests.laws.test_engine_laws import opened
from tests.laws.variants import drain, each_strategy_with, text
from tests.tiny import PAGES, SMALL, tiny_components, tiny_f_theta, tiny_latent
from tests.tiny_folder import save_tiny_model
from tests.tiny_native import library, tiny_native


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library()
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("asked", "given", "itemsize"),
    [("auto", "float16", 2), ("float32", "float32", 4), ("float16", "float16", 2), ("bfloat16", "bfloat16", 2)],
)
def test_entries_take_the_bytes_that_were_asked_for(asked: str, given: str, itemsize: int, folder: Path) -> None:
    forward = open_backend(ModelConfig(model=str(folder), backend="native", kv_dtype=asked, threads=1))

    assert forward.facts.numerics == f"exact, {given} K/V"
    geometry = forward.geometry(**PAGES)
    assert geometry.itemsize == itemsize
    context = forward.open(geometry, 2**20)
    assert context.pool.memory.itemsize == itemsize


@each_strategy_with(part=["k_norm", "v_proj"])
def test_an_entry_that_is_too_large_ends_in_an_error(strategy: KVStrategy, part: str) -> None:
    """Whatever a strategy does with it: it is read, archived, coded, summarised or moved."""
    forward = tiny_native(kv_type=KVType.FLOAT16, enlarged=part)
    calibrated: dict[str, Any] = {"latent": tiny_latent(), "components": tiny_components(), "f_theta": tiny_f_theta()}
    with Engine(forward, EngineConfig(**SMALL), **calibrated) as engine:
        session = opened(engine, strategy, text(100))
        with pytest.raises((NonFiniteLogits, RestorationFailed)):
            drain(engine.generate(session, GenerateParams(max_tokens=60)))


@pytest.mark.parametrize(("numerics", "identity"), [("auto", "exact"), ("int8", "exact")])
def test_what_is_promised_of_batches_changes_no_identity(numerics: str, identity: str, folder: Path) -> None:
    for determinism in ("off", "batch-invariant"):
        config = ModelConfig(model=str(folder), numerics=numerics, determinism=determinism, threads=1)
        facts = open_backend(config).facts
        assert (facts.numerics, facts.mode) == (f"{identity}, float16 K/V", config.mode)
