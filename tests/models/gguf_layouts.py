"""Tiny models of the families that came to GGUF after the dense ones, and their keys as llama.cpp's converter writes
them: conversion/ in its repository; `gguf_tensors.py` has their tensors. `llama_cpp_logits.py` compares with llama.cpp
itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_DEFAULT = {"rope_type": "default", "rope_theta": 5e4}
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {
    "num_hidden_layers": 3,
    "layer_types": [_LINEAR, _LINEAR, _FULL],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {**_DEFAULT, "partial_rotary_factor": 0.5},
}
_DELTA_MIXTURE = {**_DELTA, **_MIXTURE, "shared_expert_intermediate_size": 32}
_MAMBA = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}
_GRANITE = {
    **_MAMBA,
    "layer_types": ["mamba", "attention", "mamba"],
    "position_embedding_type": None,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
_CONVOLUTIONS = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", _FULL, "conv"],
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "rope_parameters": _DEFAULT,
}
_GEMMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL],
    "sliding_window": 4,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
_LARGE_GEMMA4 = {**_GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
_SMALL_GEMMA4 = {
    **_GEMMA4,
    "num_hidden_layers": 8,
    "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL] * 2,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": 259,
    "hidden_size_per_layer_input": 32,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
_DEEPSEEK = {
    **_LATENT,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 2.5,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}


def _config(kind: str, **changes: Any) -> Any:
    return CONFIG_MAPPING[kind](**{**SMALL, **changes})


MORE_FAMILIES: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "mixtral": lambda: _config("mixtral", num_local_experts=4, num_experts_per_tok=2),
        "phi3": lambda: _config("phi3", rope_parameters={**_DEFAULT, "partial_rotary_factor": 0.5}),
        "qwen2moe": lambda: _config("qwen2_moe", **_MIXTURE, shared_expert_intermediate_size=64),
        "glm4moe": lambda: _config(
            "glm4_moe",
            head_dim=16,
            n_routed_experts=4,
            n_shared_experts=2,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            use_qk_norm=True,
            attention_bias=True,
            routed_scaling_factor=1.5,
            first_k_dense_replace=1,
        ),
        "gpt-oss": lambda: _config(
            "gpt_oss",
            head_dim=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=4,
            rope_parameters={**_YARN, "truncate": False},
        ),
        "qwen35": lambda: _config("qwen3_5_text", **_DELTA),
        "qwen35moe": lambda: _config("qwen3_5_moe_text", **_DELTA_MIXTURE),
        "qwen3next": lambda: _config("qwen3_next", **_DELTA_MIXTURE),
        "granitehybrid": lambda: _config(
            "granitemoehybrid", **_GRANITE, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32
        ),
        "dense granitehybrid": lambda: _config(
            "granitemoehybrid",
            **_GRANITE,
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=96,
            tie_word_embeddings=True,
        ),
        "bamba": lambda: _config(
            "bamba", **_MAMBA, attn_layer_indices=[1], rope_parameters={**_DEFAULT, "partial_rotary_factor": 1.0}
        ),
        "falcon-h1": lambda: _config(
            "falcon_h1",
            **_MAMBA,
            mamba_d_ssm=128,
            head_dim=16,
            attention_in_multiplier=0.8,
            attention_out_multiplier=1.2,
            key_multiplier=0.7,
            embedding_multiplier=2.0,
            lm_head_multiplier=0.5,
            ssm_in_multiplier=1.1,
            ssm_out_multiplier=0.9,
            mlp_multipliers=[0.9, 1.3],
            ssm_multipliers=[0.8, 0.9, 1.1, 1.2, 0.7],
        ),
        "nemotron_h": lambda: _config(
            "nemotron_h",
            layers_block_type=[_LINEAR, "mlp", _FULL, _LINEAR],
            num_hidden_layers=4,
            head_dim=16,
            mamba_num_heads=4,
            mamba_head_dim=32,
            ssm_state_size=32,
            n_groups=2,
            chunk_size=16,
        ),
        "lfm2": lambda: _config("lfm2", **_CONVOLUTIONS, block_auto_adjust_ff_dim=False, tie_word_embeddings=True),
        "lfm2moe": lambda: _config(
            "lfm2_moe", **_CONVOLUTIONS, **_MIXTURE, num_dense_layers=1, tie_word_embeddings=True
        ),
        "gemma4": lambda: _config("gemma4_text", **_LARGE_GEMMA4),
        "gemma4 with experts": lambda: _config(
            "gemma4_text",
            **_LARGE_GEMMA4,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=32,
        ),
        "gemma4 with inputs by layer": lambda: _config("gemma4_text", **_SMALL_GEMMA4),
        "deepseek2": lambda: _config(
            "deepseek_v3", **_DEEPSEEK, rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
        ),
        "deepseek2 of V2": lambda: _config(
            "deepseek_v2",
            **{**_DEEPSEEK, "n_group": 1, "n_shared_experts": 2, "routed_scaling_factor": 1.0},
            topk_method="greedy",
            rope_parameters={**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        ),
        "deepseek2 of GLM": lambda: _config("glm4_moe_lite", **{**_DEEPSEEK, "n_group": 1}),
        "minicpm3": lambda: _config("minicpm3", **_LATENT),
    }
)


@torch.no_grad()
def fill(model: Any) -> None:
    """Numbers by the names of tensors, so that they are the same with another transformers or torch."""
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        numbers = np.random.default_rng(zlib.crc32(name.encode())).normal(size=tuple(tensor.shape))
        if name.endswith("A_log"):
            numbers = np.log(0.5 + np.abs(numbers))
        elif tensor.ndim == 1 and ("norm" in name or name.endswith(("layer_scalar", "mamba.D", "scale"))):
            numbers = 1 + 0.1 * numbers
        else:
            numbers = (0.3 if tensor.ndim == 1 or "embed" in name else 0.15) * numbers
        tensor.copy_(torch.from_numpy(numbers))


# -- keys -------------------------------------------------------------------------------------------------------------

_ARCHITECTURES = {
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "granitemoehybrid": "granitehybrid",
    "bamba": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "lfm2_moe": "lfm2moe",
    "gemma4_text": "gemma4",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
}


def architecture_of(config: Any) -> str:
    kind: str = config.model_type
    return _ARCHITECTURES.get(kind, kind)


def values_of(config: Any) -> dict[str, Any]:
    """The keys that a family has beside those of dense models, or in place of theirs."""
    maker = _VALUES.get(config.model_type)
    return {} if maker is None else maker(config)


def _mixture(config: Any, **more: Any) -> dict[str, Any]:
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    return {"expert_count": count, "expert_used_count": config.num_experts_per_tok, **more}


def _heads(config: Any) -> dict[str, Any]:
    return {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}


def _rotated(config: Any, dim: int) -> int:
    return int(dim * config.rope_parameters.get("partial_rotary_factor", 1.0))


def _phi3(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "rope.dimension_count": _rotated(config, config.hidden_size // config.num_attention_heads),
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
        "rope.scaling.attn_factor": rope.get("attention_factor"),
        "attention.sliding_window": config.sliding_window or 0,
    }


def _qwen2_moe(config: Any) -> dict[str, Any]:
    shared = config.shared_expert_intermediate_size
    return _mixture(
        config,
        expert_feed_forward_length=config.moe_intermediate_size,
        expert_shared_feed_forward_length=shared,
    )


def _sigmoid_mixture(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_gating_func": 1 if config.model_type == "deepseek_v2" else 2,
        "expert_weights_scale": float(config.routed_scaling_factor),
        **({"expert_weights_norm": True} if config.norm_topk_prob else {}),
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", 1),
    }


def _glm4_moe(config: Any) -> dict[str, Any]:
    return {**_heads(config), **_sigmoid_mixture(config), "rope.dimension_count": _rotated(config, config.head_dim)}


def _gpt_oss(config: Any) -> dict[str, Any]:
    return {
        **_heads(config),
        **_mixture(config, expert_feed_forward_length=config.intermediate_size),
        "attention.sliding_window": config.sliding_window,
    }


def _delta(config: Any) -> dict[str, Any]:
    mixture = _qwen2_moe(config) if hasattr(config, "num_experts") else {}
    sections = {} if config.model_type == "qwen3_next" else {"rope.dimension_sections": [11, 11, 10, 0]}
    return {
        **_heads(config),
        **mixture,
        **sections,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "attention.recurrent_layers": [kind == _LINEAR for kind in config.layer_types],
        "full_attention_interval": 4,
        "rope.dimension_count": _rotated(config, config.head_dim),
    }


def _mamba(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
    }


def _granite(config: Any) -> dict[str, Any]:
    is_bamba = config.model_type == "bamba"
    attends = (
        [layer in config.attn_layer_indices for layer in range(config.num_hidden_layers)]
        if is_bamba
        else [kind in ("attention", _FULL) for kind in config.layer_types]
    )
    found = {
        **_mamba(config),
        "attention.head_count_kv": [config.num_key_value_heads * one for one in attends],
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.scaling.finetuned": is_bamba or config.position_embedding_type == "rope",
    }
    if is_bamba:
        return found
    return {
        **found,
        **_mixture(config, expert_shared_feed_forward_length=config.shared_intermediate_size),
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _falcon_h1(config: Any) -> dict[str, Any]:
    return {**_mamba(config), **_heads(config)}


def _nemotron_h(config: Any) -> dict[str, Any]:
    return {
        **_heads(config),
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "attention.head_count_kv": [config.num_key_value_heads * (kind == _FULL) for kind in config.layer_types],
        "feed_forward_length": [config.intermediate_size * (kind == "mlp") for kind in config.layer_types],
        "rope.scaling.finetuned": False,
        "rope.dimension_count": config.head_dim // 2,  # hidden numbers by heads, which are no head's here
    }


def _lfm2(config: Any) -> dict[str, Any]:
    found = {
        "attention.head_count_kv": [config.num_key_value_heads * (kind == _FULL) for kind in config.layer_types],
        "shortconv.l_cache": config.conv_L_cache,
    }
    if config.model_type == "lfm2":
        return found
    mixture = _mixture(config, expert_feed_forward_length=config.moe_intermediate_size)
    return {**found, **mixture, "leading_dense_block_count": config.num_dense_layers, "expert_gating_func": 2}


def _gemma4(config: Any) -> dict[str, Any]:
    said = config.to_dict()
    slides = [kind == _SLIDING for kind in said["layer_types"]]
    layers, near, dim = range(len(slides)), said["num_key_value_heads"], said["head_dim"]
    full = said["per_layer_config"][str(slides.index(False))]
    far, far_dim = full.get("num_key_value_heads", near), full.get("head_dim", dim)
    inner, first = config.intermediate_size, config.num_hidden_layers - config.num_kv_shared_layers
    experts = {
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }
    return {
        **(experts if config.enable_moe_block else {}),
        "feed_forward_length": [inner * (1 + (layer >= first)) for layer in layers]
        if config.use_double_wide_mlp
        else inner,
        "attention.head_count_kv": near if far == near else [near if one else far for one in slides],
        "attention.key_length": far_dim,
        "attention.value_length": far_dim,
        "attention.key_length_swa": dim,
        "attention.value_length_swa": dim,
        "rope.dimension_count": far_dim,
        "rope.dimension_count_swa": dim,
        "rope.freq_base_swa": config.rope_parameters[_SLIDING]["rope_theta"],
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def _deepseek(config: Any) -> dict[str, Any]:
    key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    scale = config.rope_parameters.get("mscale_all_dim")
    return {
        **_sigmoid_mixture(config),
        **({"attention.q_lora_rank": config.q_lora_rank} if config.q_lora_rank else {}),
        **({} if scale is None else {"rope.scaling.yarn_log_multiplier": 0.1 * scale}),
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": key_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
    }


def _minicpm3(config: Any) -> dict[str, Any]:
    return {
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
    }


_VALUES: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "mixtral": lambda config: _mixture(config, **{"rope.dimension_count": 16}),
    "phi3": _phi3,
    "qwen2_moe": _qwen2_moe,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "qwen3_5_text": _delta,
    "qwen3_5_moe_text": _delta,
    "qwen3_next": _delta,
    "granitemoehybrid": _granite,
    "bamba": _granite,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "gemma4_text": _gemma4,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "glm4_moe_lite": _deepseek,
    "minicpm3": _minicpm3,
}
