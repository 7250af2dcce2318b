"""The operations that a model's step is a list of: the one place that says what each reads, writes and computes.

    hidden = embed(ids)
    normed = norm(hidden) · heads = normed · [q k v] · rotate(heads) · mixed = attend(heads) · delta = mixed · o
    hidden += delta · normed = norm(hidden) · gates = normed · [gate up] · inner = act(gate) · up · delta = inner · down
    hidden += delta · … · last = norm(hidden of the queries asked for) · logits = last · head

A register holds one vector for each token; layers of other sizes have registers of their own. Families write lists
(`models/families`); an executor registers a kernel for each operation that it runs (`OperationKernels`), and what it
lacks for a list is refused by name. Where `plain` is not left out, it is the reference of these kernels, on torch; of
products, attention, experts, gates and states `inference_engine/kernels` has the references.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from inference_engine.kernels.routing import Router
from inference_engine.kv.geometry import LayerGeometry

if TYPE_CHECKING:  # lists are written and read without torch
    from torch import Tensor

K = TypeVar("K")
_ALIGNED = 16  # numbers


class NoStepListError(Exception):
    """The model cannot be written as a list of operations that the executor has; the message says why."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Base of all operations: frozen values."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The registers that it reads, without one that it adds to."""
        return tuple(
            getattr(self, name) for name in ("input", "router", "gate", "other", "register") if hasattr(self, name)
        )

    @property
    def writes(self) -> str | None:
        """The register that it replaces or adds to, or leaves as it is; None: the logits."""
        return next((getattr(self, name) for name in ("output", "register", "input") if hasattr(self, name)), None)

    def plain(self, step: PlainStep) -> None:
        """The reference: float32 between input and output, rounded once."""
        raise NotImplementedError(type(self).__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class PlainStep:
    """A step on torch as it goes through a list. registers: [N, width] each, replaced and never written to.

    tensor: of the checkpoint, by its name. turn: of a rotation table, cosines and sines [N, turned / 2].
    """

    ids: Tensor
    kept: Tensor
    tap_layers: Collection[int]
    tensor: Callable[[str], Tensor]
    turn: Callable[[str], tuple[Tensor, Tensor]]
    registers: dict[str, Tensor] = field(default_factory=dict)
    taps: list[Tensor] = field(default_factory=list)
    logits: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Embed(Operation):
    """output = the embedding of each token's id, times `factor`."""

    output: str
    matrix: str
    factor: float = 1.0

    def plain(self, step: PlainStep) -> None:
        states = step.tensor(self.matrix).index_select(0, step.ids)
        # As modules do it: the factor is rounded to the dtype.
        factor = float(states.new_tensor(self.factor, device="cpu"))
        step.registers[self.output] = states if factor == 1.0 else states * factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm(Operation):
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

    def plain(self, step: PlainStep) -> None:
        states, end = step.registers[self.input], self.offset + self.heads * self.width
        part = states[:, self.offset : end].float().view(len(states), self.heads, self.width)
        weights = step.tensor(self.weights).float() + (1.0 if self.plus_one else 0.0)
        normed = part * (part.square().mean(-1, keepdim=True) + self.epsilon).rsqrt() * weights
        out = states.clone() if self.output == self.input else states.new_empty(len(states), end - self.offset)
        first = self.offset if self.output == self.input else 0
        out[:, first : first + end - self.offset] = normed.flatten(1)
        step.registers[self.output] = out


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitNorm(Operation):
    """`Norm` without weights."""

    input: str
    output: str
    epsilon: float
    width: int
    heads: int = 1
    offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Product(Operation):
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
class Rotate(Operation):
    """RoPE of `heads` heads of `width` numbers, from `offset` on, in place. rotary: the table.

    A table may turn the first numbers of a head alone: each of their first half with the one half of them further.
    """

    register: str
    rotary: str
    heads: int
    width: int
    offset: int = 0

    def plain(self, step: PlainStep) -> None:
        cos, sin = (part.float()[:, None] for part in step.turn(self.rotary))
        half, out = cos.shape[-1], step.registers[self.register].clone()
        heads = out[:, self.offset : self.offset + self.heads * self.width].view(len(out), self.heads, self.width)
        first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
        turned = first * cos - second * sin, second * cos + first * sin
        heads[..., :half], heads[..., half : 2 * half] = turned
        step.registers[self.register] = out


