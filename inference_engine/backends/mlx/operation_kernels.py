"""What MLX computes for each operation of a list: functions that go on with the graph of a step.

Queries, keys and values of a token are three registers of heads here, so that norms and rotation copy nothing. Sums
over a state, a convolution and experts are float32 between input and output.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import mlx.core as mx

from inference_engine.backends.mlx.list_weights import ListWeights
from inference_engine.backends.mlx.step_states import RuleInputs, StepStates
from inference_engine.backends.mlx.weights import Matrix
from inference_engine.errors import ModelError
from inference_engine.kernels.routing import Router
from inference_engine.kernels.states import StateLayer
from inference_engine.kv.geometry import LayerGeometry
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
    OperationKernels,
    Product,
    Rotate,
    Scale,
    Select,
    SelectiveScan,
    SigmoidGate,
    Slice,
    Softcap,
    Tap,
    UnitNorm,
)

_NORM_EPSILON = 1e-6  # of queries and keys of the delta rule


@dataclass(frozen=True, slots=True)
class AttendCall:
    """Of an attention, which layer's entries it reads, and how their scores become weights."""

    layer: int
    scaling: float
    softcap: float | None = None


class LayerAttention(Protocol):
    """Queries, keys and values of a layer, [N, H, D] each, the first two rotated -> [N, Hq · Dv]. Without keys and
    values: of the step's tokens they were given before."""

    def __call__(
        self, call: AttendCall, queries: mx.array, keys: mx.array | None, values: mx.array | None
    ) -> mx.array: ...


@dataclass(slots=True, eq=False)
class GraphStep:
    """The graph of one step while it is built. registers: of attention, queries, keys, values apart. None: logits."""

    ids: mx.array
    turns: Mapping[str, tuple[mx.array, mx.array]]
    attend: LayerAttention
    states: StepStates | None
    logit_queries: mx.array
    tap_layers: frozenset[int]
    taps: dict[int, mx.array] = field(default_factory=dict)
    registers: dict[str | None, Any] = field(default_factory=dict)

    @property
    def kept(self) -> StepStates:
        assert self.states is not None, "a list with states has those of its sessions"
        return self.states


# -- from operations to functions --------------------------------------------------------------------------------------

Compute = Callable[[GraphStep], Any]
# Prepares an operation, by its number in the list, and returns what computes the register that it writes.
KERNELS: OperationKernels[Callable[[ListWeights, Any, int], Compute]] = OperationKernels("MLX")


@KERNELS.of(Embed)
def _embed(program: ListWeights, operation: Embed, _: int) -> Compute:
    matrix, factor = program.product([operation.matrix])[0], program.factor(operation.factor)
    return lambda step: _times(matrix.rows(step.ids), factor)


@KERNELS.of(Norm, UnitNorm)
def _norm(program: ListWeights, operation: Norm | UnitNorm, index: int) -> Compute:
    vector, width = None, operation.width
    if isinstance(operation, Norm):
        vector = program.weights.vector(operation.weights, added=1.0 if operation.plus_one else 0.0)
        vector = program.checked(operation.weights, vector, width)

    def normed(states: mx.array) -> mx.array:
        shape = states.shape
        if shape[-1] != width:  # some pieces, or all heads as one
            states = states.reshape(len(states), -1, width)
        return mx.fast.rms_norm(states, vector, operation.epsilon).reshape(shape)

    return _in_place(program, operation, index, operation.offset, operation.heads * width, normed)


@KERNELS.of(Scale)
def _scale(program: ListWeights, operation: Scale, index: int) -> Compute:
    factor = mx.array(operation.factor)
    if operation.tensor is not None:
        factor = program.constant(factor * program.numbers(operation.tensor, 1))
    width = operation.width or program.steps.widths[operation.register]
    return _in_place(program, operation, index, operation.offset, width, lambda states: _scaled(states, factor))


