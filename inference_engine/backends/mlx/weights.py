"""A checkpoint's tensors as arrays of MLX, in the dtype of the activations; matrices in groups as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from inference_engine.backends.native.packed_weights import SourceTensor, TensorSource
from inference_engine.models.grouped import Grouped, GroupedCheckpoint

# As numpy reads them, and as what MLX takes the bytes for.
_FLOATS = {"F32": ("<f4", mx.float32), "F16": ("<u2", mx.float16), "BF16": ("<u2", mx.bfloat16)}


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
            states, self.numbers, self.scales, self.offsets, group_size=self.group, bits=self.bits
        )

    def times_chosen(self, states: mx.array, experts: mx.array) -> mx.array:
        """states [N, 1 or K, 1, inputs], experts [N, K] -> [N, K, 1, outputs], each by the matrix of its expert."""
        if self.scales is None:
            return mx.gather_mm(states, self.numbers.swapaxes(-1, -2), rhs_indices=experts)
        return mx.gather_qmm(
            states, self.numbers, self.scales, self.offsets, None, experts, group_size=self.group, bits=self.bits
        )

    def rows(self, ids: mx.array) -> mx.array:
        """[N, inputs], the rows of these outputs."""
        if self.scales is None or self.offsets is None:
            return self.numbers[ids]
        return mx.dequantize(
            self.numbers[ids], self.scales[ids], self.offsets[ids], group_size=self.group, bits=self.bits
        )

    @staticmethod
    def below_each_other(matrices: Sequence[Matrix]) -> Matrix:
        first = matrices[0]
        if len(matrices) == 1:
            return first
        numbers = mx.concatenate([one.numbers for one in matrices], -2)
        if not first.bits:
            return Matrix(numbers)
        scales, offsets = (mx.concatenate([getattr(one, key) for one in matrices], -2) for key in ("scales", "offsets"))
        return Matrix(numbers, scales, offsets, first.group, first.bits)


class CheckpointWeights:
    """Tensors by transformers' names. Matrices of other encodings, as of GGUF, become floating-point numbers."""

    def __init__(self, checkpoint: TensorSource, dtype: mx.Dtype) -> None:
        self._checkpoint = checkpoint
        self._grouped = checkpoint if isinstance(checkpoint, GroupedCheckpoint) else None
        self._dtype = dtype

    def matrix(self, name: str) -> Matrix:
        if self._grouped is not None and (grouped := self._grouped.matrix(name)) is not None:
            return self._of_groups(grouped)
        return Matrix(self._numbers(self._checkpoint.tensor(name)))

    def experts(self, names: Sequence[str]) -> Matrix:
        """[experts, outputs, inputs], one matrix of each."""
        if self._grouped is not None and (grouped := self._grouped.experts(names)) is not None:
            return self._of_groups(grouped)
        stacked = mx.stack([self._numbers(self._checkpoint.tensor(name)) for name in names])
        mx.eval(stacked)
        return Matrix(stacked)

    def vector(self, name: str, *, added: float = 0.0, dtype: mx.Dtype | None = None) -> mx.array:
        """The numbers of a norm or a bias, `added` to in float32. dtype: None means that of the activations."""
        return mx.array(self._checkpoint.tensor(name).as_float32() + np.float32(added)).astype(dtype or self._dtype)

    def whole(self, name: str, *, dtype: mx.Dtype | None = None) -> mx.array:
        """All numbers of a tensor, those in groups unpacked. dtype: None means that of the activations."""
        if self._grouped is not None and (grouped := self._grouped.matrix(name)) is not None:
            matrix = self._of_groups(grouped)
            return matrix.rows(mx.arange(matrix.numbers.shape[-2])).astype(dtype or self._dtype)
        return mx.array(self._checkpoint.tensor(name).as_float32()).astype(dtype or self._dtype)

    def _of_groups(self, grouped: Grouped) -> Matrix:
        scales, offsets = (self._numbers(tensor) for tensor in (grouped.scales, grouped.offsets))
        return Matrix(mx.array(grouped.words), scales, offsets, grouped.group, grouped.bits)

    def _numbers(self, tensor: SourceTensor) -> mx.array:
        found: mx.array
        if tensor.encoding in _FLOATS and tensor.row_order is None:
            stored, dtype = _FLOATS[tensor.encoding]
            words: NDArray[np.generic] = tensor.data.view(stored).reshape(tensor.shape)
            found = mx.array(words)
            found = found if found.dtype == dtype else mx.view(found, dtype)
        else:
            found = mx.array(tensor.as_float32())
        return found.astype(self._dtype)
