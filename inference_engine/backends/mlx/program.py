"""A model's list of operations (`models/operations.py`) over arrays of MLX, computed when they are asked for.

Queries, keys and values of a token are three registers of heads here, so that norms and rotation copy nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from inference_engine.backends.mlx.device import Limits
from inference_engine.backends.mlx.weights import CheckpointWeights, Matrix
from inference_engine.backends.model_spec import ModelSpec
from inference_engine.backends.native.packed_weights import TensorSource
from inference_engine.errors import ModelError
from inference_engine.kernels.routing import Router
from inference_engine.kv.geometry import SHORT_ROTARY
from inference_engine.models.families import step_list
from inference_engine.models.operations import (
    Add,
    Attend,
    Embed,
    Experts,
    Gated,
    Norm,
    NoStepListError,
    OperationKernels,
    Product,
    Rotate,
    Select,
    SigmoidGate,
    Softcap,
    Tap,
)


class LayerAttention(Protocol):
    """Queries, keys and values of a layer, [N, H, D] each, the first two rotated -> [N, Hq · D]."""

    def __call__(self, operation: Attend, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array: ...


class MLXProgram:
    """The list of a model, with its weights."""

    def __init__(self, spec: ModelSpec, checkpoint: TensorSource, names: Sequence[str], dtype: mx.Dtype) -> None:
        """names: of the checkpoint's tensors, those of this model. dtype: of activations.

        Raises NoStepListError for a list that is not one of a model, ModelError for weights that do not fit it.
        """
        self.steps = steps = step_list(spec.config, spec.layers, names, spec.reads)
        self.dtype = dtype
        self._trained = spec.trained_positions
        self._rotaries = {name: (table.frequencies, table.factor) for name, table in spec.rotaries.items()}
        self._short = self._rotaries.pop(SHORT_ROTARY, None)
        limits = Limits()  # before the weights: what they are made of is let go one by one
        self._matrices: dict[tuple[str, ...], list[Matrix]] = {}
        self._arrays: list[mx.array] = []
        self.weights = CheckpointWeights(checkpoint, dtype)
        KERNELS.check(steps.operations)
        self._operations = [(one.writes, KERNELS[one](self, one, at)) for at, one in enumerate(steps.operations)]
        self._embedding = next(one.matrix for one in steps.operations if isinstance(one, Embed))
        self._before_head = next(index for index, one in enumerate(steps.operations) if isinstance(one, Select))
        self._head = next(one for one in steps.operations if isinstance(one, Product) and one.output is None)
        del self.weights
        # Computed here: an array belongs to the thread that first computes it.
        mx.eval(self._arrays)
        self._limits = limits  # set last, so that it goes last: the weights are freed within the limits

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    def embedding(self) -> mx.array:
        """[V, hidden] in the dtype of the activations, without a factor."""
        return self._unpacked((self._embedding,))

    def head(self) -> mx.array | None:
        """[V, hidden]; None if it has a bias."""
        return None if self._head.biases else self._unpacked(self._head.matrices)

    def run(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        attend: LayerAttention,
        *,
        logit_queries: Sequence[int],
        tap_layers: Sequence[int] = (),
    ) -> tuple[mx.array, mx.array | None]:
        """The logits [asked, V], float32, and the hidden states [N, taps, hidden] after `tap_layers`.

        Nothing is computed yet.
        """
        _streams.begin()
        step = _Step(
            ids=mx.array(token_ids.astype(np.int32)),
            turns={name: self._turns(name, positions) for name in self._rotaries},
            attend=attend,
            logit_queries=mx.array(np.array(logit_queries, np.int32)),
            tap_layers=frozenset(tap_layers),
        )
        # Not every operation of MLX can be asked for no rows.
        for register, compute in self._operations if len(logit_queries) else self._operations[: self._before_head]:
            step.registers[register] = compute(step)
        logits = step.registers.get(None, mx.zeros((0, self.steps.vocabulary)))
        return logits, mx.stack([step.taps[layer] for layer in tap_layers], axis=1) if tap_layers else None

    def _turns(self, name: str, positions: NDArray[np.int64]) -> tuple[mx.array, mx.array]:
        """Cosines and sines [N, 1, turned / 2], as transformers has them: past the trained positions in float64."""
        angles, factor = self._rotaries[name]
        if self._short is not None:
            angles = np.where(positions[:, None] < 0, self._short[0], angles)
            positions = np.maximum(positions, ~positions)
        turns = positions.astype(np.float32)[:, None] * angles
        cos, sin = np.cos(turns), np.sin(turns)
        if (far := positions >= self._trained).any():
            exact = positions[far].astype(np.float64)[:, None] * np.broadcast_to(angles, turns.shape)[far]
            cos[far], sin[far] = np.cos(exact), np.sin(exact)
        scale = np.float32(factor)
        return tuple(mx.array(part * scale).astype(self.dtype)[:, None] for part in (cos, sin))  # type: ignore[return-value]

    def product(self, names: Sequence[str]) -> list[Matrix]:
        """The matrices, neighbours of one format as one. Each is kept once, whatever uses it."""
        if (found := self._matrices.get(tuple(names))) is not None:
            return found
        groups = groupby([self.weights.matrix(name) for name in names], key=lambda matrix: matrix.format)
        found = self.computed([Matrix.below_each_other(list(group)) for _, group in groups])
        self._matrices[tuple(names)] = found
        return found

    def computed(self, matrices: list[Matrix]) -> list[Matrix]:
        """At once, so that what they are made of is let go layer by layer."""
        arrays = [array for matrix in matrices for array in matrix.arrays]
        mx.eval(arrays)
        self._arrays += arrays
        return matrices

    def factor(self, factor: float) -> mx.array | None:
        return None if factor == 1.0 else mx.array(factor, dtype=self.dtype)

    def checked(self, name: str, vector: mx.array, width: int) -> mx.array:
        if vector.shape != (width,):
            raise ModelError(
                f"{name} has the shape {tuple(vector.shape)}, the configuration asks for {width} numbers; the weights "
                "do not fit config.json"
            )
        self._arrays.append(vector)
        return vector

    def _unpacked(self, names: tuple[str, ...]) -> mx.array:
        (matrix,) = self._matrices[names]
        return matrix.rows(mx.arange(matrix.numbers.shape[-2])) if matrix.bits else matrix.numbers

    def is_read_by_attention(self, register: str) -> bool:
        return any(isinstance(one, Attend) and one.input == register for one in self.steps.operations)

    def layer_of(self, register: str, index: int) -> Any:
        """The layer whose attention reads the register next."""
        rest = self.steps.operations[index:]
        found = next((one for one in rest if isinstance(one, Attend) and one.input == register), None)
        if found is None:
            raise NoStepListError(f"no attention reads {register}")
        return self.steps.layers[found.layer]

    def part_of(self, norm: Norm, index: int) -> int | None:
        """Which of queries (0) and keys (1) a norm is about; None: it is about a whole register."""
        if not self.is_read_by_attention(norm.input):
            if norm.heads != 1 or norm.offset:
                raise NoStepListError(f"{norm.weights} cannot normalise a slice of {norm.input}")
            return None
        layer = self.layer_of(norm.input, index)
        parts = {(0, layer.query_heads): 0, (layer.query_heads * layer.head_dim, layer.kv_heads): 1}
        if norm.input != norm.output or (norm.offset, norm.heads) not in parts or norm.width != layer.head_dim:
            raise NoStepListError(f"{norm.weights} is about neither the queries nor the keys of a layer")
        return parts[norm.offset, norm.heads]


class _Streams(threading.local):
    """MLX's streams of a thread end with it. Else a process whose threads ran compiled functions aborts at its end."""

    last: _End | None = None

    def begin(self) -> None:
        if self.last is None and threading.current_thread() is not threading.main_thread():
            self.last = _End()


