"""One thin latent per token: K and V of all covered layers as `bytes_per_token` bytes, and back.

    encode   rows → Basis.analyse → coefficients ÷ (deviation · scale) → nearest level → code → packed bits
    decode   the same, backwards

    one token   | group 0: scale, codes of component 0, 1, 2, … | group 1: scale, codes … |

A group begins on a whole byte, so a layer is restored from its own group's bytes.

The scale says how large the token's coefficients are compared with their deviations: 8 bits, sixteen steps to a
doubling. It goes half the way, in logarithm, from 1 to their root mean square: coefficients of one token rise and fall
together, but not all of them. On SmolLM2 that loses a tenth less than no scale, or than going all the way. What the
calibration text does not resemble is followed, where fixed levels would clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from kv_cache_proposer.f_theta.allocation import allocate_bytes, allocate_uniformly
from kv_cache_proposer.f_theta.basis import Basis
from kv_cache_proposer.f_theta.errors import LatentError
from kv_cache_proposer.f_theta.levels import MAX_BITS, laplace_distortion, laplace_levels
from kv_cache_proposer.f_theta.packing import Packing
from kv_cache_proposer.f_theta.rows import LayerShape, join

# How a token's bits are shared out over components: where they remove most error, or the same to all that get any.
BITS = {"variance": allocate_bytes, "uniform": allocate_uniformly}

SCALE_BYTES = 1
_SCALE_STEPS = 16  # to a doubling
_SCALE_ONE = 128  # the code of scale 1
_MOST_RATES = 16  # that are remembered


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupCoder:
    """A basis and the bits of each of its components, never rising, none of them 0."""

    basis: Basis
    packing: Packing
    levels: Tensor = field(repr=False)  # of each run of the packing, one after another, ascending
    first_levels: Tensor = field(repr=False)  # [C], where in them each component's begin
    edges: tuple[Tensor, ...] = field(repr=False)  # for each run, what lies between its levels

    @property
    def packed_bytes(self) -> int:
        return SCALE_BYTES + self.packing.packed_bytes

    @property
    def shared_bytes(self) -> int:
        tables = (self.levels, self.first_levels, *self.edges)
        return self.basis.nbytes + sum(table.nbytes for table in tables)

    def encode(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        vectors = join(self.basis.group, keys, values)
        scale_codes, codes = self._nearest(self.basis.analyse(vectors) / self.basis.deviations)
        return torch.cat((scale_codes, self.packing.pack(codes)), dim=1)

    def coefficients(self, packed: Tensor) -> Tensor:
        """uint8 [n, packed_bytes] → float32 [n, C]."""
        codes = self.packing.unpack(packed[:, SCALE_BYTES:])
        return self._units(packed[:, :SCALE_BYTES], codes) * self.basis.deviations

    def rounded(self, units: Tensor) -> Tensor:
        """Coefficients ÷ deviations [n, C] as they come back from their codes."""
        return self._units(*self._nearest(units))

    def _nearest(self, units: Tensor) -> tuple[Tensor, Tensor]:
        """The code of the scale, uint8 [n, 1], and those of the components, int32 [n, C]."""
        scale_codes = _scale_codes(units)
        units = units / _scales(scale_codes)
        codes = [
            torch.bucketize(units[:, run.first : run.first + run.count].contiguous(), between, out_int32=True)
            for run, between in zip(self.packing.runs, self.edges, strict=True)
        ]
        return scale_codes, torch.cat(codes, dim=1)

    def _units(self, scale_codes: Tensor, codes: Tensor) -> Tensor:
        return self.levels[codes + self.first_levels] * _scales(scale_codes)

    def to(self, device: torch.device | str) -> GroupCoder:
        return replace(
            self,
            basis=self.basis.to(device),
            levels=self.levels.to(device),
            first_levels=self.first_levels.to(device),
            edges=tuple(between.to(device) for between in self.edges),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LatentCodec:
    """A calibrated code for the rows of one model. Its tensors lie on one device; rows to encode must too.

    bits: how `at` shares them out, one of BITS.
    """

    coders: tuple[GroupCoder, ...]
    bits: str = "variance"
    # By bytes per token. To share bits out takes longer than to open a session.
    _lower: dict[int, LatentCodec] = field(init=False, repr=False, default_factory=dict)

    @property
    def bytes_per_token(self) -> int:
        return sum(part.packed_bytes for part in self.coders)

    @property
    def least_bytes_per_token(self) -> int:
        """The fewest bytes that `at` can give: a scale and a byte of codes for each group."""
        return len(self.coders) * (SCALE_BYTES + 1)

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        return tuple(shape for part in self.coders for shape in part.basis.group.shapes)

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's layers that the latent covers, ascending."""
        return tuple(shape.layer for shape in self.shapes)

    @property
    def shared_bytes(self) -> int:
        """Bytes of bases, means, weights and levels: held once, however many sessions there are."""
        return sum(part.shared_bytes for part in self.coders)

    @property
    def device(self) -> torch.device:
        return self.coders[0].basis.mean.device

    def to(self, device: torch.device | str) -> LatentCodec:
        return replace(self, coders=tuple(part.to(device) for part in self.coders))

    def at(self, bytes_per_token: int) -> LatentCodec:
        """The same bases, in the same memory, at fewer bytes: bits shared out again, components without bits left out.

        Raises LatentError for more bytes than this codec has: their components are gone.
        """
        if (known := self._lower.get(bytes_per_token)) is not None:
            return known
        if bytes_per_token > self.bytes_per_token:
            raise LatentError(
                f"a codec of {self.bytes_per_token} bytes per token cannot be refined to {bytes_per_token}; fit one at "
                "the largest number of bytes in use"
            )
        lower = code(tuple(part.basis for part in self.coders), bytes_per_token, bits=self.bits)
        self._lower[bytes_per_token] = lower
        for earlier in list(self._lower)[:-_MOST_RATES]:
            self._lower.pop(earlier, None)
        return lower

    def encode(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Unrotated rows of each covered layer, [n, Hkv, D] in any float dtype, as uint8 [n, bytes_per_token].

        A row's code depends on that row alone, up to rounding in matrix products. Raises NonFiniteRows with the layer.
        """
        if not len(keys) == len(values) == len(self.layers):
            raise LatentError(
                f"the latent covers {len(self.layers)} layers, got keys of {len(keys)} and values of {len(values)}"
            )
        codes: list[Tensor] = []
        first = 0
        for part in self.coders:
            last = first + len(part.basis.group.shapes)
            codes.append(part.encode(keys[first:last], values[first:last]))
            first = last
        return torch.cat(codes, dim=1)

    def decode(self, codes: Tensor, layers: Sequence[int] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """K and V, unrotated, float32 [n, Hkv, D], of each layer asked for, in that order; None asks for all.

        Only the groups of those layers are unpacked, and only those layers' part of the basis is used.
        """
        if codes.dtype != torch.uint8 or codes.ndim != 2 or codes.shape[1] != self.bytes_per_token:
            raise LatentError(
                f"codes must be uint8 [n, {self.bytes_per_token}], got {codes.dtype} {list(codes.shape)}; "
                "they are of another codec or rate"
            )
        wanted = self.layers if layers is None else tuple(layers)
        if unknown := sorted(set(wanted) - set(self.layers)):
            raise LatentError(f"layers {unknown} are not in this latent, which covers {list(self.layers)}")
        found: dict[int, tuple[Tensor, Tensor]] = {}
        packed = torch.split(codes, [part.packed_bytes for part in self.coders], dim=1)
        for part, own in zip(self.coders, packed, strict=True):
            indices = [index for index, shape in enumerate(part.basis.group.shapes) if shape.layer in wanted]
            if indices:
                coefficients = part.coefficients(own)
                for index in indices:
                    layer = part.basis.group.shapes[index].layer
                    found[layer] = part.basis.synthesise(coefficients, index)
        return [found[layer][0] for layer in wanted], [found[layer][1] for layer in wanted]


def code(bases: Sequence[Basis], bytes_per_token: int, *, bits: str = "variance") -> LatentCodec:
    """Share out a token's bytes over the bases' components as `bits` says, and drop components that get none.

    Raises LatentError for fewer bytes than a codec needs, or more than its components can take.
    """
    least = len(bases) * (SCALE_BYTES + 1)
    if bytes_per_token < least:
        raise LatentError(f"{bytes_per_token} bytes per token are too few for {len(bases)} groups; at least {least}")
    distortions = [laplace_distortion(bits) for bits in range(MAX_BITS + 1)]
    variances = [basis.deviations.double().square() for basis in bases]
    shares = BITS[bits](variances, bytes_per_token - len(bases) * SCALE_BYTES, distortions)
    widths = [tuple(int(width) for width in share if width) for share in shares]
    return LatentCodec(
        coders=tuple(coder(basis.truncated(len(own)), own) for basis, own in zip(bases, widths, strict=True)), bits=bits
    )


def coder(basis: Basis, widths: tuple[int, ...]) -> GroupCoder:
    """Code each component of the basis with its number of bits."""
    packing = Packing(widths)
    tables = [laplace_levels(run.width) for run in packing.runs]
    counts = torch.tensor([run.count for run in packing.runs])
    firsts = torch.tensor([0, *accumulate(len(table) for table in tables[:-1])], dtype=torch.int32)
    return GroupCoder(
        basis=basis,
        packing=packing,
        levels=torch.cat(tables),
        first_levels=firsts.repeat_interleave(counts),
        edges=tuple((table[1:] + table[:-1]) / 2 for table in tables),
    ).to(basis.mean.device)


def _scale_codes(units: Tensor) -> Tensor:
    """The scale of each row [n, C], uint8 [n, 1]."""
    energy = units.square().mean(dim=1, keepdim=True)
    # The square root of the root mean square: a quarter of the energy's logarithm.
    steps = energy.clamp_min(torch.finfo(torch.float32).tiny).log2() * (_SCALE_STEPS / 4)
    return (steps.round() + _SCALE_ONE).clamp(0, 255).to(torch.uint8)


def _scales(codes: Tensor) -> Tensor:
    return ((codes.float() - _SCALE_ONE) / _SCALE_STEPS).exp2()
