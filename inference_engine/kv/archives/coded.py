"""An archive of compressed entries: each K and V vector is coded by itself, layer by layer, and packed.

    run of a layer   means [K and V, Hkv, D] | codes [K and V][capacity, Hkv, vector bytes]

Coded are the unrotated key minus a per-channel mean, and the value minus its mean: keys have a large constant part per
channel that a code would otherwise spend its bits on (record `codec_error`, lloyd4: 3.9 times less error at equal
bytes). The means are those of the session's own first entries: they need no calibration, are a function of the
history, and take the memory of one entry. Decoding gives unrotated keys; the model's rotation moves them back to their
positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from inference_engine.kernels.kv_dtype import as_kept
from inference_engine.kv.archives.finite import FiniteCheck
from inference_engine.kv.archives.restorer import Archive, ArchivedPart, EntryBlock, KeptLayers, Restorer
from inference_engine.kv.compressor import KVCompressor
from inference_engine.kv.context import CodedPlaces, KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import Positions
from inference_engine.kv.memory.pool import Demand, Run
from inference_engine.kv.slots import LayerSlots, evenly_apart, neighbours

_ALIGNED = 16  # bytes, at which codes begin


@dataclass(frozen=True, slots=True)
class Coded(Restorer):
    """Keeps entries as codes of `compressor`."""

    entries: type[ArchivedPart]
    compressor: KVCompressor

    def check(self, geometry: Geometry, layers: Sequence[int]) -> None:
        for index in layers:
            self.compressor.check(geometry.layers[index].head_dim)

    def demands(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> tuple[Demand, ...]:
        return tuple(demand for group in kept for demand in [self._demand(geometry, group)] * len(group.layers.layers))

    def open(self, context: KVContext, kept: Sequence[KeptLayers]) -> Archive | None:
        demands = self.demands(context.geometry, kept)
        starts = context.pool.reserve(demands)
        return None if starts is None else _CodedArchive(self.compressor, context, kept, demands, starts)

    def _demand(self, geometry: Geometry, group: KeptLayers) -> Demand:
        """One layer's codes, and its means, as large as one entry."""
        if not group.capacity:
            return Demand(width=1, elements=0)
        means = group.layers.kv_heads * group.layers.entry.width * geometry.itemsize
        return Demand.of_bytes(geometry, means + 2 * _code_bytes(self.compressor, group))


class _CodedArchive(Archive):
    def __init__(
        self,
        compressor: KVCompressor,
        context: KVContext,
        kept: Sequence[KeptLayers],
        demands: Sequence[Demand],
        starts: Sequence[int],
    ) -> None:
        self._compressor = compressor
        self._context = context
        self._demands = demands
        self._starts = starts
        self._kept = kept
        self._finite = FiniteCheck()
        # Does the device code entries that are in regions?
        self._has_coder = all(context.coder.codes(compressor, group.layers.head_dim) for group in kept)
        ends = np.cumsum([len(group.layers.layers) for group in kept])
        self._groups = [
            _CodedGroup(compressor, context, group, starts[end - len(group.layers.layers) : end])
            for group, end in zip(kept, ends.tolist(), strict=True)
        ]

    def begin(self, blocks: Sequence[EntryBlock]) -> None:
        for group, block in zip(self._groups, blocks, strict=True):
            group.begin(block)

    def keep(self, blocks: Sequence[EntryBlock]) -> None:
        for kept, group, block in zip(self._kept, self._groups, blocks, strict=True):
            self._finite.ask(kept.layers.layers, block.keys, block.values, come_back=False)
            group.keep(block)

    def keep_from(self, regions: Sequence[LayerSlots], positions: Sequence[Positions]) -> None:
        if self._has_coder and all(
            group.compress(slots, asked) for group, slots, asked in zip(self._groups, regions, positions, strict=True)
        ):
            return
        super().keep_from(regions, positions)  # where an entry is not finite, the check says which

    def restore(self, positions: Sequence[Positions]) -> Sequence[EntryBlock]:
        return [group.restore(asked) for group, asked in zip(self._groups, positions, strict=True)]

    def restore_into(self, regions: Sequence[LayerSlots], positions: Sequence[Positions]) -> None:
        if self._has_coder:
            for group, slots, asked in zip(self._groups, regions, positions, strict=True):
                group.decompress(slots, asked)
        else:
            super().restore_into(regions, positions)

    def ask_finite(self) -> int:
        return self._finite.send()

    def require_finite(self, upto: int | None = None) -> None:
        self._finite.require(upto)

    def save(self, positions: Sequence[Positions]) -> Iterator[tuple[Tensor, ...]]:
        for group, kept in zip(self._groups, positions, strict=True):
            yield from group.save(kept)

    def load(self, positions: Sequence[Positions], saved: Iterable[tuple[Tensor, ...]]) -> None:
        parts = iter(saved)
        for group, kept in zip(self._groups, positions, strict=True):
            group.load(kept, parts)

    def held_bytes(self, counts: Sequence[int]) -> int:
        return sum(group.held_bytes(count) for group, count in zip(self._groups, counts, strict=True))

    def forget(self) -> None:
        """Old codes are never read again, and new ones overwrite them."""
        self._finite.forget()

    @property
    def runs(self) -> Sequence[Run]:
        return self._context.pool.runs(self._demands, self._starts)

    def release(self) -> None:
        self._context.pool.release(self._demands, self._starts)