class _End:
    def __del__(self) -> None:
        mx.clear_streams()


_streams = _Streams()


@dataclass(slots=True, eq=False)
class _Step:
    """The graph of one step while it is built. registers: of attention, queries, keys, values apart. None: logits."""

    ids: mx.array
    turns: Mapping[str, tuple[mx.array, mx.array]]
    attend: LayerAttention
    logit_queries: mx.array
    tap_layers: frozenset[int]
    taps: dict[int, mx.array] = field(default_factory=dict)
    registers: dict[str | None, Any] = field(default_factory=dict)


# -- from operations to functions --------------------------------------------------------------------------------------

Compute = Callable[[_Step], Any]
# Prepares an operation, by its number in the list, and returns what computes the register that it writes.
KERNELS: OperationKernels[Callable[[MLXProgram, Any, int], Compute]] = OperationKernels("MLX")


@KERNELS.of(Embed)
def _embed(program: MLXProgram, operation: Embed, _: int) -> Compute:
    matrix, factor = program.product([operation.matrix])[0], program.factor(operation.factor)
    return lambda step: _times(matrix.rows(step.ids), factor)


@KERNELS.of(Norm)
def _norm(program: MLXProgram, operation: Norm, index: int) -> Compute:
    vector = program.weights.vector(operation.weights, added=1.0 if operation.plus_one else 0.0)
    vector = program.checked(operation.weights, vector, operation.width)
    part = program.part_of(operation, index)

    def compute(step: _Step) -> Any:
        states = step.registers[operation.input]
        if part is None:
            return mx.fast.rms_norm(states, vector, operation.epsilon)
        return [
            mx.fast.rms_norm(each, vector, operation.epsilon) if place == part else each
            for place, each in enumerate(states)
        ]

    return compute


