"""Lanes: where the rows of alike layers lie in the pool, and which position is in which slot.

A group is a set of layers that share a layout and a shape, and so share every slot. It is reserved whole and given
back whole; writing, reading and wiping go by position or slot, for all its layers at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.bounds import block_bounds, block_means
from inference_engine.kv.chunk_view import RowSource, chunks_between
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.lane_tables import Indexes, as_slice, places_of
from inference_engine.kv.layout import SEGMENTS_IN_A_CHUNK, BlockSelector, Layout, Positions, TierLayout
from inference_engine.kv.pool import Arena, Demand
from inference_engine.kv.query_rings import QueryRings, ring_demand
from inference_engine.kv.runs import evenly_apart, neighbours
from inference_engine.kv.slab import Slab
from inference_engine.kv.tier_rows import TierRows
from inference_engine.kv.trunk import Piece, Trunk
from inference_engine.kv.views import Lane

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSet:
    """Layers of one shape."""

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    rotary: str


def alike(geometry: Geometry, keys: Mapping[int, Key]) -> tuple[tuple[LayerSet, Key], ...]:
    """The layers of `keys` in sets of equal shape and equal key."""
    members: dict[tuple[Key, int, int, str], list[int]] = {}
    for index, key in keys.items():
        layer = geometry.layers[index]
        members.setdefault((key, layer.kv_heads, layer.head_dim, layer.rotary), []).append(index)
    return tuple(
        (LayerSet(layers=tuple(layers), kv_heads=kv_heads, head_dim=head_dim, rotary=rotary), key)
        for (key, kv_heads, head_dim, rotary), layers in members.items()
    )


def lane_demand(geometry: Geometry, layers: LayerSet, layout: Layout) -> Demand:
    """What one layer of the set needs of the pool."""
    unit = geometry.alignment
    elements = layers.kv_heads * layout.lane * layers.head_dim
    return Demand(head_dim=layers.head_dim, elements=-(-elements // unit) * unit)


def demands(geometry: Geometry, layers: LayerSet, layout: Layout) -> list[Demand]:
    """What the set needs of the pool: each layer's lanes, then, where queries are matched, each layer's ring."""
    lanes = [lane_demand(geometry, layers, layout)] * len(layers.layers)
    if layout.matcher is None:
        return lanes
    return lanes + [ring_demand(geometry, layer, layout.matcher) for layer in layers.layers]


def tier_bytes(geometry: Geometry, layers: LayerSet, layout: Layout) -> int:
    """What the set needs of the second tier."""
    if layout.tier is None:
        return 0
    rows = layout.tier.chunks * layout.tier.chunk
    return 2 * rows * layers.kv_heads * layers.head_dim * geometry.itemsize * len(layers.layers)


def summaries(keys: Tensor, selector: BlockSelector) -> tuple[Tensor, Tensor]:
    """What the selector's scorer wants to know of each block: [..., S, D] -> two of [..., B, D]."""
    if selector.scorer == "mean":
        means = block_means(keys, selector.block)
        return means, means
    return block_bounds(keys, selector.block)


def _open_tier(
    context: KVContext, layers: LayerSet, layout: Layout, tier: TierLayout, starts: tuple[int, ...]
) -> TierRows:
    return TierRows(
        context,
        layout,
        tier,
        layers=layers.layers,
        starts=starts[: len(layers.layers)],
        kv_heads=layers.kv_heads,
        head_dim=layers.head_dim,
    )