@KERNELS.of(Arrange)
def _arrange(program: ListWeights, operation: Arrange, index: int) -> Compute:
    order, factors = mx.array(operation.order), None
    if operation.weights is not None:
        own = program.weights.vector(operation.weights, dtype=mx.float32)[order]
        factors = program.constant(mx.where(mx.arange(operation.width) < operation.weighted, own, 1.0))

    def arranged(states: mx.array) -> mx.array:
        heads = states.reshape(len(states), -1, operation.width)[..., order]
        return (heads if factors is None else _scaled(heads, factors)).reshape(states.shape)

    whole = operation.heads * operation.width
    return _in_place(program, operation, index, operation.offset, whole, arranged)


def _in_place(
    program: ListWeights, operation: Any, index: int, offset: int, width: int, change: Callable[[mx.array], mx.array]
) -> Compute:
    """Of an operation on `width` numbers of a register from `offset` on: all, or whole parts of what attention reads.

    change: of [N, width], or [N, heads, D].
    """
    given = operation.input if hasattr(operation, "input") else operation.register
    output, layer = operation.writes, program.layer_of(given, index)
    if layer is None:

        def compute(step: GraphStep) -> Any:
            states = step.registers[given]
            if not offset and width >= states.shape[-1]:
                return change(states)
            end = offset + width
            return mx.concatenate([states[:, :offset], change(states[:, offset:end]), states[:, end:]], axis=-1)

        if given != output and (offset or width != program.steps.widths[given]):
            raise NoStepListError(f"{type(operation).__name__} of a part of {given} is written to another register")
        return compute

    firsts = _firsts(layer)
    places = [place for place in range(3) if offset <= firsts[place] and firsts[place + 1] <= offset + width]
    if given != output or sum(firsts[place + 1] - firsts[place] for place in places) != width:
        raise NoStepListError(
            f"{type(operation).__name__} is about neither the queries, the keys nor the values of a layer"
        )

    def compute_heads(step: GraphStep) -> Any:
        heads = list(step.registers[given])
        for place in places:
            heads[place] = change(heads[place])
        return heads

    return compute_heads


def _firsts(layer: LayerGeometry) -> list[int]:
    """Where queries, keys and values begin in what attention reads, and where they end."""
    counts = layer.query_heads, layer.kv_heads, layer.kv_heads
    return [0, *itertools.accumulate(count * layer.head_dim for count in counts)]


def _as_heads(layer: LayerGeometry, rows: mx.array, offset: int = 0) -> list[mx.array | None]:
    """Queries, keys and values of numbers [N, width] that begin at `offset`. None: they are not among them."""
    firsts, end = _firsts(layer), offset + rows.shape[-1]
    return [
        rows[:, first - offset : last - offset].reshape(len(rows), -1, layer.head_dim)
        if offset <= first and last <= end
        else None
        for first, last in pairwise(firsts)
    ]


@KERNELS.of(Product)
def _product(program: ListWeights, operation: Product, index: int) -> Compute:
    if operation.offset:
        raise NoStepListError("a product of a model begins where its register does")
    matrices, output = program.product(operation.matrices), operation.output
    width = program.steps.vocabulary if output is None else operation.count or program.steps.widths[output]
    outputs = sum(matrix.numbers.shape[-2] for matrix in matrices)
    if outputs != width:
        raise ModelError(
            f"{', '.join(operation.matrices)} have {outputs} outputs, the configuration asks for {width}; the weights "
            "do not fit config.json"
        )
    biases = [program.weights.vector(name) for name in operation.biases]
    bias = program.checked(operation.biases[0], mx.concatenate(biases), width) if biases else None
    layer = program.layer_of(output, index)

    def compute(step: GraphStep) -> Any:
        parts = [matrix.times(step.registers[operation.input]) for matrix in matrices]
        out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
        out = out if bias is None else out + bias
        if layer is None:
            return out.astype(mx.float32) if output is None else out
        return _as_heads(layer, out)

    return compute


