"""A model's list of operations (`models/step_list.py`) over arrays of MLX, which computes them when they are asked for.

    Matrix    numbers as they are multiplied: floating-point, or 2 to 8 bits with a scale and an offset for each group
    Program   the list with its weights; `run` builds the graph of one step

Queries, keys and values of a token are three registers of heads here, so that norms and rotation copy nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from inference_engine.backends.native.described import Frequencies
from inference_engine.errors import ModelError
from inference_engine.models.step_list import (
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
    StepList,
    Tap,
)


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Numbers [..., outputs, inputs]. With `bits`: packed in words of 32 bits, `group` inputs to a scale and offset."""

    numbers: mx.array
    scales: mx.array | None = None
    offsets: mx.array | None = None
    group: int = 0
    bits: int = 0

    @property
    def format(self) -> tuple[object, ...]:
        """Matrices of one format can lie one below the other."""
        return self.numbers.dtype, self.group, self.bits

    @property
    def arrays(self) -> list[mx.array]:
        return [array for array in (self.numbers, self.scales, self.offsets) if array is not None]

    def times(self, states: mx.array) -> mx.array:
        """states [N, inputs] -> [N, outputs]."""
        if self.scales is None:
            return states @ self.numbers.swapaxes(-1, -2)
        return mx.quantized_matmul(
            states, self.numbers, self.scales, self.offsets, transpose=True, group_size=self.group, bits=self.bits
        )

    def times_chosen(self, states: mx.array, experts: mx.array) -> mx.array:
        """states [N, 1 or K, 1, inputs], experts [N, K] -> [N, K, 1, outputs], each by the matrix of its expert."""
        if self.scales is None:
            return mx.gather_mm(states, self.numbers.swapaxes(-1, -2), rhs_indices=experts)
        return mx.gather_qmm(
            states,
            self.numbers,
            self.scales,
            self.offsets,
            rhs_indices=experts,
            transpose=True,
            group_size=self.group,
            bits=self.bits,
        )

    def rows(self, ids: mx.array) -> mx.array:
        """[N, inputs], the rows of these outputs."""
        if self.scales is None or self.offsets is None:
            return self.numbers[ids]
        return mx.dequantize(
            self.numbers[ids], self.scales[ids], self.offsets[ids], group_size=self.group, bits=self.bits
        )

    @staticmethod
    def below_each_other(matrices: Sequence[Matrix], *, axis: int = -2) -> Matrix:
        first = matrices[0]
        if len(matrices) == 1:
            return first
        numbers = mx.concatenate([one.numbers for one in matrices], axis=axis)
        if not first.bits:
            return Matrix(numbers)
        scales, offsets = (
            mx.concatenate([getattr(one, name) for one in matrices], axis=axis) for name in ("scales", "offsets")
        )
        return Matrix(numbers, scales, offsets, first.group, first.bits)


class Weights(Protocol):
    """A model's weights by transformers' names, in the dtype of the activations."""

    def matrix(self, name: str) -> Matrix: ...

    def experts(self, names: Sequence[str]) -> Matrix:
        """[experts, outputs, inputs], one matrix of each."""

    def vector(self, name: str, *, added: float = 0.0) -> mx.array:
        """The numbers of a norm or a bias, `added` to in float32."""