@dataclass(kw_only=True, slots=True, eq=False)
class LaneGroup:
    """The lanes of a set of layers. `held` says which position each slot holds, -1 for none.

    layer_index, place_index: `layers`, and their places among those with as many KV heads, to look up with.
    """

    layers: NDArray[np.int64]
    starts: NDArray[np.int64]  # first arena row of each layer's lanes
    slab: Slab
    layout: Layout
    kv_heads: int
    head_dim: int
    rotary: str
    context: KVContext
    rings: QueryRings | None = None
    source: RowSource | None = None  # where the rows are that are read and not in the lanes
    tier: TierRows | None = None  # that source, if it is the second tier
    trunk: Trunk | None = None  # that source, if other sessions hold them
    held: Positions = field(init=False)
    layer_index: Indexes = field(init=False)
    place_index: Indexes = field(init=False)
    _even: tuple[tuple[slice, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        self.held = np.full(self.layout.capacity, -1, dtype=np.int64)
        self.layer_index = as_slice(self.layers)
        self.place_index = as_slice(places_of(self.context.geometry)[self.layers])
        self._even = tuple(evenly_apart(self.starts.tolist()))

    @staticmethod
    def reserve(context: KVContext, layers: LayerSet, layout: Layout, trunk: Trunk | None = None) -> LaneGroup | None:
        """Take the lanes from the pool; None, and nothing taken, if there is no room.

        trunk: where the rows before `layout.base` are; its slabs are the caller's to borrow. Raises Overloaded, with
        nothing taken, if the second tier cannot be had after all.
        """
        assert layout.base == (0 if trunk is None else trunk.end)
        slab = Slab.reserve(context.pool, demands(context.geometry, layers, layout), itemsize=context.geometry.itemsize)
        if slab is None:
            return None
        starts, count = slab.starts, len(layers.layers)
        rings = None
        if layout.matcher is not None:
            rings = QueryRings(layout.matcher, dict(zip(layers.layers, starts[count:], strict=True)), context)
        try:
            tier = None if layout.tier is None else _open_tier(context, layers, layout, layout.tier, starts)
        except BaseException:
            slab.release()
            raise
        return LaneGroup(
            layers=np.array(layers.layers, dtype=np.int64),
            starts=np.array(starts[:count], dtype=np.int64),
            slab=slab,
            layout=layout,
            kv_heads=layers.kv_heads,
            head_dim=layers.head_dim,
            rotary=layers.rotary,
            context=context,
            rings=rings,
            source=tier or trunk,
            tier=tier,
            trunk=trunk,
        )

    def release(self) -> None:
        try:
            if self.tier is not None:
                self.tier.release()
        finally:
            self.slab.release()

    def piece(self, length: int) -> Piece:
        """The rows that the lanes hold of a history of `length`, for a fork to read. Every row has to stay."""
        base = self.layout.base
        return Piece(slab=self.slab, lane=self.lane, base=base, first=base, last=length)

    @property
    def has_one_trunk(self) -> bool:
        """Are the rows before its own in the lanes of one other session? Then a lane goes on from another."""
        return self.trunk is not None and len(self.trunk.pieces) == 1

    @property
    def lane(self) -> Lane:
        """Where the lanes lie."""
        starts = dict(zip(self.layers.tolist(), self.starts.tolist(), strict=True))
        return Lane(starts=starts, heads=self.kv_heads, lane=self.layout.lane)

    def trunk_of(self, pieces: Sequence[Piece]) -> Trunk:
        """A trunk of these pieces, for layers like these."""
        return Trunk(pieces, self.arena, row_bytes=self.row_bytes)

    @property
    def floor(self) -> int:
        """Rows of positions below this one are not the session's own to forget: others read them, or hold them."""
        return max(self.layout.base, self.slab.lent_until if self.slab.is_lent else 0)

    @property
    def arena(self) -> Arena:
        return self.context.pool.arenas[self.head_dim]

    @property
    def row_bytes(self) -> int:
        """Bytes of one position in all layers of the group."""
        return 2 * self.kv_heads * self.head_dim * self.context.geometry.itemsize * len(self.layers)

    def lane_rows(self, slots: Positions) -> NDArray[np.int64]:
        """How far from a layer's start `slots` lie in every head: [slots · Hkv]."""
        heads = np.arange(self.kv_heads, dtype=np.int64) * self.layout.lane
        return (slots[:, None] + heads).reshape(-1)

    def chunks(self, position: int) -> tuple[range, ...]:
        """Positions that queries in the segment of `position` read from the source, chunk by chunk."""
        if self.source is None or self.trunk is not None:
            return ()
        whole = SEGMENTS_IN_A_CHUNK * self.context.geometry.segment_tokens
        size = whole if self.layout.tier is None else self.layout.tier.chunk
        return chunks_between(self.layout.sink, self.layout.horizon(position), size)

    def open_slots(self, length: int) -> int:
        """Slots that histories of `length` have touched."""
        return min(length - self.layout.base, self.layout.capacity)

    def open_rows(self, length: int) -> int:
        """Slots in the pages that histories of `length` have opened."""
        page = self.context.geometry.opening_tokens
        return min(self.layout.capacity, -(-self.open_slots(length) // page) * page)

    def open(self, first: int, end: int) -> None:
        """Wipe the slots from `first` to `end`."""
        for states in (self.arena.keys, self.arena.values):
            for _, rows in self._views(states, first, end):
                rows.zero_()

    def wipe(self, slots: Positions) -> None:
        for first, end in neighbours(slots):
            self.open(first, end)

    def forget(self, slots: Positions, length: int) -> None:
        """Wipe these slots and all else that was kept of a history of `length`. The table of slots is the caller's."""
        copies = self.layout.capacity + np.arange(min(self.layout.spare, length), dtype=np.int64)
        blocks = 0 if self.layout.selector is None else length // self.layout.selector.block
        summaries = self.layout.summaries_from + np.arange(blocks, dtype=np.int64)
        with ExitStack() as stack:
            if self.tier is not None:
                stack.callback(self.tier.forget)
            if self.rings is not None:
                stack.callback(self.rings.forget)
            stack.callback(self.wipe, np.concatenate([slots, copies, summaries]))

    def read(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """Keys, rotated at their own positions, and values of `positions`: [layers, n, Hkv, D] each."""
        slots = self.layout.slots(positions)
        own = np.where(positions < self.layout.spare, self.layout.capacity + positions, slots)
        return self._rows_in(self.arena.keys, own), self._rows_in(self.arena.values, slots)

    def write(self, positions: Positions, keys: Tensor, values: Tensor) -> None:
        """Put rows [layers, n, Hkv, D], keys rotated at their own positions, where they belong, and hold them.

        The positions ascend.
        """
        slots = self.layout.slots(positions)
        self._put(self.arena.keys, slots, keys)
        self._put(self.arena.values, slots, values)
        self.held[slots] = positions
        sink = positions[positions < self.layout.spare]
        self._put(self.arena.keys, self.layout.capacity + sink, keys[:, : len(sink)])

    def copy_from(self, other: LaneGroup, length: int) -> None:
        """Hold what `other`, of the same layers and rule, reads after a history of `length`. Only into new lanes.

        Limits may differ, and slots with them. Raises OSError if the second tier cannot take its part.
        """
        if self._has_slots_of(other):
            self._copy_slots(other, 0, 0, self.open_rows(length))
            self._copy_slots(other, self.layout.capacity, other.layout.capacity, min(self.layout.spare, length))
            held = min(len(self.held), len(other.held))
            self.held[:held] = other.held[:held]
        else:
            self._copy_rows(other, length)
        if self.layout.selector is not None:
            blocks = length // self.layout.selector.block
            self._copy_slots(other, self.layout.summaries_from, other.layout.summaries_from, blocks)
        if self.rings is not None and other.rings is not None:
            self.rings.copy_from(other.rings)
        if self.tier is not None and other.tier is not None:
            self.tier.copy_from(other.tier)

    def _has_slots_of(self, other: LaneGroup) -> bool:
        """Is each position in the same slot?"""
        ours, theirs = self.layout, other.layout
        return ours.base == theirs.base and (ours.window is None or ours.capacity == theirs.capacity)

    def _copy_slots(self, other: LaneGroup, first: int, source: int, count: int) -> None:
        """The bytes of `count` slots of `other`, from its slot `source` on, into those from `first` on."""
        mine, theirs = self.lane, other.lane
        for layer in self.layers.tolist():
            for states in (self.arena.keys, self.arena.values):
                mine.slots(states, layer, first, count).copy_(theirs.slots(states, layer, source, count))

    def _copy_rows(self, other: LaneGroup, length: int) -> None:
        """Position by position, those in the trunk of `other` alone among them."""
        self.wipe(np.arange(self.open_rows(length), dtype=np.int64))
        step = self.context.geometry.segment_tokens
        for piece in other.trunk.pieces if other.trunk is not None else ():
            # Of one that is in this session's trunk, too, there is nothing to copy.
            for chunk in chunks_between(max(piece.first, self.layout.base), piece.last, step):
                self.write(np.array(chunk, dtype=np.int64), *other._from_trunk(chunk))
        positions = np.sort(other.held[other.held >= self.layout.base])
        for first in range(0, len(positions), step):
            some = positions[first : first + step]
            self.write(some, *other.read(some))
        if shift := self.layout.sink_shift(length):
            self.move_sink(shift)

    def _from_trunk(self, chunk: range) -> tuple[Tensor, Tensor]:
        """Rows of a chunk of the trunk, as `read` gives those of the lanes."""
        assert self.trunk is not None
        states = [self.trunk.chunk(layer, chunk.start, chunk.stop) for layer in self.layers.tolist()]
        keys, values = (torch.stack(rows).transpose(1, 2) for rows in zip(*states, strict=True))
        return keys, values

    def drop(self, positions: Positions) -> None:
        """Wipe the rows of positions that were rejected."""
        self.wipe(self.layout.slots(positions))

    def keep_sink(self, before: int, length: int) -> None:
        """Keep the sink's keys where they are, too, while the history goes from `before` to `length`."""
        sink = np.arange(before, min(length, self.layout.spare), dtype=np.int64)
        if len(sink):
            self._put(self.arena.keys, self.layout.capacity + sink, self._rows_in(self.arena.keys, sink))

    def evict(self, length: int) -> None:
        """Let leave what no query of a history of `length` may see; the sink moves up to the oldest row that stays.

        To the second tier, if there is one. Raises RestorationFailed if it cannot keep them.
        """
        leaving = np.flatnonzero((self.held >= self.layout.sink) & (self.held < self.layout.horizon(length)))
        if self.tier is not None:
            positions = np.sort(self.held[leaving])
            self.tier.keep(positions, *self.read(positions))
        self.held[leaving] = -1
        self.wipe(leaving)
        if shift := self.layout.sink_shift(length):
            self.move_sink(shift)

    def move_sink(self, shift: int) -> None:
        """Let the sink's keys stand `shift` positions after their own. Always from the copies, so no error adds up."""
        sink = np.arange(self.layout.sink, dtype=np.int64)
        own = self._rows_in(self.arena.keys, self.layout.capacity + sink).transpose(1, 2)  # [layers, Hkv, sink, D]
        shifts = torch.full((self.layout.sink,), shift, dtype=torch.long)
        moved = self.context.rotate(own.flatten(0, 1), shifts, self.rotary)
        self._put(self.arena.keys, sink, moved.view(own.shape).transpose(1, 2))

    def summarize(self, before: int, length: int) -> None:
        """Note the bounds of the blocks that became whole while the history went from `before` to `length`."""
        selector = self.layout.selector
        if selector is None:
            return
        whole = np.arange(before // selector.block, length // selector.block, dtype=np.int64)
        if not len(whole):
            return
        slots = self.layout.slots((whole[:, None] * selector.block + np.arange(selector.block)).reshape(-1))
        keys = self._rows_in(self.arena.keys, slots).transpose(1, 2)  # [layers, Hkv, n · block, D]
        low, high = summaries(keys, selector)
        for states, summary in ((self.arena.keys, low), (self.arena.values, high)):
            self._put(states, self.layout.summaries_from + whole, summary.transpose(1, 2))

    # Slots are read and written run by run, layers that lie evenly apart at once: no table goes to the device, and
    # nobody waits for one.

    def _rows_in(self, states: Tensor, slots: Positions) -> Tensor:
        """A copy of what lies in `slots` of every layer: [layers, n, Hkv, D]."""
        found = states.new_empty((len(self.layers), len(slots), self.kv_heads, self.head_dim))
        place = 0
        for first, end in neighbours(slots):
            for layers, rows in self._views(states, first, end):
                found[layers, place : place + end - first] = rows.transpose(1, 2)
            place += end - first
        return found

    def _put(self, states: Tensor, slots: Positions, fresh: Tensor) -> None:
        """The inverse; rounded to the arena's type."""
        place = 0
        for first, end in neighbours(slots):
            for layers, rows in self._views(states, first, end):
                rows.copy_(fresh[layers, place : place + end - first].transpose(1, 2))
            place += end - first

    def _views(self, states: Tensor, first: int, end: int) -> Iterator[tuple[slice, Tensor]]:
        """The slots from `first` to `end` of all layers, [some layers, Hkv, slots, D] at a time."""
        dim = self.head_dim
        for layers, apart in self._even:
            shape = (layers.stop - layers.start, self.kv_heads, end - first, dim)
            strides = (apart * dim, self.layout.lane * dim, dim, 1)
            yield layers, states.as_strided(shape, strides, (int(self.starts[layers.start]) + first) * dim)
