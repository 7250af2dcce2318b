"""Mamba2 beside attention: Granite 4, Bamba and Nemotron-H by layers, Falcon-H1 in every layer.

A layer of Nemotron-H is one thing alone: attention, Mamba2, or a product. llama.cpp has Bamba as a Granite whose
numbers are all 1; here it is one, too. Falcon-H1's converter multiplies its matrices by the model's numbers, so here
these are 1.
"""

from __future__ import annotations

from typing import Any

from inference_engine.models.gguf_architectures.architecture import (
    IN_LAYER,
    Architecture,
    Config,
    Made,
    MovedBlocks,
    Numbers,
    TensorLayout,
    changed,
    in_pairs,
    log_of_decay,
    of_one_input,
)
from inference_engine.models.gguf_architectures.header_keys import Keys

_MIXER, _ALONE = "mamba.", "mixer."


def _names(mixer: str) -> dict[str, str]:
    return {
        "ssm_in": f"{mixer}in_proj",
        "ssm_out": f"{mixer}out_proj",
        "ssm_conv1d.bias": f"{mixer}conv1d.bias",
        "ssm_dt.bias": f"{mixer}dt_bias",
    }


def _flat(numbers: Numbers) -> Numbers:
    return numbers.reshape(-1)


def _decay(numbers: Numbers) -> Numbers:
    return log_of_decay(numbers).reshape(-1)


def _vectors(mixer: str) -> dict[str, tuple[Made | MovedBlocks, ...]]:
    return {
        f"{mixer}A_log": changed(_decay, "ssm_a"),
        f"{mixer}D": changed(_flat, "ssm_d"),
        f"{mixer}conv1d.weight": changed(of_one_input, "ssm_conv1d.weight"),
    }


def _mixer(keys: Keys) -> dict[str, Any]:
    heads, inner = keys.size("ssm.time_step_rank"), keys.size("ssm.inner_size")
    groups = keys.size("ssm.group_count")
    if inner % heads or heads % groups:
        raise keys.refusal(
            f"{heads} heads in {groups} groups for {inner} numbers ({keys.key('ssm.time_step_rank')}, "
            "ssm.group_count, ssm.inner_size); get the file again"
        )
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": keys.size("ssm.state_size"),
        "mamba_n_groups": groups,
        "mamba_d_conv": keys.size("ssm.conv_kernel"),
        "mamba_conv_bias": keys.has_bias("ssm_conv1d"),
        "mamba_proj_bias": False,
    }


def _granite(keys: Keys) -> dict[str, Any]:
    common, mixer = keys.common(hybrid=True), _mixer(keys)
    heads = keys.of_layers("attention.head_count_kv") or [1] * keys.layers
    inner = mixer["mamba_n_heads"] * mixer["mamba_d_head"]
    if inner % common["hidden_size"]:
        raise keys.refusal(f"{keys.key('ssm.inner_size')} is {inner}, no multiple of {common['hidden_size']}")
    experts = keys.optional("expert_count") or 0
    shared = keys.optional("expert_shared_feed_forward_length") or 0
    if experts and not shared:
        raise keys.refusal(
            f"{experts} experts, and {keys.key('expert_shared_feed_forward_length')} is {shared}; only mixtures with "
            "an expert for all tokens can be served"
        )
    return {
        **common,
        **mixer,
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "mamba_expand": inner // common["hidden_size"],
        "layer_types": ["attention" if count else "mamba" for count in heads],
        "position_embedding_type": "rope" if keys.flag("rope.scaling.finetuned", True) else None,
        "attention_multiplier": keys.factor("attention.scale", common["head_dim"] ** -0.5),
        "embedding_multiplier": keys.factor("embedding_scale"),
        "residual_multiplier": keys.factor("residual_scale"),
        "logits_scaling": keys.factor("logit_scale"),
        "num_local_experts": experts,
        "num_experts_per_tok": keys.experts()["used"] if experts else 0,
        "shared_intermediate_size": shared if experts else common["intermediate_size"],
        "attention_bias": keys.has_bias("attn_q", "attn_k", "attn_v", "attn_output"),
    }


