"""The settings of the native backend: what kv_dtype makes of K and V, and that torch refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference_engine.compose import open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import BackendError, ConfigError, NonFiniteLogits, RestorationFailed
from inference_engine.kv.strategy import KVStrategy
from inference_engine.native.library import KVType
from inference_engine.types import GenerateParams, Mode
from tests.laws.test_engine_laws import opened
from tests.laws.variants import drain, each_strategy_with, text
from tests.tiny import PAGES, SMALL, tiny_components, tiny_latent
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
    geometry = forward.geometry(mode=Mode.BATCHED, **PAGES)
    assert geometry.itemsize == itemsize
    context = forward.open(geometry, 2**20)
    assert {buffer.keys.itemsize for buffer in context.pool.buffers.values()} == {itemsize}


def test_weights_in_another_type_are_another_numeric_identity(folder: Path) -> None:
    """A copy of K and V, which is used again within one identity, is not what these weights would give."""
    found = {
        weights: open_backend(
            ModelConfig(model=str(folder), backend="native", weights=weights, threads=1)
        ).facts.numerics
        for weights in ("auto", "int8", "int4", "bfloat16")
    }
    assert found["auto"] == "exact, float16 K/V"
    assert found["int8"] == "exact, int8 weights, float16 K/V"
    assert len(set(found.values())) == len(found)


def test_torch_keeps_them_in_its_own_dtype(folder: Path) -> None:
    for backend in ("torch", "auto"):
        asked = ModelConfig(model=str(folder), backend=backend, kv_dtype="float16", kernels="plain", threads=1)
        with pytest.raises(BackendError, match="kv_dtype=float16 is for the native backend"):
            open_backend(asked)
    own = open_backend(ModelConfig(model=str(folder), backend="torch", kv_dtype="float32", threads=1))
    assert own.geometry(mode=Mode.BATCHED, **PAGES).itemsize == 4


def test_a_dtype_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_dtype must be"):
        ModelConfig(kv_dtype="float8")


@each_strategy_with(part=["k_norm", "v_proj"])
def test_an_entry_that_is_too_large_ends_in_an_error(strategy: KVStrategy, part: str) -> None:
    """Whatever a strategy does with it: it is read, archived, coded, summarised or moved."""
    forward = tiny_native(kv_type=KVType.FLOAT16, enlarged=part)
    with Engine(forward, EngineConfig(**SMALL), latent=tiny_latent(), components=tiny_components()) as engine:
        session = opened(engine, strategy, text(100))
        with pytest.raises((NonFiniteLogits, RestorationFailed)):
            drain(engine.generate(session, GenerateParams(max_tokens=60)))


def test_invariant_is_exact_here_which_has_its_property(folder: Path) -> None:
    forward = open_backend(ModelConfig(model=str(folder), numerics="invariant", threads=1))

    assert forward.facts.numerics == "exact, float16 K/V"


@pytest.mark.parametrize("setting", [{"weights": "int8"}, {"numerics": "int8"}], ids=str)
def test_torch_refuses_what_only_the_native_backend_has(folder: Path, setting: dict[str, Any]) -> None:
    """Also where `auto` goes to torch: a setting without effect would go unnoticed."""
    choices: tuple[dict[str, Any], ...] = ({"backend": "torch"}, {"backend": "auto", "kernels": "plain"})
    for choice in choices:
        with pytest.raises(BackendError, match="is for the native backend"):
            open_backend(ModelConfig(model=str(folder), threads=1, **choice, **setting))
