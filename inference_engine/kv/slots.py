"""The slot table of alike layers: where entries lie in the pool, and which position is in which slot.

Layers that share a layout and a shape use the same slots. Their regions are reserved and given back together; writing,
reading and wiping go by position or slot, for all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.kv_dtype import as_kept
from inference_engine.kernels.transfer import on_device
from inference_engine.kv.compressors.identity import Identity
from inference_engine.kv.context import CodedPlaces, KVContext
from inference_engine.kv.layout import LayerSet, Layout, Positions
from inference_engine.kv.memory.pool import KVBuffer
from inference_engine.kv.numbers import Indexes, RegionLines, as_slice, places_of
from inference_engine.kv.views import ChunkView, EntrySource, Moved, Portion, Region, StagedQueries, StepReads


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionPlaces:
    """Where the regions of a set of layers are, on all ranks alike: for work that each of them does (`Mirror.done`).

    starts: first buffer vector of each layer's regions.
    """

    layer_set: LayerSet
    layout: Layout
    starts: tuple[int, ...]

    def slots(self, context: KVContext) -> LayerSlots:
        """With the memory of this rank, and a table of its own."""
        starts = np.array(self.starts, dtype=np.int64)
        return LayerSlots(context=context, layer_set=self.layer_set, layout=self.layout, starts=starts)


@dataclass(kw_only=True, slots=True, eq=False)
class LayerSlots:
    """The regions of a set of layers. `held` says which position each slot holds, -1 for none.

    layer_index: the layers' numbers. place_index: their places among the layers with as many KV heads.
    entry_bytes: bytes of one position in all layers of the set. vectors: [layers, Hkv], where each head's slots begin.
    moved_out: entries whose slots a step has taken while it still reads them (`move_out`).
    """

    context: KVContext
    layer_set: LayerSet
    layout: Layout
    starts: NDArray[np.int64]  # first buffer vector of each layer's regions
    layers: NDArray[np.int64] = field(init=False)
    held: Positions = field(init=False)
    layer_index: Indexes = field(init=False)
    place_index: Indexes = field(init=False)
    region: Region = field(init=False)
    lines: RegionLines = field(init=False)
    kv_heads: int = field(init=False)
    head_dim: int = field(init=False)
    entry_bytes: int = field(init=False)
    vectors: NDArray[np.int64] = field(init=False)
    moved_out: Moved | None = field(init=False, default=None)
    _heads: NDArray[np.int64] = field(init=False)  # where each head's slots begin, from a layer's start
    _even: tuple[tuple[slice, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        self.kv_heads, self.head_dim = self.layer_set.kv_heads, self.layer_set.head_dim
        vectors = self.kv_heads * len(self.layer_set.layers)
        self.entry_bytes = vectors * self.layer_set.entry.width * self.context.geometry.itemsize
        self.lines = RegionLines(self.layout)
        self._heads = np.arange(self.kv_heads, dtype=np.int64) * self.layout.region
        self.vectors = self.starts[:, None] + self._heads
        self.layers = np.array(self.layer_set.layers, dtype=np.int64)
        self.held = np.full(self.layout.capacity, -1, dtype=np.int64)
        self.layer_index = as_slice(self.layers)
        self.place_index = as_slice(places_of(self.context.geometry)[self.layers])
        starts = self.starts.tolist()
        self.region = Region(
            starts=dict(zip(self.layer_set.layers, starts, strict=True)), heads=self.kv_heads, region=self.layout.region
        )
        self._even = tuple(evenly_apart(starts))

    @property
    def buffer(self) -> KVBuffer:
        return self.context.pool.buffers[self.layer_set.layers[0]]

    @property
    def places(self) -> RegionPlaces:
        return RegionPlaces(layer_set=self.layer_set, layout=self.layout, starts=tuple(self.starts.tolist()))

    def region_offsets(self, slots: Positions) -> NDArray[np.int64]:
        """Offsets of `slots` in every head from a layer's start: [slots · Hkv]."""
        return (slots[:, None] + self._heads).reshape(-1)

    def paged_slots(self, length: int) -> int:
        """Slots in the pages that histories of `length` have opened."""
        page, layout = self.context.geometry.opening_tokens, self.layout
        return min(layout.capacity, -(-(length - layout.base) // page) * page)

    def open(self, first: int, end: int) -> None:
        """Wipe the slots from `first` to `end`."""
        for _, views in self._views(self.buffer.vectors, first, end):
            self.context.pool.wipe(views)

    def leaving(self, before: int, length: int) -> Positions:
        """The positions, in order, that leave the regions as the history grows from `before` to `length`."""
        horizon = self.layout.horizon(length)
        if horizon <= self.layout.horizon(before):
            return np.zeros(0, dtype=np.int64)
        return np.sort(self.held[(self.held >= self.layout.sink) & (self.held < horizon)])

    def wipe(self, slots: Positions) -> None:
        for first, end in neighbours(slots):
            self.open(first, end)

    def read_entries(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """Keys, rotated at their own positions, and values of `positions`: [layers, n, Hkv, D] each, of all ranks."""
        return self._read(positions, self.gather_all)

    def read_own(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """The same of this rank alone."""
        return self._read(positions, self.gather)

    def _read(self, positions: Positions, gather: Callable[[Tensor, Positions], Tensor]) -> tuple[Tensor, Tensor]:
        slots = self.layout.slots(positions)
        own = np.where(positions < self.layout.spare, self.layout.capacity + positions, slots)
        return gather(self.buffer.keys, own), gather(self.buffer.values, slots)

    def write_entries(self, positions: Positions, keys: Tensor, values: Tensor) -> None:
        """Write entries [layers, n, Hkv, D], keys rotated at their own positions, to the slots of `positions`.

        The positions ascend. The heads are those of all ranks.
        """
        self._write(positions, keys, values, self.put_all)

    def write_own(self, positions: Positions, keys: Tensor, values: Tensor) -> None:
        """The same of this rank alone."""
        self._write(positions, keys, values, self.put)

    def _write(
        self, positions: Positions, keys: Tensor, values: Tensor, put: Callable[[Tensor, Positions, Tensor], None]
    ) -> None:
        slots = self.layout.slots(positions)
        put(self.buffer.keys, slots, keys)
        put(self.buffer.values, slots, values)
        self.held[slots] = positions
        sink = positions[positions < self.layout.spare]
        put(self.buffer.keys, self.layout.capacity + sink, keys[:, : len(sink)])

    def write_unrotated(self, positions: Positions, keys: Tensor, values: Tensor) -> None:
        """`write_entries` of float32 entries whose keys are not rotated yet, but where the value lies in them."""
        if self.layer_set.entry.value_in_key:
            self.write_entries(positions, keys, values)
            return
        numbers, coder = Identity(), self.context.coder
        has_copies = len(positions) > 0 and positions[0] < self.layout.spare
        is_coded = self.layer_set.entry.is_even and coder.codes(numbers, self.head_dim)
        if has_copies or not len(positions) or not is_coded:
            self.write_entries(positions, self.moved(keys, positions), values)
            return
        slots = self.layout.slots(positions)
        for states, fresh, shifts in ((self.buffer.keys, keys, positions), (self.buffer.values, values, None)):
            places = CodedPlaces(
                codes=fresh.view(torch.uint8).unbind(),
                code_slots=np.arange(len(positions), dtype=np.int64),
                means=(),
                regions=self.regions(states),
                slots=slots,
                shifts=shifts,
                rotary=self.layer_set.rotary,
            )
            coder.decompress(numbers, places)
        self.held[slots] = positions

    def moved(self, keys: Tensor, shifts: Positions) -> Tensor:
        """Keys [layers, n, Hkv, D] of any of these layers, each rotated by its shift."""
        if not len(shifts):
            return keys
        by_head = keys.transpose(1, 2)
        flat = by_head.reshape(-1, len(shifts), keys.shape[-1])
        moved = self.context.rotate(flat, torch.from_numpy(shifts), self.layer_set.rotary)
        return moved.view(by_head.shape).transpose(1, 2)

    def regions(self, states: Tensor) -> list[Tensor]:
        """[Hkv, slots, D] of each layer: views."""
        return [self.region.slots(states, layer, 0, self.region.region) for layer in self.layer_set.layers]

    # -- how queries read the regions --------------------------------------------------------------------------------

    def slot_count(self, length: int) -> int:
        """Slots to read for a history of `length`, padded as keys are."""
        quantum, layout = self.context.geometry.key_quantum, self.layout
        return min(layout.capacity, -(-(length - layout.base) // quantum) * quantum)

    def mask(self, positions: Positions, count: int, step: StepReads) -> Tensor | None:
        """[T, count] additive. None when every query sees every key, as a single decoding query often does."""
        held = self.held[:count]
        if len(positions) == 1:
            seen = self.layout.visible(positions, held)
            if seen.all():
                return None
            visible = torch.from_numpy(seen).to(step.device)
        else:
            visible = self.layout.visible(
                torch.from_numpy(positions).to(step.device), torch.from_numpy(held).to(step.device)
            )
        mask = torch.zeros(visible.shape, dtype=step.mask_dtype, device=step.device)
        return mask.masked_fill_(~visible, float("-inf"))

    def chunk_view(
        self, queries: StagedQueries, step: StepReads, source: EntrySource, chunks: Sequence[range]
    ) -> ChunkView:
        """The view of queries that read the regions and these chunks: all queries together. In fixed-shape mode, one
        token quantum at a time, each with as many slots as its last query needs."""
        positions, quantum = queries.positions, step.geometry.token_quantum
        if chunks and self._can_read_in_order(queries, step):
            recent = on_device(self.layout.slots(np.arange(chunks[-1].stop, queries.end)), step.device)
            portions = [Portion(queries=slice(None), count=self.layout.sink, mask=None, recent=recent)]
            return self._chunk_view(step, source, chunks, portions)
        size = quantum if quantum > 1 else len(positions)
        portions = []
        for first in range(0, len(positions), size):
            some = slice(first, first + size)
            count = self.slot_count(int(positions[some][-1]) + 1)
            portions.append(Portion(queries=some, count=count, mask=self.mask(positions[some], count, step)))
        return self._chunk_view(step, source, chunks, portions)

    def view_of_two_segments(
        self, queries: StagedQueries, step: StepReads, source: EntrySource, chunks: Sequence[range], moved: Moved
    ) -> ChunkView:
        """As `chunk_view`, of queries of two segments. chunks: those of the second one; the first one reads them
        up to where its window begins. moved: what only the first one reads of the regions."""
        layout = self.layout
        assert self._can_read_in_order(queries, step)
        boundary = layout.segment_start(queries.end - 1)
        split, portions = boundary - queries.first, []
        for some, first, end in (
            (slice(0, split), queries.first, boundary),
            (slice(split, None), boundary, queries.end),
        ):
            horizon, is_first = layout.horizon(first), end == boundary
            begin = horizon + len(moved.positions) if is_first else horizon
            portions.append(
                Portion(
                    queries=some,
                    count=layout.sink,
                    mask=None,
                    recent=on_device(layout.slots(np.arange(begin, end)), step.device),
                    upto=horizon,
                    moved=moved if is_first else None,
                )
            )
        return self._chunk_view(step, source, chunks, portions)

    def _chunk_view(
        self, step: StepReads, source: EntrySource, chunks: Sequence[range], portions: Sequence[Portion]
    ) -> ChunkView:
        return ChunkView(
            region=self.region,
            portions=portions,
            source=source,
            chunks=chunks,
            attend_piece=step.attend_piece,
            attend_causal_state=step.attend_causal_state,
            merging=step.merging,
        )

    def _can_read_in_order(self, queries: StagedQueries, step: StepReads) -> bool:
        """May the slots be read without a mask, the sink as a whole and the others in the order of their positions?

        Only where the device's fused operations are used: results differ in their last bits.
        """
        layout = self.layout
        is_still = layout.native_window is None and not layout.spare  # neither moved nor hidden
        is_alike = is_still and queries.first >= layout.sink
        return is_alike and step.attends_together and len(queries.positions) == queries.count > 1

    def copy_slots(self, other: LayerSlots, first: int, source: int, count: int) -> None:
        """Copy the bytes of `count` slots of `other`, from its slot `source` on, to the slots from `first` on."""
        self._copy(self.region, first, other.region, source, count)

    # -- slots that are taken while their entries are still read ------------------------------------------------------

    def move_out(self, staged: Positions, to: Region) -> None:
        """Move the entries whose slots `staged` will take into the first slots of `to`. Theirs are free then."""
        slots = self.layout.slots(staged)
        slots = slots[self.held[slots] >= 0]
        for place, first, count in _runs(slots):
            self._copy(to, place, self.region, first, count)
        self.moved_out = Moved(positions=self.held[slots], region=to)
        self.held[slots] = -1

    def move_back(self) -> None:
        """Undo `move_out`, if there was one."""
        if (moved := self.moved_out) is None:
            return
        slots = self.layout.slots(moved.positions)
        for place, first, count in _runs(slots):
            self._copy(self.region, first, moved.region, place, count)
        self.held[slots] = moved.positions

    def _copy(self, to: Region, first: int, of: Region, source: int, count: int) -> None:
        for layer in self.layer_set.layers:
            vectors = self.buffer.vectors
            self.context.pool.copy(to.slots(vectors, layer, first, count), of.slots(vectors, layer, source, count))

    # Slots are read and written run by run, for evenly spaced layers at once: no index table goes to the device, and
    # nothing waits for one.

    def gather(self, states: Tensor, slots: Positions) -> Tensor:
        """A copy of what lies in `slots` of every layer: [layers, n, Hkv, D]."""
        found = states.new_empty((len(self.layers), len(slots), self.kv_heads, states.shape[1]))
        for place, first, count in _runs(slots):
            for layers, views in self._views(states, first, first + count):
                found[layers, place : place + count] = views.transpose(1, 2)
        return found

    def put(self, states: Tensor, slots: Positions, fresh: Tensor) -> None:
        """The inverse of `gather`; rounded to the buffer's dtype."""
        fresh = as_kept(fresh, states.dtype)
        for place, first, count in _runs(slots):
            for layers, views in self._views(states, first, first + count):
                views.copy_(fresh[layers, place : place + count].transpose(1, 2))

    def gather_all(self, states: Tensor, slots: Positions) -> Tensor:
        """As `gather`, with the heads of all ranks, one rank's behind the other's."""
        if (mirror := self.context.pool.mirror) is None:
            return self.gather(states, slots)
        found = states.new_empty((len(self.layers), len(slots), mirror.ranks, self.kv_heads, states.shape[1]))
        places, views = self._places(states, slots)
        for rank, parts in enumerate(mirror.collected(views)):
            for (layers, some), part in zip(places, parts, strict=True):
                found[layers, some, rank] = part.transpose(1, 2)
        return found.flatten(2, 3)

    def put_all(self, states: Tensor, slots: Positions, fresh: Tensor) -> None:
        """The inverse of `gather_all`."""
        if (mirror := self.context.pool.mirror) is None:
            self.put(states, slots, fresh)
            return
        kept = as_kept(fresh, states.dtype)
        by_rank = kept.reshape(*kept.shape[:2], mirror.ranks, self.kv_heads, kept.shape[-1])
        self.put(states, slots, by_rank[:, :, 0])
        places, views = self._places(states, slots)
        mirror.given(
            views,
            [[of_rank[place].transpose(1, 2) for place in places] for of_rank in by_rank.unbind(2)],
        )

    def _places(self, states: Tensor, slots: Positions) -> tuple[list[tuple[slice, slice]], list[Tensor]]:
        """Which layers and slots are in each view, [some layers, Hkv, slots, D], and the views."""
        found = [
            ((layers, slice(place, place + count)), view)
            for place, first, count in _runs(slots)
            for layers, view in self._views(states, first, first + count)
        ]
        return [place for place, _ in found], [view for _, view in found]

    def _views(self, states: Tensor, first: int, end: int) -> list[tuple[slice, Tensor]]:
        """Views of the slots from `first` to `end`, [some layers, Hkv, slots, D] at a time."""
        width, views = states.stride(0), []
        for layers, apart in self._even:
            shape = (layers.stop - layers.start, self.kv_heads, end - first, states.shape[1])
            strides = (apart * width, self.region.region * width, width, 1)
            offset = states.storage_offset() + (int(self.starts[layers.start]) + first) * width
            views.append((layers, states.as_strided(shape, strides, offset)))
        return views


def evenly_apart(starts: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """`starts` as evenly spaced runs: the indexes of each, and the spacing (0 for a single one)."""
    first = 0
    while first < len(starts):
        end = first + 1
        apart = max(0, starts[end] - starts[first]) if end < len(starts) else 0
        while apart and end < len(starts) and starts[end] - starts[end - 1] == apart:
            end += 1
        yield slice(first, end), apart if end - first > 1 else 0
        first = end


def _runs(slots: Positions) -> Iterator[tuple[int, int, int]]:
    """Of each run of neighbours the index of its first slot, that slot, and how many they are."""
    place = 0
    for first, end in neighbours(slots):
        yield place, first, end - first
        place += end - first


def neighbours(slots: Positions) -> list[tuple[int, int]]:
    """`slots` as runs of neighbours: the first slot of each run, and the slot behind its last."""
    if not len(slots):
        return []
    # Methods of arrays, not functions of numpy: those call several times as much Python.
    breaks = (slots[1:] - slots[:-1] != 1).nonzero()[0]
    firsts, lasts = slots[[0, *(breaks + 1)]], slots[[*breaks, -1]]
    return list(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True))
