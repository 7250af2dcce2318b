"""Models of real ones' shapes with random weights, made in memory: for bytes and speed, where answers do not matter.

Nothing is downloaded, and no length is beyond what such a model was trained for, unless more positions are asked for.
Their latents have random bases with a spectrum that falls: times depend on shapes and rates alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from inference_engine.backends.torch_forward import TorchForward
from inference_engine.backends.torch_loading import serve_loaded
from inference_engine.backends.twin import admit_config
from inference_engine.config import ModelConfig
from inference_engine.engine import Engine
from inference_engine.kernels.ops import open_ops
from inference_engine.kv.archives.latent import default_bytes_per_token, latent_layers
from inference_engine.kv.geometry import Geometry
from inference_engine.models import LoadedModel
from inference_engine.models.seam import ATTENTION
from kv_cache_proposer.f_theta.basis import Basis
from kv_cache_proposer.f_theta.codec import LatentCodec, code
from kv_cache_proposer.f_theta.components import Components
from kv_cache_proposer.f_theta.group_layout import Group, LayerShape, make_groups
from laboratory.evaluation.models import described

SEED = 1
WEIGHTS = "random, made in memory"
_POSITIONS = 2**17
_GROUP_LAYERS = {
    "qwen2.5-7b": 4,
    "llama-3.1-8b": 4,
    "qwen3-30b-a3b": 4,
    "llama-3.2-1b": 4,
    "smollm2-135m": 10,
    "gemma3-270m": 3,
}
_MOST_COMPONENTS = 0.5  # of a group's numbers; a twentieth of the bytes leaves bits for fewer
_FALL = 0.55  # the deviation of component i is i to the power of minus this

SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen2.5-7b": lambda: Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, max_position_embeddings=_POSITIONS, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_theta=1e6,
    ),
    "llama-3.1-8b": lambda: LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=128256, max_position_embeddings=_POSITIONS, rms_norm_eps=1e-5,
        tie_word_embeddings=False, rope_theta=5e5,
    ),
    "qwen3-30b-a3b": lambda: Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        vocab_size=151936, max_position_embeddings=_POSITIONS, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_theta=1e6,
    ),
    "llama-3.2-1b": lambda: LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, vocab_size=128256, max_position_embeddings=_POSITIONS, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_theta=5e5,
    ),
    "smollm2-135m": lambda: LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=_POSITIONS, tie_word_embeddings=True,
    ),
    "gemma3-270m": lambda: Gemma3TextConfig(
        hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, vocab_size=262_144, max_position_embeddings=_POSITIONS, sliding_window=512,
        layer_types=[*["sliding_attention"] * 5, "full_attention"] * 3, query_pre_attn_scalar=256,
        tie_word_embeddings=True,
    ),
    "qwen3.5-9b": lambda: Qwen3_5TextConfig(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_attention_heads=16, num_key_value_heads=4,
        head_dim=256, vocab_size=248_320, max_position_embeddings=_POSITIONS, rms_norm_eps=1e-6,
        tie_word_embeddings=False, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4,
    ),
    "gemma4-26b-a4b": lambda: Gemma4TextConfig(
        hidden_size=2816, intermediate_size=2112, moe_intermediate_size=704, num_experts=128, top_k_experts=8,
        enable_moe_block=True, num_hidden_layers=30, num_attention_heads=16, num_key_value_heads=8, head_dim=256,
        global_head_dim=512, num_global_key_value_heads=2, attention_k_eq_v=True, sliding_window=1024,
        layer_types=[*["sliding_attention"] * 5, "full_attention"] * 5, hidden_size_per_layer_input=0,
        vocab_size=262_144, max_position_embeddings=_POSITIONS, final_logit_softcapping=30.0,
    ),
    "deepseek-v2-lite": lambda: DeepseekV2Config(
        hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, n_routed_experts=64,
        num_experts_per_tok=6, n_shared_experts=2, first_k_dense_replace=1, num_hidden_layers=27,
        num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, vocab_size=102_400, max_position_embeddings=_POSITIONS,
        tie_word_embeddings=False,
    ),
    "tiny": lambda: Qwen2Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=_POSITIONS,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MadeTarget:
    """What a `Target` is of a real model, without texts: an engine on made weights.

    coded: what there is beside weights, and how it was made.
    """

    engine: Engine
    forward: TorchForward
    model: ModelConfig
    coded: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """What a record's config says of it."""
        found = described(self.engine, self.model)
        return {**found, "model": f"{found['model']}-random", "weights": WEIGHTS, **self.coded}

    def ids(self, count: int, seed: int) -> list[int]:
        """Random ids, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(5, self.engine.info().facts.vocab_size - 5, (count,), generator=generator).tolist()


def made_model(name: str, device: str, dtype: str, *, positions: int = 0) -> LoadedModel:
    """Random weights of that shape, norms and biases too, in memory.

    positions: the longest history, where it is longer than the model's own: beyond them no step is recorded.
    """
    config = SHAPES[name]()
    config.max_position_embeddings = max(config.max_position_embeddings, positions)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=ATTENTION)
        with torch.no_grad():
            for each, parameter in model.named_parameters():
                if each.endswith("bias") or "norm" in each:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
    return LoadedModel(
        model=model.to(device).eval().requires_grad_(requires_grad=False),
        model_id=name,
        folder=Path(),
        trained_positions=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        dtype=dtype,
        device=device,
        weights_sha256=None,
    )


def made_forward(name: str, config: ModelConfig, *, positions: int = 0) -> TorchForward:
    """A made model, ready to run with the operations of its device; positions: as of `made_model`.

    Raises BackendError as `serve_loaded` does.
    """
    # As on a GPU, wherever this runs: otherwise there would be no list on a CPU.
    ops = replace(open_ops(config.kernels, torch.device(config.device)), attends_together=True)
    loaded = made_model(name, config.device, config.dtype, positions=positions)
    return serve_loaded(loaded, config, admit_config(SHAPES[name]()), ops=ops)


def made_codec(name: str, geometry: Geometry, device: torch.device) -> LatentCodec:
    """Random orthonormal bases, at a twentieth of the bytes that entries have in bfloat16."""
    shapes = [
        LayerShape(layer=index, kv_heads=geometry.layers[index].kv_heads, head_dim=geometry.layers[index].head_dim)
        for index in latent_layers(geometry)
    ]
    generator = torch.Generator(device).manual_seed(SEED)
    bases = [_made_basis(group, device, generator) for group in make_groups(shapes, _GROUP_LAYERS.get(name, 2))]
    return code(bases, default_bytes_per_token(geometry)).to(device, kernels="auto")


def _made_basis(group: Group, device: torch.device, generator: torch.Generator) -> Basis:
    count = max(8, int(_MOST_COMPONENTS * group.width))
    entries = torch.linalg.qr(torch.randn((group.width, count), generator=generator, device=device)).Q
    unit = [
        torch.eye(shape.head_dim, device=device).expand(2, shape.kv_heads, -1, -1).contiguous()
        for shape in group.shapes
    ]
    return Basis(
        group=group,
        mean=torch.zeros(group.width, device=device),
        weights=tuple(unit),
        inverses=tuple(unit),
        components=Components(entries=entries.contiguous(), head_sizes=group.head_sizes),
        deviations=torch.arange(1, count + 1, device=device).float().pow(-_FALL),
    )
