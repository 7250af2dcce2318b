"""Hybrids whose layers are attention or a state space (Mamba 2, arXiv 2405.21060): Granite 4 H, dense and with experts.

Embeddings, scores, what layers add and logits are multiplied by factors of the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

from inference_engine.kernels.routing import Router
from inference_engine.models.families.family import Family, TextConfig
from inference_engine.models.families.list_writer import ListedLayer, ListWriter
from inference_engine.models.operations import NoStepListError

_UNLIMITED = ("(0.0, inf)", "[0.0, inf]")


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpaceConfig(TextConfig):
    hidden_act: str
    shared_intermediate_size: int
    mamba_n_heads: int
    mamba_d_head: int
    mamba_d_state: int
    mamba_n_groups: int
    mamba_d_conv: int
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    embedding_multiplier: float = 1.0
    attention_multiplier: float
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    time_step_limit: str = _UNLIMITED[0]


def write(step: ListWriter, config: StateSpaceConfig) -> None:
    if config.time_step_limit not in _UNLIMITED:
        raise NoStepListError(f"time_step_limit is {config.time_step_limit}; lists have steps of any size")
    step.embed(factor=config.embedding_multiplier)
    for layer in step.layers():
        step.norm(f"{layer.prefix}input_layernorm", "hidden", "normed")
        if layer.geometry is None:
            _states(step, layer, config)
        else:
            step.attend(layer, scaling=config.attention_multiplier)
        step.add("delta", "hidden", factor=config.residual_multiplier)
        step.norm(f"{layer.prefix}post_attention_layernorm", "hidden", "normed")
        _feed_forward(step, layer, config)
        step.add("delta", "hidden", factor=config.residual_multiplier)
    step.head(factor=1.0 / config.logits_scaling)


def _feed_forward(step: ListWriter, layer: ListedLayer, config: StateSpaceConfig) -> None:
    """A gated product, and experts beside it."""
    output, act = "delta", config.hidden_act
    if config.num_local_experts:
        router = Router(chosen=config.num_experts_per_tok, sums_to_one=True)
        step.experts(f"{layer.prefix}mlp.", router, count=config.num_local_experts, activation=act)
        output = step.register("shared", config.hidden_size)
    step.gated(
        f"{layer.prefix}shared_mlp.",
        inner=config.shared_intermediate_size,
        activation=act,
        output=output,
        names=("input_linear", "output_linear"),
    )
    if output != "delta":
        step.add(output, "delta")


def _states(step: ListWriter, layer: ListedLayer, config: StateSpaceConfig) -> None:
    prefix, heads = f"{layer.prefix}mamba.", config.mamba_n_heads
    width = heads * config.mamba_d_head
    sizes = {
        "channels": width + 2 * config.mamba_n_groups * config.mamba_d_state,
        "taps": config.mamba_d_conv,
        "key_heads": config.mamba_n_groups,
        "value_heads": heads,
        "key_dim": config.mamba_d_state,
        "value_dim": config.mamba_d_head,
    }
    state = step.keep(layer, sizes)
    channels = sizes["channels"]
    together = step.register("together", width + channels + heads)
    step.product("normed", together, f"{prefix}in_proj")
    first, registers = 0, []
    for name, count in (("outer gates", width), ("inputs of states", channels), ("state gates", heads)):
        registers.append(step.register(name, count))
        step.slice(together, registers[-1], first=first, count=count)
        first += count
    outer, inputs, gates = registers
    step.scan(
        prefix,
        state,
        inputs=inputs,
        gates=gates,
        outer=outer,
        epsilon=config.rms_norm_eps,
        groups=config.mamba_n_groups,
    )


FAMILIES = (Family(model_types=("granitemoehybrid",), config=StateSpaceConfig, write=write),)