class Attention(Protocol):
    """Queries, keys and values of a layer, [N, H, D] each, the first two rotated -> [N, Hq · D]."""

    def __call__(self, operation: Attend, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array: ...


@dataclass(slots=True, eq=False)
class _Run:
    """What the operations of one step read and write."""

    ids: mx.array
    turns: Mapping[str, tuple[mx.array, mx.array]]
    attend: Attention
    logit_queries: mx.array
    taps: dict[int, mx.array]
    registers: dict[str, Any]
    logits: mx.array | None = None


class Program:
    """The list of a model, with its weights."""

    def __init__(
        self,
        steps: StepList,
        weights: Weights,
        rotaries: Mapping[str, Frequencies],
        *,
        trained_positions: int,
        dtype: mx.Dtype,
    ) -> None:
        """Raises NoStepListError for a list that is not one of a model, ModelError for weights that do not fit it."""
        self.steps = steps
        self.dtype = dtype
        self._trained = trained_positions
        self._rotaries = {name: (np.array(table.angles, np.float32), table.factor) for name, table in rotaries.items()}
        self._matrices: dict[tuple[str, ...], list[Matrix]] = {}
        self._arrays: list[mx.array] = []
        self._weights = weights
        self._operations = [self._lowered(index) for index in range(len(steps.operations))]
        self._embedding = next(one.matrix for one in steps.operations if isinstance(one, Embed))
        self._head = next(one for one in steps.operations if isinstance(one, Product) and one.output is None)
        del self._weights
        # Computed here: an array belongs to the thread that first computes it.
        mx.eval(self._arrays)

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
        run = _Run(
            ids=mx.array(token_ids.astype(np.int32)),
            turns={name: self._turns(name, positions) for name in self._rotaries},
            attend=attend,
            logit_queries=mx.array(np.array(logit_queries, np.int32)),
            taps={},
            registers={},
        )
        wanted = set(tap_layers)
        for operation in self._operations:
            operation(run, wanted)
        assert run.logits is not None, "a list ends with its head"
        return run.logits, mx.stack([run.taps[layer] for layer in tap_layers], axis=1) if tap_layers else None

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

    def _lowered(self, index: int) -> Any:
        """A function of a `_Run` and the layers to tap, for an operation of the list."""
        operation: Operation = self.steps.operations[index]
        match operation:
            case Embed():
                matrix = self._product([operation.matrix])[0]
                factor = mx.array(operation.factor, dtype=self.dtype)
                return partial(_embed, matrix, factor if operation.factor != 1.0 else None, operation.output)
            case Norm():
                added = 1.0 if operation.plus_one else 0.0
                vector = self._kept(self._weights.vector(operation.weights, added=added))
                self._check_width(operation.weights, vector, operation.width)
                return partial(_norm, vector, operation, self._part_of(operation, index))
            case Product():
                return self._lowered_product(operation, index)
            case Rotate():
                layer = self._layer_of(operation.register, index)
                if (operation.heads, operation.offset) != (layer.query_heads + layer.kv_heads, 0):
                    raise NoStepListError("a layer rotates something else than its queries and keys")
                return partial(_rotate, operation)
            case Attend():
                return partial(_attend, operation)
            case Add():
                factor = mx.array(operation.factor, dtype=self.dtype)
                return partial(_add, factor if operation.factor != 1.0 else None, operation)
            case Gated():
                return partial(_gated, _ACTIVATIONS[operation.activation], operation)
            case Experts():
                return self._lowered_experts(operation)
            case Tap():
                return partial(_tap, operation)
            case Select():
                return partial(_select, operation)
            case Softcap():
                return partial(_softcap, operation.limit)
            case _:
                raise NoStepListError(f"{type(operation).__name__} is not an operation of a model")

    def _lowered_product(self, operation: Product, index: int) -> Any:
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
        bias = None
        if operation.biases:
            bias = self._kept(mx.concatenate([self._weights.vector(name) for name in operation.biases]))
            self._check_width(operation.biases[0], bias, width)
        sizes = None
        if operation.output is not None and self._is_read_by_attention(operation.output):
            layer = self._layer_of(operation.output, index)
            sizes = layer.query_heads, layer.kv_heads, layer.head_dim
        return partial(_multiply, matrices, bias, operation, sizes)

    def _lowered_experts(self, operation: Experts) -> Any:
        gates, ups, downs = (
            self._weights.experts([names[place] for names in operation.matrices]) for place in range(3)
        )
        if gates.format == ups.format:
            both = [Matrix.below_each_other([gates, ups])]
        else:
            both = [gates, ups]
        for matrix in (*both, downs):
            self._arrays += matrix.arrays
        mx.eval([matrix.arrays for matrix in (*both, downs)])
        return partial(_experts, both, downs, operation, _ACTIVATIONS[operation.activation])

    def _product(self, names: Sequence[str]) -> list[Matrix]:
        """The matrices, neighbours of one format as one. Each is kept once, whatever uses it."""
        if (found := self._matrices.get(tuple(names))) is not None:
            return found
        groups: list[list[Matrix]] = []
        for matrix in (self._weights.matrix(name) for name in names):
            if groups and groups[-1][0].format == matrix.format:
                groups[-1].append(matrix)
            else:
                groups.append([matrix])
        joined = [Matrix.below_each_other(group) for group in groups]
        for matrix in joined:
            self._arrays += matrix.arrays
        # Computed now, so that what they are made of is let go layer by layer.
        mx.eval([matrix.arrays for matrix in joined])
        self._matrices[tuple(names)] = joined
        return joined

    def _unpacked(self, names: tuple[str, ...]) -> mx.array:
        (matrix,) = self._matrices[names]
        return matrix.rows(mx.arange(matrix.numbers.shape[-2])) if matrix.bits else matrix.numbers

    def _kept(self, array: mx.array) -> mx.array:
        self._arrays.append(array)
        return array

    @staticmethod
    def _check_width(name: str, vector: mx.array, width: int) -> None:
        if vector.shape != (width,):
            raise ModelError(
                f"{name} has the shape {tuple(vector.shape)}, the configuration asks for {width} numbers; the weights "
                "do not fit config.json"
            )

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
                raise NoStepListError(f"{norm.weights} is about a part of {norm.input}")
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


# -- operations -------------------------------------------------------------------------------------------------------


def _embed(matrix: Matrix, factor: mx.array | None, output: str, run: _Run, _taps: set[int]) -> None:
    rows = matrix.rows(run.ids)
    run.registers[output] = rows if factor is None else rows * factor


def _norm(vector: mx.array, operation: Norm, part: int | None, run: _Run, _taps: set[int]) -> None:
    if part is None:
        run.registers[operation.output] = mx.fast.rms_norm(run.registers[operation.input], vector, operation.epsilon)
        return
    heads = list(run.registers[operation.input])
    heads[part] = mx.fast.rms_norm(heads[part], vector, operation.epsilon)
    run.registers[operation.output] = tuple(heads)


def _multiply(
    matrices: list[Matrix],
    bias: mx.array | None,
    operation: Product,
    sizes: tuple[int, int, int] | None,
    run: _Run,
    _taps: set[int],
) -> None:
    states = run.registers[operation.input]
    parts = [matrix.times(states) for matrix in matrices]
    out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
    if bias is not None:
        out = out + bias
    if operation.output is None:
        run.logits = out.astype(mx.float32)
    elif sizes is None:
        run.registers[operation.output] = out
    else:
        queries, keys, dim = sizes
        heads = out.reshape(len(out), queries + 2 * keys, dim)
        run.registers[operation.output] = tuple(mx.split(heads, [queries, queries + keys], axis=1))


def _rotate(operation: Rotate, run: _Run, _taps: set[int]) -> None:
    queries, keys, values = run.registers[operation.register]
    cos, sin = run.turns[operation.rotary]
    run.registers[operation.register] = _turned(queries, cos, sin), _turned(keys, cos, sin), values


def _turned(states: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Each number of the first half of what turns, with the one half a rotation further."""
    half = cos.shape[-1]
    turned = _pairs_turned(states[..., :half], states[..., half : 2 * half], cos, sin)
    rest = [states[..., 2 * half :]] if states.shape[-1] > 2 * half else []
    return mx.concatenate([*turned, *rest], axis=-1)


def _attend(operation: Attend, run: _Run, _taps: set[int]) -> None:
    queries, keys, values = run.registers[operation.input]
    run.registers[operation.output] = run.attend(operation, queries, keys, values)


def _add(factor: mx.array | None, operation: Add, run: _Run, _taps: set[int]) -> None:
    added = run.registers[operation.input]
    run.registers[operation.output] = run.registers[operation.output] + (added if factor is None else added * factor)


def _gated(activation: Any, operation: Gated, run: _Run, _taps: set[int]) -> None:
    gates = run.registers[operation.input]
    half = gates.shape[-1] // 2
    run.registers[operation.output] = activation(gates[..., :half], gates[..., half:])


def _experts(
    both: list[Matrix], downs: Matrix, operation: Experts, activation: Any, run: _Run, _taps: set[int]
) -> None:
    states, router = run.registers[operation.input], run.registers[operation.router]
    weights = mx.softmax(router.astype(mx.float32), axis=-1)
    count, chosen = len(states), operation.chosen
    experts = mx.argpartition(-weights, kth=chosen - 1, axis=-1)[:, :chosen]
    weights = mx.take_along_axis(weights, experts, axis=-1)
    if operation.sums_to_one:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    parts = [matrix.times_chosen(states.reshape(count, 1, 1, -1), experts) for matrix in both]
    gates, ups = parts if len(parts) == 2 else mx.split(parts[0], 2, axis=-1)
    outs = downs.times_chosen(activation(gates, ups), experts)[:, :, 0]
    run.registers[operation.output] = (outs * weights[..., None].astype(outs.dtype)).sum(axis=1)


def _tap(operation: Tap, run: _Run, taps: set[int]) -> None:
    if operation.layer in taps:
        run.taps[operation.layer] = run.registers[operation.input]


def _select(operation: Select, run: _Run, _taps: set[int]) -> None:
    run.registers[operation.output] = run.registers[operation.input][run.logit_queries]


def _softcap(limit: float, run: _Run, _taps: set[int]) -> None:
    assert run.logits is not None, "the head comes before it"
    run.logits = mx.tanh(run.logits / limit) * limit


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
