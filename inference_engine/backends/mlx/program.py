"""A model's list of operations (`models/operations.py`) over arrays of MLX, computed when they are asked for.

Queries, keys and values of a token are three registers of heads here, so that norms and rotation copy nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from inference_engine.backends.mlx.device import Limits
from inference_engine.backends.mlx.weights import CheckpointWeights, Matrix
from inference_engine.backends.native.described import Described
from inference_engine.backends.native.program import Checkpoint
from inference_engine.errors import ModelError
from inference_engine.models.families import step_list
from inference_engine.models.operations import (
    Add,
    Attend,
    Embed,
    Experts,
    Gated,
    Norm,
    NoStepListError,
    Operation,
    Product,
    Rotate,
    Select,
    Softcap,
    Tap,
)


class Attention(Protocol):
    """Queries, keys and values of a layer, [N, H, D] each, the first two rotated -> [N, Hq · D]."""

    def __call__(self, operation: Attend, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array: ...


class Program:
    """The list of a model, with its weights."""

    def __init__(self, described: Described, checkpoint: Checkpoint, names: Sequence[str], dtype: mx.Dtype) -> None:
        """names: of the checkpoint's tensors, those of this model. dtype: of activations.

        Raises NoStepListError for a list that is not one of a model, ModelError for weights that do not fit it.
        """
        self.steps = steps = step_list(described.config, described.layers, names)
        self.dtype = dtype
        self._trained = described.trained_positions
        self._rotaries = {
            name: (np.array(table.angles, np.float32), table.factor) for name, table in described.rotaries.items()
        }
        limits = Limits()  # before the weights: what they are made of is let go one by one
        self._matrices: dict[tuple[str, ...], list[Matrix]] = {}
        self._arrays: list[mx.array] = []
        self._weights = CheckpointWeights(checkpoint, dtype)
        self._operations = [(one, self._ready(one, index)) for index, one in enumerate(steps.operations)]
        self._embedding = next(one.matrix for one in steps.operations if isinstance(one, Embed))
        self._before_head = next(index for index, one in enumerate(steps.operations) if isinstance(one, Select))
        self._head = next(one for one in steps.operations if isinstance(one, Product) and one.output is None)
        del self._weights
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
        attend: Attention,
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
        for operation, ready in self._operations if len(logit_queries) else self._operations[: self._before_head]:
            step.do(operation, ready)
        logits = mx.zeros((0, self.steps.vocabulary)) if step.logits is None else step.logits
        return logits, mx.stack([step.taps[layer] for layer in tap_layers], axis=1) if tap_layers else None

    def _turns(self, name: str, positions: NDArray[np.int64]) -> tuple[mx.array, mx.array]:
        """Cosines and sines [N, 1, turned / 2], as transformers has them: past the trained positions in float64."""
        angles, factor = self._rotaries[name]
        turns = positions.astype(np.float32)[:, None] * angles
        cos, sin = np.cos(turns), np.sin(turns)
        if (far := positions >= self._trained).any():
            exact = positions[far].astype(np.float64)[:, None] * angles.astype(np.float64)
            cos[far], sin[far] = np.cos(exact), np.sin(exact)
        scale = np.float32(factor)
        return tuple(mx.array(part * scale).astype(self.dtype)[:, None] for part in (cos, sin))  # type: ignore[return-value]

    # -- from operations to functions --------------------------------------------------------------------------------

    def _ready(self, operation: Operation, index: int) -> Any:
        """What `_Step.do` needs beside the operation. Raises NoStepListError for one that is not of a model."""
        match operation:
            case Embed():
                return self._product([operation.matrix])[0], self._factor(operation.factor)
            case Norm():
                vector = self._weights.vector(operation.weights, added=1.0 if operation.plus_one else 0.0)
                return self._checked(operation.weights, vector, operation.width), self._part_of(operation, index)
            case Product():
                return self._ready_product(operation, index)
            case Rotate():
                layer = self._layer_of(operation.register, index)
                if (operation.heads, operation.offset) != (layer.query_heads + layer.kv_heads, 0):
                    raise NoStepListError("a layer rotates something else than its queries and keys")
            case Add():
                return self._factor(operation.factor)
            case Experts():
                gates, ups, downs = (
                    self._weights.experts([names[place] for names in operation.matrices]) for place in range(3)
                )
                is_alike = gates.format == ups.format
                matrices = [Matrix.below_each_other([gates, ups])] if is_alike else [gates, ups]
                return self._computed(matrices), self._computed([downs])[0]
            case Attend() | Gated() | Tap() | Select() | Softcap():
                pass
            case _:
                raise NoStepListError(f"{type(operation).__name__} is not an operation of a model")
        return None

    def _ready_product(self, operation: Product, index: int) -> Any:
        if operation.offset or operation.count is not None:
            raise NoStepListError("a product of a model writes its whole register")
        matrices = self._product(operation.matrices)
        width = self.steps.vocabulary if operation.output is None else self.steps.widths[operation.output]
        outputs = sum(matrix.numbers.shape[-2] for matrix in matrices)
        if outputs != width:
            raise ModelError(
                f"{', '.join(operation.matrices)} have {outputs} outputs, the configuration asks for {width}; the "
                "weights do not fit config.json"
            )
        biases = [self._weights.vector(name) for name in operation.biases]
        bias = self._checked(operation.biases[0], mx.concatenate(biases), width) if biases else None
        heads = None
        if operation.output is not None and self._is_read_by_attention(operation.output):
            layer = self._layer_of(operation.output, index)
            heads = layer.query_heads, layer.kv_heads, layer.head_dim
        return matrices, bias, heads

    def _product(self, names: Sequence[str]) -> list[Matrix]:
        """The matrices, neighbours of one format as one. Each is kept once, whatever uses it."""
        if (found := self._matrices.get(tuple(names))) is not None:
            return found
        groups = groupby([self._weights.matrix(name) for name in names], key=lambda matrix: matrix.format)
        found = self._computed([Matrix.below_each_other(list(group)) for _, group in groups])
        self._matrices[tuple(names)] = found
        return found

    def _computed(self, matrices: list[Matrix]) -> list[Matrix]:
        """At once, so that what they are made of is let go layer by layer."""
        arrays = [array for matrix in matrices for array in matrix.arrays]
        mx.eval(arrays)
        self._arrays += arrays
        return matrices

    def _factor(self, factor: float) -> mx.array | None:
        return None if factor == 1.0 else mx.array(factor, dtype=self.dtype)

    def _checked(self, name: str, vector: mx.array, width: int) -> mx.array:
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

    def _is_read_by_attention(self, register: str) -> bool:
        return any(isinstance(one, Attend) and one.input == register for one in self.steps.operations)

    def _layer_of(self, register: str, index: int) -> Any:
        """The layer whose attention reads the register next."""
        rest = self.steps.operations[index:]
        found = next((one for one in rest if isinstance(one, Attend) and one.input == register), None)
        if found is None:
            raise NoStepListError(f"no attention reads {register}")
        return self.steps.layers[found.layer]

    def _part_of(self, norm: Norm, index: int) -> int | None:
        """Which of queries (0) and keys (1) a norm is about; None: it is about a whole register."""
        if not self._is_read_by_attention(norm.input):
            if norm.heads != 1 or norm.offset:
                raise NoStepListError(f"{norm.weights} cannot normalise a slice of {norm.input}")
            return None
        layer = self._layer_of(norm.input, index)
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
    """The graph of one step while it is built. registers: of attention, queries, keys and values apart."""

    ids: mx.array
    turns: Mapping[str, tuple[mx.array, mx.array]]
    attend: Attention
    logit_queries: mx.array
    tap_layers: frozenset[int]
    taps: dict[int, mx.array] = field(default_factory=dict)
    registers: dict[str, Any] = field(default_factory=dict)
    logits: mx.array | None = None

    def do(self, operation: Operation, ready: Any) -> None:
        """ready: of `Program._ready`."""
        held = self.registers
        match operation:
            case Embed():
                matrix, factor = ready
                held[operation.output] = _times(matrix.rows(self.ids), factor)
            case Norm():
                vector, part = ready
                if part is None:
                    held[operation.output] = mx.fast.rms_norm(held[operation.input], vector, operation.epsilon)
                else:
                    heads = list(held[operation.input])
                    heads[part] = mx.fast.rms_norm(heads[part], vector, operation.epsilon)
                    held[operation.output] = heads
            case Product():
                self._multiply(operation, *ready)
            case Rotate():
                queries, keys, values = held[operation.register]
                turn = self.turns[operation.rotary]
                held[operation.register] = [_turned(queries, *turn), _turned(keys, *turn), values]
            case Attend():
                held[operation.output] = self.attend(operation, *held[operation.input])
            case Add():
                held[operation.output] = held[operation.output] + _times(held[operation.input], ready)
            case Gated():
                gates, ups = mx.split(held[operation.input], 2, axis=-1)
                held[operation.output] = _ACTIVATIONS[operation.activation](gates, ups)
            case Experts():
                states, router = held[operation.input], held[operation.router]
                held[operation.output] = _mixed(operation, ready[0], ready[1], states, router)
            case Tap():
                if operation.layer in self.tap_layers:
                    self.taps[operation.layer] = held[operation.input]
            case Select():
                held[operation.output] = held[operation.input][self.logit_queries]
            case Softcap():
                assert self.logits is not None, "the head comes before it"
                self.logits = mx.tanh(self.logits / operation.limit) * operation.limit

    def _multiply(
        self, operation: Product, matrices: list[Matrix], bias: mx.array | None, heads: tuple[int, int, int] | None
    ) -> None:
        parts = [matrix.times(self.registers[operation.input]) for matrix in matrices]
        out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
        if bias is not None:
            out = out + bias
        if operation.output is None:
            self.logits = out.astype(mx.float32)
        elif heads is None:
            self.registers[operation.output] = out
        else:
            queries, keys, dim = heads
            by_head = out.reshape(len(out), queries + 2 * keys, dim)
            self.registers[operation.output] = mx.split(by_head, [queries, queries + keys], axis=1)


def _times(states: mx.array, factor: mx.array | None) -> mx.array:
    return states if factor is None else states * factor


def _turned(states: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Each number of the first half of what turns, with the one half a rotation further."""
    half = cos.shape[-1]
    turned = _pairs_turned(states[..., :half], states[..., half : 2 * half], cos, sin)
    rest = [states[..., 2 * half :]] if states.shape[-1] > 2 * half else []
    return mx.concatenate([*turned, *rest], axis=-1)


def _mixed(operation: Experts, both: list[Matrix], downs: Matrix, states: mx.array, router: mx.array) -> mx.array:
    """The chosen experts' products of each token, by the softmax of all."""
    weights = mx.softmax(router.astype(mx.float32), axis=-1)
    experts = mx.argpartition(-weights, kth=operation.chosen - 1, axis=-1)[:, : operation.chosen]
    weights = mx.take_along_axis(weights, experts, axis=-1)
    if operation.sums_to_one:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    parts = [matrix.times_chosen(states[:, None, None], experts) for matrix in both]
    gates, ups = parts if len(parts) == 2 else mx.split(parts[0], 2, axis=-1)
    outs = downs.times_chosen(_ACTIVATIONS[operation.activation](gates, ups), experts)[:, :, 0]
    return (outs * weights[..., None].astype(outs.dtype)).sum(axis=1)


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
