"""Qwen 3 with a mixture of experts (arXiv 2505.09388) in the place of feed-forward layers, in all layers or some."""

from __future__ import annotations

from dataclasses import dataclass

from inference_engine.models.families.family import Family
from inference_engine.models.families.llama import LlamaConfig
from inference_engine.models.families.writer import Writer


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenMoeConfig(LlamaConfig):
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = False


def write(step: Writer, config: QwenMoeConfig) -> None:
    step.embed()
    for layer in step.layers():
        step.norm(f"{layer.prefix}input_layernorm", "hidden", "normed")
        step.attend(layer)
        step.add("delta", "hidden")
        step.norm(f"{layer.prefix}post_attention_layernorm", "hidden", "normed")
        mlp = f"{layer.prefix}mlp."
        if step.has(f"{mlp}gate.weight"):
            step.experts(
                mlp,
                count=config.num_experts,
                chosen=config.num_experts_per_tok,
                sums_to_one=config.norm_topk_prob,
                activation=config.hidden_act,
            )
        else:
            step.gated(mlp, inner=config.intermediate_size, activation=config.hidden_act)
        step.add("delta", "hidden")
    step.head()


FAMILY = Family(model_types=("qwen3_moe",), config=QwenMoeConfig, write=write)
