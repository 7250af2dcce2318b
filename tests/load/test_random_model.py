"""A folder with random weights is a model like any other, the same whenever it is made."""

from __future__ import annotations

from pathlib import Path

from inference_engine.config import EngineConfig, ModelConfig
from laboratory.evaluation.made_models import SHAPES
from laboratory.evaluation.models import open_target
from scripts.random_model import write_model
from tests.tiny import SMALL, tiny_config


def test_a_model_of_random_weights_is_served_and_made_again_alike(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_model(tiny_config(), tmp_path / name, seed=3)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "other"))
    assert first == second
    model = ModelConfig(model=str(tmp_path / "one"), backend="torch", threads=1)
    with open_target(model, EngineConfig(**SMALL)) as target:
        session = target.engine.create_session(limit_tokens=64).session_id
        target.engine.append(session, target.texts.filler("looped", 20, 0))
        assert target.engine.session_info(session).history_length == 20
        assert target.model_id == "one"


def test_shapes_are_those_of_the_models_they_are_named_for() -> None:
    gemma = SHAPES["gemma3-270m"]()
    assert [index for index, kind in enumerate(gemma.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert SHAPES["smollm2-135m"]().num_hidden_layers == 30
