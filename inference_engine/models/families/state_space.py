"""Hybrids of attention and a state space (Mamba 2, arXiv 2405.21060).

granitemoehybrid   by layers; a gated product, and experts beside it                  Granite 4 H
bamba              by layers; a gated product                                         IBM, Princeton, CMU, UIUC
falcon_h1          both in every layer, side by side; a gated product                 arXiv 2507.22448
nemotron_h         a layer is one of attention, a state space, a product, experts     arXiv 2504.03624

Embeddings, parts of projections, scores, what layers add and logits are multiplied by factors of the configuration.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from inference_engine.kernels.routing import Router
from inference_engine.models.families.family import Family, TextConfig
from inference_engine.models.families.list_writer import SQUARED, ListedLayer, ListWriter
from inference_engine.models.operations import NoStepListError

_UNLIMITED = ("(0.0, inf)", "[0.0, inf]")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Space:
    """A state space of a layer. factors: of the gate, the values, the keys, the queries and the sizes of steps. least,
    gates_first: as `ListWriter.scan` has them."""

    heads: int
    head_dim: int
    state: int
    groups: int
    taps: int
    epsilon: float
    least: float = 0.0
    gates_first: bool = True
    input_factor: float = 1.0
    factors: tuple[float, ...] = (1.0,) * 5

    def write(self, step: ListWriter, layer: ListedLayer, prefix: str) -> None:
        """delta = the state space of normed."""
        width, shared = self.heads * self.head_dim, self.groups * self.state
        channels = width + 2 * shared
        sizes = {"key_heads": self.groups, "value_heads": self.heads, "key_dim": self.state, "value_dim": self.head_dim}
        state = step.keep(layer, {"channels": channels, "taps": self.taps, **sizes})
        together, given = step.register("together", width + channels + self.heads), "normed"
        if self.input_factor != 1.0:
            given = step.register("normed for states", step.hidden)
            step.slice("normed", given, first=0, count=step.hidden)
            step.scale(given, self.input_factor)
        step.product(given, together, f"{prefix}in_proj")
        first = 0
        for factor, count in zip(self.factors, (width, width, shared, shared, self.heads), strict=True):
            step.scale(together, factor, offset=first, width=count)
            first += count
        first, registers = 0, []
        for name, count in (("outer gates", width), ("inputs of states", channels), ("state gates", self.heads)):
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
            epsilon=self.epsilon,
            groups=self.groups,
            least=self.least,
            gates_first=self.gates_first,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpaceConfig(TextConfig):
    hidden_act: str
    mamba_n_heads: int
    mamba_d_head: int
    mamba_d_state: int
    mamba_n_groups: int
    mamba_d_conv: int
    time_step_limit: str = _UNLIMITED[0]

    @property
    def space(self) -> _Space:
        if self.time_step_limit not in _UNLIMITED:
            raise NoStepListError(f"time_step_limit is {self.time_step_limit}; lists have steps of any size")
        return _Space(
            heads=self.mamba_n_heads,
            head_dim=self.mamba_d_head,
            state=self.mamba_d_state,
            groups=self.mamba_n_groups,
            taps=self.mamba_d_conv,
            epsilon=self.rms_norm_eps,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GraniteConfig(StateSpaceConfig):
    shared_intermediate_size: int
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    embedding_multiplier: float = 1.0
    attention_multiplier: float
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


def granite(step: ListWriter, config: GraniteConfig) -> None:
    step.embed(factor=config.embedding_multiplier)
    for layer in step.layers():
        step.norm(f"{layer.prefix}input_layernorm", "hidden", "normed")
        if layer.geometry is None:
            config.space.write(step, layer, f"{layer.prefix}mamba.")
        else:
            step.attend(layer, scaling=config.attention_multiplier)
        step.add("delta", "hidden", factor=config.residual_multiplier)
        step.norm(f"{layer.prefix}post_attention_layernorm", "hidden", "normed")
        _granite_experts(step, layer, config)
        step.add("delta", "hidden", factor=config.residual_multiplier)
    step.head(factor=1.0 / config.logits_scaling)


def _granite_experts(step: ListWriter, layer: ListedLayer, config: GraniteConfig) -> None:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class BambaConfig(StateSpaceConfig):
    intermediate_size: int


def bamba(step: ListWriter, config: BambaConfig) -> None:
    step.embed()
    for layer in step.layers():
        step.norm(f"{layer.prefix}input_layernorm", "hidden", "normed")
        if layer.geometry is None:
            config.space.write(step, layer, f"{layer.prefix}mamba.")
        else:
            step.attend(layer)
        step.add("delta", "hidden")
        step.norm(f"{layer.prefix}pre_ff_layernorm", "hidden", "normed")
        step.gated(f"{layer.prefix}feed_forward.", inner=config.intermediate_size, activation=config.hidden_act)
        step.add("delta", "hidden")
    step.head(norm="model.final_layernorm")


@dataclass(frozen=True, kw_only=True, slots=True)
class FalconConfig(BambaConfig):
    """mlp_multipliers, ssm_multipliers: lists of numbers."""

    mamba_norm_before_gate: bool = True
    embedding_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    key_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    mlp_multipliers: str = "[1.0, 1.0]"
    ssm_multipliers: str = "[1.0, 1.0, 1.0, 1.0, 1.0]"


def falcon(step: ListWriter, config: FalconConfig) -> None:
    gate, down = _numbers("mlp_multipliers", config.mlp_multipliers, 2)
    space = replace(
        config.space,
        gates_first=not config.mamba_norm_before_gate,
        input_factor=config.ssm_in_multiplier,
        factors=_numbers("ssm_multipliers", config.ssm_multipliers, 5),
    )
    step.embed(factor=config.embedding_multiplier)
    for layer in step.layers():
        step.norm(f"{layer.prefix}input_layernorm", "hidden", "normed")
        space.write(step, layer, f"{layer.prefix}mamba.")
        step.add("delta", "hidden", factor=config.ssm_out_multiplier)
        step.scale("normed", config.attention_in_multiplier)
        step.attend(layer, key_factor=config.key_multiplier)
        step.add("delta", "hidden", factor=config.attention_out_multiplier)
        step.norm(f"{layer.prefix}pre_ff_layernorm", "hidden", "normed")
        step.gated(
            f"{layer.prefix}feed_forward.",
            inner=config.intermediate_size,
            activation=config.hidden_act,
            gate_factor=gate,
        )
        step.add("delta", "hidden", factor=down)
    step.head(norm="model.final_layernorm", factor=config.lm_head_multiplier)


def _numbers(name: str, said: str, count: int) -> tuple[float, ...]:
    try:
        found = tuple(float(number) for number in ast.literal_eval(said))
    except (ValueError, TypeError, SyntaxError) as error:
        raise NoStepListError(f"{name} is {said}, not a list of numbers") from error
    if len(found) != count:
        raise NoStepListError(f"{name} is {said}; lists ask for {count} numbers")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class NemotronConfig(TextConfig):
    """layer_norm_epsilon: in the place of `rms_norm_eps`."""

    rms_norm_eps: float = 0.0
    layer_norm_epsilon: float
    intermediate_size: int
    mlp_hidden_act: str
    mamba_num_heads: int
    mamba_head_dim: int
    ssm_state_size: int
    n_groups: int
    conv_kernel: int
    time_step_min: float = 0.0
    n_routed_experts: int = 0
    num_experts_per_tok: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_latent_size: int = 0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0


_NEMOTRON_WORDS = "model.embeddings.weight"


def nemotron(step: ListWriter, config: NemotronConfig) -> None:
    if config.mlp_hidden_act != SQUARED:
        raise NoStepListError(f"mlp_hidden_act is {config.mlp_hidden_act!r}; lists of this family have {SQUARED}")
    step.epsilon = config.layer_norm_epsilon
    space = _Space(
        heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        state=config.ssm_state_size,
        groups=config.n_groups,
        taps=config.conv_kernel,
        epsilon=config.layer_norm_epsilon,
        least=config.time_step_min,
    )
    step.embed(matrix=_NEMOTRON_WORDS)
    for layer in step.layers():
        mixer = f"{layer.prefix}mixer."
        step.norm(f"{layer.prefix}norm", "hidden", "normed")
        if layer.geometry is not None:
            step.attend(layer, module="mixer")
        elif step.has(f"{mixer}A_log"):
            space.write(step, layer, mixer)
        elif step.has(f"{mixer}gate.weight"):
            _nemotron_experts(step, mixer, config)
        else:
            step.squared(mixer, inner=config.intermediate_size)
        step.add("delta", "hidden")
    step.head(norm="model.norm_f", embedding=_NEMOTRON_WORDS)


def _nemotron_experts(step: ListWriter, prefix: str, config: NemotronConfig) -> None:
    """Experts without gates, of a shorter vector where there are projections to it, and one for all tokens beside."""
    given = out = None
    if config.moe_latent_size:
        given, out = (step.register(name, config.moe_latent_size) for name in ("latent", "mixed latent"))
        step.product("normed", given, f"{prefix}fc1_latent_proj")
    step.experts(
        prefix,
        Router(
            chosen=config.num_experts_per_tok,
            scores="sigmoid",
            sums_to_one=config.norm_topk_prob,
            factor=config.routed_scaling_factor,
            groups=config.n_group,
            chosen_groups=config.topk_group,
        ),
        count=config.n_routed_experts,
        activation=SQUARED,
        bias=f"{prefix}gate.e_score_correction_bias",
        registers=(given or "normed", out or "delta"),
    )
    if out is not None:
        step.product(out, "delta", f"{prefix}fc2_latent_proj")
    shared = step.register("shared", config.hidden_size)
    step.squared(f"{prefix}shared_experts.", inner=config.moe_shared_expert_intermediate_size, output=shared)
    step.add(shared, "delta")


FAMILIES = (
    Family(model_types=("granitemoehybrid",), config=GraniteConfig, write=granite),
    Family(model_types=("bamba",), config=BambaConfig, write=bamba),
    Family(model_types=("falcon_h1",), config=FalconConfig, write=falcon),
    Family(model_types=("nemotron_h",), config=NemotronConfig, write=nemotron),
)