@KERNELS.of(Slice)
def _slice(program: ListWeights, operation: Slice, index: int) -> Compute:
    source, layer = program.layer_of(operation.input, index), program.layer_of(operation.output, index)

    def compute(step: GraphStep) -> Any:
        states: Any = step.registers[operation.input]
        before: Any = step.registers.get(operation.output)
        if source is not None:
            states = mx.concatenate([part.reshape(len(part), -1) for part in states if part is not None], axis=-1)
        pieces = states[:, : operation.heads * operation.width].reshape(len(states), operation.heads, -1)
        found = pieces[..., operation.first : operation.first + operation.count].reshape(len(states), -1)
        if layer is not None:
            own = _as_heads(layer, found, operation.offset)
            return (
                [new if old is None or new is not None else old for old, new in zip(before, own, strict=True)]
                if operation.offset
                else own
            )
        # Behind the first, into the register of the first.
        return mx.concatenate([before[:, : operation.offset], found], axis=-1) if operation.offset else found

    return compute


@KERNELS.of(Rotate)
def _rotate(program: ListWeights, operation: Rotate, index: int) -> Compute:
    layer = program.layer_of(operation.register, index)
    if (
        layer is None
        or operation.offset
        or operation.heads not in (layer.query_heads, layer.query_heads + layer.kv_heads)
    ):
        raise NoStepListError("a layer rotates something else than its queries and keys")
    turned = 1 if operation.heads == layer.query_heads else 2

    def compute(step: GraphStep) -> Any:
        heads, turn = step.registers[operation.register], step.turns[operation.rotary]
        return [*(_turned(each, *turn) for each in heads[:turned]), *heads[turned:]]

    return compute


@KERNELS.of(Attend, AttendEarlier)
def _attend(_: ListWeights, operation: Attend | AttendEarlier, __: int) -> Compute:
    call = AttendCall(operation.layer, operation.scaling, operation.softcap)
    if isinstance(operation, AttendEarlier):
        return lambda step: step.attend(call, step.registers[operation.input][0], None, None)
    return lambda step: step.attend(call, *step.registers[operation.input])


@KERNELS.of(AttendLatent)
def _attend_latent(program: ListWeights, operation: AttendLatent, _: int) -> Compute:
    """Queries times the keys' half of the matrix read the compressed vectors, as one KV head."""
    layer, own, heads = program.steps.layers[operation.layer], operation.own, operation.heads
    call = AttendCall(operation.layer, operation.scaling)
    rank, width = layer.value_dim, layer.head_dim
    norm = program.checked(operation.norm, program.weights.vector(operation.norm), rank)
    matrix = program.weights.whole(operation.matrix)
    if matrix.shape != (heads * (own + operation.value), rank):
        raise ModelError(
            f"{operation.matrix} has the shape {tuple(matrix.shape)}, the configuration asks for "
            f"{(heads * (own + operation.value), rank)}; the weights do not fit config.json"
        )
    keys, values = mx.split(matrix.reshape(heads, -1, rank), [own], axis=1)
    (keys, values) = (
        each.numbers for each in program.computed([Matrix(mx.contiguous(each)) for each in (keys, values)])
    )

    def turned(states: mx.array, turn: tuple[mx.array, mx.array]) -> mx.array:
        if not operation.pairs:
            return _turned(states, *turn)
        found = _turned(mx.concatenate([states[..., ::2], states[..., 1::2]], axis=-1), *turn)
        if not operation.keeps_pairs:
            return found
        return mx.stack([*mx.split(found, 2, axis=-1)], axis=-1).reshape(states.shape)

    def compute(step: GraphStep) -> Any:
        queries, turn = step.registers[operation.input], step.turns[operation.rotary]
        count, turns = len(queries), width - rank
        queries = queries[:, : heads * (own + turns)].reshape(count, heads, -1)
        entry = step.registers[operation.latent][:, operation.offset : operation.offset + width]
        compressed = mx.fast.rms_norm(entry[:, :rank], norm, operation.epsilon)[:, None]
        absorbed = (queries[..., :own].swapaxes(0, 1) @ keys).swapaxes(0, 1)
        asked = mx.concatenate([absorbed, turned(queries[..., own:], turn)], axis=-1)
        key = mx.concatenate([compressed, turned(entry[:, None, rank:], turn)], axis=-1)
        out = step.attend(call, asked, key, compressed).reshape(count, heads, rank)
        return (out.swapaxes(0, 1) @ values.swapaxes(1, 2)).swapaxes(0, 1).reshape(count, -1)

    return compute


