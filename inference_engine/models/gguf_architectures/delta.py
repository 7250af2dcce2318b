"""Qwen3-Next and Qwen3.5: gated delta rule in most layers, gated attention in the others, dense or with experts.

qwen35, qwen35moe    value heads of a key head lie apart: the first of every key head, then the second of every one
qwen3next            value heads of a key head lie together, as in transformers; files made before 2026 have one
                     projection `ssm_in` in place of `attn_qkv` and `attn_gate`
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_engine.models.gguf_architectures.architecture import (
    ATTENTION,
    GATED,
    Architecture,
    Config,
    Made,
    MovedBlocks,
    Numbers,
    TensorLayout,
    changed,
    log_of_decay,
    of_one_input,
    same,
)
from inference_engine.models.gguf_architectures.header_keys import FULL, LINEAR, Keys
from inference_engine.models.gguf_architectures.routed import SHARED_BY_GATE, qwen_experts

_MIXER = "linear_attn."


def _common(keys: Keys) -> dict[str, Any]:
    value_heads, inner = keys.size("ssm.time_step_rank"), keys.size("ssm.inner_size")
    key_heads = keys.size("ssm.group_count")
    if inner % value_heads or value_heads % key_heads:
        raise keys.refusal(
            f"{value_heads} value heads for {key_heads} key heads and {inner} numbers "
            f"({keys.key('ssm.time_step_rank')}, ssm.group_count, ssm.inner_size); get the file again"
        )
    common = keys.common(rotates_part=True, hybrid=True)
    return {
        **common,
        "linear_num_value_heads": value_heads,
        "linear_num_key_heads": key_heads,
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
        "layer_types": _layer_types(keys),
    }


def _layer_types(keys: Keys) -> list[str]:
    recurrent = keys.of_layers("attention.recurrent_layers")
    if recurrent is None:
        every = keys.size("full_attention_interval", 4)
        recurrent = [int((layer + 1) % every != 0) for layer in range(keys.layers)]
    return [LINEAR if one else FULL for one in recurrent]


def _qwen35(keys: Keys) -> dict[str, Any]:
    return {**_common(keys), "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}


def _mixture(keys: Keys) -> dict[str, Any]:
    common = _common(keys)
    shared = keys.size("expert_shared_feed_forward_length", common["intermediate_size"])
    return {**common, **qwen_experts(keys, sums_to_one=True), "shared_expert_intermediate_size": shared}


def _qwen35_moe(keys: Keys) -> dict[str, Any]:
    mixture = _mixture(keys)
    for name in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"):
        del mixture[name]  # transformers' class has none of them: it is always so
    return {**mixture, "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}


def _qwen3_next(keys: Keys) -> dict[str, Any]:
    return {**_mixture(keys), "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}


def _layout(config: Config, mixer: dict[str, tuple[Made | MovedBlocks, ...]], names: dict[str, str]) -> TensorLayout:
    has_experts = "num_experts" in config
    ffn = {**SHARED_BY_GATE, "ffn_gate_inp": "mlp.gate"} if has_experts else GATED
    return TensorLayout(
        names={**ATTENTION, **ffn, **names, "post_attention_norm": "post_attention_layernorm"},
        made={
            # Of the norms this one alone is stored as it is.
            f"{_MIXER}norm.weight": changed(same, "ssm_norm.weight"),
            **{f"{_MIXER}{name}": made for name, made in mixer.items()},
        },
        experts="mlp.experts" if has_experts else "",
        plus_one=True,
    )


def _layout35(config: Config) -> TensorLayout:
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dim, keys = config["linear_value_head_dim"], 2 * key_heads * config["linear_key_head_dim"]

    def together(size: int, first: int = 0) -> NDArray[np.int64]:
        """Where values of `size` numbers lie, head for head in transformers' order, behind `first` that stay."""
        order = np.arange(value_heads * size).reshape(-1, key_heads, size).swapaxes(0, 1).reshape(-1)
        return np.concatenate((np.arange(first), first + order))

    by_head, values, behind_keys = together(1), together(dim), together(dim, keys)

    def taps(numbers: Numbers) -> Numbers:
        return of_one_input(numbers)[behind_keys]

    def decay(numbers: Numbers) -> Numbers:
        return log_of_decay(numbers)[by_head]

    def bias(numbers: Numbers) -> Numbers:
        return numbers[by_head]

    columns = None if key_heads == value_heads else values
    mixer: dict[str, tuple[Made | MovedBlocks, ...]] = {
        "in_proj_qkv.weight": (MovedBlocks(parts=("attn_qkv.weight",), rows=behind_keys),),
        "in_proj_z.weight": (MovedBlocks(parts=("attn_gate.weight",), rows=values),),
        "in_proj_b.weight": (MovedBlocks(parts=("ssm_beta.weight",), rows=by_head),),
        "in_proj_a.weight": (MovedBlocks(parts=("ssm_alpha.weight",), rows=by_head),),
        "out_proj.weight": (MovedBlocks(parts=("ssm_out.weight",), columns=columns),),
        "conv1d.weight": changed(taps, "ssm_conv1d.weight"),
        "dt_bias": changed(bias, "ssm_dt.bias"),
        "A_log": changed(decay, "ssm_a"),
    }
    return _layout(config, mixer, {})


def _layout_next(config: Config) -> TensorLayout:
    heads, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    # Of each key head: query, key, its values, their gates.
    starts = np.cumsum([0, heads * size, heads * size, heads * values])
    pieces = [
        start + np.arange(heads * count).reshape(heads, count)
        for start, count in zip(starts, (size, size, values, values), strict=True)
    ]
    by_key_head = np.concatenate(pieces, axis=1).reshape(-1)
    mixer: dict[str, tuple[Made | MovedBlocks, ...]] = {
        "in_proj_qkvz.weight": (
            MovedBlocks(parts=("attn_qkv.weight", "attn_gate.weight"), rows=by_key_head),
            MovedBlocks(parts=("ssm_in.weight",)),
        ),
        "conv1d.weight": changed(of_one_input, "ssm_conv1d.weight"),
        "A_log": changed(log_of_decay, "ssm_a"),
    }
    names = {
        "ssm_ba": f"{_MIXER}in_proj_ba",
        "ssm_out": f"{_MIXER}out_proj",
        "ssm_dt.bias": f"{_MIXER}dt_bias",
    }
    return _layout(config, mixer, names)


ARCHITECTURES = {
    "qwen35": Architecture(config=_qwen35, layout=_layout35),
    "qwen35moe": Architecture(config=_qwen35_moe, layout=_layout35),
    "qwen3next": Architecture(config=_qwen3_next, layout=_layout_next),
}
