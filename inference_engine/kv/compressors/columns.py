"""Coding a batch of vectors as columns: the common part of every compressor that computes.

Vectors are turned on their side, [D, N], so that each operation runs along the batch: many vectors in one go, whatever
the head size. What a column becomes depends on that column alone, to the bit: families use element-wise operations,
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

# Numbers worked on at once on a CPU: the arrays of one go stay in its cache (measured: up to 3 times faster).
_CPU_NUMBERS = 2**17

# Rounding of float32 in the arithmetic here, as a share of the vector's length: at most 12 stages of a rotation each
# way and a handful of operations beside them, of 2^-24 each. And what is lost below float32's normal numbers.
_ROUNDING = 2.0**-18
_UNDERFLOW = 1e-30


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnCompressor(KVCompressor):
    """Codes columns that were brought near 1 before: a vector is divided by a power of two, which loses nothing."""

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
        """[D, N] with magnitudes below 2 -> [N]: the largest error, were arithmetic exact."""

    def encode(self, vectors: Tensor) -> Tensor:
        head_dim = vectors.shape[-1]
        self.check(head_dim)
        rows = vectors.reshape(-1, head_dim)
        codes = rows.new_empty((len(rows), self.vector_bytes(head_dim)), dtype=torch.uint8)
        for part in _parts(rows, head_dim):
            codes[part] = self._encode(*_normalised(rows[part].float().t())).t()
        return codes.view(*vectors.shape[:-1], codes.shape[1])

    def decode(self, codes: Tensor, head_dim: int) -> Tensor:
        self.check(head_dim)
        assert codes.dtype == torch.uint8 and codes.shape[-1] == self.vector_bytes(head_dim), (codes.dtype, codes.shape)
        rows = codes.reshape(-1, codes.shape[-1])
        vectors = rows.new_empty((len(rows), head_dim), dtype=torch.float32)
        for part in _parts(rows, head_dim):
            vectors[part] = self._decode(rows[part].t().contiguous(), head_dim).t()
        return vectors.view(*codes.shape[:-1], head_dim)

    def error_bound(self, vectors: Tensor) -> Tensor:
        head_dim = vectors.shape[-1]
        self.check(head_dim)
        rows = vectors.reshape(-1, head_dim)
        bounds = rows.new_empty(len(rows), dtype=torch.float32)
        for part in _parts(rows, head_dim):
            columns, powers = _normalised(rows[part].float().t())
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


def _parts(rows: Tensor, head_dim: int) -> Iterator[slice]:
    step = max(1, _CPU_NUMBERS // head_dim) if rows.device.type == "cpu" else max(1, len(rows))
    for start in range(0, len(rows), step):
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