@KERNELS.of(Convolve)
def _convolve(program: ListWeights, operation: Convolve, _: int) -> Compute:
    layer = program.state_of(operation)
    tensors = [program.weights.whole(name, dtype=mx.float32) for name in operation.weights]
    if any(each.shape[1:] != (1, layer.taps) for each in tensors) or sum(map(len, tensors)) != layer.channels:
        shapes = ", ".join(str(each.shape) for each in tensors)
        raise ModelError(f"{operation.weights[0]}: {shapes}, not {layer.channels} of {layer.taps} taps")
    (taps,) = program.computed([Matrix(mx.contiguous(mx.concatenate(tensors)[:, 0].T))])
    bias = None if operation.bias is None else program.numbers(operation.bias, layer.channels)
    activates = operation.activation == "silu"
    return lambda step: step.kept.convolve(
        layer, step.registers[operation.input], taps.numbers, bias, activates=activates
    )


@KERNELS.of(DeltaRule)
def _delta_rule(program: ListWeights, operation: DeltaRule, _: int) -> Compute:
    layer = program.state_of(operation)
    heads, keys = layer.value_heads, layer.key_heads * layer.key_dim
    rates = program.constant(-mx.exp(program.numbers(operation.decay, heads)))
    bias = program.numbers(operation.bias, heads)

    def compute(step: GraphStep) -> Any:
        states = step.registers[operation.input]
        gates = step.registers[operation.gate].astype(mx.float32)
        queries, own, values = mx.split(states.astype(mx.float32), [keys, 2 * keys], axis=-1)
        betas = mx.sigmoid(gates[:, :heads]) * (2.0 if operation.doubles else 1.0)
        given = RuleInputs(
            _of_unit_length(_by_keys(layer, queries)) * layer.key_dim**-0.5,
            _of_unit_length(_by_keys(layer, own)),
            _by_values(layer, values),
            _by_heads(layer, rates * mx.logaddexp(gates[:, heads:] + bias, 0.0)),
            _by_heads(layer, betas),
        )
        return step.kept.run(layer, given).astype(states.dtype)

    return compute


@KERNELS.of(SelectiveScan)
def _selective_scan(program: ListWeights, operation: SelectiveScan, _: int) -> Compute:
    layer = program.state_of(operation)
    heads, width, keys = layer.value_heads, layer.value_heads * layer.value_dim, layer.key_heads * layer.key_dim
    rates = program.constant(-mx.exp(program.numbers(operation.decay, heads)))
    bias, skips = (program.numbers(name, heads) for name in (operation.bias, operation.skip))

    def compute(step: GraphStep) -> Any:
        states = step.registers[operation.input]
        gates = step.registers[operation.gate].astype(mx.float32)
        values, own, queries = mx.split(states.astype(mx.float32), [width, width + keys], axis=-1)
        sizes = mx.maximum(mx.logaddexp(gates + bias, 0.0), operation.least)
        by_head = values.reshape(len(values), heads, -1)
        given = RuleInputs(
            _by_keys(layer, queries),
            _by_keys(layer, own),
            _by_values(layer, by_head * sizes[..., None]),
            _by_heads(layer, rates * sizes),
            None,
        )
        out = step.kept.run(layer, given) + (by_head * skips[:, None]).reshape(len(values), -1)
        return out.astype(states.dtype)

    return compute


