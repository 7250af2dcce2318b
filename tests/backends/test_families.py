"""Whole model folders of many families, tiny and random: served as transformers generates, or refused in words.

A refusal comes from the configuration alone: the weights of its folder were never written.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from inference_engine.compose import open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import BackendError, ModelError
from inference_engine.models import find_model, remarks
from tests.further import further
from tests.laws.variants import generate, text
from tests.tiny import SMALL

# What a family has besides is in test_seam.py.
pytestmark = pytest.mark.usefixtures("trying_no_strategies")

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_OLD_SIZES: dict[str, Any] = {"vocab_size": 128, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}
_NO_SPECIAL_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "first_k_dense_replace": 1,
}

INDEXER: dict[str, Any] = {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 16}

SERVED: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt_neox": {"num_key_value_heads": None},  # a quarter of each head rotated, one projection for all three
    "gpt_neox plain": {"model_type": "gpt_neox", "rotary_pct": 1.0, "num_key_value_heads": None},
    "stablelm": {},  # partial
    "stablelm plain": {"model_type": "stablelm", "partial_rotary_factor": 1.0},
    "stablelm normed": {"model_type": "stablelm", "qk_layernorm": True, "use_parallel_residual": True},
    "nemotron": {"head_dim": 16},  # half
    "exaone4": {"sliding_window": 16, "sliding_window_pattern": 4},
    "phi": {"num_key_value_heads": 4},
    "smollm3": {},
    "cohere2": {"sliding_window": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 16},
    "gemma3": {  # as it is published: with a tower for pictures, which no token passes through
        "text_config": {**SIZES, "head_dim": 16, "sliding_window": 16},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
    },
    "gemma4": {  # as it is published: with towers for pictures and sound, which are left out
        "text_config": {**SIZES, "head_dim": 16, "global_head_dim": 32, "sliding_window": 16, "num_kv_shared_layers": 2}
        | {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8, "pad_token_id": 0}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "position_embedding_size": 16,
        },
        "audio_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, **LATENT},
    "deepseek_v3": LATENT,
    "deepseek_v32": {**LATENT, **INDEXER},
    "glm_moe_dsa": {**LATENT, **INDEXER, "indexer_types": ["full", "shared"] * 2},
    "qwen3_5": {  # the same
        "text_config": {**SIZES, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
        },
    },
    "gpt_oss": {"head_dim": 16, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}
# Of families that are alike the first; the others are further cases.
FIRST = ("llama", "gpt_neox", "smollm3", "qwen3", "gemma3", "gemma4", "deepseek_v3", "gpt_oss")
# What people ask for, and is not served; and what the refusal has to say.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "llama4": ({"text_config": SIZES}, "chunked_attention"),
    "llama4_text": (SIZES, "chunked_attention"),
    "minimax": (SIZES, ""),
    "gptj": (_OLD_SIZES, "another attention function"),
    "gpt2": (_OLD_SIZES, "in 0 of them"),
    "opt": ({**SIZES, "ffn_dim": 48}, ""),
    "bloom": (_OLD_SIZES, "rotate"),
    "mpt": ({"vocab_size": 128, "d_model": 64, "n_layers": 4, "n_heads": 4, "max_seq_len": 512}, ""),
    "falcon": (SIZES, "another attention function"),
    "mamba": (SIZES, ""),
}
# Words of a training library's error messages, which ours must not have.
_INTERNAL = re.compile(
    r"Error\b|Exception|Traceback|_attend|index_copy_|NoneType|tensor\(|size of tensor|has no setter|kwarg|\(\)"
)


def write_config(folder: Path, model_type: str, sizes: dict[str, Any]) -> Any:
    config = AutoConfig.for_model(**{"model_type": model_type, **_NO_SPECIAL_IDS, **sizes})
    folder.mkdir()
    config.save_pretrained(folder)
    return config


def write_model(folder: Path, model_type: str, sizes: dict[str, Any]) -> Any:
    config = write_config(folder, model_type, sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", [each if each in FIRST else further(each) for each in SERVED])
def test_a_folder_of_a_family_that_is_served_generates_as_transformers_does(family: str, tmp_path: Path) -> None:
    sizes = dict(SERVED[family])
    if "text_config" not in sizes:
        sizes = {**SIZES, **sizes}
    own = write_model(tmp_path / "model", sizes.pop("model_type", family), sizes)
    history = text(90)
    prompt = torch.tensor([history])
    everything = torch.ones_like(prompt)  # else token 0 counts as padding
    own.generation_config.pad_token_id = 0
    output = own.generate(prompt, attention_mask=everything, max_new_tokens=24, do_sample=False)
    expected = output[0, len(history) :].tolist()
    forward = open_backend(ModelConfig(model=str(tmp_path / "model"), cache_dir=str(tmp_path / "cache"), threads=1))
    with Engine(forward, EngineConfig(**SMALL)) as engine:
        session = engine.create_session().session_id
        engine.append(session, history)
        assert [token for token, _ in generate(engine, session, 24)] == expected


def test_parts_that_are_left_out_need_not_be_whole_and_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(folder, "gemma4", SERVED["gemma4"])
    model = ModelConfig(model=str(folder), cache_dir=str(tmp_path / "cache"), threads=1)
    tensors = load_file(folder / "model.safetensors")
    text_alone = {name: one for name, one in tensors.items() if not name.startswith("model.vision_tower.")}
    assert 0 < len(text_alone) < len(tensors)
    save_file(text_alone, folder / "model.safetensors", {"format": "pt"})
    (note,) = remarks(find_model(str(folder), cache=model.cache_path))
    assert "served as a model of text: vision_config, audio_config, with " in note
    open_backend(model)
    later = {"mtp.fc.weight": torch.ones(4), "mtp.norm.weight": torch.ones(4)}
    save_file({**text_alone, **later}, folder / "model.safetensors", {"format": "pt"})
    _, other_note = remarks(find_model(str(folder), cache=model.cache_path))
    assert "layers that predict later tokens, with 2 tensors" in other_note
    open_backend(model)
    save_file({**text_alone, "model.strange.weight": torch.ones(4)}, folder / "model.safetensors", {"format": "pt"})
    for backend in ("auto", "torch", "native"):
        with pytest.raises((BackendError, ModelError), match=r"model\.strange\.weight"):
            open_backend(replace(model, backend=backend))


@pytest.mark.parametrize("family", REFUSED)
def test_a_folder_of_an_unserved_family_is_refused_in_words_and_without_weights(family: str, tmp_path: Path) -> None:
    sizes, said = REFUSED[family]
    write_config(tmp_path / "model", family, sizes)
    with pytest.raises(ModelError) as caught:
        open_backend(ModelConfig(model=str(tmp_path / "model"), cache_dir=str(tmp_path / "cache"), threads=1))
    message = str(caught.value)
    assert said in message
    assert not _INTERNAL.search(message), message
    assert "safetensors" not in message


@pytest.fixture(scope="module")
def sound_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the sound configuration, which all cases have: it is admitted once."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                }
            },
            "short_factor of 1 numbers",
        ),
        ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "linear_attention"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"vocab_size": "many"}, "config.json"),
        ({"hidden_size": None}, ""),
        ({"num_attention_heads": 10**9}, ""),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantised"),
        ({"model_type": "bert"}, "in 0 of them"),
        ({"model_type": "clip"}, "no class that generates text"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(next(iter(value))),
)
def test_a_configuration_at_fault_is_refused_before_the_weights_are_looked_at(
    tmp_path: Path, changes: dict[str, Any], said: str, sound_cache: Path
) -> None:
    folder = tmp_path / "model"
    write_config(folder, "llama", SIZES)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))
    (folder / "model.safetensors").write_bytes(b"nothing that could be read")
    with pytest.raises(ModelError) as caught:
        open_backend(ModelConfig(model=str(folder), cache_dir=str(tmp_path / "cache"), threads=1))
    assert re.search(said, str(caught.value))
    assert "safetensors" not in str(caught.value)
    assert not _INTERNAL.search(str(caught.value))
    # The same folder with a sound configuration is refused for its weights: they were there to be looked at.
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="not a safetensors file"):
        open_backend(ModelConfig(model=str(folder), cache_dir=str(sound_cache), threads=1))
