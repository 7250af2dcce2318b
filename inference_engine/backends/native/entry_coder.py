"""Entries are compressed where they lie in a session's regions, and decompressed into them, by the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.backends.native.decoders import RotationTables, native_analyser, native_codes, native_decoder
from inference_engine.kernels.trellis import Levels
from inference_engine.kv.compressor import KVCompressor
from inference_engine.kv.context import ArchivedCodes, CodedPlaces, GroupAnalyser, ReadLayer, RestoredLayer, Rotate
from inference_engine.kv.layout import Positions
from inference_engine.native.library import (
    CodedAs,
    CodedEntries,
    Kernels,
    KeyIndex,
    KVType,
    NativeCoding,
    ProductIdentity,
    RestoredRun,
    Threads,
    TrellisCodes,
)

_LANES = 16
_KINDS = {None: CodedAs.LEVELS, torch.float32: CodedAs.FLOAT32, torch.bfloat16: CodedAs.BFLOAT16}


@dataclass(frozen=True, slots=True, eq=False)
class NativeChoice:
    """Implements `kernels.trellis.Choose`: the same codes."""

    kernels: Kernels
    threads: Threads

    def __call__(self, numbers: Tensor, levels: Levels) -> Tensor:
        own = numbers.float().contiguous()
        codes = torch.empty(own.shape, dtype=torch.int32)
        tables = [levels.values, levels.weights, levels.first, levels.size]
        assert all(table.is_contiguous() for table in tables)
        values, weights, first, size = (table.data_ptr() for table in tables)
        given = TrellisCodes(
            numbers=own.data_ptr(),
            values=values,
            weights=weights,
            first=first,
            size=size,
            codes=codes.data_ptr(),
            vectors=len(own),
            count=levels.count,
            chains=levels.chains,
        )
        self.kernels.choose(self.threads, given)
        return codes


@dataclass(frozen=True, slots=True, eq=False)
class NativeCoder:
    """Implements Coder. turned: by rotation table, how many numbers of a head are rotated. turns: the rotations."""

    kernels: Kernels
    threads: Threads
    kv_type: KVType
    identity: ProductIdentity
    rotate: Rotate
    turned: Mapping[str, int]
    turns: Mapping[str, RotationTables]

    def codes(self, compressor: KVCompressor, head_dim: int) -> bool:
        return compressor.coding is not None and head_dim % _LANES == 0

    def decompress(self, compressor: KVCompressor, places: CodedPlaces) -> None:
        entries, _alive = self._entries(compressor, places)
        self.kernels.decompress(self.threads, entries)

    def compress(self, compressor: KVCompressor, places: CodedPlaces) -> bool:
        entries, _alive = self._entries(compressor, places)
        return self.kernels.compress(self.threads, entries)

    def restores(self, codes: ArchivedCodes, rotary: str) -> bool:
        return rotary in self.turns and codes.decoder.means.shape[1] % (2 * _LANES) == 0

    def restore(self, layers: Sequence[RestoredLayer], first: int, found: Tensor) -> None:
        for index, layer in enumerate(layers):
            if not self._restore(layer, first):
                found[index] = torch.nan

    def _restore(self, layer: RestoredLayer, first: int) -> bool:
        """False if a number is not finite."""
        decoder, turns = native_decoder(layer.codes.decoder, self.identity), self.turns[layer.rotary]
        heads, count, head_dim = layer.keys.shape
        apart = layer.keys.stride(0)
        row = layer.keys.stride(1)
        assert layer.keys.stride() == layer.values.stride() == (apart, row, 1) and apart % row == 0
        held = layer.held
        run = RestoredRun(
            codes=native_codes(layer.codes),
            turning=turns.structure,
            decoder=ctypes.addressof(decoder.structure),
            keys=layer.keys.data_ptr(),
            values=layer.values.data_ptr(),
            archive=None if held is None else KeyIndex.from_address(held.index).archive,
            held_keys=None if held is None else held.keys.data_ptr(),
            held_values=None if held is None else held.values.data_ptr(),
            first=first,
            count=count,
            apart=apart // row,
            row=row,
            held_row=0 if held is None else held.keys.stride(0),
            kv_heads=heads,
            head_dim=head_dim,
            kv_type=self.kv_type,
        )
        return self.kernels.restore(self.threads, run)

    def analyses(self, rotary: str, head_dim: int, count: int) -> bool:
        return rotary in self.turns

    def analyse(self, analyser: GroupAnalyser, layers: Sequence[ReadLayer], first: int) -> tuple[Tensor, Tensor]:
        made, count = native_analyser(analyser, self.identity), layers[0].keys.shape[1]
        numbers, part = torch.zeros(count, analyser.count), np.empty((count, analyser.count), np.float32)
        back = -torch.arange(first, first + count)
        found = torch.zeros(2, len(layers))
        for index, (layer, (matrix, means)) in enumerate(zip(layers, made.layers, strict=True)):
            keys, values = self.rotate(layer.keys.float(), back, layer.rotary), layer.values.float()
            entries = torch.cat((keys, values), dim=-1).transpose(0, 1).reshape(count, -1)  # K and V of each head
            self.kernels.linear(self.threads, matrix, self.identity, (entries - means).numpy(), part)
            numbers += torch.from_numpy(part)
            found[0, index], found[1, index] = (0 * keys).sum(), (0 * values).sum()  # NaN if one is not finite
        return numbers, found

    def _entries(self, compressor: KVCompressor, places: CodedPlaces) -> tuple[CodedEntries, tuple[object, ...]]:
        """With what has to live as long as they are used."""
        heads, region, head_dim = places.regions[0].shape
        slot_bytes, head_bytes, _ = places.codes[0].stride()
        coding, tables = _coding_of(compressor, head_dim)
        codes, means, regions = (_addresses(tensors) for tensors in (places.codes, places.means, places.regions))
        code_slots, slots = (np.ascontiguousarray(some, np.int64) for some in (places.code_slots, places.slots))
        turned = 0 if places.shifts is None else self.turned.get(places.rotary, 0)
        turns = None if places.shifts is None or not turned else self._turns(places.shifts, places.rotary, head_dim)
        entries = CodedEntries(
            coding=coding,
            codes=codes.ctypes.data,
            means=means.ctypes.data if places.means else None,
            regions=regions.ctypes.data,
            code_slots=code_slots.ctypes.data,
            entry_slots=slots.ctypes.data,
            turns=None if turns is None else turns.data_ptr(),
            slot_bytes=slot_bytes,
            head_bytes=head_bytes,
            region_slots=region,
            row=places.regions[0].stride(1),
            count=len(slots),
            layers=len(codes),
            heads=heads,
            head_dim=head_dim,
            turned=turned,
            kv_type=self.kv_type,
        )
        return entries, (tables, codes, means, regions, code_slots, slots, turns)

    def _turns(self, shifts: Positions, rotary: str, head_dim: int) -> Tensor:
        """[n, turned], cosines and sines as the model's own rotation has them: it turns vectors of 1 and 0."""
        turned = self.turned[rotary]
        ones = torch.zeros((1, len(shifts), head_dim))
        ones[..., : turned // 2] = 1
        return self.rotate(ones, torch.from_numpy(shifts), rotary)[0, :, :turned].contiguous()


def _addresses(tensors: Sequence[Tensor]) -> NDArray[np.int64]:
    return np.array([tensor.data_ptr() for tensor in tensors], np.int64)


@lru_cache
def _coding_of(compressor: KVCompressor, head_dim: int) -> tuple[NativeCoding, tuple[NDArray[Any] | None, ...]]:
    """With the tables that it points to."""
    given = compressor.coding
    assert given is not None
    levels = None if given.levels is None else np.array(given.levels, np.float32)
    nearest = None if given.nearest is None else np.frombuffer(given.nearest, np.uint8)
    coding = NativeCoding(
        kind=_KINDS[given.dtype],
        bits=given.bits,
        group=0 if given.dtype is not None else min(given.group or head_dim, head_dim),
        has_centres=given.has_centres,
        is_rotated=given.is_rotated,
        middle=given.middle,
        spread=given.spread,
        outermost=given.outermost,
        levels=None if levels is None else levels.ctypes.data,
        nearest=None if nearest is None else nearest.ctypes.data,
    )
    return coding, (levels, nearest)