@dataclass(frozen=True, kw_only=True, slots=True)
class Attend(Operation):
    """Write K and V of the layer and attend. input: queries, keys, values of a token, one behind the other."""

    input: str
    output: str
    layer: int
    scaling: float
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttendEarlier(Operation):
    """Attend to what an earlier operation has written of this layer, by its K and V. input: queries of a token."""

    input: str
    output: str
    layer: int
    scaling: float
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttendLatent(Operation):
    """Write the layer's entry, one vector for all heads, and attend (`models/latent_attention.py`).

    input: queries of a token, `heads` of `own` numbers and of those that are rotated. latent: from `offset` on, the
    compressed vector, which is normed here, and numbers that are rotated. output: `heads` of `value` numbers. matrix:
    of keys and values of all heads. pairs: are numbers beside each other turned together? Then keeps_pairs: do they
    stay so? Else the first ones come first.
    """

    input: str
    latent: str
    output: str
    layer: int
    scaling: float
    norm: str
    epsilon: float
    rotary: str
    matrix: str
    heads: int
    own: int
    value: int
    offset: int = 0
    pairs: bool = False
    keeps_pairs: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrange(Operation):
    """In place, each of `heads` pieces of `width` numbers, from `offset` on: its number `order[i]` becomes number i.

    weights: a tensor of `width` numbers, which the first `weighted` ones, in their new order, are multiplied by.
    """

    register: str
    heads: int
    width: int
    order: tuple[int, ...]
    offset: int = 0
    weights: str | None = None
    weighted: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice(Operation):
    """output, from `offset` on = `count` numbers, from `first` on, of each of the first `heads` pieces of `width`."""

    input: str
    output: str
    heads: int
    width: int
    first: int
    count: int
    offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolve(Operation):
    """output = activation of a causal convolution of each number of input over the session's last tokens, this one
    behind them. weights: tensors [numbers, 1, taps], one below the other. state: which of `StepList.states` keeps the
    inputs before the step."""

    input: str
    output: str
    weights: tuple[str, ...]
    state: int
    bias: str | None = None
    activation: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaRule(Operation):
    """The gated delta rule (Yang et al., arXiv 2412.06464): per head a matrix S of the whole history, keys by values,

        S ← decay · S,  S ← S + k (beta · (v - kᵀ S))ᵀ,  output = qᵀ S

    input: queries, keys and values of a token, one behind the other; queries and keys are normed here. gate: the logits
    of beta, then what `decay` and `bias` make the decay of: exp(-exp(decay) · softplus(x + bias)). doubles: is beta up
    to 2? state: of `StepList.states`, which has the sizes. It may write into its inputs.
    """

    input: str
    gate: str
    output: str
    decay: str
    bias: str
    state: int
    doubles: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectiveScan(Operation):
    """The state space of Mamba 2 (Dao and Gu, arXiv 2405.21060): per head a matrix S of the whole history,

        S ← exp(-exp(decay) · t) · S + k (t · v)ᵀ,  output = qᵀ S + skip · v        t = softplus(gate + bias)

    input: values, keys and queries of a token (x, B and C), one behind the other. gate: a number for each head. state:
    of `StepList.states`, which has the sizes. least: of t. It may write into its inputs.
    """

    input: str
    gate: str
    output: str
    decay: str
    bias: str
    skip: str
    state: int
    least: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedNorm(Operation):
    """output = norm(input) · silu(gate), or norm(input · silu(gate)): a root mean square norm of `heads` pieces of
    `width` numbers. weights: of a piece; of all pieces where the gate comes `first`."""

    input: str
    gate: str
    output: str
    weights: str
    epsilon: float
    width: int
    heads: int
    first: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiply(Operation):
    """output = input · other, number by number."""

    input: str
    other: str
    output: str

    def plain(self, step: PlainStep) -> None:
        step.registers[self.output] = step.registers[self.input] * step.registers[self.other]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale(Operation):
    """The register, or `width` numbers of it from `offset` on, times `factor` and, if there is a `tensor`, its one
    number."""

    register: str
    factor: float = 1.0
    tensor: str | None = None
    offset: int = 0
    width: int | None = None

    def plain(self, step: PlainStep) -> None:
        factor = self.factor if self.tensor is None else self.factor * step.tensor(self.tensor)
        states = step.registers[self.register].clone()
        end = states.shape[1] if self.width is None else self.offset + self.width
        states[:, self.offset : end] *= factor
        step.registers[self.register] = states


@dataclass(frozen=True, kw_only=True, slots=True)
class Add(Operation):
    """output += input · factor."""

    input: str
    output: str
    factor: float = 1.0

    def plain(self, step: PlainStep) -> None:
        states, added = step.registers[self.output], step.registers[self.input]
        step.registers[self.output] = states.add(added, alpha=self.factor)  # in float32, rounded once


