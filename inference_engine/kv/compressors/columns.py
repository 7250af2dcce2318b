"""Coding a batch of vectors as columns: the common part of every compressor that computes.

Vectors are transposed to [D, N], so each operation runs along the batch: many vectors at once, whatever the head size.
The code of a column depends on that column alone, to the bit: families use element-wise operations,
maxima and `sum_channels`, and never a matrix product or `Tensor.sum`, whose order of summation changes with the batch.
Nor a root: CPUs and GPUs round it differently, and codes are to be the same on both.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from inference_engine.kv.compressor import KVCompressor

# Elements per batch on a CPU: the arrays of one batch stay in its cache (measured: up to 3 times faster).
_CPU_NUMBERS = 2**17

# Rounding of float32 in the arithmetic here, as a share of the vector's length: at most 12 stages of a rotation in
# each direction and a handful of operations beside them, of 2^-24 each. And what is lost below float32's normal
# numbers.
_ROUNDING = 2.0**-18
_UNDERFLOW = 1e-30


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnCompressor(KVCompressor):
    """Codes columns that were scaled to magnitudes near 1: each is divided by a power of two, which is exact."""

    @abstractmethod
    def _encode(self, columns: Tensor, powers: Tensor) -> Tensor:
        """[D, N] with magnitudes below 2, [1, N] -> uint8 [vector_bytes, N], the codes of columns · powers.

        powers is NaN, and the column 0, where the vector was not finite.
        """

    @abstractmethod
    def _decode(self, codes: Tensor, head_dim: int) -> Tensor:
        """uint8 [vector_bytes, N] -> [D, N]."""

    @abstractmethod
    def _bound(self, columns: Tensor) -> Tensor:
        """[D, N] with magnitudes below 2 -> [N]: the largest error in exact arithmetic."""

    def encode(self, vectors: Tensor) -> Tensor:
        head_dim = vectors.shape[-1]
        self.check(head_dim)
        flat = vectors.reshape(-1, head_dim)
        codes = flat.new_empty((len(flat), self.vector_bytes(head_dim)), dtype=torch.uint8)
        for part in _parts(flat, head_dim):
            codes[part] = self._encode(*_normalised(flat[part].float().t())).t()
        return codes.view(*vectors.shape[:-1], codes.shape[1])

    def decode(self, codes: Tensor, head_dim: int) -> Tensor:
        self.check(head_dim)
        assert codes.dtype == torch.uint8 and codes.shape[-1] == self.vector_bytes(head_dim), (codes.dtype, codes.shape)
        flat = codes.reshape(-1, codes.shape[-1])
        vectors = flat.new_empty((len(flat), head_dim), dtype=torch.float32)
        for part in _parts(flat, head_dim):
            vectors[part] = self._decode(flat[part].t().contiguous(), head_dim).t()
        return vectors.view(*codes.shape[:-1], head_dim)

    def error_bound(self, vectors: Tensor) -> Tensor:
        head_dim = vectors.shape[-1]
        self.check(head_dim)
        flat = vectors.reshape(-1, head_dim)
        bounds = flat.new_empty(len(flat), dtype=torch.float32)
        for part in _parts(flat, head_dim):
            columns, powers = _normalised(flat[part].float().t())
            bound = self._bound(columns) + _ROUNDING * torch.linalg.vector_norm(columns, dim=0)
            bounds[part] = torch.where(powers[0].isnan(), torch.inf, bound * powers[0] + _UNDERFLOW)
        return bounds.view(vectors.shape[:-1])


def sum_channels(columns: Tensor) -> Tensor:
    """[D, N] -> [1, N]: sums by halves, in the same order for every batch."""
    while (count := len(columns)) > 1:
        half = count // 2
        pairs = columns[:half] + columns[half : 2 * half]
        columns = pairs if count % 2 == 0 else torch.cat((pairs, columns[-1:]))
    return columns


def _parts(flat: Tensor, head_dim: int) -> Iterator[slice]:
    step = max(1, _CPU_NUMBERS // head_dim) if flat.device.type == "cpu" else max(1, len(flat))
    for start in range(0, len(flat), step):
        yield slice(start, start + step)


def _normalised(columns: Tensor) -> tuple[Tensor, Tensor]:
    """[D, N] -> (columns ÷ powers, powers [1, N]), powers of two, so that the largest magnitudes lie in [1, 2).

    A column that is not finite becomes 0, and its power NaN.
    """
    columns = columns.contiguous()
    largest = columns.abs().amax(dim=0, keepdim=True)
    exponents = largest.view(torch.int32) & 0x7F80_0000
    is_finite = exponents < 0x7F80_0000
    powers = exponents.clamp(min=0x0080_0000).view(torch.float32)
    units = torch.where(is_finite, columns / powers, 0.0)
    return units, torch.where(is_finite, powers, torch.nan)
