"""Lattice codecs for Kakeya: blocks of a rotated vector become points of D4 or E8, packed as integers.

    D4    integers with an even sum, four at a time
    E8    integers with an even sum, or the same shifted by ½ in every element, eight at a time

Elements lie within ±reach (Q). Four digits d = x + Q in base n = 2Q + 1 make a number I = ((d0·n + d1)·n + d2)·n + d3.
As n is odd, I is even exactly if the sum of the digits is, so:

    D4    stores I ÷ 2: the fewest bits there can be for its points. Q = 9: 16, 37: 24, 75: 28, 151: 32 a block
    E8    stores two of them: the second's last bit equals the first's, and its place is taken by the shift

A point outside the range is never clipped, which would break the parity and leave the lattice: the cheapest step within
the range is taken instead.

Against equal steps a lattice gains from the shape of its cells, 0.37 dB for D4 and 0.65 dB for E8, at equal bits.
Coding a decoded vector again gives the same bytes where the outermost element is ±Q; the sum's parity, or E8's shift,
may have moved it.

Sources: Conway and Sloane, Fast quantizing and decoding algorithms for lattice quantizers and codes, 1982; the
`kakeyalattice` package for rotation and scale. It stores no bits, and where it clips a shifted E8 element to Q it
leaves the lattice (about 1 % less error at D = 64, with points that no index of that size can name).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from inference_engine.kv.compressors.bits import pack, packed_bytes, unpack
from inference_engine.kv.compressors.rotated import RotatedCompressor

_QUAD = 4  # digits in one number


@dataclass(frozen=True, kw_only=True, slots=True)
class Lattice(RotatedCompressor):
    """reach: the largest element of a point, Q in the package; the vector's largest magnitude becomes it.

    is_fitted: narrower scales are tried, too, and the one with the least error is kept.
    """

    family: ClassVar[str]
    known_bits: ClassVar[int] = 0  # of a number, that need not be stored

    reach: int
    is_fitted: bool = False

    @property
    def name(self) -> str:
        return f"{self.family}q{self.reach}fit" if self.is_fitted else f"{self.family}q{self.reach}"

    @property
    def word_bits(self) -> int:
        """Bits of one stored number: a block of D4, half a block of E8."""
        base = 2 * self.reach + 1
        return (base * base * base * base - 1).bit_length() - self.known_bits

    @abstractmethod
    def _block_points(self, blocks: Tensor) -> Tensor:
        """[B, block, N] -> the nearest points within the range, [B, block, N]."""

    @abstractmethod
    def _block_misses(self, blocks: Tensor) -> Tensor:
        """[B, block, N] -> squares of lengths that the errors of the blocks cannot exceed, [B, N]."""

    def _points_bytes(self, head_dim: int) -> int:
        return packed_bytes(head_dim // _QUAD, self.word_bits)

    def _scales(self, turned: Tensor) -> list[Tensor]:
        scale = turned.abs().amax(dim=0, keepdim=True).clamp(min=2.0**-40) * (1 / self.reach)
        # The first clips nothing; narrower ones have finer steps and clip some elements.
        return [scale * (1 - 0.05 * step) for step in range(8 if self.is_fitted else 1)]

    def _nearest(self, scaled: Tensor) -> Tensor:
        return self._block_points(self._blocks(scaled)).view(scaled.shape)

    def _misses(self, scaled: Tensor) -> Tensor:
        return self._block_misses(self._blocks(scaled)).sqrt()

    def _blocks(self, columns: Tensor) -> Tensor:
        return columns.view(-1, self.block, columns.shape[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class D4(Lattice):
    block: ClassVar[int] = 4
    family: ClassVar[str] = "d4"
    known_bits: ClassVar[int] = 1

    def _block_points(self, blocks: Tensor) -> Tensor:
        return even_points(blocks, self.reach)

    def _block_misses(self, blocks: Tensor) -> Tensor:
        # Within the range no point of space is further than 1 from D4.
        return even_misses(blocks, self.reach)

    def _pack(self, points: Tensor) -> Tensor:
        return pack(_numbers(self._blocks(points), self.reach) >> 1, self.word_bits)

    def _unpack(self, packed: Tensor, head_dim: int) -> Tensor:
        halves = unpack(packed, head_dim // _QUAD, self.word_bits).to(torch.int64)
        # Of 2·half and 2·half + 1, the first: the sum is even.
        return _digits(halves << 1, self.reach).view(head_dim, -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class E8(Lattice):
    block: ClassVar[int] = 8
    family: ClassVar[str] = "e8"

    def _block_points(self, blocks: Tensor) -> Tensor:
        whole = even_points(blocks, self.reach)
        # Elements from ½ − Q to Q + ½: digits again from 0 to 2Q.
        shifted = even_points(blocks - 0.5, self.reach) + 0.5
        return torch.where(_squares(blocks - shifted) < _squares(blocks - whole), shifted, whole)

    def _block_misses(self, blocks: Tensor) -> Tensor:
        # Within the range of both shifts no point of space is further than 1 from E8; otherwise the unshifted integers
        # are used.
        low, high = blocks.amin(dim=1), blocks.amax(dim=1)
        is_inside = (low >= 0.5 - self.reach) & (high <= self.reach)
        return torch.where(is_inside, 1.0, even_misses(blocks, self.reach))

    def _pack(self, points: Tensor) -> Tensor:
        is_shifted = points[:: self.block] != points[:: self.block].floor()  # [B, N]
        quads = (self._blocks(points) - is_shifted[:, None] * 0.5).view(-1, _QUAD, points.shape[1])
        first, second = _numbers(quads, self.reach).view(-1, 2, points.shape[1]).unbind(dim=1)
        words = torch.stack((first, (second >> 1 << 1) | is_shifted), dim=1)
        return pack(words.view(-1, points.shape[1]), self.word_bits)

    def _unpack(self, packed: Tensor, head_dim: int) -> Tensor:
        words = unpack(packed, head_dim // _QUAD, self.word_bits).to(torch.int64).view(-1, 2, packed.shape[1])
        first, second = words.unbind(dim=1)
        is_shifted = second & 1
        numbers = torch.stack((first, (second >> 1 << 1) | (first & 1)), dim=1).view(-1, packed.shape[1])
        blocks = _digits(numbers, self.reach).view(-1, self.block, packed.shape[1])
        return (blocks + is_shifted[:, None] * 0.5).view(head_dim, -1)


def even_points(blocks: Tensor, reach: int) -> Tensor:
    """[B, n, N] -> the nearest integers within ±reach that have an even sum in each block.

    Rounds each element; where the sum is odd, takes one step with the element where that costs least.
    """
    rounded = blocks.round().clamp_(-reach, reach)
    left = blocks - rounded
    step = torch.where(left >= 0, 1.0, -1.0)
    step = torch.where(rounded * step >= reach, -step, step)
    # A step costs 1 − 2·left·step. Its gain, made positive, with the element's number in its last bits: no two are
    # alike. (An arg-max along this dimension takes fifty times as long on a CPU.)
    gains = ((left * step).clamp_(min=-0.5) + 1.0).view(torch.int32)
    places = torch.arange(blocks.shape[1], dtype=torch.int32, device=blocks.device)[:, None]
    gains = (gains & -8) | places
    is_best = gains == gains.amax(dim=1, keepdim=True)
    is_odd = rounded.sum(dim=1, keepdim=True).to(torch.int32) & 1
    return rounded + step * (is_best & (is_odd == 1))


def even_misses(blocks: Tensor, reach: int) -> Tensor:
    """[B, n, N] -> squares of lengths that `blocks − even_points(blocks)` cannot exceed, [B, N].

    Elements within the range are at most ½ from an integer. A step is needed at most once, with the element furthest
    away, and then n elements at ½ are the worst: n/4. (n ≥ 4; with all elements whole, the step is 1.)
    Elements beyond the range by at most r are max(½, r) away, and a step inwards adds at most 1 + 2r to the square.
    """
    size = blocks.shape[1]
    beyond = (blocks.abs().amax(dim=1) - reach).clamp(min=0)
    return size * beyond.clamp(min=0.5).square() + torch.where(beyond > 0, 1 + 2 * beyond, 0.0)


def _squares(blocks: Tensor) -> Tensor:
    """[B, 8, N] -> sums of squares over a block, [B, 1, N], in the same order for every batch."""
    squares = blocks.square()
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return squares


def _numbers(quads: Tensor, reach: int) -> Tensor:
    """[B, 4, N] of integers within ±reach -> int64 [B, N], below (2·reach + 1)^4."""
    base = 2 * reach + 1
    digits = (quads + reach).to(torch.int64)
    numbers = digits[:, 0]
    for place in range(1, _QUAD):
        numbers = numbers * base + digits[:, place]
    return numbers


def _digits(numbers: Tensor, reach: int) -> Tensor:
    """The inverse of `_numbers`: int64 [B, N] -> float32 [B, 4, N]."""
    base = 2 * reach + 1
    digits = []
    for _ in range(_QUAD - 1):
        quotient = torch.div(numbers, base, rounding_mode="trunc")
        digits.append(numbers - quotient * base)
        numbers = quotient
    digits.append(numbers)
    return torch.stack(digits[::-1], dim=1).float() - reach


CODECS = (
    *(D4(reach=reach) for reach in (4, 9, 37, 75, 151)),
    D4(reach=9, is_fitted=True),
    *(E8(reach=reach) for reach in (7, 9, 31, 37, 75, 127, 151)),
    E8(reach=7, is_fitted=True),
)
