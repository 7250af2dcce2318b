"""LFM2 (arXiv 2511.23404), dense and with experts: attention in some layers, in the others a short convolution between
two gates."""

from __future__ import annotations

from dataclasses import dataclass

from inference_engine.kernels.routing import Router
from inference_engine.models.families.family import Family, TextConfig
from inference_engine.models.families.list_writer import ListedLayer, ListWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionConfig(TextConfig):
    """norm_eps: in the place of `rms_norm_eps`."""

    rms_norm_eps: float = 0.0
    norm_eps: float
    conv_L_cache: int  # noqa: N815  its name in the configuration
    intermediate_size: int
    block_auto_adjust_ff_dim: bool = False
    block_multiple_of: int = 1
    block_ffn_dim_multiplier: float | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0

    @property
    def inner(self) -> int:
        """The width of the gated product."""
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        inner = int(2 * self.intermediate_size / 3)
        if self.block_ffn_dim_multiplier is None:
            return inner
        inner = int(self.block_ffn_dim_multiplier * inner)
        return -(-inner // self.block_multiple_of) * self.block_multiple_of


def write(step: ListWriter, config: ConvolutionConfig) -> None:
    step.epsilon = config.norm_eps
    step.embed()
    for layer in step.layers():
        step.norm(f"{layer.prefix}operator_norm", "hidden", "normed")
        if layer.geometry is None:
            _convolution(step, layer, config)
        else:
            step.attend(layer, names=("q_layernorm", "k_layernorm", "out_proj"))
        step.add("delta", "hidden")
        step.norm(f"{layer.prefix}ffn_norm", "hidden", "normed")
        _feed_forward(step, layer, config)
        step.add("delta", "hidden")
    step.head(norm="model.embedding_norm")


def _feed_forward(step: ListWriter, layer: ListedLayer, config: ConvolutionConfig) -> None:
    mlp = f"{layer.prefix}mlp."
    if not step.has(f"{mlp}gate.weight"):
        step.gated(f"{layer.prefix}feed_forward.", inner=config.inner, activation="silu", names=("w1", "w3", "w2"))
        return
    router = Router(
        chosen=config.num_experts_per_tok,
        scores="sigmoid",
        sums_to_one=config.norm_topk_prob,
        factor=config.routed_scaling_factor,
    )
    bias = f"{mlp}expert_bias"
    step.experts(mlp, router, count=config.num_experts, activation="silu", bias=bias if step.has(bias) else None)


def _convolution(step: ListWriter, layer: ListedLayer, config: ConvolutionConfig) -> None:
    prefix, width = f"{layer.prefix}conv.", config.hidden_size
    state = step.keep(layer, {"channels": width, "taps": config.conv_L_cache})
    three = step.register("three", 3 * width)
    before, behind, inputs = (step.register(name, width) for name in ("before", "behind", "inputs of states"))
    step.product("normed", three, f"{prefix}in_proj")
    for place, register in enumerate((before, behind, inputs)):
        step.slice(three, register, first=place * width, count=width)
    step.multiply(inputs, before, inputs)
    step.multiply(step.convolve(inputs, state, f"{prefix}conv"), behind, inputs)
    step.product(inputs, "delta", f"{prefix}out_proj")


FAMILIES = (Family(model_types=("lfm2", "lfm2_moe"), config=ConvolutionConfig, write=write),)