def _granite_layout(config: Config) -> TensorLayout:
    names = {name: own for name, own in IN_LAYER.items() if not name.startswith("ffn_") or name == "ffn_norm"}
    shared = "shared_mlp."
    end = "_shexp" if config["num_local_experts"] else ""
    made: dict[str, tuple[Made | MovedBlocks, ...]] = {
        **_vectors(_MIXER),
        f"{_MIXER}norm.weight": changed(_flat, "ssm_norm.weight"),
        f"{shared}input_linear.weight": (MovedBlocks(parts=(f"ffn_gate{end}.weight", f"ffn_up{end}.weight")),),
    }
    return TensorLayout(
        names={
            **names,
            **_names(_MIXER),
            f"ffn_down{end}": f"{shared}output_linear",
            "ffn_gate_inp": "mlp.gate",
        },
        made=made,
        experts="mlp.experts",
        heads=in_pairs(config),
    )


def _falcon_h1(keys: Keys) -> dict[str, Any]:
    if keys.has_in_layer("ssm_norm.weight"):
        raise keys.refusal(
            "Falcon-H1 with a norm in its mixer (ssm_norm), whose place the file does not say, cannot be served from "
            "GGUF; a folder of safetensors can"
        )
    mixer = _mixer(keys)
    ones = ("attention_in", "attention_out", "embedding", "key", "lm_head", "ssm_in", "ssm_out")
    return {
        **keys.common(),
        **mixer,
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_d_ssm": mixer["mamba_n_heads"] * mixer["mamba_d_head"],
        "mamba_rms_norm": False,
        "attention_bias": keys.has_bias("attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": keys.has_bias("ffn_gate", "ffn_up", "ffn_down"),
        **{f"{name}_multiplier": 1.0 for name in ones},
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    }


def _falcon_h1_layout(_config: Config) -> TensorLayout:
    mlp = {f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")}
    return TensorLayout(
        names={**IN_LAYER, **_names(_MIXER), **mlp, "ffn_norm": "pre_ff_layernorm.weight"},
        outside={"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
        made=_vectors(_MIXER),
    )


def _nemotron_h(keys: Keys) -> dict[str, Any]:
    # No layer rotates, whatever the header says of it: converters write the numbers of a head as others have them.
    common, mixer = keys.common(rotates=False, hybrid=True), _mixer(keys)
    by_layer = {name: keys.of_layers(name) for name in ("attention.head_count_kv", "feed_forward_length")}
    for name, found in by_layer.items():
        if found is None:
            raise keys.refusal(f"no {keys.key(name)}, by layer; get the file again")
    attends, inner = (found or [] for found in by_layer.values())
    kinds = [(count > 0) + 2 * (size > 0) for count, size in zip(attends, inner, strict=True)]
    if 3 in kinds:
        raise keys.refusal(f"layer {kinds.index(3)} has heads and a product; of this architecture a layer has one")
    return {
        **common,
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": [("linear_attention", "full_attention", "mlp")[kind] for kind in kinds],
        "layer_norm_epsilon": common.pop("rms_norm_eps"),
        "mamba_num_heads": mixer["mamba_n_heads"],
        "mamba_head_dim": mixer["mamba_d_head"],
        "ssm_state_size": mixer["mamba_d_state"],
        "n_groups": mixer["mamba_n_groups"],
        "conv_kernel": mixer["mamba_d_conv"],
        "use_conv_bias": mixer["mamba_conv_bias"],
        "attention_bias": keys.has_bias("attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": keys.has_bias("ffn_up", "ffn_down"),
    }


def _nemotron_h_layout(_config: Config) -> TensorLayout:
    return TensorLayout(
        names={
            "attn_norm": "norm",
            **{f"attn_{name}": f"{_ALONE}{name}_proj" for name in "qkv"},
            "attn_output": f"{_ALONE}o_proj",
            **{f"ffn_{name}": f"{_ALONE}{name}_proj" for name in ("up", "down")},
            **_names(_ALONE),
        },
        outside={"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"},
        made={**_vectors(_ALONE), f"{_ALONE}norm.weight": changed(_flat, "ssm_norm.weight")},
    )


ARCHITECTURES = {
    "granitehybrid": Architecture(config=_granite, layout=_granite_layout),
    "falcon-h1": Architecture(config=_falcon_h1, layout=_falcon_h1_layout),
    "nemotron_h": Architecture(config=_nemotron_h, layout=_nemotron_h_layout),
}
