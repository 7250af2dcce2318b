"""A family's decode step as data: a short list of operations over registers, for executors that are not transformers.

    hidden = embed(ids)
    normed = norm(hidden) · heads = normed · [q k v] · rotate(heads) · mixed = attend(heads) · delta = mixed · o
    hidden += delta · normed = norm(hidden) · gates = normed · [gate up] · inner = act(gate) · up · delta = inner · down
    hidden += delta · … · last = norm(hidden of the queries asked for) · logits = last · head

A register holds one vector for each token. The list is made from the model's configuration and the names in its
checkpoint; a new family is a new list, not a new kernel. Whether it is right is tested, not believed: a small twin of
the model runs it beside transformers (`backends/native/trial.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inference_engine.kv.geometry import IMMOVABLE, UNROTATED, LayerGeometry

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

# What these families do in a layer is in the list below; whether the list is right is for the twin to say.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text", "qwen3_moe")
_GEMMA = ("gemma2", "gemma3_text")
_LANES = 16  # numbers that a kernel takes at once


class NoStepListError(Exception):
    """The model cannot be written as a list of these operations; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Embed:
    """output = the embedding of each token's id, times `factor`."""

    output: str
    matrix: str
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """Root mean square norm of `heads` pieces of `width` numbers of `input`, from `offset` on.

    plus_one: weights are stored as differences from one. In place if output is input.
    """

    input: str
    output: str
    weights: str
    epsilon: float
    width: int
    heads: int = 1
    offset: int = 0
    plus_one: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """output = input · [matrices, one below the other] + biases. output None: the logits.

    offset, count: the part of the output that it is; None: all of it.
    """

    input: str
    output: str | None
    matrices: tuple[str, ...]
    biases: tuple[str, ...] = ()
    offset: int = 0
    count: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotate:
    """Rotary position embedding of `heads` heads of `width` numbers, from `offset` on, in place. rotary: the table."""

    register: str
    rotary: str
    heads: int
    width: int
    offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Attend:
    """Write K and V of the layer and attend. input: queries, keys, values of a token, one behind the other."""

    input: str
    output: str
    layer: int
    scaling: float
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Add:
    """output += input · factor."""

    input: str
    output: str
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Gated:
    """output = activation(first half of input) · second half."""

    input: str
    output: str
    activation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """output = the gated products of each token's `chosen` experts, weighted by the softmax of `router`.

    matrices: gate, up and down of each expert. sums_to_one: are the weights of the chosen ones divided by their sum?
    """

    input: str
    router: str
    output: str
    matrices: tuple[tuple[str, str, str], ...]
    chosen: int
    sums_to_one: bool
    activation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """output = the vectors that the caller hands in: for lists that begin with states, not with ids."""

    output: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """Write K and V of the layer; nothing attends. input: keys, values of a token, one behind the other."""

    input: str
    layer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tap:
    """The hidden states after this layer, for steps that ask for them."""

    input: str
    layer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Select:
    """output = input of the queries whose logits are asked for; the operations behind it are about those."""

    input: str
    output: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Softcap:
    """logits = limit · tanh(logits / limit)."""

    limit: float


Operation = Embed | Norm | Product | Rotate | Attend | Add | Gated | Experts | Given | Write | Tap | Select | Softcap


