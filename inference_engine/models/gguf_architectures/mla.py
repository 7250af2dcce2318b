"""Latent attention: DeepSeek V2 and V3, GLM-4.7-Flash, MiniCPM3.

A head's keys and values are made of the latent by one matrix in transformers, by two in files of `deepseek2` since
2025: the keys' half is stored turned, as queries are multiplied by it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from inference_engine.models.gguf_architectures.architecture import (
    IN_LAYER,
    Architecture,
    Config,
    Made,
    Numbers,
    TensorLayout,
    same,
)
from inference_engine.models.gguf_architectures.header_keys import SIGMOID, SOFTMAX, Keys
from inference_engine.models.gguf_architectures.routed import SHARED, groups_of

# Layers and vocabulary of GLM-4.7-Flash, of which files without expert_gating_func are known.
_GLM_LAYERS, _GLM_VOCABULARY = (47, 48), 154_880
_NAMES = {
    **{name: own for name, own in IN_LAYER.items() if name not in ("attn_k", "attn_v", "attn_q_norm", "attn_k_norm")},
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
}


def _common(keys: Keys, *, key_dim: int, value_dim: int) -> dict[str, Any]:
    sizes, rotated = keys.sizes(), keys.size("rope.dimension_count")
    if rotated >= key_dim:
        raise keys.refusal(f"{rotated} rotated numbers of the {key_dim} of a key; get the file again")
    return {
        **sizes,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_key_value_heads": sizes["num_attention_heads"],
        "q_lora_rank": keys.optional("attention.q_lora_rank") or None,
        "kv_lora_rank": keys.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_dim - rotated,
        "v_head_dim": value_dim,
        "rope_parameters": keys.rotation(rotated),
        "attention_bias": False,
    }


def _deepseek2(keys: Keys) -> dict[str, Any]:
    is_split = "attention.key_length_mla" in keys
    end = "_mla" if is_split else ""
    common = _common(
        keys, key_dim=keys.size(f"attention.key_length{end}"), value_dim=keys.size(f"attention.value_length{end}")
    )
    rotation = common["rope_parameters"]
    if rotation["rope_type"] == "yarn":
        # What a converter multiplies by 0.1, and what both of transformers' numbers are.
        scale = round(10 * keys.factor("rope.scaling.yarn_log_multiplier", 0.0), 6)
        if not scale:
            raise keys.refusal(
                f"no {keys.key('rope.scaling.yarn_log_multiplier')}, which scales attention with YaRN; get the file "
                "again, converted by a later llama.cpp"
            )
        rotation |= {"mscale": scale, "mscale_all_dim": scale}
    is_glm = keys.layers in _GLM_LAYERS and common["vocab_size"] == _GLM_VOCABULARY
    scores = keys.scores(SIGMOID if is_glm else SOFTMAX, SOFTMAX, SIGMOID)
    mixture = {
        **common,
        **groups_of(keys),
        "n_routed_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "n_shared_experts": keys.size("expert_shared_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "first_k_dense_replace": keys.optional("leading_dense_block_count") or 0,
        "routed_scaling_factor": keys.factor("expert_weights_scale"),
        "norm_topk_prob": (sums_to_one := keys.flag("expert_weights_norm", False)),
    }
    if scores == SIGMOID:
        return {**mixture, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    if sums_to_one or keys.has_in_layer("exp_probs_b.bias"):
        raise keys.refusal(
            "softmax scores of experts that sum to one or have a bias (expert_weights_norm, exp_probs_b): transformers "
            "has no such DeepSeek, so it cannot be served"
        )
    method = "greedy" if mixture["n_group"] == 1 else "group_limited_greedy"
    return {
        **mixture,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": method,
    }


def _minicpm3(keys: Keys) -> dict[str, Any]:
    if keys.has("rope_factors_long.weight") or keys.has("rope_factors_short.weight"):
        raise keys.refusal(
            "rope_factors_long.weight and rope_factors_short.weight: this scaling of the rotation cannot be served "
            "from GGUF; a folder of safetensors can"
        )
    key_dim = keys.size("attention.key_length")
    by_heads = max(1, keys.size("embedding_length") // keys.size("attention.head_count"))
    return {
        **_common(keys, key_dim=key_dim, value_dim=keys.size("attention.value_length", by_heads)),
        "model_type": "minicpm3",
        "architectures": ["MiniCPM3ForCausalLM"],
        # No key says these: it is what llama.cpp computes.
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }


def _layout(config: Config) -> TensorLayout:
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]

    def one_matrix(keys: Numbers, values: Numbers) -> Numbers:
        """keys [heads, rank, inner], values [heads, inner, rank]: of each head its keys' rows, then its values'."""
        found = np.concatenate((keys.reshape(heads, rank, -1).swapaxes(1, 2), values.reshape(heads, -1, rank)), axis=1)
        return found.reshape(-1, rank)

    made = {
        "self_attn.kv_b_proj.weight": (
            Made(parts=("attn_k_b.weight", "attn_v_b.weight"), make=one_matrix),
            Made(parts=("attn_kv_b.weight",), make=same),
        )
    }
    if "n_routed_experts" not in config:
        return TensorLayout(names=_NAMES, made=made)
    return TensorLayout(names={**_NAMES, **SHARED, "ffn_gate_inp": "mlp.gate"}, made=made, experts="mlp.experts")


ARCHITECTURES = {
    "deepseek2": Architecture(config=_deepseek2, layout=_layout),
    "minicpm3": Architecture(config=_minicpm3, layout=_layout),
}
