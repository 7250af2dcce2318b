"""An archive of compressed entries: each K and V vector is coded by itself, layer by layer, and packed.

    run of a layer   means [K and V, Hkv, D] | codes [K and V][capacity, Hkv, vector bytes]

Of an entry whose key and value share numbers, coded are the value and the key's other numbers. Where all of the value
lies in the key (latent attention), the others are kept as they are, rotated: they are few, all heads read them, and
nothing has to be unrotated.

Coded are the unrotated key minus a per-channel mean, and the value minus its mean: keys have a large constant part per
channel that a code would otherwise spend its bits on (record `codec_error`, lloyd4: 3.9 times less error at equal
bytes). The means are those of the session's own first entries: they need no calibration, are a function of the
history, and take the memory of one entry. Decoding gives unrotated keys; the model's rotation moves them back to their
positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from inference_engine.kernels.kv_dtype import as_kept
from inference_engine.kv.archives.finite import FiniteCheck, extremes
from inference_engine.kv.archives.restorer import Archive, ArchivedPart, EntryBlock, KeptLayers, Restorer
from inference_engine.kv.compressor import KVCompressor
from inference_engine.kv.context import CodedPlaces, KVContext
from inference_engine.kv.geometry import EntryShape, Geometry
from inference_engine.kv.layout import Positions
from inference_engine.kv.memory.pool import Demand, Mirror, Run
from inference_engine.kv.slots import LayerSlots, RegionPlaces, evenly_apart, neighbours

_ALIGNED = 16  # bytes, at which codes begin


@dataclass(frozen=True, slots=True)
class Coded(Restorer):
    """Keeps entries as codes of `compressor`."""

    entries: type[ArchivedPart]
    compressor: KVCompressor

    def takes(self, entry: EntryShape) -> bool:
        return entry.is_even or entry.shared > 0

    def check(self, geometry: Geometry, layers: Sequence[int]) -> None:
        for index in layers:
            for half in _halves(self.compressor, geometry.layers[index].entry, geometry.itemsize):
                if half.compressor is not None:
                    half.compressor.check(half.width)

    def demands(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> tuple[Demand, ...]:
        return tuple(demand for group in kept for demand in [self._demand(geometry, group)] * len(group.layers.layers))

    def open(self, context: KVContext, kept: Sequence[KeptLayers]) -> Archive | None:
        demands = self.demands(context.geometry, kept)
        starts = context.pool.reserve(demands)
        return None if starts is None else _CodedArchive(self.compressor, context, kept, demands, starts)

    def _demand(self, geometry: Geometry, group: KeptLayers) -> Demand:
        """One layer's codes, and the means of what is coded."""
        if not group.capacity:
            return Demand(width=1, elements=0)
        halves = _halves(self.compressor, group.layers.entry, geometry.itemsize)
        means = group.layers.kv_heads * sum(half.mean_width for half in halves) * geometry.itemsize
        return Demand.of_bytes(geometry, means + sum(half.bytes_of(group) for half in halves))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Half:
    """What an archive keeps of an entry's key, or of its value: `width` numbers of a head, from `first` on.

    compressor: None keeps the numbers as they lie in the pool, of `itemsize` bytes each.
    """

    first: int
    width: int
    compressor: KVCompressor | None
    itemsize: int

    def of(self, states: Tensor) -> Tensor:
        return states[..., self.first : self.first + self.width]

    @property
    def mean_width(self) -> int:
        return 0 if self.compressor is None else self.width

    @property
    def vector_bytes(self) -> int:
        return self.width * self.itemsize if self.compressor is None else self.compressor.vector_bytes(self.width)

    def bytes_of(self, group: KeptLayers) -> int:
        """Of a layer's codes, in memory."""
        own = group.capacity * group.layers.kv_heads * self.vector_bytes
        return -(-own // _ALIGNED) * _ALIGNED

    def encode(self, dtype: torch.dtype, vectors: Tensor) -> Tensor:
        if self.compressor is None:
            return vectors.to(dtype).contiguous().view(torch.uint8)
        return self.compressor.encode(vectors)

    def decode(self, dtype: torch.dtype, codes: Tensor) -> Tensor:
        if self.compressor is None:
            return codes.contiguous().view(dtype).float()
        return self.compressor.decode(codes, self.width)


def _halves(compressor: KVCompressor, entry: EntryShape, itemsize: int) -> tuple[_Half, _Half]:
    """Of the key, and of the value."""
    of_key = None if entry.value_in_key else compressor
    own = _Half(first=entry.shared, width=entry.key - entry.shared, compressor=of_key, itemsize=itemsize)
    return own, _Half(first=0, width=entry.value, compressor=compressor, itemsize=itemsize)


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
        self._has_coder = all(
            group.layers.entry.is_even and context.coder.codes(compressor, group.layers.head_dim) for group in kept
        )
        ends = np.cumsum([len(group.layers.layers) for group in kept])
        self._groups = [
            _CodedGroup(compressor, context, group, starts[end - len(group.layers.layers) : end])
            for group, end in zip(kept, ends.tolist(), strict=True)
        ]

    def begin(self, blocks: Sequence[EntryBlock]) -> None:
        for group, block in zip(self._groups, blocks, strict=True):
            group.begin(block)

    def begin_from(self, regions: Sequence[LayerSlots], positions: Sequence[Positions]) -> None:
        if (mirror := self._context.pool.mirror) is None:
            super().begin_from(regions, positions)
        else:
            self._on_all_ranks(mirror, _CodedWork.begin, regions, positions)

    def keep(self, blocks: Sequence[EntryBlock]) -> None:
        for kept, group, block in zip(self._kept, self._groups, blocks, strict=True):
            self._finite.ask(kept.layers.layers, block.keys, block.values, come_back=False)
            group.keep(block)

    def keep_from(self, regions: Sequence[LayerSlots], positions: Sequence[Positions]) -> None:
        if (mirror := self._context.pool.mirror) is not None:
            found = self._on_all_ranks(mirror, _CodedWork.keep, regions, positions)
            for slots, of_ranks in zip(regions, found, strict=True):
                if of_ranks:
                    halves = [half for part in of_ranks for half in part.chunk(2)]
                    numbers = torch.cat((*halves[::2], *halves[1::2]))
                    self._finite.note(slots.layer_set.layers, numbers, come_back=False)
            return
        if self._has_coder and all(
            group.compress(slots, asked) for group, slots, asked in zip(self._groups, regions, positions, strict=True)
        ):
            return
        super().keep_from(regions, positions)  # where an entry is not finite, the check says which

    def restore(self, positions: Sequence[Positions]) -> Sequence[EntryBlock]:
        return [group.restore(asked) for group, asked in zip(self._groups, positions, strict=True)]

    def restore_into(self, regions: Sequence[LayerSlots], positions: Sequence[Positions]) -> None:
        if (mirror := self._context.pool.mirror) is not None:
            self._on_all_ranks(mirror, _CodedWork.restore, regions, positions)
            for slots, asked in zip(regions, positions, strict=True):
                slots.held[slots.layout.slots(asked)] = asked
        elif self._has_coder:
            for group, slots, asked in zip(self._groups, regions, positions, strict=True):
                group.decompress(slots, asked)
        else:
            super().restore_into(regions, positions)

    def _on_all_ranks(
        self,
        mirror: Mirror,
        verb: Callable[[_CodedWork, KVContext], Tensor | None],
        regions: Sequence[LayerSlots],
        positions: Sequence[Positions],
    ) -> list[list[Tensor]]:
        """Each codes its own heads. Returns what each found, by sets of layers; [] of one that has nothing to do."""
        found: list[list[Tensor]] = []
        for group, slots, asked in zip(self._groups, regions, positions, strict=True):
            work = group.work(slots, asked)
            found.append(mirror.done(partial(verb, work), self._context) if len(asked) else [])
        return found

    def ask_finite(self) -> int:
        return self._finite.send()

    def require_finite(self, upto: int | None = None) -> None:
        self._finite.require(upto)

    def save(self, positions: Sequence[Positions], length: int) -> Iterator[tuple[Tensor, ...]]:
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
        self._starts = tuple(starts)
        heads, itemsize = kept.layers.kv_heads, context.geometry.itemsize
        self._halves = _halves(compressor, kept.layers.entry, itemsize)
        self._mean_bytes = sum(half.mean_width for half in self._halves) * heads * itemsize * len(starts)
        runs = tuple(evenly_apart(starts)) if kept.capacity else ()
        memory = context.pool.memory
        # Of keys and of values: views of the pool, for some layers at a time. Without a mean the tensors are empty.
        self._means: list[list[tuple[slice, Tensor]]] = []
        self._codes: list[list[tuple[slice, Tensor]]] = []
        first = 0
        for half in self._halves:
            shape: tuple[int, ...] = (heads, half.mean_width)
            self._means.append(
                [
                    (layers, _spaced(memory, starts[layers.start] + first, layers, apart, shape))
                    for layers, apart in runs
                ]
            )
            first += math.prod(shape)
        first *= itemsize
        for half in self._halves:
            shape = (kept.capacity, heads, half.vector_bytes)
            self._codes.append(
                [
                    (
                        layers,
                        _spaced(
                            memory.view(torch.uint8),
                            starts[layers.start] * itemsize + first,
                            layers,
                            apart * itemsize,
                            shape,
                        ),
                    )
                    for layers, apart in runs
                ]
            )
            first += half.bytes_of(kept)

    def begin(self, block: EntryBlock) -> None:
        if not len(block.positions):
            return
        for half, means, entries in zip(self._halves, self._means, (block.keys, block.values), strict=True):
            if half.mean_width:
                mean = half.of(entries).mean(dim=1)
                for layers, place in means:
                    place.copy_(as_kept(mean[layers], place.dtype))

    def keep(self, block: EntryBlock) -> None:
        if not len(block.positions):
            return
        entries = [
            (half.of(states) - self._mean(index)).transpose(0, 1)
            for index, (half, states) in enumerate(zip(self._halves, (block.keys, block.values), strict=True))
        ]
        name, dtype = ("codes", self._halves), self._context.pool.memory.dtype
        codes = self._context.compute(name, partial(_encode, self._halves, dtype), entries)
        for index, fresh in enumerate(codes):
            self._put(index, block.positions, fresh)

    def _put(self, index: int, positions: Positions, codes: Tensor) -> None:
        """codes: [n, L, Hkv, vector bytes] of the keys (0), or of the values (1)."""
        for some, place in self._places_of(index, positions):
            place.copy_(codes[some].transpose(0, 1))

    def _places_of(self, index: int, positions: Positions) -> list[tuple[tuple[slice, slice], Tensor]]:
        """Where the codes of these positions are: which positions and layers, and a view [some layers, n, Hkv, …]."""
        found, first = [], 0
        for begin, end in neighbours(self._kept.slots(positions)):
            some = slice(first, first + end - begin)
            found += [((some, layers), place[:, begin:end]) for layers, place in self._codes[index]]
            first = some.stop
        return found

    def restore(self, positions: Positions) -> EntryBlock:
        layers, entry = self._kept.layers, self._kept.layers.entry
        if not len(positions):
            device = self._context.device if self._kept.capacity else torch.device("cpu")
            shape = (len(layers.layers), 0, layers.kv_heads)
            return EntryBlock(
                positions, *(torch.zeros((*shape, each), device=device) for each in (entry.key, entry.value))
            )
        name, dtype = ("vectors of codes", self._halves), self._context.pool.memory.dtype
        codes = [self._codes_of(index, positions) for index in range(2)]
        entries = self._context.compute(name, partial(_decode, self._halves, dtype), codes)
        keys, values = (part.transpose(0, 1) + self._mean(index) for index, part in enumerate(entries))
        if entry.shared:
            keys = torch.cat((values[..., entry.key_at :], keys), dim=-1)
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

    def work(self, slots: LayerSlots, positions: Positions) -> _CodedWork:
        return _CodedWork(
            compressor=self._compressor,
            kept=self._kept,
            starts=self._starts,
            regions=slots.places,
            positions=positions,
        )

    def _codes_of(self, index: int, positions: Positions, mirror: Mirror | None = None) -> Tensor:
        """[n, L, Hkv, vector bytes] of the keys (0), or of the values (1). mirror: with the heads of all ranks."""
        layers, width = self._kept.layers, self._halves[index].vector_bytes
        places = self._places_of(index, positions)
        views = [place for _, place in places]
        by_rank = [views] if mirror is None else mirror.collected(views)
        shape = (len(positions), len(layers.layers), len(by_rank), layers.kv_heads, width)
        found = views[0].new_empty(shape)
        for rank, parts in enumerate(by_rank):
            for (some, _), part in zip(places, parts, strict=True):
                found[*some, rank] = part.transpose(0, 1)
        return found.flatten(2, 3)

    def save(self, positions: Positions) -> Iterator[tuple[Tensor, ...]]:
        """The means [layers, Hkv, D] of keys and of values, then the codes [n, layers, Hkv, vector bytes] of both.

        The heads are those of all ranks.
        """
        if not len(positions):
            return
        mirror, means = self._context.pool.mirror, []
        for places in self._means:
            views = [place for _, place in places]
            by_rank = [views] if mirror is None else mirror.collected(views)
            means.append(torch.cat([torch.cat(parts) for parts in by_rank], dim=1))
        yield tuple(means)
        yield tuple(self._codes_of(index, positions, mirror) for index in range(2))

    def load(self, positions: Positions, saved: Iterator[tuple[Tensor, ...]]) -> None:
        if not len(positions):
            return
        mirror, heads = self._context.pool.mirror, self._kept.layers.kv_heads
        for means, given in zip(self._means, next(saved), strict=True):
            by_rank = torch.split(given, heads, dim=1)
            for layers, place in means:
                place.copy_(by_rank[0][layers])
            if mirror is not None:
                mirror.given([place for _, place in means], [[part[layers] for layers, _ in means] for part in by_rank])
        for index, codes in enumerate(next(saved)):
            by_rank = torch.split(codes, heads, dim=2)
            self._put(index, positions, by_rank[0])
            if mirror is not None:
                places = self._places_of(index, positions)
                mirror.given(
                    [place for _, place in places],
                    [[part[some].transpose(0, 1) for some, _ in places] for part in by_rank],
                )

    def held_bytes(self, count: int) -> int:
        if not count:
            return 0
        page = self._context.geometry.page_tokens
        entries = min(self._kept.capacity, -(-count // page) * page)
        heads, layers = self._kept.layers.kv_heads, len(self._kept.layers.layers)
        return self._mean_bytes + entries * heads * sum(half.vector_bytes for half in self._halves) * layers

    def _mean(self, index: int) -> Tensor | float:
        """[layers, 1, Hkv, D] float32; 0 of what is kept as it is."""
        if not self._halves[index].mean_width:
            return 0.0
        means = [place for _, place in self._means[index]]
        return (means[0] if len(means) == 1 else torch.cat(means)).float()[:, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _CodedWork:
    """What each rank does with its own heads of one set of layers, all of whose places are the same there.

    starts: of the layers' codes, in the pool.
    """

    compressor: KVCompressor
    kept: KeptLayers
    starts: tuple[int, ...]
    regions: RegionPlaces
    positions: Positions

    def begin(self, context: KVContext) -> None:
        self._group(context).begin(self._block(context))

    def keep(self, context: KVContext) -> Tensor:
        """Returns `extremes` of the entries."""
        block = self._block(context)
        self._group(context).keep(block)
        return extremes(block.keys, block.values)

    def restore(self, context: KVContext) -> None:
        block, slots = self._group(context).restore(self.positions), self.regions.slots(context)
        slots.write_own(self.positions, slots.moved(block.keys, self.positions), block.values)

    def _group(self, context: KVContext) -> _CodedGroup:
        return _CodedGroup(self.compressor, context, self.kept, self.starts)

    def _block(self, context: KVContext) -> EntryBlock:
        slots = self.regions.slots(context)
        return EntryBlock.read(slots, self.positions, slots.read_own(self.positions))


def _spaced(memory: Tensor, first: int, layers: slice, apart: int, shape: tuple[int, ...]) -> Tensor:
    """[layers, *shape] of flat memory, contiguous for each layer, from number `first` on, one every `apart`."""
    own = memory[first : first + math.prod(shape)].view(shape)
    count = layers.stop - layers.start
    return own.as_strided((count, *shape), (apart, *own.stride()))


# These functions hold nothing of a session, because recordings of them outlive it.


def _encode(halves: Sequence[_Half], dtype: torch.dtype, entries: Sequence[Tensor]) -> Sequence[Tensor]:
    return [half.encode(dtype, part) for half, part in zip(halves, entries, strict=True)]


def _decode(halves: Sequence[_Half], dtype: torch.dtype, codes: Sequence[Tensor]) -> Sequence[Tensor]:
    return [half.decode(dtype, part) for half, part in zip(halves, codes, strict=True)]
