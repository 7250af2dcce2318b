"""Between KV entries of a layer and the numbers that a latent stores: the contracts are `GroupAnalyser` and
`LayerDecoder`, in `kv/context.py`.

    entries ── analyse ──▶ numbers [n, C] of a group ··· codes ··· ── units ──▶ numbers ── entries ──▶ K and V

Entries are read and written where attention reads them, keys rotated. The layers of a group share their numbers: they
are unpacked once, and each layer adds its part to them. The bits of a number or an entry follow from its token alone:
neither from how many are computed at once nor from where they lie. The references below run anywhere;
`triton/latents.py` has the same operations for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

PADDED = 64  # the numbers of a token are padded with zeros to a multiple of it
_MOST_BITS = 16  # of a code: with what stands before it in its first byte it has at most three bytes

Turn = tuple[Tensor, Tensor]  # cosines and sines [n, D / 2] float32, of rotations in halves


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CodeTables:
    """How the codes of one group's tokens are read, C of them, on the device.

    begins, widths, tables [C] int32: a code's first bit, counted from the byte behind the scale, how many it has, and
    where its levels begin. levels, scales: float32. chains, first_byte: see `LayerDecoder`.
    """

    begins: Tensor
    widths: Tensor
    tables: Tensor
    levels: Tensor
    scales: Tensor
    chains: int
    first_byte: int

    @staticmethod
    def of(
        widths: Tensor, tables: Tensor, levels: Tensor, scales: Tensor, *, chains: int, first_byte: int
    ) -> CodeTables:
        """On the device of `tables`."""
        own, device = widths.cpu().int(), tables.device
        assert int(own.max()) <= _MOST_BITS, "a code would have a fourth byte"
        return CodeTables(
            begins=(own.cumsum(0) - own).int().to(device),
            widths=own.to(device),
            tables=tables.int(),
            levels=levels.float().to(device),
            scales=scales.float().to(device),
            chains=chains,
            first_byte=first_byte,
        )

    @property
    def count(self) -> int:
        return len(self.widths)

    @property
    def padded(self) -> int:
        return padded(self.count)


@dataclass(frozen=True, slots=True, eq=False)
class Synthesis:
    """How numbers become entries of a layer: numbers · matrix · factors + means.

    matrix: [Hkv, 2 · D, padded], float32, or float16 for entries in 16 bits, whose own rounding loses more. factors:
    [Hkv, 2 · D] float32, so that no number of the matrix is larger than 1. means: [Hkv, 2 · D] float32.
    """

    matrix: Tensor
    factors: Tensor
    means: Tensor

    @staticmethod
    def of(matrix: Tensor, means: Tensor, dtype: torch.dtype) -> Synthesis:
        """From a matrix [Hkv, 2 · D, C]. dtype: of the entries."""
        factors = matrix.float().abs().amax(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        small = matrix.float() / factors[..., None]
        whole = F.pad(small, (0, -matrix.shape[-1] % PADDED)).contiguous()
        return Synthesis(whole.to(operand_dtype(dtype)), factors.contiguous(), means.float().contiguous())


def padded(count: int) -> int:
    return -(-count // PADDED) * PADDED


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what entries of `dtype` are multiplied."""
    return torch.float32 if dtype == torch.float32 else torch.float16


class Units(Protocol):
    def __call__(self, low: Tensor, high: Tensor, tables: CodeTables, dtype: torch.dtype) -> Tensor:
        """The numbers of n tokens, scale · level of each code: [n, padded] of `dtype`, zeros behind the last.

        low, high: the two halves of their codes, uint8 [n, half] each.
        """