def _by_keys(layer: StateLayer, rows: mx.array) -> mx.array:
    """[N, Hk · Dk] -> [Hk, 1, N, Dk]"""
    return rows.reshape(len(rows), layer.key_heads, 1, -1).transpose(1, 2, 0, 3)


def _by_values(layer: StateLayer, rows: mx.array) -> mx.array:
    """[N, Hv · Dv], or by heads -> [Hk, group, N, Dv]"""
    return rows.reshape(len(rows), layer.key_heads, -1, layer.value_dim).transpose(1, 2, 0, 3)


def _by_heads(layer: StateLayer, rows: mx.array) -> mx.array:
    """[N, Hv] -> [Hk, group, N]"""
    return rows.reshape(len(rows), layer.key_heads, -1).transpose(1, 2, 0)


def _of_unit_length(vectors: mx.array) -> mx.array:
    return vectors * mx.rsqrt((vectors * vectors).sum(axis=-1, keepdims=True) + _NORM_EPSILON)


@KERNELS.of(GatedNorm)
def _gated_norm(program: ListWeights, operation: GatedNorm, _: int) -> Compute:
    heads, width = operation.heads, operation.width
    weights = program.numbers(operation.weights, heads * width if operation.first else width)

    def compute(step: GraphStep) -> Any:
        states = step.registers[operation.input]
        gates = step.registers[operation.gate].astype(mx.float32)
        opened, wide = gates * mx.sigmoid(gates), states.astype(mx.float32)
        if operation.first:
            pieces = (wide * opened).reshape(len(wide), heads, width)
            found = mx.fast.rms_norm(pieces, None, operation.epsilon).reshape(wide.shape) * weights
        else:
            pieces = wide.reshape(len(wide), heads, width)
            found = mx.fast.rms_norm(pieces, weights, operation.epsilon).reshape(wide.shape) * opened
        return found.astype(states.dtype)

    return compute


@KERNELS.of(Multiply)
def _multiply(_: ListWeights, operation: Multiply, __: int) -> Compute:
    return lambda step: step.registers[operation.input] * step.registers[operation.other]


@KERNELS.of(Add)
def _add(program: ListWeights, operation: Add, _: int) -> Compute:
    factor = program.factor(operation.factor)
    return lambda step: step.registers[operation.output] + _times(step.registers[operation.input], factor)


@KERNELS.of(Gated)
def _gated(_: ListWeights, operation: Gated, __: int) -> Compute:
    gated = _ACTIVATIONS[operation.activation]
    return lambda step: gated(*mx.split(step.registers[operation.input], 2, axis=-1))


@KERNELS.of(SigmoidGate)
def _sigmoid_gate(_: ListWeights, operation: SigmoidGate, __: int) -> Compute:
    return lambda step: step.registers[operation.input] * mx.sigmoid(step.registers[operation.gate])


@KERNELS.of(Experts)
def _experts(program: ListWeights, operation: Experts, _: int) -> Compute:
    *firsts, downs = (
        program.weights.experts([names[at] for names in operation.matrices]) for at in range(len(operation.matrices[0]))
    )
    is_one = len({each.format for each in firsts}) == 1
    firsts = program.computed([Matrix.below_each_other(firsts)] if is_one else firsts)
    (down,) = program.computed([downs])
    bias = None if operation.bias is None else program.numbers(operation.bias, len(operation.matrices))
    scales = None if operation.scales is None else program.numbers(operation.scales, len(operation.matrices))
    is_gated = len(operation.matrices[0]) == 3  # else what they give is its own gate

    def compute(step: GraphStep) -> Any:
        states = step.registers[operation.input]
        experts, weights = _routed(operation.routing, step.registers[operation.router], bias)
        weights = weights if scales is None else weights * scales[experts]
        parts = [matrix.times_chosen(states[:, None, None], experts) for matrix in firsts]
        parts = [*mx.split(parts[0], 2, axis=-1)] if is_gated and is_one else parts
        outs = down.times_chosen(_ACTIVATIONS[operation.activation](parts[0], parts[-1]), experts)[:, :, 0]
        return (outs * weights[..., None].astype(outs.dtype)).sum(axis=1)

    return compute


