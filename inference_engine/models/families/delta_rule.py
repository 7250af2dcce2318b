"""Hybrids whose layers are attention or the gated delta rule (Yang et al., arXiv 2412.06464): Qwen3-Next, Qwen3.5, OLMo
Hybrid.

Qwen: norms are stored as differences from one, attention has a gate of its output, a part of each head is rotated, and
the layers end in a gated product or in experts. Qwen3-Next's projections have the numbers of one head together. OLMo
norms what its attention layers give, and all heads of queries and keys as one.
"""

from __future__ import annotations

from dataclasses import dataclass

from inference_engine.kernels.routing import Router
from inference_engine.models.families.family import Family
from inference_engine.models.families.list_writer import ListedLayer, ListWriter
from inference_engine.models.families.mixtures import MixtureConfig, feed_forward

_OLMO_EPSILON = 1e-5  # of the gated norm, whatever the configuration says of others


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaConfig(MixtureConfig):
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    num_experts_per_tok: int = 0
    linear_allow_neg_eigval: bool = False


def qwen(step: ListWriter, config: DeltaConfig, router: Router) -> None:
    step.plus_one = True
    step.embed()
    for layer in step.layers():
        step.norm(f"{layer.prefix}input_layernorm", "hidden", "normed")
        if layer.geometry is None:
            _qwen_states(step, layer, config)
        else:
            step.attend(layer, is_gated=True)
        step.add("delta", "hidden")
        step.norm(f"{layer.prefix}post_attention_layernorm", "hidden", "normed")
        feed_forward(step, layer, config, router)
        step.add("delta", "hidden")
    step.head()


def olmo(step: ListWriter, config: DeltaConfig) -> None:
    step.embed()
    for layer in step.layers():
        before, behind = f"{layer.prefix}input_layernorm", f"{layer.prefix}post_attention_layernorm"
        if layer.geometry is None:
            step.norm(before, "hidden", "normed")
            _olmo_states(step, layer, config)
            step.add("delta", "hidden")
            step.norm(behind, "hidden", "normed")
            step.gated(f"{layer.prefix}mlp.", inner=config.intermediate_size, activation=config.hidden_act)
        else:
            step.slice("hidden", "normed", first=0, count=config.hidden_size)
            step.attend(layer, norms_all_heads=True)
            step.norm(behind, "delta", "delta")
            step.add("delta", "hidden")
            step.slice("hidden", "normed", first=0, count=config.hidden_size)
            step.gated(f"{layer.prefix}mlp.", inner=config.intermediate_size, activation=config.hidden_act)
            step.norm(f"{layer.prefix}post_feedforward_layernorm", "delta", "delta")
        step.add("delta", "hidden")
    step.head()


def _keep(step: ListWriter, layer: ListedLayer, config: DeltaConfig) -> int:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    sizes = {
        "channels": 2 * keys + config.linear_num_value_heads * config.linear_value_head_dim,
        "taps": config.linear_conv_kernel_dim,
        "key_heads": config.linear_num_key_heads,
        "value_heads": config.linear_num_value_heads,
        "key_dim": config.linear_key_head_dim,
        "value_dim": config.linear_value_head_dim,
    }
    return step.keep(layer, sizes)


def _qwen_states(step: ListWriter, layer: ListedLayer, config: DeltaConfig) -> None:
    prefix, state = f"{layer.prefix}linear_attn.", _keep(step, layer, config)
    inputs, outer, gates = _registers(step, state)
    if step.has(f"{prefix}in_proj_qkvz.weight"):
        _interleaved(step, prefix, config, inputs, outer, gates)
    else:
        step.product("normed", inputs, f"{prefix}in_proj_qkv")
        step.product("normed", outer, f"{prefix}in_proj_z")
        step.product("normed", gates, f"{prefix}in_proj_b", f"{prefix}in_proj_a")
    step.delta_rule(
        prefix,
        state,
        inputs=inputs,
        gates=gates,
        outer=outer,
        names=("norm", "out_proj"),
        epsilon=config.rms_norm_eps,
    )


def _interleaved(step: ListWriter, prefix: str, config: DeltaConfig, inputs: str, outer: str, gates: str) -> None:
    """Of each key head its query, its key, the values of its heads and their gates; then betas and decays of these."""
    heads, dim = config.linear_num_key_heads, config.linear_key_head_dim
    group = config.linear_num_value_heads // heads
    values = group * config.linear_value_head_dim
    width = 2 * (dim + values)
    both = step.register("interleaved", heads * width)
    step.product("normed", both, f"{prefix}in_proj_qkvz")
    parts = ((inputs, 0, dim, 0), (inputs, dim, dim, heads * dim), (inputs, 2 * dim, values, 2 * heads * dim))
    for output, first, count, offset in (*parts, (outer, 2 * dim + values, values, 0)):
        step.slice(both, output, heads=heads, width=width, first=first, count=count, offset=offset)
    two = step.register("interleaved gates", 2 * heads * group)
    step.product("normed", two, f"{prefix}in_proj_ba")
    for first in (0, group):
        step.slice(two, gates, heads=heads, width=2 * group, first=first, count=group, offset=first * heads)


def _olmo_states(step: ListWriter, layer: ListedLayer, config: DeltaConfig) -> None:
    prefix, state = f"{layer.prefix}linear_attn.", _keep(step, layer, config)
    inputs, outer, gates = _registers(step, state)
    step.product("normed", inputs, *(f"{prefix}{name}_proj" for name in "qkv"))
    step.product("normed", outer, f"{prefix}g_proj")
    step.product("normed", gates, f"{prefix}b_proj", f"{prefix}a_proj")
    step.delta_rule(
        prefix,
        state,
        inputs=inputs,
        gates=gates,
        outer=outer,
        names=("o_norm", "o_proj"),
        epsilon=_OLMO_EPSILON,
        doubles=config.linear_allow_neg_eigval,
    )


def _registers(step: ListWriter, state: int) -> tuple[str, str, str]:
    """Of the inputs of the convolution, of the gates of the output, and of those of the rule: betas, then decays."""
    sizes = step.states[state]
    return (
        step.register("inputs of states", sizes.channels),
        step.register("outer gates", sizes.value_heads * sizes.value_dim),
        step.register("state gates", 2 * sizes.value_heads),
    )


def _dense(step: ListWriter, config: DeltaConfig) -> None:
    qwen(step, config, Router(chosen=1))  # which no layer asks


def _mixture(step: ListWriter, config: DeltaConfig) -> None:
    qwen(step, config, Router(chosen=config.num_experts_per_tok, sums_to_one=True))


def _next(step: ListWriter, config: DeltaConfig) -> None:
    qwen(step, config, Router(chosen=config.num_experts_per_tok, sums_to_one=config.norm_topk_prob))


FAMILIES = (
    Family(model_types=("qwen3_5_text",), config=DeltaConfig, write=_dense),
    Family(model_types=("qwen3_5_moe_text",), config=DeltaConfig, write=_mixture),
    Family(model_types=("qwen3_next",), config=DeltaConfig, write=_next),
    Family(model_types=("olmo_hybrid",), config=DeltaConfig, write=olmo),
)
