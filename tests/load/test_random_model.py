"""A folder with random weights is a model like any other, the same whenever it is made."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

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


# As their models are published; those with embeddings of their own for the output count them twice.
PARAMETERS = {
    "qwen2.5-7b": 7_615_616_512,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-3.2-1b": 1_235_814_400,
    "smollm2-135m": 134_515_008,
    "gemma3-270m": 268_098_176,
    "qwen3.5-9b": 8_953_803_264,
    "gemma4-26b-a4b": 25_233_141_760,  # without what sees
    "deepseek-v2-lite": 15_706_484_224,
}


def test_shapes_are_those_of_the_models_they_are_named_for() -> None:
    counted = {}
    for name in SHAPES.keys() - {"tiny"}:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(SHAPES[name]())
        counted[name] = sum(each.numel() for each in model.parameters())
    assert counted == PARAMETERS
    llama, experts = SHAPES["llama-3.1-8b"](), SHAPES["qwen3-30b-a3b"]()
    assert [(each.num_attention_heads, each.num_key_value_heads) for each in (llama, experts)] == [(32, 8), (32, 4)]
    assert (experts.num_experts, experts.num_experts_per_tok, experts.head_dim) == (128, 8, 128)
    gemma = SHAPES["gemma3-270m"]()
    assert [index for index, kind in enumerate(gemma.layer_types) if kind == "full_attention"] == [5, 11, 17]
