"""Small random models of real classes, with norms that do something, and random ids for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

HEADS = 2
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "max_position_embeddings": 128,
}


def llama() -> PreTrainedModel:
    return build(LlamaForCausalLM, LlamaConfig(**SIZES))


def qwen3() -> PreTrainedModel:
    return build(Qwen3ForCausalLM, Qwen3Config(**SIZES))


def gemma3(*, attention: str = "eager") -> PreTrainedModel:
    """Two rotation tables: one for its layer with a window, one for the two without."""
    config = Gemma3TextConfig(**SIZES, layer_types=["sliding_attention", "full_attention", "full_attention"])
    return build(Gemma3ForCausalLM, config, attention=attention)


def gemma4(*, attention: str = "eager") -> PreTrainedModel:
    """Values of its last two layers are made of keys, of which a quarter is rotated."""
    config = Gemma4TextConfig(
        **SIZES,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        attention_k_eq_v=True,
        global_head_dim=SIZES["head_dim"],
        num_global_key_value_heads=HEADS,
        hidden_size_per_layer_input=0,
    )
    return build(Gemma4ForCausalLM, config, attention=attention)


def smollm3() -> PreTrainedModel:
    """Its second layer rotates nothing."""
    return build(SmolLM3ForCausalLM, SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1]))


def phi() -> PreTrainedModel:
    """Half of each head is rotated, and cut off before."""
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    return build(PhiForCausalLM, PhiConfig(**sizes))


def build(kind: type[PreTrainedModel], config: PretrainedConfig, *, attention: str = "eager") -> PreTrainedModel:
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight")):  # else norms would be the identity of their scale
                nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def tokens(sequences: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 64, (sequences, length), generator=torch.Generator().manual_seed(seed))
