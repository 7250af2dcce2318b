"""Mixtures of experts whose layers all have attention."""

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
    changed,
)
from inference_engine.models.gguf_architectures.header_keys import SIGMOID, Keys

_QKV = ("attn_q", "attn_k", "attn_v")
SHARED_BY_GATE = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
SHARED = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}


def qwen_experts(keys: Keys, *, sums_to_one: bool) -> dict[str, Any]:
    """In every layer, and what llama.cpp takes for sizes that a file does not say."""
    experts, inner = keys.experts(), keys.size("feed_forward_length", keys.optional("expert_feed_forward_length"))
    return {
        "num_experts": experts["count"],
        "num_experts_per_tok": experts["used"],
        "moe_intermediate_size": keys.size("expert_feed_forward_length", max(1, inner // experts["used"])),
        "norm_topk_prob": sums_to_one,  # no key says it: it is what llama.cpp computes
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(keys: Keys) -> dict[str, Any]:
    common = keys.common()
    return {
        **common,
        **qwen_experts(keys, sums_to_one=False),
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length", common["intermediate_size"]),
        "qkv_bias": keys.has_bias(*_QKV),
    }


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    return {
        **keys.common(),
        **qwen_experts(keys, sums_to_one=True),
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
    }


def groups_of(keys: Keys) -> dict[str, int]:
    """Groups of experts; one is none."""
    groups = keys.optional("expert_group_count") or 1
    chosen = keys.optional("expert_group_used_count") or 1
    if not 1 <= chosen <= groups or keys.size("expert_count") % groups:
        raise keys.refusal(f"{chosen} of {groups} groups of {keys.size('expert_count')} experts; get the file again")
    return {"n_group": groups, "topk_group": chosen}


def _glm4_moe(keys: Keys) -> dict[str, Any]:
    keys.scores(SIGMOID, SIGMOID)
    return {
        **keys.common(rotates_part=True),
        **groups_of(keys),
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "n_routed_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "n_shared_experts": keys.size("expert_shared_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "first_k_dense_replace": keys.optional("leading_dense_block_count") or 0,
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "routed_scaling_factor": keys.factor("expert_weights_scale"),
        "attention_bias": keys.has_bias(*_QKV),
        "use_qk_norm": keys.has_in_layer("attn_q_norm.weight"),
    }


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    common, experts = keys.common(), keys.experts()
    rotation = common["rope_parameters"]
    if rotation["rope_type"] == "yarn":
        rotation["truncate"] = False  # of every such model; no key says it
    return {
        **common,
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": keys.size("expert_feed_forward_length"),
        "num_local_experts": experts["count"],
        "num_experts_per_tok": experts["used"],
        "sliding_window": keys.size("attention.sliding_window"),
        "layer_types": keys.layer_types(2),
        "attention_bias": True,
    }


def _qwen_layout(_config: Config) -> TensorLayout:
    return TensorLayout(names={**IN_LAYER, **SHARED_BY_GATE, "ffn_gate_inp": "mlp.gate"}, experts="mlp.experts")


def _glm_layout(_config: Config) -> TensorLayout:
    names = {**IN_LAYER, **SHARED, "ffn_gate_inp": "mlp.gate", "post_attention_norm": "post_attention_layernorm"}
    return TensorLayout(names={name: own for name, own in names.items() if name != "ffn_norm"}, experts="mlp.experts")


def _gpt_oss_layout(_config: Config) -> TensorLayout:
    names = {
        **IN_LAYER,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    }
    made = {
        "mlp.experts.gate_up_proj": (
            Made(parts=("ffn_gate_exps.weight", "ffn_up_exps.weight"), make=_alternating_columns),
        ),
        "mlp.experts.gate_up_proj_bias": (Made(parts=("ffn_gate_exps.bias", "ffn_up_exps.bias"), make=_alternating),),
        "mlp.experts.down_proj": changed(_turned, "ffn_down_exps.weight"),
    }
    return TensorLayout(names={name: own for name, own in names.items() if name != "ffn_norm"}, made=made)


def _turned(matrices: Numbers) -> Numbers:
    return matrices.swapaxes(-1, -2)


def _alternating(gates: Numbers, ups: Numbers) -> Numbers:
    """A gate, an up, the next gate: along the last dimension."""
    return np.stack((gates, ups), axis=-1).reshape(*gates.shape[:-1], -1)


def _alternating_columns(gates: Numbers, ups: Numbers) -> Numbers:
    return _alternating(_turned(gates), _turned(ups))


ARCHITECTURES = {
    "qwen2moe": Architecture(config=_qwen2_moe, layout=_qwen_layout),
    "qwen3moe": Architecture(config=_qwen3_moe, layout=_qwen_layout),
    "glm4moe": Architecture(config=_glm4_moe, layout=_glm_layout),
    "gpt-oss": Architecture(config=_gpt_oss, layout=_gpt_oss_layout),
}
