"""Dense models: Llama, Mistral, Qwen, Phi-3; of the Llama kind, Mixtral too, whose architecture has the same name."""

from __future__ import annotations

from typing import Any

from inference_engine.models.gguf_architectures.architecture import (
    IN_LAYER,
    Architecture,
    Config,
    TensorLayout,
    in_pairs,
)
from inference_engine.models.gguf_architectures.header_keys import DEFAULT_THETA, Keys

_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")


def _llama(keys: Keys) -> dict[str, Any]:
    common = keys.common()
    if keys.optional("expert_count"):
        return {**common, **_mixtral(keys)}
    if window := keys.optional("attention.sliding_window"):
        return {
            **common,
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": window,
        }
    return {
        **common,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": keys.has_bias(*_ATTENTION),
        "mlp_bias": keys.has_bias("ffn_gate", "ffn_up", "ffn_down"),
    }


def _mixtral(keys: Keys) -> dict[str, Any]:
    experts = keys.experts()
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": experts["count"],
        "num_experts_per_tok": experts["used"],
        "sliding_window": keys.optional("attention.sliding_window") or None,
    }


def _qwen2(keys: Keys) -> dict[str, Any]:
    return {**keys.common(), "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def _qwen3(keys: Keys) -> dict[str, Any]:
    return {
        **keys.common(),
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": keys.has_bias(*_ATTENTION),
    }


_FACTORS = ("short", "long")


def _phi3(keys: Keys) -> dict[str, Any]:
    common = keys.common(rotates=False)
    return {
        **common,
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": keys.optional("attention.sliding_window") or None,
        "original_max_position_embeddings": keys.optional("rope.scaling.original_context_length")
        or common["max_position_embeddings"],
        "rope_parameters": _phi3_rotation(keys, common),
        "pad_token_id": common["pad_token_id"] or 0,  # the class's own may be no row
    }


def _phi3_rotation(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Of models for long texts a file has a factor for each pair of numbers, for short texts and for long ones."""
    dim = common["head_dim"]
    names = [f"rope_factors_{kind}.weight" for kind in _FACTORS]
    if not any(map(keys.has, names)):
        rotation = keys.rotation_of(dim, rotates_part=True)
        if (kind := rotation["rope_type"]) != "default":
            raise keys.refusal(
                f"a rotation scaled as {kind}, which transformers' Phi-3 does not have; it cannot be served"
            )
        return rotation
    rotated = keys.size("rope.dimension_count", dim)
    factors = [keys.divisors(rotated // 2, name) for name in names]
    if rotated > dim or rotated % 2 or any(found is None for found in factors):
        raise keys.refusal(f"{' and '.join(names)} are not {rotated // 2} numbers each in float32; get the file again")
    named, factor = keys.text("rope.scaling.type"), keys.real("rope.scaling.factor")
    if named not in (None, "none", "longrope") or factor not in (None, 0.0, 1.0):
        raise keys.refusal(
            f"rope_factors_long.weight and {keys.key('rope.scaling.type')} {named!r}, of a factor {factor}, both scale "
            "the rotation; only the former can be served from GGUF"
        )
    return {
        "rope_type": "longrope",
        "rope_theta": keys.real("rope.freq_base", DEFAULT_THETA),
        "partial_rotary_factor": rotated / dim,
        "original_max_position_embeddings": keys.optional("rope.scaling.original_context_length")
        or common["max_position_embeddings"],
        "attention_factor": keys.factor("rope.scaling.attn_factor"),
        **{f"{one}_factor": found.tolist() for one, found in zip(_FACTORS, factors, strict=True) if found is not None},
    }


def _phi3_layout(_config: Config) -> TensorLayout:
    names = {**IN_LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    apart = ("attn_q", "attn_k", "attn_v", "ffn_gate", "attn_q_norm", "attn_k_norm")
    return TensorLayout(
        names={name: own for name, own in names.items() if name not in apart},
        configured=tuple(f"rope_factors_{kind}.weight" for kind in _FACTORS),
    )


def _llama_layout(config: Config) -> TensorLayout:
    if config["model_type"] == "mixtral":
        return TensorLayout(
            names={**IN_LAYER, "ffn_gate_inp": "mlp.gate"}, experts="mlp.experts", heads=in_pairs(config)
        )
    return TensorLayout(heads=in_pairs(config))


ARCHITECTURES = {
    "llama": Architecture(config=_llama, layout=_llama_layout),
    "qwen2": Architecture(config=_qwen2),
    "qwen3": Architecture(config=_qwen3),
    "phi3": Architecture(config=_phi3, layout=_phi3_layout),
}