@dataclass(frozen=True, kw_only=True, slots=True)
class Gated(Operation):
    """output = activation(first half of input) · second half. activation: `silu`, `gelu_tanh` or `relu`."""

    input: str
    output: str
    activation: str

    def plain(self, step: PlainStep) -> None:
        states = step.registers[self.input]
        gate, up = states.float().chunk(2, dim=-1)
        if self.activation == "silu":
            active = gate * gate.sigmoid()
        elif self.activation == "relu":
            active = gate.relu()
        else:
            active = 0.5 * gate * (1.0 + (0.7978845608028654 * (gate + 0.044715 * gate**3)).tanh())
        step.registers[self.output] = (active * up).to(states.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class SigmoidGate(Operation):
    """output = input · sigmoid(gate), which has one number or as many as input."""

    input: str
    gate: str
    output: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts(Operation):
    """output = the gated products of the experts that each token is routed to, times their weights.

    router: the register of its logits. matrices: gate, up and down of each expert; or up and down, whose product
    between them is its own gate. bias: a tensor, of `routing`.
    scales: a tensor, of which each expert's weight is multiplied by its number.
    """

    input: str
    router: str
    output: str
    matrices: tuple[tuple[str, ...], ...]
    routing: Router
    activation: str
    bias: str | None = None
    scales: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Given(Operation):
    """output = the vectors that the caller hands in: for lists that begin with states, not with ids."""

    output: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Write(Operation):
    """Write K and V of the layer; nothing attends. input: keys, values of a token, one behind the other."""

    input: str
    layer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tap(Operation):
    """The hidden states after this layer, for steps that ask for them."""

    input: str
    layer: int

    def plain(self, step: PlainStep) -> None:
        if self.layer in step.tap_layers:
            step.taps.append(step.registers[self.input])


@dataclass(frozen=True, kw_only=True, slots=True)
class Select(Operation):
    """output = input of the queries whose logits are asked for; the operations behind it are about those."""

    input: str
    output: str

    def plain(self, step: PlainStep) -> None:
        states = step.registers[self.input]
        is_all = len(states) == len(step.kept) == 1  # of a step of one token, that one is kept
        step.registers[self.output] = states if is_all else states.index_select(0, step.kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce(Operation):
    """The register is the sum of what each rank of a model has in it. Of a list that is split between ranks."""

    register: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Softcap(Operation):
    """logits = limit · tanh(logits / limit)."""

    limit: float

    def plain(self, step: PlainStep) -> None:
        assert step.logits is not None, "the logits come before their cap"
        step.logits = (step.logits / self.limit).tanh() * self.limit


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSizes:
    """What a layer keeps of the history: the inputs of a convolution of `channels` numbers over `taps` tokens, and of
    each of `value_heads` heads a matrix of `key_dim` · `value_dim` numbers, which share `key_heads` keys. layer: of the
    model."""

    layer: int
    channels: int
    taps: int
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    def numbers(self, room: int) -> int:
        """Those of a session, with room for so many entries: the matrices; keys, values and decays; the inputs."""
        entry = self.key_heads * self.key_dim + self.value_heads * (self.value_dim + 1)
        matrices = self.value_heads * self.key_dim * self.value_dim
        numbers = matrices + room * entry + (self.taps - 1 + room) * self.channels
        return -(-numbers // _ALIGNED) * _ALIGNED


@dataclass(frozen=True, kw_only=True, slots=True)
class StepList:
    """The operations of a step, and the numbers that each register holds for one token. states: of the layers that keep
    a recurrent state."""

    operations: tuple[Operation, ...]
    widths: dict[str, int]
    layers: tuple[LayerGeometry, ...]
    hidden: int
    vocabulary: int
    states: tuple[StateSizes, ...] = ()


class OperationKernels(Generic[K]):
    """What an executor has for each type of operation."""

    def __init__(self, executor: str) -> None:
        """executor: its name, in a refusal."""
        self._executor = executor
        self._found: dict[type, K] = {}

    def of(self, *kinds: type) -> Callable[[K], K]:
        """Register what is decorated for these types of operations."""

        def register(kernel: K) -> K:
            self._found |= dict.fromkeys(kinds, kernel)
            return kernel

        return register

    def __getitem__(self, operation: object) -> K:
        return self._found[type(operation)]

    def supports(self, operation: object) -> bool:
        return type(operation) in self._found

    def check(self, operations: Iterable[object]) -> None:
        """Raise NoStepListError that names every type of operation that there is no kernel for."""
        missing = sorted({type(one).__name__ for one in operations if not self.supports(one)})
        if missing:
            raise NoStepListError(f"{self._executor} has no kernel for {', '.join(missing)}")