@dataclass(frozen=True, kw_only=True, slots=True)
class StepList:
    """The operations of a step, and the numbers that each register holds for one token."""

    operations: tuple[Operation, ...]
    widths: dict[str, int]
    layers: tuple[LayerGeometry, ...]
    hidden: int
    vocabulary: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """What a list is made of, of a text model's configuration, under transformers' names."""

    model_type: str
    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    hidden_act: str
    intermediate_size: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    norm_topk_prob: bool | None = None
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    @classmethod
    def of(cls, config: Any) -> TextConfig:
        """config: transformers'. Raises NoStepListError if there is no list for models of its kind."""
        check_family(config)

        def read(name: str, kind: type) -> Any:
            return None if (value := getattr(config, name, None)) is None else kind(value)

        try:
            return cls(
                model_type=str(config.model_type),
                hidden_size=int(config.hidden_size),
                vocab_size=int(config.vocab_size),
                rms_norm_eps=float(config.rms_norm_eps),
                hidden_act=str(getattr(config, "hidden_activation", None) or config.hidden_act),
                intermediate_size=read("intermediate_size", int),
                num_experts=read("num_experts", int),
                num_experts_per_tok=read("num_experts_per_tok", int),
                norm_topk_prob=read("norm_topk_prob", bool),
                query_pre_attn_scalar=read("query_pre_attn_scalar", float),
                attn_logit_softcapping=read("attn_logit_softcapping", float),
                final_logit_softcapping=read("final_logit_softcapping", float),
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise NoStepListError(f"its configuration cannot be read: {error}") from error


def step_list(
    config: PretrainedConfig | TextConfig, layers: Sequence[LayerGeometry], names: Collection[str]
) -> StepList:
    """The list of a model. config: of its text model; names: of the tensors in its checkpoint.

    Raises NoStepListError if there is none.
    """
    own = config if isinstance(config, TextConfig) else TextConfig.of(config)
    return _Builder(own, layers, frozenset(names)).build()


def check_family(config: PretrainedConfig | TextConfig) -> None:
    """Raise NoStepListError if there is no list for models of this kind. config: of the text model."""
    if config.model_type not in FAMILIES:
        raise NoStepListError(f"there is no list of operations for the model type {config.model_type!r}")
    heads = getattr(config, "num_attention_heads", None)
    dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    if dim % _LANES:
        raise NoStepListError(f"it has heads of {dim} numbers, which is no multiple of {_LANES}")


@dataclass(kw_only=False, slots=True)
class _Builder:
    config: TextConfig
    layers: Sequence[LayerGeometry]
    names: frozenset[str]
    operations: list[Operation] = field(default_factory=list)
    widths: dict[str, int] = field(default_factory=dict)

    def build(self) -> StepList:
        kind = self.config.model_type
        if self._hidden < 1:
            raise NoStepListError(f"hidden_size is {self._hidden}")
        self.widths |= {"hidden": self._hidden, "normed": self._hidden, "delta": self._hidden, "last": self._hidden}
        factor = float(self._hidden) ** 0.5 if kind in _GEMMA else 1.0
        self.operations.append(Embed(output="hidden", matrix=self._own(EMBEDDING), factor=factor))
        for index in range(len(self.layers)):
            self._layer(index)
        self.operations.append(Select(input="hidden", output="last"))
        self._norm("model.norm.weight", "last", "last")
        head = HEAD if HEAD in self.names else EMBEDDING
        biases = ("lm_head.bias",) if "lm_head.bias" in self.names else ()
        self.operations.append(Product(input="last", output=None, matrices=(head,), biases=biases))
        if (limit := self.config.final_logit_softcapping) is not None:
            self.operations.append(Softcap(limit=limit))
        return StepList(
            operations=tuple(self.operations),
            widths=dict(self.widths),
            layers=tuple(self.layers),
            hidden=self._hidden,
            vocabulary=self.config.vocab_size,
        )

    def _layer(self, index: int) -> None:
        layer, prefix = self.layers[index], f"model.layers.{index}."
        queries, keys, dim = layer.query_heads, layer.kv_heads, layer.head_dim
        if dim < 1 or dim % _LANES:
            raise NoStepListError(f"layer {index} has heads of {dim} numbers, which is no multiple of {_LANES}")
        if keys < 1 or queries < 1 or queries % keys:
            raise NoStepListError(f"layer {index} has {queries} query heads, which are not as many for each of {keys}")
        if layer.rotary == IMMOVABLE:
            raise NoStepListError(f"layer {index} changes its keys by position in a way that is not a rotation")
        self._register("heads", (queries + 2 * keys) * dim)
        self._register("mixed", queries * dim)
        self._norm(prefix + "input_layernorm.weight", "hidden", "normed")
        attention = prefix + "self_attn."
        self._product("normed", "heads", [f"{attention}{name}_proj" for name in "qkv"])
        for name, heads, offset in (("q_norm", queries, 0), ("k_norm", keys, queries * dim)):
            if (weights := f"{attention}{name}.weight") in self.names:
                self._norm(weights, "heads", "heads", width=dim, heads=heads, offset=offset)
        if layer.rotary != UNROTATED:
            self.operations.append(Rotate(register="heads", rotary=layer.rotary, heads=queries + keys, width=dim))
        self.operations.append(
            Attend(input="heads", output="mixed", layer=index, scaling=self._scaling(dim), softcap=self._softcap)
        )
        self._product("mixed", "delta", [attention + "o_proj"])
        has_four_norms = prefix + "pre_feedforward_layernorm.weight" in self.names
        if has_four_norms:
            self._norm(prefix + "post_attention_layernorm.weight", "delta", "delta")
        self.operations.append(Add(input="delta", output="hidden"))
        second = "pre_feedforward_layernorm" if has_four_norms else "post_attention_layernorm"
        self._norm(f"{prefix}{second}.weight", "hidden", "normed")
        self._feed_forward(prefix + "mlp.")
        if has_four_norms:
            self._norm(prefix + "post_feedforward_layernorm.weight", "delta", "delta")
        self.operations += [Add(input="delta", output="hidden"), Tap(input="hidden", layer=index)]

    def _feed_forward(self, prefix: str) -> None:
        if prefix + "gate.weight" in self.names:
            self._experts(prefix)
            return
        inner = self.config.intermediate_size or 0
        self._register("gates", 2 * inner)
        self._register("inner", inner)
        self._product("normed", "gates", [prefix + "gate_proj", prefix + "up_proj"])
        self.operations.append(Gated(input="gates", output="inner", activation=self._activation))
        self._product("inner", "delta", [prefix + "down_proj"])

    def _experts(self, prefix: str) -> None:
        config: Any = self.config
        if not 1 <= config.num_experts_per_tok <= config.num_experts:
            raise NoStepListError(f"{config.num_experts_per_tok} of {config.num_experts} experts are chosen")
        self._register("router", config.num_experts)
        self._product("normed", "router", [prefix + "gate"])
        experts = (f"{prefix}experts.{expert}." for expert in range(config.num_experts))
        matrices = tuple(
            (
                self._own(f"{expert}gate_proj.weight"),
                self._own(f"{expert}up_proj.weight"),
                self._own(f"{expert}down_proj.weight"),
            )
            for expert in experts
        )
        self.operations.append(
            Experts(
                input="normed",
                router="router",
                output="delta",
                matrices=matrices,
                chosen=config.num_experts_per_tok,
                sums_to_one=bool(config.norm_topk_prob),
                activation=self._activation,
            )
        )

    def _norm(
        self, weights: str, register: str, output: str, *, width: int | None = None, heads: int = 1, offset: int = 0
    ) -> None:
        self.operations.append(
            Norm(
                input=register,
                output=output,
                weights=self._own(weights),
                epsilon=float(self.config.rms_norm_eps),
                width=width or self._hidden,
                heads=heads,
                offset=offset,
                plus_one=self.config.model_type in _GEMMA,
            )
        )

    def _product(self, register: str, output: str, modules: Sequence[str]) -> None:
        matrices = tuple(self._own(f"{module}.weight") for module in modules)
        biases = tuple(name for module in modules if (name := f"{module}.bias") in self.names)
        if biases and len(biases) != len(modules):
            raise NoStepListError(f"{biases[0]} is there, and not a bias for each of {', '.join(modules)}")
        self.operations.append(Product(input=register, output=output, matrices=matrices, biases=biases))

    def _register(self, name: str, width: int) -> None:
        if width < 1:
            raise NoStepListError(f"{name}: {width} numbers")
        if self.widths.setdefault(name, width) != width:
            raise NoStepListError(f"layers differ in their sizes ({name}: {self.widths[name]} and {width} numbers)")

    def _own(self, name: str) -> str:
        if name not in self.names:
            raise NoStepListError(f"the checkpoint has no {name}")
        return name

    def _scaling(self, head_dim: int) -> float:
        scalar = self.config.query_pre_attn_scalar
        return math.pow(head_dim if scalar is None else scalar, -0.5)

    @property
    def _softcap(self) -> float | None:
        return self.config.attn_logit_softcapping

    @property
    def _hidden(self) -> int:
        return self.config.hidden_size

    @property
    def _activation(self) -> str:
        name = self.config.hidden_act
        if name not in ACTIVATIONS:
            raise NoStepListError(f"the activation {name!r} is not one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]
