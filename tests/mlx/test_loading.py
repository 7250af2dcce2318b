"""Models that MLX runs, those in MLX's own layout among them, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from inference_engine.backends.base import Forward
from inference_engine.cli.main import main
from inference_engine.compose import open_backend
from inference_engine.config import ModelConfig
from inference_engine.errors import BackendError, ModelError
from inference_engine.kv.strategies.full import Full
from inference_engine.models.folder import CONFIG
from inference_engine.models.open_checkpoint import open_checkpoint
from tests.further import off_metal, off_metal_test
from tests.models.hub_entry import COMMIT
from tests.models.hub_server import Hub, served
from tests.native.test_forward import Sessions
from tests.tiny_folder import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("admitting_once")

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
DENSE = LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True)
MIXED = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
IDS = [int(one) for one in np.random.default_rng(0).integers(1, 128, 40)]


def saved(config: PretrainedConfig, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    kind = LlamaForCausalLM if config.model_type == "llama" else Qwen3MoeForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.to(dtype).save_pretrained(folder)
    return folder


def published(
    config: PretrainedConfig,
    folder: Path,
    *,
    bits: int,
    exceptions: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """A folder as mlx-lm's converter writes it.

    bits: 0 for none. exceptions: quantisation of modules by the end of their names. dtype: of scales, and of the rest.
    """
    source = saved(config, folder / "source", dtype=dtype)
    # Names that transformers 5 does not write any more, and published configurations have.
    content = json.loads((source / CONFIG).read_text()) | {"rope_theta": 10000.0, "rope_scaling": None}
    if config.model_type == "qwen3_moe":
        content["num_experts"] = config.num_experts
    model, loaded = load_model(source, model_config=content)

    def choose(path: str, _module: object) -> Any:
        return next((own for end, own in (exceptions or {}).items() if path.endswith(end)), True)

    quantised = {**content, **loaded}
    if bits:
        model, quantised = quantize_model(model, quantised, 32, bits, quant_predicate=choose)
    save_model(folder / "model", model)
    save_config(quantised, folder / "model" / CONFIG)
    return folder / "model"


def config_of(folder: Path, **settings: Any) -> ModelConfig:
    return ModelConfig(model=str(folder), cache_dir=str(folder.parent / "cache"), device="mlx", **settings)


def logits_of(forward: Forward) -> torch.Tensor:
    return Sessions(forward, Full()).logits(0, IDS, [16, 32])


@pytest.mark.parametrize("config", [off_metal(DENSE), MIXED], ids=["dense", "experts"])
def test_a_folder_of_safetensors_gives_the_logits_of_torch(config: PretrainedConfig, tmp_path: Path) -> None:
    folder = saved(config, tmp_path / "model", dtype=torch.bfloat16)
    forward = open_backend(config_of(folder))
    torch_config = replace(config_of(folder), device="cpu", backend="torch")

    assert (forward.facts.backend, forward.facts.device) == ("mlx", "mlx")
    found, expected = logits_of(forward), logits_of(open_backend(torch_config))
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("config", "bits", "exceptions", "dtype"),
    [
        (DENSE, 4, None, torch.bfloat16),
        off_metal(DENSE, 8, {"v_proj": {"group_size": 64, "bits": 4}, "down_proj": False}, torch.float16),
        (MIXED, 4, {"mlp.gate": {"group_size": 64, "bits": 8}}, torch.bfloat16),
        off_metal(MIXED, 0, None, torch.float32),
    ],
    ids=["4 bits", "8 bits, some with fewer, some with none", "experts", "experts, not quantised"],
)
def test_a_checkpoint_in_the_layout_of_mlx_gives_the_logits_of_its_own_library(
    config: PretrainedConfig, bits: int, exceptions: dict[str, Any] | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Scales have the 16 bits that published checkpoints have; both compute in float32."""
    folder = published(config, tmp_path, bits=bits, exceptions=exceptions, dtype=dtype)
    reference, _ = load_model(folder)
    reference.set_dtype(mx.float32)
    expected = np.array(reference(mx.array([IDS]))[0].astype(mx.float32))

    forward = open_backend(config_of(folder))

    found = logits_of(forward).numpy()
    assert np.abs(found - expected).max() / np.abs(expected).max() < 1e-4
    assert ("grouped" in forward.facts.numerics) == bool(bits)
    checkpoint = open_checkpoint(folder)
    encodings = {checkpoint.tensor(name).encoding for name in checkpoint.names()}
    assert (f"{bits} bits" if bits else "F32") in encodings


@off_metal_test
def test_a_checkpoint_in_the_layout_of_mlx_is_fetched_and_served_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As people publish them: with an index, and a tokenizer."""
    folder = published(DENSE, tmp_path, bits=4, dtype=torch.bfloat16)
    expected = logits_of(open_backend(config_of(folder)))
    tiny_tokenizer().save_pretrained(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "model.safetensors.index.json" in files
    for name, value in (("HF_HUB_CACHE", "hub"), ("HF_HOME", "home")):
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with served(Hub(name="community/tiny-4bit", commit=COMMIT, files=files)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert main(["models", "fetch", "community/tiny-4bit", "--cache-dir", str(tmp_path / "cache")]) == 0
    forward = open_backend(replace(config_of(folder), model="community/tiny-4bit"))
    assert "grouped" in forward.facts.numerics
    assert torch.equal(logits_of(forward), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "mxfp4"}, "mode 'mxfp4' with 4 bits"),
        ({"bits": 7}, "7 bits in groups of 32"),
        ({"bits": 8}, "embed_tokens has scales"),
        ({"group_size": 64}, "embed_tokens has scales"),
    ],
    ids=str,
)
def test_a_layout_that_does_not_fit_its_configuration_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = published(DENSE, tmp_path, bits=4)
    content = json.loads((folder / CONFIG).read_text())
    content["quantization"] |= change
    content["quantization_config"] = content["quantization"]
    (folder / CONFIG).write_text(json.dumps(content))

    with pytest.raises((ModelError, BackendError), match=message):
        open_backend(config_of(folder))


def test_checkpoints_quantised_in_other_ways_are_refused_as_before(tmp_path: Path) -> None:
    folder = published(DENSE, tmp_path, bits=4)
    content = json.loads((folder / CONFIG).read_text())
    content["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / CONFIG).write_text(json.dumps(content))

    with pytest.raises(ModelError, match="quantised checkpoints are not supported"):
        open_backend(config_of(folder))


def test_without_the_package_the_way_to_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(BackendError, match=r"mlx is not installed; install kakeya-runtime\[mlx\]; or start with"):
        open_backend(config_of(saved(DENSE, tmp_path / "model")))
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert ModelConfig().device == "cpu"