@dataclass(frozen=True, slots=True, eq=False)
class MadeLayer:
    """A layer whose entries are made of numbers: keys and values [Hkv, n, D], each head's contiguous, are written.

    found: float32 [2], becomes NaN where one of the keys, or of the values, is not finite.
    """

    synthesis: Synthesis
    keys: Tensor
    values: Tensor
    found: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Analysis:
    """How entries of a layer become its part of a group's numbers: ((entries − means) · matrix) · factors.

    matrix: [Hkv, 2, padded, D], of keys and of values, in the dtype of `Synthesis.matrix`, in which the deviations are
    multiplied, too. means: [Hkv, 2 · D] float32. factors: [padded] float32, one for all layers of the group.
    """

    matrix: Tensor
    means: Tensor
    factors: Tensor

    @staticmethod
    def of(matrices: Sequence[Tensor], means: Sequence[Tensor], dtype: torch.dtype) -> tuple[Analysis, ...]:
        """Of the layers of a group, from matrices [Hkv, 2 · D, C]. dtype: of the entries."""
        count = matrices[0].shape[-1]
        factors = torch.ones(padded(count), device=matrices[0].device)
        if operand_dtype(dtype) != torch.float32:
            # In 16 bits no number of a matrix is larger than 1; what is lost of one far below is lost of the sum, too.
            largest = torch.stack([matrix.float().abs().amax(dim=(0, 1)) for matrix in matrices]).amax(dim=0)
            factors[:count] = largest.clamp_min(torch.finfo(torch.float32).tiny)
        found = []
        for matrix, own in zip(matrices, means, strict=True):
            whole = F.pad(matrix.float(), (0, padded(count) - count)) / factors
            halves = whole.view(len(matrix), 2, matrix.shape[1] // 2, -1).mT
            found.append(Analysis(halves.to(operand_dtype(dtype)).contiguous(), own.float().contiguous(), factors))
        return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class AnalysedLayer:
    """A layer whose entries give their part of a group's numbers.

    keys, values: [Hkv, n, D], each head's contiguous. found: see `MadeLayer`; also NaN where a deviation is too large
    for the dtype in which it is multiplied.
    """

    analysis: Analysis
    keys: Tensor
    values: Tensor
    found: Tensor


class Entries(Protocol):
    def __call__(self, units: Tensor, layers: Sequence[MadeLayer], *, turn: Turn | None) -> None:
        """Write the entries of a group's layers, all of one shape and of equal strides.

        units: [n, padded] in the dtype of the matrices. turn: by which keys are rotated; None: they are not.
        """


class Analyse(Protocol):
    def __call__(self, layers: Sequence[AnalysedLayer], *, turn: Turn | None) -> Tensor:
        """The numbers of a group, float32 [n, padded]: the sum of its layers' parts, in their order.

        The layers have one shape, equal strides and one group's factors. turn: by which keys have been rotated; None:
        they have not.
        """


@dataclass(frozen=True, slots=True)
class LatentOps:
    """The operations, of one kind: `PLAIN`, or a device's own."""

    units: Units
    entries: Entries
    analyse: Analyse


def units(low: Tensor, high: Tensor, tables: CodeTables, dtype: torch.dtype) -> Tensor:
    """See `Units`."""
    own = torch.cat((low, high), dim=1)[:, tables.first_byte :]
    octets = F.pad(own[:, 1:], (0, 3)).int()
    threes = (octets[:, :-2] << 16) | (octets[:, 1:-1] << 8) | octets[:, 2:]
    right = 24 - tables.begins % 8 - tables.widths
    codes = (threes[:, (tables.begins // 8).long()] >> right) & ((1 << tables.widths) - 1)
    ends = codes & 1
    one, two, three = (F.pad(ends, (steps * tables.chains, 0))[:, : tables.count] for steps in (1, 2, 3))
    level = tables.tables + ((codes >> 1) << 2) + (((ends ^ one ^ three) << 1) | two)
    numbers = tables.levels[level.long()] * tables.scales[own[:, 0].long()][:, None]
    return F.pad(numbers, (0, tables.padded - tables.count)).to(dtype)


def entries(units: Tensor, layers: Sequence[MadeLayer], *, turn: Turn | None) -> None:
    """See `Entries`."""
    for layer in layers:
        synthesis = layer.synthesis
        products = units.float() @ synthesis.matrix.float().mT
        both = products * synthesis.factors[:, None] + synthesis.means[:, None]
        fresh, other = both.chunk(2, dim=-1)
        for index, (place, states) in enumerate(((layer.keys, _turned(fresh, turn)), (layer.values, other))):
            place.copy_(states)
            if not place.isfinite().all():
                layer.found[index] = torch.nan


def analyse(layers: Sequence[AnalysedLayer], *, turn: Turn | None) -> Tensor:
    """See `Analyse`."""
    first = layers[0]
    numbers = torch.zeros((first.keys.shape[1], first.analysis.matrix.shape[2]), device=first.keys.device)
    back = None if turn is None else (turn[0], -turn[1])
    for layer in layers:
        own = layer.analysis
        for index, states in enumerate((_turned(layer.keys.float(), back), layer.values.float())):
            means = own.means[:, index * states.shape[-1] :][:, None, : states.shape[-1]]
            deviations = (states - means).to(own.matrix.dtype).float()
            numbers += torch.einsum("hnd,hcd->nc", deviations, own.matrix[:, index].float())
            if not deviations.isfinite().all():
                layer.found[index] = torch.nan
    return numbers * first.analysis.factors


def _turned(keys: Tensor, turn: Turn | None) -> Tensor:
    if turn is None:
        return keys
    (lower, upper), (cos, sin) = keys.chunk(2, dim=-1), turn
    return torch.cat((lower * cos - upper * sin, upper * cos + lower * sin), dim=-1)


PLAIN = LatentOps(units, entries, analyse)
