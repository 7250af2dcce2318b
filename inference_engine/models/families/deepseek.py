"""Families with multi-head latent attention (`models/latent_attention.py`), and mixtures of experts behind it.

deepseek_v2     softmax, rotated as complex numbers                             arXiv 2405.04434
deepseek_v3     sigmoid with a bias for the choice, groups                      arXiv 2412.19437
glm4_moe_lite   the same router
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass

from inference_engine.kernels.routing import Router
from inference_engine.models.families.family import Family
from inference_engine.models.families.list_writer import ListWriter
from inference_engine.models.families.mixtures import MixtureConfig, feed_forward, sigmoid_router
from inference_engine.models.operations import NoStepListError

_EPSILON = 1e-6  # of norms within attention, whatever the model's is


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentConfig(MixtureConfig):
    """rope_parameters: a dictionary. qk_head_dim: of both parts."""

    num_experts_per_tok: int = 0
    q_lora_rank: int | None = None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    topk_method: str | None = None
    rope_interleave: bool = False
    rope_parameters: str = "{}"

    @property
    def scaling(self) -> float:
        """Of scores: YaRN (arXiv 2309.00071) makes it larger."""
        found = math.pow(self.qk_nope_head_dim + self.qk_rope_head_dim, -0.5)
        try:
            said = ast.literal_eval(self.rope_parameters) or {}
            factor, share = float(said.get("factor") or 1.0), float(said.get("mscale_all_dim") or 0.0)
        except (ValueError, TypeError, SyntaxError, AttributeError) as error:
            raise NoStepListError(f"rope_parameters are {self.rope_parameters}, not a dictionary of numbers") from error
        if said.get("rope_type", "default") == "default" or factor <= 1.0:
            return found
        return found * math.pow(0.1 * share * math.log(factor) + 1.0, 2)


def write(step: ListWriter, config: LatentConfig, router: Router, *, pairs: bool, keeps_pairs: bool) -> None:
    step.embed()
    for layer in step.layers():
        step.norm(f"{layer.prefix}input_layernorm", "hidden", "normed")
        step.attend_latent(
            layer,
            own=config.qk_nope_head_dim,
            value=config.v_head_dim,
            scaling=config.scaling,
            pairs=pairs,
            keeps_pairs=keeps_pairs,
            query_rank=config.q_lora_rank,
            epsilon=_EPSILON,
        )
        step.add("delta", "hidden")
        step.norm(f"{layer.prefix}post_attention_layernorm", "hidden", "normed")
        feed_forward(step, layer, config, router)
        step.add("delta", "hidden")
    step.head()


def _second(step: ListWriter, config: LatentConfig) -> None:
    if config.topk_method not in (None, "greedy") and config.n_group > config.topk_group:
        raise NoStepListError(
            f"topk_method is {config.topk_method!r}, {config.topk_group} of {config.n_group} groups by their best "
            "expert; lists have groups by their two best"
        )
    router = Router(chosen=config.num_experts_per_tok, factor=config.routed_scaling_factor)
    write(step, config, router, pairs=True, keeps_pairs=True)


def _third(step: ListWriter, config: LatentConfig) -> None:
    write(step, config, sigmoid_router(config), pairs=config.rope_interleave, keeps_pairs=False)


FAMILIES = (
    Family(model_types=("deepseek_v2",), config=LatentConfig, write=_second),
    Family(model_types=("deepseek_v3", "glm4_moe_lite"), config=LatentConfig, write=_third),
)
