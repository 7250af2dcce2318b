"""Writes a family's list of operations: the blocks that families are put together from.

A family names the parts of a layer as its checkpoint does. What is there is checked: every tensor that an operation
reads is in the checkpoint, and every size is one that kernels take.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from inference_engine.errors import ConfigError
from inference_engine.kernels.routing import Router
from inference_engine.kv.geometry import IMMOVABLE, UNROTATED, LayerGeometry
from inference_engine.models.operations import (
    Add,
    Arrange,
    Attend,
    AttendEarlier,
    AttendLatent,
    Convolve,
    DeltaRule,
    Embed,
    Experts,
    Gated,
    GatedNorm,
    Multiply,
    Norm,
    NoStepListError,
    Operation,
    Product,
    Rotate,
    Scale,
    Select,
    SelectiveScan,
    SigmoidGate,
    Slice,
    Softcap,
    StateSizes,
    StepList,
    Tap,
    UnitNorm,
)

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
LANES = 16  # numbers that a kernel takes at once
SQUARED = "relu2"
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedLayer:
    """index: its number in the model. prefix: of the names of its tensors. stored: the number, among the layers that
    keep entries, of the one that it reads; None, as `geometry` is, without attention. keeper: the prefix of the layer
    that keeps them, itself or an earlier one."""

    index: int
    prefix: str
    stored: int | None
    geometry: LayerGeometry | None
    keeper: str


@dataclass(kw_only=True, slots=True)
class ListWriter:
    """A list while it is written. geometries, reads: the layers and reads of Geometry. names: of the tensors in the
    checkpoint.

    epsilon, plus_one: of all norms; see `Norm`.
    """

    hidden: int
    vocabulary: int
    geometries: Sequence[LayerGeometry]
    reads: Sequence[int | None]
    names: Collection[str]
    epsilon: float
    plus_one: bool = False
    operations: list[Operation] = field(default_factory=list)
    widths: dict[str, int] = field(default_factory=dict)
    states: list[StateSizes] = field(default_factory=list)

    def list(self) -> StepList:
        return StepList(
            operations=tuple(self.operations),
            widths=dict(self.widths),
            layers=tuple(self.geometries),
            hidden=self.hidden,
            vocabulary=self.vocabulary,
            states=tuple(self.states),
        )

    def has(self, name: str) -> bool:
        """Is there such a tensor?"""
        return name in self.names

    def embed(self, *, factor: float = 1.0, matrix: str = EMBEDDING) -> None:
        """hidden = the embedding of each token, times `factor`."""
        if self.hidden < 1:
            raise NoStepListError(f"hidden_size is {self.hidden}")
        self.widths |= dict.fromkeys(("hidden", "normed", "delta", "last"), self.hidden)
        self.embed_as(matrix, "hidden", factor=factor)

    def embed_as(self, matrix: str, output: str, *, factor: float = 1.0) -> None:
        """output = the row of each token in a matrix, times `factor`."""
        self.operations.append(Embed(output=output, matrix=self._own(matrix), factor=factor))

    def layers(self) -> Iterator[ListedLayer]:
        """The layers, one after another. Behind each, steps may ask for its hidden states."""
        keepers: dict[int | None, str] = {}
        for index, stored in enumerate(self.reads):
            prefix = f"model.layers.{index}."
            geometry = None if stored is None else self.geometries[stored]
            keeper = prefix if stored is None else keepers.setdefault(stored, prefix)
            yield ListedLayer(index=index, prefix=prefix, stored=stored, geometry=geometry, keeper=keeper)
            self.operations.append(Tap(input="hidden", layer=index))

    def norm(self, name: str, register: str, output: str, *, pieces: int = 1) -> None:
        """output = the norm of the register, or of each of so many pieces of it, by the weights `name`."""
        self._norm(name, register, output, width=self.widths[register] // pieces, heads=pieces)

    def attend(
        self,
        layer: ListedLayer,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        is_gated: bool = False,
        norms_all_heads: bool = False,
        norms_values: bool = False,
        key_factor: float = 1.0,
        module: str = "self_attn",
        names: tuple[str, str, str] = ("q_norm", "k_norm", "o_proj"),
    ) -> None:
        """delta = attention of normed: projections `q_proj`, `k_proj`, `v_proj` or `qkv_proj`, norms `q_norm` and
        `k_norm` of heads where they are there, rotation, attention, `o_proj`. Without `v_proj`, values are keys before
        their norm. A layer that reads what an earlier one keeps has queries alone.

        scaling: of scores; None: the inverse root of a head's size. is_gated: does `q_proj` give each head a gate of
        what it attends to, behind its query? norms_all_heads: is a norm one of all heads together? norms_values: have
        values one, without weights? key_factor: of keys. module: its name in the layer. names: of the norms and of the
        last projection.
        """
        geometry, prefix = layer.geometry, f"{layer.prefix}{module}."
        assert geometry is not None and layer.stored is not None, "it has attention"
        queries, keys, dim = geometry.query_heads, geometry.kv_heads, geometry.head_dim
        if dim < 1 or dim % LANES:
            raise NoStepListError(f"layer {layer.index}: head size {dim} must be a multiple of {LANES}")
        if keys < 1 or queries < 1 or queries % keys:
            raise NoStepListError(f"layer {layer.index}: {queries} query heads must be a multiple of {keys} KV heads")
        if not geometry.entry.is_even and (not norms_values or geometry.entry.value_in_key):
            shared = f", {geometry.shared_dim} of which are both's" if geometry.shared_dim else ""
            raise NoStepListError(
                f"layer {layer.index} keeps keys of {dim} numbers and values of {geometry.value_dim}{shared}; lists "
                "are of keys and values of one size, side by side"
            )
        if geometry.rotary == IMMOVABLE:
            raise NoStepListError(f"layer {layer.index} changes its keys by position in a way that is not a rotation")
        keeps, mixed = layer.keeper == layer.prefix, self.register("mixed", queries * dim)
        turned = queries + keys if keeps else queries
        heads = self.register("heads", (turned + keys if keeps else turned) * dim)
        is_one, has_values = self.has(f"{prefix}qkv_proj.weight"), self.has(f"{prefix}v_proj.weight")
        parts = "q" if not keeps else "qkv" if has_values or not norms_values else "qk"
        projections = [f"{prefix}qkv_proj"] if is_one else [f"{prefix}{one}_proj" for one in parts]
        gates = ""
        if is_gated:
            both, gates = self.register("gated heads", 2 * (queries + keys) * dim), self.register("gate", queries * dim)
            self.product("normed", both, *projections)
            for output, first in ((heads, 0), (gates, dim)):
                self.slice(both, output, heads=queries, width=2 * dim, first=first, count=dim)
            self.slice(both, heads, first=2 * queries * dim, count=2 * keys * dim, offset=queries * dim)
        elif parts == "qk":
            self.product("normed", heads, *projections, count=turned * dim)
            self.slice(heads, heads, first=queries * dim, count=keys * dim, offset=turned * dim)
        else:
            self.product("normed", heads, *projections)
        for name, count, offset in ((names[0], queries, 0), (names[1], keys, queries * dim))[: 2 if keeps else 1]:
            if self.has(f"{prefix}{name}.weight"):
                width, pieces = (count * dim, 1) if norms_all_heads else (dim, count)
                self._norm(f"{prefix}{name}", heads, heads, width=width, heads=pieces, offset=offset)
        if keeps:
            self.scale(heads, key_factor, offset=queries * dim, width=keys * dim)
        if norms_values and keeps:
            self.unit_norm(heads, heads, width=dim, heads=keys, offset=turned * dim)
        if geometry.rotary != UNROTATED:
            self.operations.append(Rotate(register=heads, rotary=geometry.rotary, heads=turned, width=dim))
        order = _still_first(geometry)
        if order is not None:
            self._share(layer, heads, order, f"{layer.keeper}{module}.{names[1]}.weight")
        scale = float(dim) ** -0.5 if scaling is None else scaling
        attend = Attend if keeps else AttendEarlier
        self.operations.append(attend(input=heads, output=mixed, layer=layer.stored, scaling=scale, softcap=softcap))
        if order is not None:
            turned_first = order[geometry.shared_dim :] + order[: geometry.shared_dim]
            back = tuple(turned_first.index(number) for number in range(dim))
            self.operations.append(Arrange(register=mixed, heads=queries, width=dim, order=back))
        if is_gated:
            self.operations.append(SigmoidGate(input=mixed, gate=gates, output=mixed))
        self.product(mixed, "delta", f"{prefix}{names[2]}")

    def attend_latent(
        self,
        layer: ListedLayer,
        *,
        own: int,
        value: int,
        scaling: float,
        pairs: bool,
        keeps_pairs: bool,
        query_rank: int | None,
        epsilon: float,
    ) -> None:
        """delta = latent attention of normed: `q_proj`, or `q_a_proj`, a norm and `q_b_proj`; `kv_a_proj_with_mqa`, a
        norm, `kv_b_proj` and `o_proj`. epsilon: of both norms. The others: as `AttendLatent` has them.
        """
        geometry, prefix = layer.geometry, f"{layer.prefix}self_attn."
        assert geometry is not None and layer.stored is not None, "it has attention"
        heads, rank, width = geometry.query_heads, geometry.value_dim, geometry.head_dim
        turned = width - rank
        if not geometry.entry.value_in_key or geometry.is_indexed or geometry.rotary == IMMOVABLE:
            raise NoStepListError(f"layer {layer.index} does not keep a compressed vector and rotated numbers alone")
        for name, size in {"kv_lora_rank": rank, "qk_nope_head_dim": own, "v_head_dim": value}.items():
            if size < 1:
                raise NoStepListError(f"layer {layer.index}: {name} is {size}")
        queries, latent, offset = heads * (own + turned), "", 0
        if query_rank is None:  # one product for both
            latent, offset = self.register("latent heads", queries + width), queries
            self.product("normed", latent, f"{prefix}q_proj", f"{prefix}kv_a_proj_with_mqa")
            given = latent
        else:
            normed = self.register("normed ranks", query_rank)
            latent, given = self.register("latent", width), self.register("latent queries", queries)
            self.product("normed", latent, f"{prefix}kv_a_proj_with_mqa")
            self.product("normed", self.register("query ranks", query_rank), f"{prefix}q_a_proj")
            self._norm(f"{prefix}q_a_layernorm", "query ranks", normed, width=query_rank, epsilon=epsilon)
            self.product(normed, given, f"{prefix}q_b_proj")
        mixed = self.register("mixed", heads * value)
        self.operations.append(
            AttendLatent(
                input=given,
                latent=latent,
                output=mixed,
                layer=layer.stored,
                scaling=scaling,
                norm=self._own(f"{prefix}kv_a_layernorm.weight"),
                epsilon=epsilon,
                rotary=geometry.rotary,
                matrix=self._own(f"{prefix}kv_b_proj.weight"),
                heads=heads,
                own=own,
                value=value,
                offset=offset,
                pairs=pairs,
                keeps_pairs=keeps_pairs,
            )
        )
        self.product(mixed, "delta", f"{prefix}o_proj")

    def _share(self, layer: ListedLayer, heads: str, order: tuple[int, ...], weights: str) -> None:
        """Queries, keys and values as entries have them that share numbers; see `models/keyed_values.py`. weights: of
        the norm of keys, by which these differ from values."""
        geometry = layer.geometry
        assert geometry is not None, "it has attention"
        queries, keys, dim, shared = geometry.query_heads, geometry.kv_heads, geometry.head_dim, geometry.shared_dim
        self.operations.append(
            Arrange(register=heads, heads=queries, width=dim, order=order, weights=self._own(weights), weighted=shared)
        )
        if layer.keeper == layer.prefix:
            for place, own in ((queries, order), (queries + keys, order[shared:] + order[:shared])):
                self.operations.append(Arrange(register=heads, heads=keys, width=dim, order=own, offset=place * dim))

    def keep(self, layer: ListedLayer, sizes: Mapping[str, int]) -> int:
        """The number of a layer's state, of these sizes (`StateSizes`)."""
        for name, size in sizes.items():
            if size < 1:
                raise NoStepListError(f"layer {layer.index}: {name} is {size}")
        state = StateSizes(layer=layer.index, **sizes)
        if state.key_heads and state.value_heads % state.key_heads:
            raise NoStepListError(f"layer {layer.index}: {state.value_heads} heads share {state.key_heads} keys")
        if any(size % LANES for size in (state.channels, state.key_dim, state.value_dim)):
            raise NoStepListError(
                f"layer {layer.index}: a state of {state.channels} channels, in heads of {state.key_dim} by "
                f"{state.value_dim} numbers; they must be multiples of {LANES}"
            )
        self.states.append(state)
        return len(self.states) - 1

    def delta_rule(
        self,
        prefix: str,
        state: int,
        *,
        inputs: str,
        gates: str,
        outer: str,
        names: tuple[str, str],
        epsilon: float,
        doubles: bool = False,
    ) -> None:
        """delta = the gated delta rule of the registers `inputs` (queries, keys, values) and `gates`, behind the
        convolution `conv1d`, or one for each of the three; then a norm, gated by `outer`, and a projection, which have
        these names.
        """
        sizes = self.states[state]
        mixed = self.register("mixed by states", sizes.value_heads * sizes.value_dim)
        apart = [f"{prefix}{one}_conv1d" for one in "qkv"]
        names_of = apart if self.has(f"{apart[0]}.weight") else [f"{prefix}conv1d"]
        convolved = self.convolve(inputs, state, *names_of, activation="silu")
        self.operations += [
            DeltaRule(
                input=convolved,
                gate=gates,
                output=mixed,
                decay=self._own(f"{prefix}A_log"),
                bias=self._own(f"{prefix}dt_bias"),
                state=state,
                doubles=doubles,
            ),
            GatedNorm(
                input=mixed,
                gate=outer,
                output=mixed,
                weights=self._own(f"{prefix}{names[0]}.weight"),
                epsilon=epsilon,
                width=sizes.value_dim,
                heads=sizes.value_heads,
            ),
        ]
        self.product(mixed, "delta", f"{prefix}{names[1]}")

    def scan(
        self,
        prefix: str,
        state: int,
        *,
        inputs: str,
        gates: str,
        outer: str,
        epsilon: float,
        groups: int,
        least: float = 0.0,
        gates_first: bool = True,
    ) -> None:
        """delta = a state space of the registers `inputs` (values, keys, queries) and `gates`, behind the convolution
        `conv1d`; then a norm of `groups` if there is one, gated by `outer` before or behind it, and a projection.

        least: of the sizes of steps.
        """
        sizes = self.states[state]
        width = sizes.value_heads * sizes.value_dim
        mixed = self.register("mixed by states", width)
        convolved = self.convolve(inputs, state, f"{prefix}conv1d", activation="silu")
        self.operations += [
            SelectiveScan(
                input=convolved,
                gate=gates,
                output=mixed,
                decay=self._own(f"{prefix}A_log"),
                bias=self._own(f"{prefix}dt_bias"),
                skip=self._own(f"{prefix}D"),
                state=state,
                least=least,
            )
        ]
        if self.has(weights := f"{prefix}norm.weight"):
            if groups > 1 and not gates_first:
                raise NoStepListError(f"{weights} is of {groups} groups, which are gated behind it")
            self.operations.append(
                GatedNorm(
                    input=mixed,
                    gate=outer,
                    output=mixed,
                    weights=weights,
                    epsilon=epsilon,
                    width=width // groups,
                    heads=groups,
                    first=gates_first,
                )
            )
        else:
            both = self.register("gates of states", 2 * width)
            self.slice(outer, both, first=0, count=width)
            self.slice(mixed, both, first=0, count=width, offset=width)
            self.activate(both, mixed, "silu")
        self.product(mixed, "delta", f"{prefix}out_proj")

    def convolve(self, register: str, state: int, *modules: str, activation: str | None = None) -> str:
        """The register of the convolution of another, by the weights of these modules."""
        output, bias = self.register("convolved", self.states[state].channels), f"{modules[0]}.bias"
        self.operations.append(
            Convolve(
                input=register,
                output=output,
                weights=tuple(self._own(f"{module}.weight") for module in modules),
                bias=bias if len(modules) == 1 and self.has(bias) else None,
                activation=activation,
                state=state,
            )
        )
        return output

    def multiply(self, register: str, other: str, output: str) -> None:
        """output = register · other."""
        self.operations.append(Multiply(input=register, other=other, output=output))

    def slice(
        self,
        register: str,
        output: str,
        *,
        first: int,
        count: int,
        heads: int = 1,
        width: int | None = None,
        offset: int = 0,
    ) -> None:
        """A part of a register, or of each of its heads of `width` numbers."""
        whole = self.widths[register] if width is None else width
        self.operations.append(
            Slice(input=register, output=output, heads=heads, width=whole, first=first, count=count, offset=offset)
        )

    def gated(
        self,
        prefix: str,
        *,
        inner: int | None,
        activation: str,
        output: str = "delta",
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        gate_factor: float = 1.0,
    ) -> None:
        """output = down_proj(activation(gate_proj(normed)) · up_proj(normed)), or of `gate_up_proj`.

        inner: the width between them. activation: under transformers' name. names: of the projections. gate_factor: of
        what is activated.
        """
        inner = inner or 0
        gates, between = self.register("gates", 2 * inner), self.register("inner", inner)
        *both, last = names
        if self.has(f"{prefix}gate_up_proj.weight"):
            both = ["gate_up_proj"]
        self.product("normed", gates, *(f"{prefix}{name}" for name in both))
        self.scale(gates, gate_factor, width=inner)
        self.activate(gates, between, activation)
        self.product(between, output, f"{prefix}{last}")

    def squared(self, prefix: str, *, inner: int, output: str = "delta") -> None:
        """output = down_proj of the squares of what is positive of up_proj(normed)."""
        twice, between = self.register("gates", 2 * inner), self.register("inner", inner)
        self.product("normed", twice, f"{prefix}up_proj", count=inner)
        self.slice(twice, twice, first=0, count=inner, offset=inner)
        self.operations.append(Gated(input=twice, output=between, activation="relu"))
        self.product(between, output, f"{prefix}down_proj")

    def experts(
        self,
        prefix: str,
        router: Router,
        *,
        count: int,
        activation: str,
        bias: str | None = None,
        scales: str | None = None,
        gate: str = "gate",
        chooses_by: str = "normed",
        norm: str | None = None,
        registers: tuple[str, str] = ("normed", "delta"),
    ) -> None:
        """delta = the mixture of `count` experts of normed, which `router` chooses by the logits of `gate`.

        activation: under transformers' name; `relu2` of experts without a gate. bias: the tensor that the router adds
        to scores. scales: the tensor of each expert's factor. chooses_by: the register of which the logits are made.
        norm: of hidden, for what they multiply. registers: in place of normed and delta.
        """
        try:
            router.check(count)
        except ConfigError as error:
            raise NoStepListError(str(error)) from error
        logits = self.register("router", count)
        self.product(chooses_by, logits, f"{prefix}{gate}")
        if norm is not None:
            self.norm(norm, "hidden", registers[0])
        squares = activation == SQUARED
        parts = ("up_proj", "down_proj") if squares else ("gate_proj", "up_proj", "down_proj")
        matrices = ([self._own(f"{prefix}experts.{expert}.{part}.weight") for part in parts] for expert in range(count))
        self.operations.append(
            Experts(
                input=registers[0],
                router=logits,
                output=registers[1],
                matrices=tuple(map(tuple, matrices)),
                routing=router,
                bias=None if bias is None else self._own(bias),
                scales=None if scales is None else self._own(scales),
                activation="relu" if squares else _activation(activation),
            )
        )

    def shared_expert(self, prefix: str, *, inner: int, activation: str, gate: str | None = None) -> None:
        """delta += a gated product that all tokens have. gate: the module whose sigmoid it is multiplied by."""
        output = self.register("shared", self.hidden)
        self.gated(prefix, inner=inner, activation=activation, output=output)
        if gate is not None:
            opens = self.register("shared gate", 1)
            self.product("normed", opens, gate)
            self.operations.append(SigmoidGate(input=output, gate=opens, output=output))
        self.add(output, "delta")

    def add(self, register: str, output: str, *, factor: float = 1.0) -> None:
        """output += register · factor."""
        self.operations.append(Add(input=register, output=output, factor=factor))

    def head(
        self,
        *,
        softcap: float | None = None,
        norm: str = "model.norm",
        factor: float = 1.0,
        embedding: str = EMBEDDING,
    ) -> None:
        """The logits of the queries asked for, by the head or, if there is none, the embedding, times `factor`."""
        self.operations.append(Select(input="hidden", output="last"))
        self.norm(norm, "last", "last")
        self.scale("last", factor)
        head = HEAD if self.has(HEAD) else embedding
        biases = ("lm_head.bias",) if self.has("lm_head.bias") else ()
        self.operations.append(Product(input="last", output=None, matrices=(head,), biases=biases))
        if softcap is not None:
            self.operations.append(Softcap(limit=softcap))

    def scale(
        self,
        register: str,
        factor: float = 1.0,
        tensor: str | None = None,
        *,
        offset: int = 0,
        width: int | None = None,
    ) -> None:
        """The register, or a part of it, times `factor` and the one number of a tensor."""
        own = None if tensor is None else self._own(tensor)
        if own is not None or factor != 1.0:
            self.operations.append(Scale(register=register, factor=factor, tensor=own, offset=offset, width=width))

    def activate(self, register: str, output: str, activation: str) -> None:
        """output = activation(first half of register) · second half."""
        self.operations.append(Gated(input=register, output=output, activation=_activation(activation)))

    def unit_norm(self, register: str, output: str, *, width: int, heads: int = 1, offset: int = 0) -> None:
        """output = the norm of pieces of the register, without weights."""
        self.operations.append(
            UnitNorm(input=register, output=output, epsilon=self.epsilon, width=width, heads=heads, offset=offset)
        )

    def product(self, register: str, output: str, *modules: str, count: int | None = None) -> None:
        """output, or its first `count` numbers = the register times the matrices of these modules, one below the other,
        and their biases."""
        matrices = tuple(self._own(f"{module}.weight") for module in modules)
        biases = tuple(name for module in modules if (name := f"{module}.bias") in self.names)
        if biases and len(biases) != len(modules):
            raise NoStepListError(f"{biases[0]} is there, and not a bias for each of {', '.join(modules)}")
        self.operations.append(Product(input=register, output=output, matrices=matrices, biases=biases, count=count))

    def _norm(
        self,
        name: str,
        register: str,
        output: str,
        *,
        width: int,
        heads: int = 1,
        offset: int = 0,
        epsilon: float | None = None,
    ) -> None:
        self.operations.append(
            Norm(
                input=register,
                output=output,
                weights=name if self.has(name) else self._own(f"{name}.weight"),
                epsilon=self.epsilon if epsilon is None else epsilon,
                width=width,
                heads=heads,
                offset=offset,
                plus_one=self.plus_one,
            )
        )

    def register(self, name: str, width: int) -> str:
        """A register of this name and width. Layers of other sizes have another one."""
        if width < 1:
            raise NoStepListError(f"{name}: {width} numbers")
        if self.widths.get(name, width) != width:
            name = f"{name} of {width}"
        self.widths[name] = width
        return name

    def _own(self, name: str) -> str:
        if name not in self.names:
            raise NoStepListError(f"the checkpoint has no {name}")
        return name


def _still_first(geometry: LayerGeometry) -> tuple[int, ...] | None:
    """The numbers of a head whose keys and values share what is not rotated: those first. None if they share none."""
    dim, shared = geometry.head_dim, geometry.shared_dim
    if not shared:
        return None
    half, turned = dim // 2, (dim - shared) // 2
    return (
        *(*range(turned, half), *range(half + turned, dim)),
        *(*range(turned), *range(half, half + turned)),
    )


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise NoStepListError(f"the activation {name!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
