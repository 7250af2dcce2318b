"""Lanes: where the rows of alike layers lie in the pool, and which position is in which slot.

A group is a set of layers that share a layout and a shape, and so share every slot. It is reserved whole and given
back whole; writing, reading and wiping go by position or slot, for all its layers at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
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
from inference_engine.kv.layout import BlockSelector, Layout, Positions, TierLayout
from inference_engine.kv.pool import Arena, Demand
from inference_engine.kv.query_rings import QueryRings, ring_demand
from inference_engine.kv.tier_rows import TierRows

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
    """The lanes of a set of layers. `held` says which position each slot holds, -1 for none."""

    layers: NDArray[np.int64]
    starts: NDArray[np.int64]  # first arena row of each layer's lanes
    layout: Layout
    kv_heads: int
    head_dim: int
    rotary: str
    context: KVContext
    rings: QueryRings | None = None
    source: RowSource | None = None  # where the rows are that have left and are read all the same
    tier: TierRows | None = None  # that source, if it is the second tier
    held: Positions = field(init=False)

    def __post_init__(self) -> None:
        self.held = np.full(self.layout.capacity, -1, dtype=np.int64)

    @staticmethod
    def reserve(context: KVContext, layers: LayerSet, layout: Layout) -> LaneGroup | None:
        """Take the lanes from the pool; None, and nothing taken, if there is no room.

        Raises Overloaded, with nothing taken, if the second tier cannot be had after all.
        """
        starts = context.pool.reserve(demands(context.geometry, layers, layout))
        if starts is None:
            return None
        count = len(layers.layers)
        rings = None
        if layout.matcher is not None:
            rings = QueryRings(layout.matcher, dict(zip(layers.layers, starts[count:], strict=True)), context)
        try:
            tier = None if layout.tier is None else _open_tier(context, layers, layout, layout.tier, starts)
        except BaseException:
            context.pool.release(demands(context.geometry, layers, layout), starts)
            raise
        return LaneGroup(
            layers=np.array(layers.layers, dtype=np.int64),
            starts=np.array(starts[:count], dtype=np.int64),
            layout=layout,
            kv_heads=layers.kv_heads,
            head_dim=layers.head_dim,
            rotary=layers.rotary,
            context=context,
            rings=rings,
            source=tier,
            tier=tier,
        )

    def release(self) -> None:
        layers = LayerSet(
            layers=tuple(self.layers.tolist()), kv_heads=self.kv_heads, head_dim=self.head_dim, rotary=self.rotary
        )
        starts = [*self.starts.tolist(), *(self.rings.starts if self.rings is not None else ())]
        try:
            if self.tier is not None:
                self.tier.release()
        finally:
            self.context.pool.release(demands(self.context.geometry, layers, self.layout), starts)

    @property
    def arena(self) -> Arena:
        return self.context.pool.arenas[self.head_dim]

    @property
    def row_bytes(self) -> int:
        """Bytes of one position in all layers of the group."""
        return 2 * self.kv_heads * self.head_dim * self.context.geometry.itemsize * len(self.layers)

    def rows(self, slots: Positions) -> NDArray[np.int64]:
        """Arena rows of `slots` in every layer and head: [layers, slots, Hkv]."""
        heads = np.arange(self.kv_heads, dtype=np.int64) * self.layout.lane
        return self.starts[:, None, None] + slots[None, :, None] + heads[None, None, :]

    def chunks(self, position: int) -> tuple[range, ...]:
        """Positions that queries in the segment of `position` read from the source."""
        if self.source is None:
            return ()
        size = self.context.geometry.segment_tokens if self.layout.tier is None else self.layout.tier.chunk
        return chunks_between(self.layout.sink, self.layout.horizon(position), size)

    def open_slots(self, length: int) -> int:
        """Slots that histories of `length` have touched."""
        return min(length, self.layout.capacity)

    def open_rows(self, length: int) -> int:
        """Slots in the pages that histories of `length` have opened."""
        page = self.context.geometry.opening_tokens
        return min(self.layout.capacity, -(-self.open_slots(length) // page) * page)

    def wipe(self, slots: Positions) -> None:
        if len(slots):
            rows = self._index(slots)
            self.arena.keys.index_fill_(0, rows, 0)
            self.arena.values.index_fill_(0, rows, 0)

    def read(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """Keys, rotated at their own positions, and values of `positions`: [layers, n, Hkv, D] each."""
        slots = self.layout.slots(positions)
        own = np.where(positions < self.layout.spare, self.layout.capacity + positions, slots)
        shape = (len(self.layers), len(positions), self.kv_heads, self.head_dim)
        return self.arena.keys[self._index(own)].view(shape), self.arena.values[self._index(slots)].view(shape)

    def write(self, positions: Positions, keys: Tensor, values: Tensor) -> None:
        """Put rows [layers, n, Hkv, D], keys rotated at their own positions, where they belong, and hold them."""
        if not len(positions):
            return
        slots = self.layout.slots(positions)
        dtype = self.arena.keys.dtype
        flat = keys.to(dtype).reshape(-1, self.head_dim)
        self.arena.keys.index_copy_(0, self._index(slots), flat)
        self.arena.values.index_copy_(0, self._index(slots), values.to(dtype).reshape(-1, self.head_dim))
        sink = np.flatnonzero(positions < self.layout.spare)
        if len(sink):
            copies = self._index(self.layout.capacity + positions[sink])
            chosen = keys[:, torch.from_numpy(sink).to(keys.device)]
            self.arena.keys.index_copy_(0, copies, chosen.to(dtype).reshape(-1, self.head_dim))
        self.held[slots] = positions

    def drop(self, positions: Positions) -> None:
        """Wipe the rows of positions that were rejected, the second copies of a sink's keys among them."""
        copies = self.layout.capacity + positions[positions < self.layout.spare]
        self.wipe(np.concatenate([self.layout.slots(positions), copies]))

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
        source = self.rows(self.layout.capacity + sink).transpose(0, 2, 1)  # [layers, Hkv, sink]
        target = self.rows(sink).transpose(0, 2, 1).reshape(-1)
        device = self.context.device
        own = self.arena.keys[torch.from_numpy(source.reshape(-1).copy()).to(device)]
        shifts = torch.full((self.layout.sink,), shift, dtype=torch.long, device=device)
        moved = self.context.rotate(own.view(-1, self.layout.sink, self.head_dim), shifts, self.rotary)
        self.arena.keys.index_copy_(0, torch.from_numpy(target.copy()).to(device), moved.reshape(-1, self.head_dim))

    def summarize(self, before: int, length: int) -> None:
        """Note the bounds of the blocks that became whole while the history went from `before` to `length`."""
        selector = self.layout.selector
        if selector is None:
            return
        whole = np.arange(before // selector.block, length // selector.block, dtype=np.int64)
        if not len(whole):
            return
        slots = self.layout.slots((whole[:, None] * selector.block + np.arange(selector.block)).reshape(-1))
        shape = (len(self.layers), len(slots), self.kv_heads, self.head_dim)
        keys = self.arena.keys[self._index(slots)].view(shape).transpose(1, 2)  # [layers, Hkv, n · block, D]
        low, high = summaries(keys, selector)
        target = self._index(self.layout.summaries_from + whole)
        for states, summary in ((self.arena.keys, low), (self.arena.values, high)):
            states.index_copy_(0, target, summary.transpose(1, 2).to(states.dtype).reshape(-1, self.head_dim))

    def _index(self, slots: Positions) -> Tensor:
        return torch.from_numpy(self.rows(slots).reshape(-1)).to(self.context.device)