@KERNELS.of(Tap)
def _tap(_: ListWeights, operation: Tap, __: int) -> Compute:
    def compute(step: GraphStep) -> Any:
        states = step.registers[operation.input]
        if operation.layer in step.tap_layers:
            step.taps[operation.layer] = states
        return states

    return compute


@KERNELS.of(Select)
def _select(_: ListWeights, operation: Select, __: int) -> Compute:
    return lambda step: step.registers[operation.input][step.logit_queries]


@KERNELS.of(Softcap)
def _softcap(_: ListWeights, operation: Softcap, __: int) -> Compute:
    return lambda step: mx.tanh(step.registers[None] / operation.limit) * operation.limit


def _times(states: mx.array, factor: mx.array | None) -> mx.array:
    return states if factor is None else states * factor


def _scaled(states: mx.array, factors: mx.array) -> mx.array:
    """In float32, rounded once."""
    return (states.astype(mx.float32) * factors).astype(states.dtype)


def _turned(states: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Each number of the first half of what turns, with the one half a rotation further."""
    half = cos.shape[-1]
    turned = _pairs_turned(states[..., :half], states[..., half : 2 * half], cos, sin)
    rest = [states[..., 2 * half :]] if states.shape[-1] > 2 * half else []
    return mx.concatenate([*turned, *rest], axis=-1)


def _routed(routing: Router, logits: mx.array, bias: mx.array | None) -> tuple[mx.array, mx.array]:
    """As `Router.choose`."""
    wide = logits.astype(mx.float32)
    scores = mx.softmax(wide, axis=-1) if routing.scores == "softmax" else mx.sigmoid(wide)
    ranks = scores if bias is None else scores + bias
    if routing.groups > routing.chosen_groups:
        by_group = ranks.reshape(len(ranks), routing.groups, -1)
        best = mx.topk(by_group, min(2, by_group.shape[-1]), axis=-1).sum(axis=-1)
        left_out = mx.argsort(mx.argsort(-best, axis=-1), axis=-1) >= routing.chosen_groups
        ranks = mx.where(left_out[..., None], -mx.inf, by_group).reshape(ranks.shape)
    experts = mx.argpartition(-ranks, kth=routing.chosen - 1, axis=-1)[:, : routing.chosen]
    weights = mx.take_along_axis(scores, experts, axis=-1)
    if routing.sums_to_one:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return experts, weights if routing.factor == 1.0 else weights * routing.factor


@partial(mx.compile, shapeless=True)
def _pairs_turned(first: mx.array, second: mx.array, cos: mx.array, sin: mx.array) -> list[mx.array]:
    return [first * cos - second * sin, second * cos + first * sin]


@partial(mx.compile, shapeless=True)
def _silu_gated(gates: mx.array, ups: mx.array) -> mx.array:
    return gates * mx.sigmoid(gates) * ups


@partial(mx.compile, shapeless=True)
def _gelu_gated(gates: mx.array, ups: mx.array) -> mx.array:
    inner = 0.7978845608028654 * (gates + 0.044715 * gates * gates * gates)
    return 0.5 * gates * (1 + mx.tanh(inner)) * ups


def _relu_gated(gates: mx.array, ups: mx.array) -> mx.array:
    return mx.maximum(gates, 0) * ups


_ACTIVATIONS = {"silu": _silu_gated, "gelu_tanh": _gelu_gated, "relu": _relu_gated}
