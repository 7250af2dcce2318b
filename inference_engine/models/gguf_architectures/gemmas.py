"""Gemma 2 and 3, whose norms are stored with 1 added, and Gemma 4."""

from __future__ import annotations

from typing import Any

from inference_engine.models.gguf_architectures.architecture import (
    IN_LAYER,
    OUTSIDE,
    Architecture,
    Config,
    TensorLayout,
)
from inference_engine.models.gguf_architectures.header_keys import DEFAULT_THETA, FULL, SLIDING, Keys, sliding

# llama.cpp's numbers for what the files do not say: layers of the models whose attention is scaled by the hidden size.
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
_NAMES = {
    **IN_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _gemma2(keys: Keys) -> dict[str, Any]:
    common = keys.common()
    return {
        **common,
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": keys.size("attention.sliding_window", 4096),
        "layer_types": keys.layer_types(2),
        "attn_logit_softcapping": keys.real("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": keys.real("final_logit_softcapping", 30.0) or None,
        "query_pre_attn_scalar": _scalar(common, _GEMMA2_27B_LAYERS),
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    common = keys.common()
    near = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", DEFAULT_THETA)}
    window = keys.optional("attention.sliding_window")
    return {
        **common,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": window or None,
        "layer_types": keys.layer_types(6) if window else [FULL] * keys.layers,
        "rope_parameters": {FULL: dict(common["rope_parameters"]), SLIDING: near},
        "attn_logit_softcapping": keys.real("attn_logit_softcapping") or None,
        "final_logit_softcapping": keys.real("final_logit_softcapping") or None,
        "query_pre_attn_scalar": _scalar(common, _GEMMA3_27B_LAYERS),
    }


def _scalar(config: Config, layers_of_27b: int) -> int:
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _layout(_config: Config) -> TensorLayout:
    return TensorLayout(names=_NAMES, plus_one=True)


# -- Gemma 4 ----------------------------------------------------------------------------------------------------------


def _gemma4(keys: Keys) -> dict[str, Any]:
    slides = keys.of_layers("attention.sliding_window_pattern")
    if slides is None or not any(slides) or all(slides):
        raise keys.refusal(
            f"{keys.key('attention.sliding_window_pattern')} must say of each layer whether it has a window, and some "
            "have one, some none; get the file again"
        )
    sizes, dims = keys.sizes(), (keys.size("attention.key_length"), keys.size("attention.key_length_swa"))
    for dim, end in zip(dims, ("", "_swa"), strict=True):
        if (values := keys.size(f"attention.value_length{end}", dim)) != dim:
            raise keys.refusal(
                f"keys of {dim} numbers and values of {values}; only models with equal ones can be served"
            )
        if (rotated := keys.size(f"rope.dimension_count{end}", dim)) != dim:
            raise keys.refusal(f"{keys.key(f'rope.dimension_count{end}')} is {rotated}, and heads have {dim} numbers")
    shared = keys.optional("attention.shared_kv_layers") or 0
    kv_heads = keys.of_layers("attention.head_count_kv") or [sizes["num_attention_heads"]] * keys.layers
    near, far = (_same(keys, kv_heads, slides, kind) for kind in (1, 0))
    inner, is_wide = _inner(keys, shared)
    experts = keys.optional("expert_count") or 0
    per_layer = keys.optional("embedding_length_per_layer_input") or 0
    words = keys.header.tensors.get("per_layer_token_embd.weight")
    return {
        **sizes,
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "intermediate_size": inner,
        "use_double_wide_mlp": is_wide,
        "layer_types": sliding(slides),
        "sliding_window": keys.size("attention.sliding_window"),
        "head_dim": dims[1],
        "global_head_dim": dims[0],
        "num_key_value_heads": near,
        "num_global_key_value_heads": None if near == far else far,
        "attention_k_eq_v": not all(
            keys.has(f"blk.{layer}.attn_v.weight") for layer in range(max(0, keys.layers - shared)) if not slides[layer]
        ),
        "num_kv_shared_layers": shared,
        "rope_parameters": {
            FULL: _proportional(keys, dims[0]),
            SLIDING: {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", DEFAULT_THETA)},
        },
        "final_logit_softcapping": keys.real("final_logit_softcapping") or None,
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": words.shape[0] if words is not None else sizes["vocab_size"],
        "enable_moe_block": experts > 0,
        "num_experts": experts or None,
        "top_k_experts": keys.experts()["used"] if experts else None,
        "moe_intermediate_size": keys.size("expert_feed_forward_length") if experts else None,
    }


def _same(keys: Keys, heads: list[int], slides: list[int], kind: int) -> int:
    found = {count for count, one in zip(heads, slides, strict=True) if one == kind}
    if len(found) != 1 or min(found) < 1:
        raise keys.refusal(
            f"{keys.key('attention.head_count_kv')} has the values {sorted(found)} for layers of one kind; one is "
            "wanted"
        )
    return found.pop()


def _inner(keys: Keys, shared: int) -> tuple[int, bool]:
    """The width of feed-forward layers, and whether it is twice that where the K and V of others are read."""
    widths = keys.of_layers("feed_forward_length") or [keys.size("feed_forward_length")] * keys.layers
    own = max(0, keys.layers - shared)
    for factor in (1, 2):
        if widths == [widths[0]] * own + [factor * widths[0]] * (keys.layers - own) and widths[0] > 0:
            return widths[0], factor == 2
    raise keys.refusal(f"{keys.key('feed_forward_length')} has the values {sorted({*widths})}, which cannot be served")


def _proportional(keys: Keys, dim: int) -> dict[str, Any]:
    """Layers without a window rotate the first pairs of a head; those that they do not have a divisor of 10³⁰."""
    found = keys.divisors(dim // 2)
    if found is None and keys.has("rope_freqs.weight"):
        raise keys.refusal(f"rope_freqs.weight is not {dim // 2} numbers in float32; get the file again")
    rotated = dim // 2 if found is None else int((found == 1).sum())
    if found is not None and (not (found[:rotated] == 1).all() or (found[rotated:] < 1e20).any()):
        raise keys.refusal("rope_freqs.weight scales the rotation of Gemma 4 in a way that is not known")
    theta = keys.real("rope.freq_base", DEFAULT_THETA)
    return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": 2 * rotated / dim}


def _gemma4_layout(config: Config) -> TensorLayout:
    names = {
        **_NAMES,
        "layer_output_scale.weight": "layer_scalar",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    }
    outside = {
        **OUTSIDE,
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }
    if not config["enable_moe_block"]:
        return TensorLayout(names=names, outside=outside)
    names |= {
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    }
    return TensorLayout(names=names, outside=outside, experts="experts")


ARCHITECTURES = {
    "gemma2": Architecture(config=_gemma2, layout=_layout),
    "gemma3": Architecture(config=_gemma3, layout=_layout),
    "gemma4": Architecture(config=_gemma4, layout=_gemma4_layout),
}
