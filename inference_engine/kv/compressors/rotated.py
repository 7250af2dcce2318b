"""Compressors that rotate first: one scale, and the nearest points of some code in units of it.

    vector v ──÷ 2^e──▶ H·v ──÷ scale──▶ nearest points ──▶ scale (2 bytes) | points (packed)
                                                             H·(points · scale) ≈ v

After a Hadamard rotation all elements have about the same spread, whatever channels were outliers before. A fitted
compressor tries several scales and keeps the one with the least error; decoding costs the same.

Sources: the rotation before scalar codes, Ashkboos et al., QuaRot, arXiv 2404.00456; levels for Gaussian numbers after
it, Zandieh et al., TurboQuant, arXiv 2504.19874; the levels, Lloyd, Least squares quantization in PCM, 1982.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from inference_engine.kv.compressor import LARGEST_HEAD, Coding, require_head
from inference_engine.kv.compressors.bits import pack, packed_bytes, unpack
from inference_engine.kv.compressors.columns import ColumnCompressor, sum_channels
from inference_engine.kv.compressors.scales import SCALE_BYTES, load_scales, round_scales, store_scales


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def rotate(columns: Tensor) -> Tensor:
    """The Hadamard rotation: [D, N] -> H · columns, H with elements ±1 in Sylvester's order. Twice gives D · columns.

    Sums and differences of halves: log2(D) steps, each element by element, so that a column's result does not depend
    on its neighbours. Integers stay integers.
    """
    head_dim, count = columns.shape
    assert is_power_of_two(head_dim), head_dim
    span = 1
    while span < head_dim:
        pairs = columns.reshape(head_dim // (2 * span), 2, span * count)
        first, second = pairs[:, 0], pairs[:, 1]
        columns = torch.stack((first + second, first - second), dim=1).view(head_dim, count)
        span *= 2
    return columns


@dataclass(frozen=True, kw_only=True, slots=True)
class RotatedCompressor(ColumnCompressor):
    """What a family defines: which scales to try, the nearest points, and their bits."""

    block: ClassVar[int] = 1  # elements that are coded together

    @abstractmethod
    def _scales(self, turned: Tensor) -> list[Tensor]:
        """[D, N] -> scales [1, N] to try, the first being the one that `_misses` assumes."""

    @abstractmethod
    def _nearest(self, scaled: Tensor) -> Tensor:
        """[D, N] in units of the scale -> points of the code, [D, N]."""

    @abstractmethod
    def _misses(self, scaled: Tensor) -> Tensor:
        """[D, N] in units of the scale -> [any, N]: lengths that the errors of its parts cannot exceed."""

    @abstractmethod
    def _pack(self, points: Tensor) -> Tensor: ...

    @abstractmethod
    def _unpack(self, packed: Tensor, head_dim: int) -> Tensor: ...

    @abstractmethod
    def _points_bytes(self, head_dim: int) -> int: ...

    def _refit(self, turned: Tensor, points: Tensor, scale: Tensor) -> Tensor:
        """A scale that fits the points chosen at `scale` at least as well."""
        return scale

    def check(self, head_dim: int) -> None:
        require_head(
            is_power_of_two(head_dim) and self.block <= head_dim <= LARGEST_HEAD,
            self.name,
            f"that are powers of two from {self.block} to {LARGEST_HEAD}",
            head_dim,
        )

    def vector_bytes(self, head_dim: int) -> int:
        return SCALE_BYTES + self._points_bytes(head_dim)

    def _encode(self, columns: Tensor, powers: Tensor) -> Tensor:
        scale, points = self._fit(rotate(columns))
        # H·H = D, a power of two: divided out here, so that decoding needs no factor.
        stored = store_scales(scale * (powers / len(columns)))
        return torch.cat((stored, self._pack(points)))

    def _decode(self, codes: Tensor, head_dim: int) -> Tensor:
        scale = load_scales(codes[:SCALE_BYTES], 1)
        return rotate(self._unpack(codes[SCALE_BYTES:], head_dim) * scale)

    def _bound(self, columns: Tensor) -> Tensor:
        turned = rotate(columns)
        scale = round_scales(self._scales(turned)[0])
        misses = self._misses(turned / scale)
        bound: Tensor = torch.linalg.vector_norm(misses, dim=0) * scale[0] / math.sqrt(len(columns))
        return bound

    def _fit(self, turned: Tensor) -> tuple[Tensor, Tensor]:
        """[D, N] -> (scale [1, N], points [D, N]): the best of the scales to try."""
        first, *others = self._scales(turned)
        best_scale, best = self._fit_at(turned, first)
        if not others:
            return best_scale, best
        least = _misfit(turned, best_scale, best)
        for start in others:
            scale, points = self._fit_at(turned, start)
            misfit = _misfit(turned, scale, points)
            is_better = misfit < least
            least = torch.where(is_better, misfit, least)
            best_scale = torch.where(is_better, scale, best_scale)
            best = torch.where(is_better, points, best)
        return best_scale, best

    def _fit_at(self, turned: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        start = round_scales(start)
        points = self._nearest(turned / start)
        return self._refit(turned, points, start), points


def _misfit(turned: Tensor, scale: Tensor, points: Tensor) -> Tensor:
    """The squared error, [1, N]."""
    return sum_channels((points * scale - turned).square())


# The positive half of the levels that lose least on Gaussian numbers of unit variance: each is the mean of the numbers
# nearest to it.
_GAUSSIAN_LEVELS: dict[int, tuple[float, ...]] = {
    3: (0.24509, 0.75601, 1.34391, 2.15195),
    4: (0.12840, 0.38805, 0.65676, 0.94234, 1.25623, 1.61805, 2.06902, 2.73259),
    6: (
        *(0.03341, 0.10028, 0.16730, 0.23457, 0.30219, 0.37028, 0.43895, 0.50831),
        *(0.57850, 0.64966, 0.72192, 0.79547, 0.87048, 0.94715, 1.02574, 1.10649),
        *(1.18972, 1.27579, 1.36514, 1.45828, 1.55583, 1.65859, 1.76754, 1.88398),
        *(2.00961, 2.14681, 2.29898, 2.47130, 2.67227, 2.91741, 3.24044, 3.74410),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lloyd(RotatedCompressor):
    """The levels of Lloyd and Max for Gaussian numbers, which describe the elements of a rotated vector.

    Scales about the vector's spread are tried, and about the one that gives the largest element the outermost level;
    each is then replaced by the one that fits its levels best (least squares). Coding a decoded vector again may
    therefore give other bytes.
    """

    bits: int

    @property
    def name(self) -> str:
        return f"lloyd{self.bits}"

    @property
    def coding(self) -> Coding:
        levels, nearest = _gaussian_levels(self.bits), _gaussian_tables(self.bits, torch.device("cpu")).indices
        return Coding(
            bits=self.bits,
            levels=levels,
            is_rotated=True,
            nearest=bytes(nearest.tolist()),
            spread=_GAUSSIAN_SPREAD,
            outermost=1 / levels[-1],
        )

    def _points_bytes(self, head_dim: int) -> int:
        return packed_bytes(head_dim, self.bits)

    def _scales(self, turned: Tensor) -> list[Tensor]:
        # By the mean magnitude: square roots are rounded differently on different devices.
        spread = sum_channels(turned.abs()) * (_GAUSSIAN_SPREAD / len(turned))
        largest = turned.abs().amax(dim=0, keepdim=True) * (1 / _GAUSSIAN_LEVELS[self.bits][-1])
        starts = (spread, spread * 0.87, spread * 1.13, largest, largest * 0.9)
        return [start.clamp(min=2.0**-40) for start in starts]

    def _nearest(self, scaled: Tensor) -> Tensor:
        return _look_up(_gaussian_tables(self.bits, scaled.device).nearest, _cells(scaled))

    def _refit(self, turned: Tensor, points: Tensor, scale: Tensor) -> Tensor:
        return round_scales(sum_channels(turned * points) / sum_channels(points.square()))

    def _misses(self, scaled: Tensor) -> Tensor:
        tables = _gaussian_tables(self.bits, scaled.device)
        gaps = tables.levels.diff() / 2
        widest = torch.cat((gaps[:1], torch.maximum(gaps[:-1], gaps[1:]), gaps[-1:])) + 0.5 / _CELLS
        indices = _look_up(tables.indices, _cells(scaled))
        within = torch.maximum(_look_up(widest, indices), scaled.abs() - tables.levels[-1])
        # The fitted scale is rounded once more, by 2^-9 of points no longer than the vector.
        rounding = torch.linalg.vector_norm(scaled, dim=0, keepdim=True) * 2.0**-9
        return torch.cat((within, rounding))

    def _pack(self, points: Tensor) -> Tensor:
        return pack(_look_up(_gaussian_tables(self.bits, points.device).indices, _cells(points)), self.bits)

    def _unpack(self, packed: Tensor, head_dim: int) -> Tensor:
        return _look_up(_gaussian_tables(self.bits, packed.device).levels, unpack(packed, head_dim, self.bits))


_GAUSSIAN_SPREAD = math.sqrt(math.pi / 2)  # standard deviation of Gaussian numbers, in mean magnitudes
_CELLS = 512  # to a unit
_FARTHEST = 4  # units from zero; what lies beyond has the outermost level


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """levels, from the lowest; then for each cell of the line the level nearest to its middle, and that one's number.

    A search for each element takes a hundred times as long on a CPU. That an element near the border of two levels may
    get the wrong one costs less than a thousandth of the error.
    """

    levels: Tensor
    nearest: Tensor
    indices: Tensor


def _gaussian_levels(bits: int) -> tuple[float, ...]:
    half = _GAUSSIAN_LEVELS[bits]
    return (*(-level for level in reversed(half)), *half)


@lru_cache
def _gaussian_tables(bits: int, device: torch.device) -> _Tables:
    levels = torch.tensor(_gaussian_levels(bits))
    middles = (torch.arange(2 * _FARTHEST * _CELLS) + 0.5) / _CELLS - _FARTHEST
    indices = (middles[:, None] - levels).abs().argmin(dim=1)
    return _Tables(levels.to(device), levels[indices].to(device), indices.to(device, torch.uint8))


def _cells(scaled: Tensor) -> Tensor:
    """int32: the cell of the line that each element lies in."""
    return (scaled * _CELLS + _FARTHEST * _CELLS).clamp_(0, 2 * _FARTHEST * _CELLS - 1).to(torch.int32)


def _look_up(table: Tensor, places: Tensor) -> Tensor:
    """table[places]"""
    return table.index_select(0, places.to(torch.int32).view(-1)).view(places.shape)
