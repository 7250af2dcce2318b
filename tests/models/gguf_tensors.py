"""The tensors of a model as a GGUF file has them: their names, and where converters change what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

Tensor = np.ndarray[Any, np.dtype[np.float32]]

_OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "model.embeddings": "token_embd",
    "model.norm_f": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_ATTENTION = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
}
_FEED_FORWARD = {
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
_LAYER = {**_ATTENTION, **_FEED_FORWARD}
_POST = {**_LAYER, "post_attention_layernorm": "post_attention_norm"}
_GEMMA = {
    **_POST,
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
}
_MIXER = {
    **{f"{place}.out_proj": "ssm_out" for place in ("linear_attn", "mamba")},
    **{f"{place}.conv1d": "ssm_conv1d" for place in ("linear_attn", "mamba")},
    **{f"{place}.norm": "ssm_norm" for place in ("linear_attn", "mamba")},
    **{f"{place}.dt_bias": "ssm_dt.bias" for place in ("linear_attn", "mamba")},
    **{f"{place}.A_log": "ssm_a" for place in ("linear_attn", "mamba")},
    "mamba.in_proj": "ssm_in",
    "mamba.D": "ssm_d",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
}
_CONVOLUTION_NAMES = {
    **_ATTENTION,
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    **{f"conv.{name}": f"shortconv.{name}" for name in ("conv", "in_proj", "out_proj")},
}
_LATENT_NAMES = {
    **_LAYER,
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
_DELTA_NAMES = {**_POST, **_MIXER}
_NAMES: Mapping[str, Mapping[str, str]] = {
    "phi3": {**_LAYER, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "glm4_moe": _POST,
    "gpt_oss": {
        **_POST,
        "mlp.router": "ffn_gate_inp",
        "self_attn.sinks": "attn_sinks.weight",
        "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    },
    **dict.fromkeys(("gemma2", "gemma3_text", "gemma4_text"), _GEMMA),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _DELTA_NAMES),
    "granitemoehybrid": {
        **_LAYER,
        **_MIXER,
        "block_sparse_moe.router": "ffn_gate_inp",
        "shared_mlp.output_linear": "ffn_down_shexp",
    },
    "bamba": {
        **_LAYER,
        **_MIXER,
        "pre_ff_layernorm": "ffn_norm",
        **{f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    },
    "falcon_h1": {
        **_LAYER,
        **_MIXER,
        "pre_ff_layernorm.weight": "ffn_norm",  # without an end, unlike all others
        **{f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    },
    "nemotron_h": {
        "norm": "attn_norm",
        **{f"mixer.{name}_proj": f"attn_{name}" for name in "qkv"},
        "mixer.o_proj": "attn_output",
        **{f"mixer.{name}_proj": f"ffn_{name}" for name in ("up", "down")},
        **{name.replace("mamba.", "mixer."): own for name, own in _MIXER.items() if name.startswith("mamba.")},
    },
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONVOLUTION_NAMES),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"), _LATENT_NAMES),
}
_IN_PAIRS = ("llama", "mistral", "mixtral", "granitemoehybrid", "bamba")
_PLUS_ONE = ("gemma2", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


def converted(model: Any) -> dict[str, Tensor]:
    config: Any = model.config
    found: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = parameter.float().numpy()
        if name.endswith("norm.weight") and config.model_type in _PLUS_ONE and "linear_attn" not in name:
            tensor = tensor + 1
        if name.startswith("model.layers."):
            layer, inside = name.removeprefix("model.layers.").split(".", 1)
            parts = {f"blk.{layer}.{own}": part for own, part in _in_layer(config, inside, tensor)}
        else:
            module, end = name.rsplit(".", 1)
            parts = {f"{_OUTSIDE[module]}.{end}": _multiplied(config, name, tensor)}
        found |= {own: np.ascontiguousarray(part, np.float32) for own, part in parts.items()}
    if config.model_type == "gemma4_text":
        dim = max(found[name].shape[0] for name in found if name.endswith("attn_k_norm.weight"))
        turning = int(dim * config.rope_parameters["full_attention"]["partial_rotary_factor"]) // 2
        found["rope_freqs.weight"] = np.array([1.0] * turning + [1e30] * (dim // 2 - turning), np.float32)
    if config.model_type == "phi3":
        for kind in ("short", "long"):
            if (factors := config.rope_parameters.get(f"{kind}_factor")) is not None:
                found[f"rope_factors_{kind}.weight"] = np.array(factors, np.float32)
    return found


def _in_layer(config: Any, inside: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the file that are made of one of transformers', by their names in a layer."""
    kind = config.model_type
    if inside.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")) and kind != "gemma4_text":
        yield from _gates_and_ups(kind, inside, tensor)
        return
    if inside.endswith("experts.down_proj"):
        yield "ffn_down_exps.weight", tensor.swapaxes(1, 2) if kind == "gpt_oss" else tensor
        return
    if inside == "self_attn.kv_b_proj.weight" and kind != "minicpm3":
        heads = tensor.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        yield "attn_k_b.weight", heads[:, : config.qk_nope_head_dim].swapaxes(1, 2)
        yield "attn_v_b.weight", heads[:, config.qk_nope_head_dim :]
        return
    if inside == "linear_attn.in_proj_qkvz.weight":
        yield from _apart(config, tensor)
        return
    if inside == "shared_mlp.input_linear.weight":
        end = "_shexp" if config.num_local_experts else ""
        for own, part in zip(("gate", "up"), np.split(tensor, 2), strict=True):
            yield f"ffn_{own}{end}.weight", part
        return
    names, (module, _, end) = _NAMES.get(kind, _LAYER), inside.rpartition(".")
    own = names[inside] if inside in names else f"{names[module]}.{end}"
    if kind == "granitemoehybrid" and not config.num_local_experts:
        own = own.replace("_shexp", "")
    if kind in _IN_PAIRS and module in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config.num_attention_heads if module == "self_attn.q_proj" else config.num_key_value_heads
        shape = (heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        tensor = tensor.reshape(shape).swapaxes(1, 2).reshape(tensor.shape)
    if kind in ("qwen3_5_text", "qwen3_5_moe_text") and inside.startswith("linear_attn."):
        tensor = _tiled(config, inside, tensor)
    if inside.endswith("A_log"):
        tensor = -np.exp(tensor)
    if "conv1d.weight" in inside or "conv.conv.weight" in inside:
        tensor = tensor[:, 0]
    if inside.startswith(("mamba.", "mixer.")) and own in ("ssm_a", "ssm_d"):
        tensor = tensor[:, None]
    if own == "ssm_norm.weight" and inside.startswith(("mamba.", "mixer.")):
        tensor = tensor.reshape(config.n_groups if kind == "nemotron_h" else config.mamba_n_groups, -1)
    yield own, _multiplied(config, inside, tensor)


def _gates_and_ups(kind: str, inside: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    end = "bias" if inside.endswith("bias") else "weight"
    if kind == "gpt_oss":
        parts = [tensor[..., half::2] for half in range(2)]
        parts = [part if end == "bias" else part.swapaxes(1, 2) for part in parts]
    else:
        parts = np.split(tensor, 2, axis=1)
    for name, part in zip(("gate", "up"), parts, strict=True):
        yield f"ffn_{name}_exps.{end}", part


def _apart(config: Any, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Queries, keys and values of all heads, and gates, of a matrix that has all of them for each key head."""
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    parts = np.split(tensor.reshape(heads, -1, tensor.shape[-1]), np.cumsum([size, size, values]), axis=1)
    query, key, value, gate = (part.reshape(-1, tensor.shape[-1]) for part in parts)
    yield "attn_qkv.weight", np.concatenate((query, key, value))
    yield "attn_gate.weight", gate


def _tiled(config: Any, inside: str, tensor: Tensor) -> Tensor:
    """Value heads as llama.cpp repeats key heads beside them."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    first = 2 * keys * config.linear_key_head_dim if "in_proj_qkv" in inside or "conv1d" in inside else 0
    axis = 1 if "out_proj" in inside else 0
    if ".norm." in inside:
        return tensor
    tensor, before = tensor.swapaxes(0, axis), tensor.swapaxes(0, axis)[:first]
    rest = tensor[first:]
    rest = rest.reshape(keys, values // keys, -1, *rest.shape[1:]).swapaxes(0, 1).reshape(rest.shape)
    return np.concatenate((before, rest)).swapaxes(0, axis)


def _multiplied(config: Any, name: str, tensor: Tensor) -> Tensor:
    """Falcon-H1's numbers are in its matrices."""
    if config.model_type != "falcon_h1":
        return tensor
    factors = {
        "q_proj": config.attention_in_multiplier,
        "k_proj": config.attention_in_multiplier * config.key_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    module = name.split(".")[-2] if "." in name else name
    if module == "in_proj":
        inner, group = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        sizes = (inner, inner, group, group, config.mamba_n_heads)
        rows = config.ssm_in_multiplier * np.repeat(config.ssm_multipliers, sizes)[:, None]
        return np.asarray(tensor * rows, np.float32)
    return np.asarray(tensor * factors.get(module, 1.0), np.float32)


def without_dimensions_of_1(tensors: dict[str, Tensor]) -> None:
    """As other converters write them."""
    for name, tensor in tensors.items():
        tensors[name] = tensor.squeeze()
