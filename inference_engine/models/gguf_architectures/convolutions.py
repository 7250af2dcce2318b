"""LFM2: short convolutions in most layers, attention in the others, dense or with experts."""

from __future__ import annotations

from typing import Any

from inference_engine.models.gguf_architectures.architecture import (
    ATTENTION,
    Architecture,
    Config,
    TensorLayout,
    changed,
    of_one_input,
)
from inference_engine.models.gguf_architectures.header_keys import FULL, SIGMOID, Keys

_NAMES = {
    **ATTENTION,
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}


def _common(keys: Keys) -> dict[str, Any]:
    if window := keys.optional("attention.sliding_window"):
        raise keys.refusal(
            f"{keys.key('attention.sliding_window')} is {window}; such models with windows cannot be served from GGUF"
        )
    heads = keys.of_layers("attention.head_count_kv") or [1] * keys.layers
    common = keys.common(hybrid=True)
    return {
        **common,
        "norm_eps": common["rms_norm_eps"],
        "conv_L_cache": keys.size("shortconv.l_cache"),
        "conv_bias": False,
        "layer_types": [FULL if count else "conv" for count in heads],
    }


def _lfm2(keys: Keys) -> dict[str, Any]:
    return {
        **_common(keys),
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(keys: Keys) -> dict[str, Any]:
    experts = keys.experts()
    keys.scores(0, SIGMOID)
    return {
        **_common(keys),
        "model_type": "lfm2_moe",
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_experts": experts["count"],
        "num_experts_per_tok": experts["used"],
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "num_dense_layers": keys.optional("leading_dense_block_count") or 0,
        # No key says these: it is what llama.cpp computes.
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    }


def _layout(config: Config) -> TensorLayout:
    made = {"conv.conv.weight": changed(of_one_input, "shortconv.conv.weight")}
    if config["model_type"] == "lfm2":
        return TensorLayout(names=_NAMES, outside=_OUTSIDE, made=made)
    names = {**_NAMES, "ffn_gate_inp": "mlp.gate", "exp_probs_b.bias": "mlp.expert_bias"}
    return TensorLayout(names=names, outside=_OUTSIDE, made=made, experts="mlp.experts")


ARCHITECTURES = {
    "lfm2": Architecture(config=_lfm2, layout=_layout),
    "lfm2moe": Architecture(config=_lfm2_moe, layout=_layout),
}