@KERNELS.of(Product)
def _product(program: MLXProgram, operation: Product, index: int) -> Compute:
    if operation.offset or operation.count is not None:
        raise NoStepListError("a product of a model writes its whole register")
    matrices, output = program.product(operation.matrices), operation.output
    width = program.steps.vocabulary if output is None else program.steps.widths[output]
    outputs = sum(matrix.numbers.shape[-2] for matrix in matrices)
    if outputs != width:
        raise ModelError(
            f"{', '.join(operation.matrices)} have {outputs} outputs, the configuration asks for {width}; the weights "
            "do not fit config.json"
        )
    biases = [program.weights.vector(name) for name in operation.biases]
    bias = program.checked(operation.biases[0], mx.concatenate(biases), width) if biases else None
    layer = program.layer_of(output, index) if output is not None and program.is_read_by_attention(output) else None

    def compute(step: _Step) -> Any:
        parts = [matrix.times(step.registers[operation.input]) for matrix in matrices]
        out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
        out = out if bias is None else out + bias
        if layer is None:
            return out.astype(mx.float32) if output is None else out
        queries, keys = layer.query_heads, layer.kv_heads
        return mx.split(out.reshape(len(out), -1, layer.head_dim), [queries, queries + keys], axis=1)

    return compute


@KERNELS.of(Rotate)
def _rotate(program: MLXProgram, operation: Rotate, index: int) -> Compute:
    layer = program.layer_of(operation.register, index)
    if (operation.heads, operation.offset) != (layer.query_heads + layer.kv_heads, 0):
        raise NoStepListError("a layer rotates something else than its queries and keys")

    def compute(step: _Step) -> Any:
        queries, keys, values = step.registers[operation.register]
        turn = step.turns[operation.rotary]
        return [_turned(queries, *turn), _turned(keys, *turn), values]

    return compute


@KERNELS.of(Attend)
def _attend(_: MLXProgram, operation: Attend, __: int) -> Compute:
    return lambda step: step.attend(operation, *step.registers[operation.input])


@KERNELS.of(Add)
def _add(program: MLXProgram, operation: Add, _: int) -> Compute:
    factor = program.factor(operation.factor)
    return lambda step: step.registers[operation.output] + _times(step.registers[operation.input], factor)


@KERNELS.of(Gated)
def _gated(_: MLXProgram, operation: Gated, __: int) -> Compute:
    gated = _ACTIVATIONS[operation.activation]
    return lambda step: gated(*mx.split(step.registers[operation.input], 2, axis=-1))


@KERNELS.of(SigmoidGate)
def _sigmoid_gate(_: MLXProgram, operation: SigmoidGate, __: int) -> Compute:
    return lambda step: step.registers[operation.input] * mx.sigmoid(step.registers[operation.gate])


@KERNELS.of(Experts)
def _experts(program: MLXProgram, operation: Experts, _: int) -> Compute:
    gates, ups, downs = (program.weights.experts([names[at] for names in operation.matrices]) for at in range(3))
    both = program.computed([Matrix.below_each_other([gates, ups])] if gates.format == ups.format else [gates, ups])
    (down,) = program.computed([downs])
    bias = None if operation.bias is None else program.weights.vector(operation.bias, dtype=mx.float32)
    if operation.scales is not None:
        raise NoStepListError("experts whose weights have factors have no kernel on MLX")

    def compute(step: _Step) -> Any:
        states = step.registers[operation.input]
        experts, weights = _routed(operation.routing, step.registers[operation.router], bias)
        parts = [matrix.times_chosen(states[:, None, None], experts) for matrix in both]
        gates, ups = parts if len(parts) == 2 else mx.split(parts[0], 2, axis=-1)
        outs = down.times_chosen(_ACTIVATIONS[operation.activation](gates, ups), experts)[:, :, 0]
        return (outs * weights[..., None].astype(outs.dtype)).sum(axis=1)

    return compute


@KERNELS.of(Tap)
def _tap(_: MLXProgram, operation: Tap, __: int) -> Compute:
    def compute(step: _Step) -> Any:
        states = step.registers[operation.input]
        if operation.layer in step.tap_layers:
            step.taps[operation.layer] = states
        return states

    return compute


@KERNELS.of(Select)
def _select(_: MLXProgram, operation: Select, __: int) -> Compute:
    return lambda step: step.registers[operation.input][step.logit_queries]


@KERNELS.of(Softcap)
def _softcap(_: MLXProgram, operation: Softcap, __: int) -> Compute:
    return lambda step: mx.tanh(step.registers[None] / operation.limit) * operation.limit


def _times(states: mx.array, factor: mx.array | None) -> mx.array:
    return states if factor is None else states * factor


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
        weights = weights / weights.sum(axis=-1, keepdims=True)
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


_ACTIVATIONS = {"silu": _silu_gated, "gelu_tanh": _gelu_gated}
