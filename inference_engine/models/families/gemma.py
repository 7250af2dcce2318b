"""Gemma 2 (arXiv 2408.00118) and the text model of Gemma 3 (arXiv 2503.19786).

Both branches of a layer are normed before and behind, norms are stored as differences from one, the embedding is
multiplied by the root of its width, and logits and attention's scores may be capped.
"""

from __future__ import annotations

from dataclasses import dataclass

from inference_engine.models.families.family import Family, TextConfig
from inference_engine.models.families.list_writer import ListWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmaConfig(TextConfig):
    hidden_activation: str
    intermediate_size: int
    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None


def write(step: ListWriter, config: GemmaConfig) -> None:
    step.plus_one = True
    step.embed(factor=float(config.hidden_size) ** 0.5)
    for layer in step.layers():
        step.norm(f"{layer.prefix}input_layernorm", "hidden", "normed")
        step.attend(layer, scaling=config.query_pre_attn_scalar**-0.5, softcap=config.attn_logit_softcapping)
        step.norm(f"{layer.prefix}post_attention_layernorm", "delta", "delta")
        step.add("delta", "hidden")
        step.norm(f"{layer.prefix}pre_feedforward_layernorm", "hidden", "normed")
        step.gated(f"{layer.prefix}mlp.", inner=config.intermediate_size, activation=config.hidden_activation)
        step.norm(f"{layer.prefix}post_feedforward_layernorm", "delta", "delta")
        step.add("delta", "hidden")
    step.head(softcap=config.final_logit_softcapping)


FAMILIES = (Family(model_types=("gemma2", "gemma3_text"), config=GemmaConfig, write=write),)
