"""Llama (Touvron et al., arXiv 2302.13971), and what has its layers: Mistral, Phi-3, Qwen 2 and 3, SmolLM3.

What tells them apart is in the configuration and the checkpoint: biases (Qwen 2), norms of heads (Qwen 3), layers with
a window (Mistral, Qwen 2) or without rotation (SmolLM3), projections that lie in one matrix (Phi-3).
"""

from __future__ import annotations

from dataclasses import dataclass

from inference_engine.models.families.family import Family, TextConfig
from inference_engine.models.families.list_writer import ListWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig(TextConfig):
    hidden_act: str
    intermediate_size: int | None = None


def write(step: ListWriter, config: LlamaConfig) -> None:
    step.embed()
    for layer in step.layers():
        step.norm(f"{layer.prefix}input_layernorm", "hidden", "normed")
        step.attend(layer)
        step.add("delta", "hidden")
        step.norm(f"{layer.prefix}post_attention_layernorm", "hidden", "normed")
        step.gated(f"{layer.prefix}mlp.", inner=config.intermediate_size, activation=config.hidden_act)
        step.add("delta", "hidden")
    step.head()


FAMILIES = (
    Family(model_types=("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"), config=LlamaConfig, write=write),
)
