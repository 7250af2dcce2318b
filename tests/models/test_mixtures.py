"""Mixtures of experts, and GGUF files of more families, are served natively, by the names of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_engine.compose import open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.models.open_checkpoint import open_checkpoint
from inference_engine.types import Mode
from tests.further import further
from tests.laws.variants import generate, same, text
from tests.models.odd_models import configured
from tests.models.tiny_gguf import tiny_model, write_gguf
from tests.tiny import SMALL

pytestmark = pytest.mark.usefixtures("trying_no_strategies")

SHARED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 24,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 4, "shared_expert_intermediate_size": 32, **SHARED},
    "Glm4Moe": {"n_routed_experts": 4, "n_shared_experts": 1, "head_dim": 16, **SHARED},
    "Gemma4Text": GEMMA4,
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_generates_natively_what_torch_generates(kind: str, tmp_path: Path) -> None:
    configured(kind, **MIXTURES[kind])().save_pretrained(tmp_path / "model")
    generates_natively_what_torch_generates(tmp_path / "model")


# The columns of ssm_out move in whole blocks of 32, and out of those of 256.
WIDE = {"hidden_size": 256, "linear_num_value_heads": 8}


def wide_blocks(name: str) -> str:
    return "Q4_K" if "ssm_out" in name else "Q8_0"


@pytest.mark.parametrize(
    ("family", "changes", "kind"),
    [
        ("mixtral", {}, "Q8_0"),
        ("qwen2moe", {}, "Q8_0"),
        further("glm4moe", {}, "Q8_0"),
        ("qwen35moe", {}, "Q4_0"),
        further("qwen3next", {}, "Q4_0"),
        ("granitehybrid", {}, "Q4_0"),
        further("dense granitehybrid", {}, "Q4_0"),
        further("lfm2", {}, "Q4_0"),
        ("falcon-h1", {}, "Q4_0"),
        further("nemotron_h", {}, "Q4_0"),
        further("lfm2moe", {}, "Q4_0"),
        ("qwen35", WIDE, wide_blocks),
        ("gemma4 with experts", {}, "Q4_0"),
        ("gemma4 with inputs by layer", {}, "Q4_0"),
        further("gemma4", {}, "Q8_0"),
    ],
)
def test_a_gguf_file_generates_natively_what_torch_generates(
    family: str, changes: dict[str, Any], kind: str | Callable[[str], str], tmp_path: Path
) -> None:
    write_gguf(tiny_model(family, **changes), tmp_path / "model.gguf", kind)
    generates_natively_what_torch_generates(tmp_path / "model.gguf")


def test_columns_in_another_order_leave_a_matrix_in_its_blocks(tmp_path: Path) -> None:
    write_gguf(tiny_model("qwen35", **WIDE), tmp_path / "model.gguf", wide_blocks)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    matrix = checkpoint.tensor("model.layers.0.linear_attn.out_proj.weight")
    assert (matrix.encoding, checkpoint.unpacking("native")) == ("Q4_K", "")
    assert np.array_equal(matrix.as_float32(), checkpoint.numbers(matrix.name, matrix.shape))


def generates_natively_what_torch_generates(path: Path) -> None:
    found = []
    for backend in ("native", "torch"):
        kept: dict[str, Any] = {"kv_dtype": "float32"} if backend == "native" else {}
        cache = str(path.parent / "cache")
        model = ModelConfig(model=str(path), cache_dir=cache, device="cpu", backend=backend, threads=1, **kept)
        with Engine(open_backend(model), EngineConfig(**SMALL)) as engine:
            session = engine.create_session().session_id
            engine.append(session, text(40))
            found.append(generate(engine, session, 12))
    assert same(found[0], found[1], Mode.BATCHED)
