"""Mixtures of experts in layers like Llama's, in all of them or some; what differs is the router and what is beside it.

qwen3_moe    softmax                                                          arXiv 2505.09388
qwen2_moe    softmax, and an expert for all tokens behind a gate              arXiv 2407.10671
mixtral      softmax over the chosen ones                                     arXiv 2401.04088
glm4_moe     sigmoid with a bias for the choice, groups, an expert for all    arXiv 2508.06471
"""

from __future__ import annotations

from dataclasses import dataclass

from inference_engine.kernels.routing import Router
from inference_engine.models.families.family import Family
from inference_engine.models.families.list_writer import ListedLayer, ListWriter
from inference_engine.models.families.llama import LlamaConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureConfig(LlamaConfig):
    """num_local_experts: another name of num_experts. Of the rest, a family has what its router needs."""

    num_experts_per_tok: int
    num_experts: int = 0
    num_local_experts: int = 0
    norm_topk_prob: bool = False
    shared_expert_intermediate_size: int = 0
    moe_intermediate_size: int = 0
    n_shared_experts: int = 0
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0


def write(step: ListWriter, config: MixtureConfig, router: Router) -> None:
    step.embed()
    for layer in step.layers():
        step.norm(f"{layer.prefix}input_layernorm", "hidden", "normed")
        step.attend(layer)
        step.add("delta", "hidden")
        step.norm(f"{layer.prefix}post_attention_layernorm", "hidden", "normed")
        feed_forward(step, layer, config, router)
        step.add("delta", "hidden")
    step.head()


def feed_forward(step: ListWriter, layer: ListedLayer, config: MixtureConfig, router: Router) -> None:
    """delta = the experts of normed, or a gated product in a layer that has none."""
    mlp, act = f"{layer.prefix}mlp.", config.hidden_act
    if step.has(f"{mlp}gate.weight"):
        bias = f"{mlp}gate.e_score_correction_bias"
        count = config.num_experts or config.num_local_experts
        step.experts(mlp, router, count=count, activation=act, bias=bias if step.has(bias) else None)
    else:
        step.gated(mlp, inner=config.intermediate_size, activation=act)
    if step.has(f"{mlp}shared_expert_gate.weight"):
        inner = config.shared_expert_intermediate_size
        step.shared_expert(f"{mlp}shared_expert.", inner=inner, activation=act, gate=f"{mlp}shared_expert_gate")
    elif step.has(f"{mlp}shared_experts.down_proj.weight"):
        inner = config.moe_intermediate_size * config.n_shared_experts
        step.shared_expert(f"{mlp}shared_experts.", inner=inner, activation=act)


def _qwen(step: ListWriter, config: MixtureConfig) -> None:
    write(step, config, Router(chosen=config.num_experts_per_tok, sums_to_one=config.norm_topk_prob))


def _mixtral(step: ListWriter, config: MixtureConfig) -> None:
    write(step, config, Router(chosen=config.num_experts_per_tok, sums_to_one=True))


def sigmoid_router(config: MixtureConfig) -> Router:
    return Router(
        chosen=config.num_experts_per_tok,
        scores="sigmoid",
        sums_to_one=config.norm_topk_prob,
        factor=config.routed_scaling_factor,
        groups=config.n_group,
        chosen_groups=config.topk_group,
    )


def _glm(step: ListWriter, config: MixtureConfig) -> None:
    write(step, config, sigmoid_router(config))


FAMILIES = (
    Family(model_types=("qwen2_moe", "qwen3_moe"), config=MixtureConfig, write=_qwen),
    Family(model_types=("mixtral",), config=MixtureConfig, write=_mixtral),
    Family(model_types=("glm4_moe",), config=MixtureConfig, write=_glm),
)
