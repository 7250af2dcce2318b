"""`kakeya train components` from end to end, on TinyModel's folder; then sessions choose by what it made."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_engine.cli.main import main
from inference_engine.compose import components_folder, find_components, open_parts
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.errors import ModelError
from inference_engine.kv.strategies import make_strategy
from inference_engine.models import check_model
from inference_engine.types import GenerateParams
from tests.laws.variants import drain, text, tokens


@pytest.fixture(scope="module")
def model(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    cache = tmp_path_factory.mktemp("cache")
    own = cache / "own.txt"
    own.write_text("The quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    words = ("train", "components", "--model", str(tiny_folder), "--tokens", "2048", "--text", str(own))
    assert main([*words, "--cache-dir", str(cache)]) == 0
    return ModelConfig(model=str(tiny_folder), cache_dir=str(cache))


def test_a_server_finds_what_train_made_and_gather_chooses_by_it(model: ModelConfig) -> None:
    config = EngineConfig(kv_bytes=2**24, segment_tokens=16, page_tokens=4)
    with open_parts(model).engine(config) as engine:
        opened = engine.create_session(strategy=make_strategy("gather", sink=4, window=16, budget=180))
        assert opened.strategy.options()["scorer"] == "components"
        engine.append(opened.session_id, text(300))
        assert len(tokens(drain(engine.generate(opened.session_id, GenerateParams(max_tokens=5))))) == 5


def test_components_of_other_weights_and_damaged_ones_are_refused(model: ModelConfig) -> None:
    folder = components_folder(check_model(model.model, cache=model.cache_path).model_id, model.cache_path)
    manifest, tensors = folder / "components.json", folder / "components.safetensors"
    stated, stored = manifest.read_text(encoding="utf-8"), tensors.read_bytes()
    digest = stated.split('"target_digest": "')[1][:64]
    try:
        manifest.write_text(stated.replace(digest, "0" * 64), encoding="utf-8")
        with pytest.raises(ModelError, match="calibrated for the model with digest 0000"):
            find_components(model)
        manifest.write_text(stated, encoding="utf-8")
        tensors.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))
        with pytest.raises(ModelError, match="SHA-256"):
            find_components(model)
    finally:
        manifest.write_text(stated, encoding="utf-8")
        tensors.write_bytes(stored)
