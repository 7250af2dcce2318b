"""A GPU's own operations between a latent and KV entries, which are read and written where attention reads them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from inference_engine.kernels.latents import (
    AnalysedLayer,
    Analysis,
    CodeTables,
    LatentOps,
    MadeLayer,
    Synthesis,
    Turn,
    operand_dtype,
)
from inference_engine.kv.compressor import KVCompressor
from inference_engine.kv.context import (
    ArchivedCodes,
    CodedPlaces,
    GroupAnalyser,
    LayerDecoder,
    ReadLayer,
    RestoredLayer,
)
from inference_engine.kv.geometry import UNROTATED
from inference_engine.models.seam import Seam

_MOST_BYTES = 128 * 2**20  # of a group's numbers, unpacked at once
_HEAD_DIMS = (32, 64, 128, 256)
_FLOAT32_BYTES = 4
_MOST_RATES = 4
# Shorter runs do not keep a GPU busy, and recorded operations do as well. Entries leave by whole segments, so a session
# always takes one way.
_LEAST_ANALYSED = 512
_TURNS_BYTES = 2**27  # of rotations that are kept: 260,000 tokens of heads of 128 channels
_TRIED = 7, 1_000  # positions
_TOLERANCE = 1e-5

Key = TypeVar("Key")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, eq=False)
class _Decoder:
    """A `LayerDecoder` on the device."""

    tables: CodeTables
    synthesis: Synthesis


@dataclass(frozen=True, slots=True, eq=False)
class _Analyser:
    """A `GroupAnalyser` on the device."""

    layers: tuple[Analysis, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TorchCoder:
    """Implements Coder for latents; other codes have no operation here."""

    seam: Seam
    latents: LatentOps
    device: torch.device
    _analysers: OrderedDict[GroupAnalyser, _Analyser] = field(init=False, default_factory=OrderedDict)
    _decoders: OrderedDict[LayerDecoder, _Decoder] = field(init=False, default_factory=OrderedDict)
    _in_halves: dict[tuple[str, int], bool] = field(init=False, default_factory=dict)
    _turns: OrderedDict[tuple[str, int, int], Turn] = field(init=False, default_factory=OrderedDict)

    def codes(self, compressor: KVCompressor, head_dim: int) -> bool:
        return False

    def decompress(self, compressor: KVCompressor, places: CodedPlaces) -> None:
        raise AssertionError("it has no operation")

    def compress(self, compressor: KVCompressor, places: CodedPlaces) -> bool:
        raise AssertionError("it has no operation")

    def restores(self, codes: ArchivedCodes, rotary: str) -> bool:
        return self._fits(rotary, codes.decoder.means.shape[1] // 2)

    def restore(self, layers: Sequence[RestoredLayer], first: int, found: Tensor) -> None:
        count = layers[0].keys.shape[1]
        for start, alike in _groups(layers):
            step = max(1, _MOST_BYTES // (_FLOAT32_BYTES * self._decoder_of(alike[0]).tables.padded))
            for begin in range(0, count, step):
                self._restore(alike, first + begin, slice(begin, min(count, begin + step)), found[start:])

    def analyses(self, rotary: str, head_dim: int, count: int) -> bool:
        return count >= _LEAST_ANALYSED and self._fits(rotary, head_dim)

    def _fits(self, rotary: str, head_dim: int) -> bool:
        return head_dim in _HEAD_DIMS and (rotary == UNROTATED or self._turns_in_halves(rotary, head_dim))

    def analyse(self, analyser: GroupAnalyser, layers: Sequence[ReadLayer], first: int) -> tuple[Tensor, Tensor]:
        found = torch.zeros((len(layers), 2), device=self.device)
        made = self._analyser(analyser, layers[0].keys.dtype)
        own = [
            AnalysedLayer(analysis, layer.keys, layer.values, broken)
            for layer, analysis, broken in zip(layers, made.layers, found, strict=True)
        ]
        numbers: Tensor | None = None
        for (rotary, *_), alike in groupby(zip(layers, own, strict=True), key=lambda pair: _place(pair[0])):
            turn = self.turn(rotary, first, layers[0].keys.shape[1])
            part = self.latents.analyse([layer for _, layer in alike], turn=turn)
            numbers = part if numbers is None else numbers + part
        assert numbers is not None, "a group has layers"
        return numbers[:, : analyser.count], found.T

    def decoding(self, codes: ArchivedCodes, dtype: torch.dtype) -> tuple[CodeTables, Synthesis]:
        """How codes become entries of `dtype`, for an operation that restores tokens of choice."""
        made = self._decoder(codes.decoder, dtype)
        return made.tables, made.synthesis

    def _restore(self, layers: Sequence[RestoredLayer], first: int, own: slice, found: Tensor) -> None:
        """Layers of one group. own: of the tokens, those to restore; the first of them is at position `first`."""
        codes, count = layers[0].codes, own.stop - own.start
        low, high = (half[first - codes.first :][:count] for half in codes.halves)
        dtype = operand_dtype(layers[0].keys.dtype)
        units = self.latents.units(low, high, self._decoder_of(layers[0]).tables, dtype)
        turn = self.turn(layers[0].rotary, first, count)
        made = [
            MadeLayer(self._decoder_of(layer).synthesis, layer.keys[:, own], layer.values[:, own], broken)
            for layer, broken in zip(layers, found, strict=False)
        ]
        self.latents.entries(units, made, turn=turn)

    def turn(self, rotary: str, first: int, count: int) -> Turn | None:
        """By which keys at `count` positions from `first` on are rotated; None: they are not.

        Layers turn alike, and old entries are restored in the same chunks again and again: those of the last calls
        stay."""
        if rotary == UNROTATED:
            return None
        wanted = (rotary, first, count)
        found = self._turns.get(wanted)
        if found is None:
            both = self.seam.turns_to(range(first, first + count), rotary, self.device)
            cos, sin = (part[:, : part.shape[1] // 2].contiguous() for part in both)
            found = self._turns[wanted] = (cos, sin)
            while len(self._turns) > 1 and _nbytes(self._turns.values()) > _TURNS_BYTES:
                self._turns.popitem(last=False)
        self._turns.move_to_end(wanted)
        return found

    def _decoder_of(self, layer: RestoredLayer) -> _Decoder:
        return self._decoder(layer.codes.decoder, layer.keys.dtype)

    def _decoder(self, decoder: LayerDecoder, dtype: torch.dtype) -> _Decoder:
        made = self._decoders.get(decoder)
        if made is None:
            tables = CodeTables.of(
                decoder.widths,
                decoder.tables.to(self.device),
                decoder.levels,
                decoder.scales,
                chains=decoder.chains,
                first_byte=decoder.first_byte,
            )
            matrix, means = decoder.make_matrix().to(self.device), decoder.means.to(self.device)
            made = _Decoder(tables, Synthesis.of(matrix, means, dtype))
            _remember(self._decoders, decoder, made, len(self.seam.layers))
        return made

    def _analyser(self, analyser: GroupAnalyser, dtype: torch.dtype) -> _Analyser:
        made = self._analysers.get(analyser)
        if made is None:
            matrices = [analyser.make_matrix(index).to(self.device) for index in range(len(analyser.means))]
            means = [each.to(self.device) for each in analyser.means]
            made = _Analyser(Analysis.of(matrices, means, dtype))
            _remember(self._analysers, analyser, made, len(self.seam.layers))
        return made

    def _turns_in_halves(self, rotary: str, head_dim: int) -> bool:
        """Is the model's rotation the one of `kernels/restoring.py`? Tried on some keys, once."""
        known = self._in_halves.get((rotary, head_dim))
        if known is None:
            known = self._in_halves[rotary, head_dim] = self._try_turning(rotary, head_dim)
        return known

    def _try_turning(self, rotary: str, head_dim: int) -> bool:
        generator = torch.Generator().manual_seed(1)
        keys = torch.randn((1, len(_TRIED), head_dim), generator=generator).to(self.device)
        expected = self.seam.rotate(keys, torch.tensor(_TRIED), rotary)
        turns = [self.seam.turns_to(range(at, at + 1), rotary, self.device) for at in _TRIED]
        cos, sin = (torch.cat(parts) for parts in zip(*turns, strict=True))
        if cos.shape[1] != head_dim:
            return False
        lower, upper = keys.chunk(2, dim=-1)
        found = keys * cos + torch.cat((-upper, lower), dim=-1) * sin
        return bool((found - expected).abs().max() < _TOLERANCE)


def _remember(known: OrderedDict[Key, Made], key: Key, made: Made, layers: int) -> None:
    """Clients choose rates, each with matrices of its own: those of a few rates stay, for all layers."""
    known[key] = made
    while len(known) > _MOST_RATES * layers:
        known.popitem(last=False)


def _nbytes(turns: Iterable[Turn]) -> int:
    return sum(cos.nbytes + sin.nbytes for cos, sin in turns)


def _place(layer: ReadLayer) -> tuple[str, torch.Size, tuple[int, ...]]:
    """Layers that are equal in it are read in one operation."""
    return layer.rotary, layer.keys.shape, layer.keys.stride()


def _groups(layers: Sequence[RestoredLayer]) -> Iterator[tuple[int, Sequence[RestoredLayer]]]:
    """Neighbours that share their codes and their rotation, and the index of the first of them."""
    start = 0
    for _, alike in groupby(layers, key=lambda layer: (layer.codes.decoder.first_byte, layer.rotary)):
        own = list(alike)
        yield start, own
        start += len(own)
