"""One small latent per token: K and V of all covered layers as `bytes_per_token` bytes, and back.

    encode   entries → Basis.analyse → coefficients ÷ (deviation · scale) → path through a trellis → codes → packed bits
    decode   the same, backwards

    one token   | group 0: scale, codes of component 0, 1, 2, … | group 1: scale, codes … |

A group begins on a whole byte, so a layer is restored from its own group's bytes.

The scale says how large the token's coefficients are compared with their deviations: 8 bits (`kernels/trellis.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from inference_engine.kernels.ops import open_ops
from inference_engine.kernels.trellis import Levels, Trellis, make_levels, scales
from inference_engine.kv.context import GroupAnalyser, LayerDecoder
from kv_cache_proposer.f_theta import levels
from kv_cache_proposer.f_theta.basis import Basis
from kv_cache_proposer.f_theta.bit_allocation import allocate_bytes
from kv_cache_proposer.f_theta.codec_errors import LatentError
from kv_cache_proposer.f_theta.group_layout import LayerShape, join
from kv_cache_proposer.f_theta.levels import LEADING, MAX_BITS
from kv_cache_proposer.f_theta.packing import Packing

SCALE_BYTES = 1
_MOST_RATES = 16  # that are remembered


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupCoder:
    """A basis and the bits of each of its components, in descending order, none of them 0."""

    basis: Basis
    packing: Packing
    levels: Levels = field(repr=False)
    trellis: Trellis = field(repr=False)

    @property
    def packed_bytes(self) -> int:
        return SCALE_BYTES + self.packing.packed_bytes

    @property
    def shared_bytes(self) -> int:
        return self.basis.nbytes + self.levels.nbytes

    def encode(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        vectors = join(self.basis.group, keys, values)
        units = self.basis.analyse(vectors) / self.basis.deviations
        packed = torch.empty((len(units), self.packed_bytes), dtype=torch.uint8, device=units.device)
        self.encode_units_into(units, packed)
        return packed

    def encode_units_into(self, units: Tensor, packed: Tensor) -> None:
        """Coefficients ÷ deviations [n, C] → uint8 [n, packed_bytes]."""
        scaled = self.trellis.scale(units, packed[:, :SCALE_BYTES])
        codes = self.trellis.choose(scaled, self.levels)
        self.trellis.pack(codes, self.packing.bits_on(units.device), packed[:, SCALE_BYTES:])

    def analyser(self) -> GroupAnalyser:
        shapes = self.basis.group.shapes
        return GroupAnalyser(
            layers=tuple(shape.layer for shape in shapes),
            count=self.levels.count,
            means=tuple(self.basis.means_of(index) for index in range(len(shapes))),
            make_matrix=self.basis.analysis_of,
        )

    def coefficients(self, packed: Tensor) -> Tensor:
        """uint8 [n, packed_bytes] → float32 [n, C]."""
        codes = self.packing.unpack(packed[:, SCALE_BYTES:])
        units = self.trellis.levels_of(codes, self.levels) * scales(packed[:, :SCALE_BYTES])
        return units * self.basis.deviations

    def decoder(self, index: int, first_byte: int) -> LayerDecoder:
        """Of the group's layer number `index`, whose group begins at `first_byte` of a code."""
        return LayerDecoder(
            first_byte=first_byte,
            chains=self.levels.chains,
            scales=scales(torch.arange(256, device=self.basis.mean.device)),
            widths=torch.tensor(self.packing.widths, dtype=torch.int32),
            tables=self.levels.first,
            levels=self.levels.values,
            means=self.basis.means_of(index),
            make_matrix=partial(self.basis.matrix_of, index),
        )

    def to(self, device: torch.device, trellis: Trellis) -> GroupCoder:
        return replace(self, basis=self.basis.to(device), levels=self.levels.to(device), trellis=trellis)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LatentCodec:
    """A calibrated code for the KV entries of one model. Its tensors and the entries to encode are on one device.

    kernels: as for an engine, `ModelConfig.kernels`.
    """

    coders: tuple[GroupCoder, ...]
    kernels: str = "auto"
    # By bytes per token. Allocating bits takes longer than opening a session.
    _lower: dict[int, LatentCodec] = field(init=False, repr=False, default_factory=dict)
    _decoders: dict[int, LayerDecoder] = field(init=False, repr=False, default_factory=dict)  # by layer
    _analysers: list[GroupAnalyser] = field(init=False, repr=False, default_factory=list)

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

    def to(self, device: torch.device | str, kernels: str | None = None) -> LatentCodec:
        """kernels: None for those it has. Raises BackendError for some that the device cannot have."""
        place, chosen = torch.device(device), kernels or self.kernels
        trellis = open_ops(chosen, place).trellis
        return replace(self, coders=tuple(part.to(place, trellis) for part in self.coders), kernels=chosen)

    def analysers(self) -> Sequence[GroupAnalyser]:
        if not self._analysers:
            self._analysers.extend(part.analyser() for part in self.coders)
        return self._analysers

    def encode_numbers(self, numbers: Sequence[Tensor]) -> Tensor:
        """As `encode`, of what `analysers` make: coefficients ÷ deviations [n, C] of each group."""
        packed = torch.empty((len(numbers[0]), self.bytes_per_token), dtype=torch.uint8, device=numbers[0].device)
        widths = [part.packed_bytes for part in self.coders]
        for part, own, place in zip(self.coders, numbers, torch.split(packed, widths, dim=1), strict=True):
            part.encode_units_into(own, place)
        return packed

    def using(self, trellis: Trellis) -> LatentCodec:
        return replace(self, coders=tuple(replace(part, trellis=trellis) for part in self.coders))

    def decoder(self, layer: int) -> LayerDecoder:
        """As `TokenCodec`."""
        if layer not in self._decoders:
            first_byte = 0
            for part in self.coders:
                layers = [shape.layer for shape in part.basis.group.shapes]
                if layer in layers:
                    self._decoders[layer] = part.decoder(layers.index(layer), first_byte)
                first_byte += part.packed_bytes
        return self._decoders[layer]

    def has(self, bytes_per_token: int) -> bool:
        """As `TokenCodec`: were its bits allocated already?"""
        return bytes_per_token in self._lower

    def at(self, bytes_per_token: int) -> LatentCodec:
        """The same bases, in the same memory, at fewer bytes: bits allocated again, components without bits removed.

        Raises LatentError for more bytes than this codec has: their components are gone.
        """
        if (known := self._lower.get(bytes_per_token)) is not None:
            return known
        if bytes_per_token > self.bytes_per_token:
            raise LatentError(
                f"a codec of {self.bytes_per_token} bytes per token cannot be refined to {bytes_per_token}; fit one at "
                "the largest number of bytes in use"
            )
        bases = tuple(part.basis for part in self.coders)
        lower = code(bases, bytes_per_token, kernels=self.kernels)
        lower = lower.using(self.coders[0].trellis)
        self._lower[bytes_per_token] = lower
        for earlier in list(self._lower)[:-_MOST_RATES]:
            self._lower.pop(earlier, None)
        return lower

    def encode(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Unrotated KV entries of each covered layer, [n, Hkv, D] in any float dtype, as uint8 [n, bytes_per_token].

        An entry's code depends on that entry alone, up to rounding in matrix products. The code of an entry that is not
        finite is undefined.
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

        Only the groups of those layers are unpacked, and only those layers' part of the basis is used. Entries
        of a layer decoded alone may round differently from those decoded with the whole group.
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
            shapes = part.basis.group.shapes
            indices = [index for index, shape in enumerate(shapes) if shape.layer in wanted]
            # One layer fits in a CPU's caches, all layers do not; on a GPU launches dominate.
            if len(indices) == len(shapes) and self.device.type != "cpu":
                states = part.basis.synthesise_all(part.coefficients(own))
                found |= {shape.layer: pair for shape, pair in zip(shapes, states, strict=True)}
            elif indices:
                coefficients = part.coefficients(own)
                found |= {shapes[index].layer: part.basis.synthesise(coefficients, index) for index in indices}
        return [found[layer][0] for layer in wanted], [found[layer][1] for layer in wanted]


def code(bases: Sequence[Basis], bytes_per_token: int, *, kernels: str = "auto") -> LatentCodec:
    """Share out a token's bytes over the bases' components, and drop components that get none.

    Raises LatentError for fewer bytes than a codec needs, or more than its components can take.
    """
    least = len(bases) * (SCALE_BYTES + 1)
    if bytes_per_token < least:
        raise LatentError(f"{bytes_per_token} bytes per token are too few for {len(bases)} groups; at least {least}")
    distortions = [levels.distortion(count) for count in range(MAX_BITS + 1)]
    variances = [basis.deviations.double().square() for basis in bases]
    shares = allocate_bytes(variances, bytes_per_token - len(bases) * SCALE_BYTES, distortions)
    widths = [tuple(int(width) for width in share if width) for share in shares]
    return coded([basis.truncated(len(own)) for basis, own in zip(bases, widths, strict=True)], widths, kernels)


def coded(bases: Sequence[Basis], widths: Sequence[tuple[int, ...]], kernels: str = "auto") -> LatentCodec:
    """A codec with so many bits for each component. The other arguments are those of `code`."""
    trellis = open_ops(kernels, bases[0].mean.device).trellis
    coders = [
        GroupCoder(
            basis=basis,
            packing=Packing(own),
            # An error in a coefficient of a fitted basis costs its square, wherever it is: see `Basis`.
            levels=make_levels(
                [levels.levels(width, place < LEADING) for place, width in enumerate(own)],
                basis.deviations.square(),
            ),
            trellis=trellis,
        )
        for basis, own in zip(bases, widths, strict=True)
    ]
    return LatentCodec(coders=tuple(coders), kernels=kernels)
