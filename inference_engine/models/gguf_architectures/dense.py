"""Dense models: Llama, Mistral and Qwen; of the Llama kind, Mixtral too, whose architecture has the same name."""

from __future__ import annotations

from typing import Any

from inference_engine.models.gguf_architectures.architecture import (
    IN_LAYER,
    Architecture,
    Config,
    TensorLayout,
    in_pairs,
)
from inference_engine.models.gguf_architectures.header_keys import Keys

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
}