class _CodedGroup:
    """The codes of one set of layers."""

    def __init__(self, compressor: KVCompressor, context: KVContext, kept: KeptLayers, starts: Sequence[int]) -> None:
        self._compressor = compressor
        self._context = context
        self._kept = kept
        heads, dim, itemsize = kept.layers.kv_heads, kept.layers.head_dim, context.geometry.itemsize
        self._vector_bytes = compressor.vector_bytes(dim)
        self._mean_bytes = 2 * heads * dim * itemsize * len(starts)
        runs = tuple(evenly_apart(starts)) if kept.capacity else ()
        # Of keys and of values: views of the pool, for some layers at a time.
        memory, apart_codes = context.pool.memory, _code_bytes(compressor, kept)
        self._means = [
            [
                (layers, _spaced(memory, starts[layers.start] + index * heads * dim, layers, apart, (heads, dim)))
                for layers, apart in runs
            ]
            for index in range(2)
        ]
        shape = (kept.capacity, heads, self._vector_bytes)
        self._codes = [
            [
                (
                    layers,
                    _spaced(
                        memory.view(torch.uint8),
                        (starts[layers.start] + 2 * heads * dim) * itemsize + index * apart_codes,
                        layers,
                        apart * itemsize,
                        shape,
                    ),
                )
                for layers, apart in runs
            ]
            for index in range(2)
        ]

    def begin(self, block: EntryBlock) -> None:
        if not len(block.positions):
            return
        for means, entries in zip(self._means, (block.keys, block.values), strict=True):
            mean = entries.mean(dim=1)
            for layers, place in means:
                place.copy_(as_kept(mean[layers], place.dtype))

    def keep(self, block: EntryBlock) -> None:
        if not len(block.positions):
            return
        entries = [
            (states - self._mean(index)).transpose(0, 1) for index, states in enumerate((block.keys, block.values))
        ]
        name = ("codes", self._compressor)
        codes = self._context.compute(name, partial(_encode, self._compressor), entries)
        for places, fresh in zip(self._codes, codes, strict=True):
            self._put(places, block.positions, fresh)

    def _put(self, places: Sequence[tuple[slice, Tensor]], positions: Positions, codes: Tensor) -> None:
        """codes: [n, L, Hkv, vector bytes]"""
        first = 0
        for begin, end in neighbours(self._kept.slots(positions)):
            for layers, place in places:
                place[:, begin:end] = codes[first : first + end - begin, layers].transpose(0, 1)
            first += end - begin

    def restore(self, positions: Positions) -> EntryBlock:
        layers, dim = self._kept.layers, self._kept.layers.head_dim
        if not len(positions):
            device = self._context.device if self._kept.capacity else torch.device("cpu")
            nothing = torch.zeros((len(layers.layers), 0, layers.kv_heads, dim), device=device)
            return EntryBlock(positions, nothing, nothing)
        name = ("vectors of codes", self._compressor, dim)
        codes = [self._codes_of(places, positions) for places in self._codes]
        entries = self._context.compute(name, partial(_decode, self._compressor, dim), codes)
        keys, values = (part.transpose(0, 1) + self._mean(index) for index, part in enumerate(entries))
        return EntryBlock(positions, keys, values)

    def compress(self, slots: LayerSlots, positions: Positions) -> bool:
        """Code entries that are in regions. False if one is not finite: then the codes mean nothing."""
        coder, places = self._context.coder, self._places(slots, positions, -positions)
        return all(coder.compress(self._compressor, part) for part in places)

    def decompress(self, slots: LayerSlots, positions: Positions) -> None:
        """Write archived entries into regions, keys rotated to their positions."""
        for part in self._places(slots, positions, positions):
            self._context.coder.decompress(self._compressor, part)
        slots.held[slots.layout.slots(positions)] = positions

    def _places(self, slots: LayerSlots, positions: Positions, shifts: Positions) -> Iterator[CodedPlaces]:
        """Of the keys, and of the values."""
        if not len(positions):
            return
        assert positions[0] >= slots.layout.spare, "keys of the sink have been moved"
        for index, states in enumerate((slots.buffer.keys, slots.buffer.values)):
            yield CodedPlaces(
                codes=[codes for _, place in self._codes[index] for codes in place],
                code_slots=self._kept.slots(positions),
                means=[mean for _, place in self._means[index] for mean in place],
                regions=slots.regions(states),
                slots=slots.layout.slots(positions),
                shifts=shifts if index == 0 else None,
                rotary=self._kept.layers.rotary,
            )

    def _codes_of(self, places: Sequence[tuple[slice, Tensor]], positions: Positions) -> Tensor:
        """[n, L, Hkv, vector bytes]"""
        layers = self._kept.layers
        found = places[0][1].new_empty((len(positions), len(layers.layers), layers.kv_heads, self._vector_bytes))
        first = 0
        for begin, end in neighbours(self._kept.slots(positions)):
            for own, place in places:
                found[first : first + end - begin, own] = place[:, begin:end].transpose(0, 1)
            first += end - begin
        return found

    def save(self, positions: Positions) -> Iterator[tuple[Tensor, ...]]:
        """The means [layers, Hkv, D] of keys and of values, then the codes [n, layers, Hkv, vector bytes] of both."""
        if len(positions):
            yield tuple(torch.cat([place for _, place in means]) for means in self._means)
            yield tuple(self._codes_of(places, positions) for places in self._codes)

    def load(self, positions: Positions, saved: Iterator[tuple[Tensor, ...]]) -> None:
        if not len(positions):
            return
        for means, given in zip(self._means, next(saved), strict=True):
            for layers, place in means:
                place.copy_(given[layers])
        for places, codes in zip(self._codes, next(saved), strict=True):
            self._put(places, positions, codes)

    def held_bytes(self, count: int) -> int:
        if not count:
            return 0
        page = self._context.geometry.page_tokens
        entries = min(self._kept.capacity, -(-count // page) * page)
        heads, layers = self._kept.layers.kv_heads, len(self._kept.layers.layers)
        return self._mean_bytes + 2 * entries * heads * self._vector_bytes * layers

    def _mean(self, index: int) -> Tensor:
        """[layers, 1, Hkv, D] float32."""
        means = [place for _, place in self._means[index]]
        return (means[0] if len(means) == 1 else torch.cat(means)).float()[:, None]


def _code_bytes(compressor: KVCompressor, group: KeptLayers) -> int:
    """Of the codes of a layer's keys, or of its values, in memory."""
    own = group.capacity * group.layers.kv_heads * compressor.vector_bytes(group.layers.head_dim)
    return -(-own // _ALIGNED) * _ALIGNED


def _spaced(memory: Tensor, first: int, layers: slice, apart: int, shape: tuple[int, ...]) -> Tensor:
    """[layers, *shape] of flat memory, contiguous for each layer, from number `first` on, one every `apart`."""
    own = memory[first : first + math.prod(shape)].view(shape)
    count = layers.stop - layers.start
    return own.as_strided((count, *shape), (apart, *own.stride()))


# These functions hold nothing of a session, because recordings of them outlive it.


def _encode(compressor: KVCompressor, entries: Sequence[Tensor]) -> Sequence[Tensor]:
    return [compressor.encode(part) for part in entries]


def _decode(compressor: KVCompressor, head_dim: int, codes: Sequence[Tensor]) -> Sequence[Tensor]:
    return [compressor.decode(part, head_dim) for part in codes]
