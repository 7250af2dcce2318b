"""A checkpoint's tensors as arrays of MLX, in the dtype of the activations; matrices in groups as they are stored."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from inference_engine.backends.mlx.program import Matrix
from inference_engine.backends.native.program import Checkpoint, StoredTensor
from inference_engine.models.grouped import Grouped, GroupedCheckpoint

# As numpy reads them, and as what MLX takes the bytes for.
_FLOATS = {"F32": ("<f4", mx.float32), "F16": ("<u2", mx.float16), "BF16": ("<u2", mx.bfloat16)}


class CheckpointWeights:
    """Implements Weights. Matrices of other encodings, such as GGUF's blocks, become floating-point numbers."""

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype) -> None:
        self._checkpoint = checkpoint
        self._grouped = checkpoint if isinstance(checkpoint, GroupedCheckpoint) else None
        self._dtype = dtype

    def matrix(self, name: str) -> Matrix:
        if self._grouped is not None and (grouped := self._grouped.matrix(name)) is not None:
            return self._of_groups(grouped)
        return Matrix(self._numbers(self._checkpoint.tensor(name)))

    def experts(self, names: Sequence[str]) -> Matrix:
        if self._grouped is not None and (grouped := self._grouped.experts(names)) is not None:
            return self._of_groups(grouped)
        stacked = mx.stack([self._numbers(self._checkpoint.tensor(name)) for name in names])
        mx.eval(stacked)
        return Matrix(stacked)

    def vector(self, name: str, *, added: float = 0.0) -> mx.array:
        numbers = self._checkpoint.tensor(name).as_float32()
        return mx.array(numbers + np.float32(added)).astype(self._dtype)

    def _of_groups(self, grouped: Grouped) -> Matrix:
        scales, offsets = (self._numbers(tensor) for tensor in (grouped.scales, grouped.offsets))
        return Matrix(mx.array(grouped.words), scales, offsets, grouped.group, grouped.bits)

    def _numbers(self, tensor: StoredTensor) -> mx.array:
        found: mx.array
        if tensor.encoding in _FLOATS and tensor.row_order is None:
            stored, dtype = _FLOATS[tensor.encoding]
            words: NDArray[np.generic] = tensor.data.view(stored).reshape(tensor.shape)
            found = mx.array(words)
            found = found if found.dtype == dtype else mx.view(found, dtype)
        else:
            found = mx.array(tensor.as_float32())
        return found.astype(self._dtype)
