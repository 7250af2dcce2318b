"""Gemma 2 (arXiv 2408.00118), and the text models of Gemma 3 (arXiv 2503.19786) and Gemma 4.

Both branches of a layer are normed before and behind, the embedding is multiplied by the root of its width, and logits
and attention's scores may be capped. Before Gemma 4 norms are stored as differences from one. Gemma 4 may have experts
beside the gated product, and in each layer an embedding of its own, which a third branch is gated by.
"""

from __future__ import annotations

from dataclasses import dataclass

from inference_engine.kernels.routing import Router
from inference_engine.models.families.family import Family, TextConfig
from inference_engine.models.families.list_writer import ListedLayer, ListWriter
from inference_engine.models.operations import NoStepListError


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


_PER_LAYER = "inputs of layers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma4Config(TextConfig):
    hidden_activation: str
    intermediate_size: int
    use_double_wide_mlp: bool = False
    final_logit_softcapping: float | None = None
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    num_experts: int = 0
    top_k_experts: int = 0


def write_4(step: ListWriter, config: Gemma4Config) -> None:
    step.embed(factor=float(config.hidden_size) ** 0.5)
    if config.hidden_size_per_layer_input:
        _embed_layers(step, config)
    for layer in step.layers():
        step.norm(f"{layer.prefix}input_layernorm", "hidden", "normed")
        step.attend(layer, scaling=1.0, norms_values=True)
        step.norm(f"{layer.prefix}post_attention_layernorm", "delta", "delta")
        step.add("delta", "hidden")
        step.norm(f"{layer.prefix}pre_feedforward_layernorm", "hidden", "normed")
        _feed_forward(step, layer, config)
        step.norm(f"{layer.prefix}post_feedforward_layernorm", "delta", "delta")
        step.add("delta", "hidden")
        if config.hidden_size_per_layer_input:
            _add_input(step, layer, config)
        step.scale("hidden", tensor=f"{layer.prefix}layer_scalar")
    step.head(softcap=config.final_logit_softcapping)


def _feed_forward(step: ListWriter, layer: ListedLayer, config: Gemma4Config) -> None:
    """A gated product, and experts beside it, each branch with a norm of its own."""
    reads = layer.keeper != layer.prefix
    inner = config.intermediate_size * (2 if reads and config.use_double_wide_mlp else 1)
    output, prefix = "delta", layer.prefix
    has_experts = step.has(f"{prefix}router.proj.weight")
    if has_experts:
        output = step.register("dense", config.hidden_size)
    step.gated(f"{prefix}mlp.", inner=inner, activation=config.hidden_activation, output=output)
    if not has_experts:
        return
    step.norm(f"{prefix}post_feedforward_layernorm_1", output, output)
    routed = step.register("routed", config.hidden_size)
    step.norm(f"{prefix}router.scale", "hidden", routed)
    step.scale(routed, float(config.hidden_size) ** -0.5)
    step.experts(
        prefix,
        Router(chosen=config.top_k_experts, sums_to_one=True),
        count=config.num_experts,
        activation=config.hidden_activation,
        gate="router.proj",
        scales=f"{prefix}router.per_expert_scale",
        chooses_by=routed,
        norm=f"{prefix}pre_feedforward_layernorm_2",
    )
    step.norm(f"{prefix}post_feedforward_layernorm_2", "delta", "delta")
    step.add(output, "delta")


def _embed_layers(step: ListWriter, config: Gemma4Config) -> None:
    """The inputs of all layers: an embedding for each of them, and a projection of the model's own."""
    if config.vocab_size_per_layer_input != config.vocab_size:
        raise NoStepListError(
            f"vocab_size_per_layer_input is {config.vocab_size_per_layer_input}, and vocab_size {config.vocab_size}; "
            "lists embed every token in each layer"
        )
    count, width = len(step.reads), config.hidden_size_per_layer_input
    inputs, projected = (step.register(name, count * width) for name in (_PER_LAYER, "projected inputs"))
    step.embed_as("model.embed_tokens_per_layer.weight", inputs, factor=float(width) ** 0.5)
    step.product("hidden", projected, "model.per_layer_model_projection")
    step.scale(projected, float(config.hidden_size) ** -0.5)
    step.norm("model.per_layer_projection_norm", projected, projected, pieces=count)
    step.add(projected, inputs)
    step.scale(inputs, 2.0**-0.5)


def _add_input(step: ListWriter, layer: ListedLayer, config: Gemma4Config) -> None:
    width = config.hidden_size_per_layer_input
    both, inner = step.register("input gates", 2 * width), step.register("inner input", width)
    step.product("hidden", both, f"{layer.prefix}per_layer_input_gate", count=width)
    step.slice(_PER_LAYER, both, first=layer.index * width, count=width, offset=width)
    step.activate(both, inner, config.hidden_activation)
    step.product(inner, "delta", f"{layer.prefix}per_layer_projection")
    step.norm(f"{layer.prefix}post_per_layer_input_norm", "delta", "delta")
    step.add("delta", "hidden")


FAMILIES = (
    Family(model_types=("gemma2", "gemma3_text"), config=GemmaConfig, write=write),
    Family(model_types=("gemma4_text", "gemma4_unified_text"), config=Gemma4Config, write=write_4),
)
