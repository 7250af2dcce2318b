"""One session's K and V: its slab, which position lies in which slot, and the life of its rows.

    stage(n)       the next n positions get slots; their rows are written by this step's attention
    commit(length) staged rows below `length` stay, the rest are wiped; then, at a segment boundary, rows leave

Eviction happens in `commit`, never before, so a rejected draft leaves no trace. Slots are wiped when they are opened,
rejected or evicted: the slab's bytes are a function of the committed rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.errors import InvariantViolated, NoCapacity
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import Layout, Positions
from inference_engine.kv.pool import Pool
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Bound, Footprint

# move(rotated keys [H, n, D], shift, rotary name) -> the keys as they would be `shift` positions later
MoveKeys = Callable[[Tensor, int, str], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVContext:
    """What a session's K/V live in: the model's geometry, the shared pool, the model's own rotation."""

    geometry: Geometry
    pool: Pool
    move_keys: MoveKeys
    device: torch.device


@dataclass(kw_only=True, slots=True)
class LayerGroup:
    """Layers that share a layout and a shape, and so share every slot."""

    layers: NDArray[np.int64]
    starts: NDArray[np.int64]  # first arena row of each layer's slab
    layout: Layout
    kv_heads: int
    head_dim: int
    rotary: str
    held: Positions = field(init=False)  # the position each slot holds, -1 for none

    def __post_init__(self) -> None:
        self.held = np.full(self.layout.capacity, -1, dtype=np.int64)

    def rows(self, slots: Positions) -> NDArray[np.int64]:
        """Arena rows of `slots` in every layer and head: [layers, slots, Hkv]."""
        heads = np.arange(self.kv_heads, dtype=np.int64) * self.layout.lane
        return self.starts[:, None, None] + slots[None, :, None] + heads[None, None, :]

    def open_slots(self, length: int) -> int:
        """Slots that histories of `length` have touched."""
        return min(length, self.layout.capacity)


class SessionKV:
    """The live state behind a strategy's spec.

    Everything but construction and `release` runs on the engine's thread.
    """

    def __init__(self, strategy: KVStrategy, context: KVContext, limit_tokens: int | None) -> None:
        """Reserve the slab. Raises NoCapacity, with nothing taken, if the pool has no room for it."""
        geometry = context.geometry
        self.strategy = strategy
        self.context = context
        self.limit_tokens = limit_tokens
        self.length = 0  # committed positions
        self.staged = 0  # positions staged beyond them
        self.evicted = 0  # committed positions that no query can read any more
        self.bound: Bound = strategy.bound(geometry, limit_tokens)
        self._demands = strategy.demands(geometry, limit_tokens)
        self.groups: tuple[LayerGroup, ...] = ()
        starts = context.pool.reserve(self._demands)
        if starts is None:
            raise NoCapacity(
                f"the session needs {self.bound.peak_bytes} bytes of K/V; {context.pool.reserved_bytes} of "
                f"{context.pool.capacity_bytes} are reserved by other sessions. Close sessions, or ask for a smaller "
                "limit_tokens or another strategy",
                retry_after_seconds=1.0,
                needed_bytes=self.bound.peak_bytes,
                capacity_bytes=context.pool.capacity_bytes,
            )
        self._starts = starts
        layouts = strategy.layouts(geometry, limit_tokens)
        self._has_windows = any(layout.window is not None for layout in layouts)
        self.groups = _group_layers(layouts, geometry, starts)

    # -- the life of rows -------------------------------------------------------------------------------------------

    def room(self) -> int:
        """Positions that can be staged in one step, within the limit.

        Where rows leave, that is up to the end of the open segment; where none ever does, segments are no concern.
        """
        segment = self.context.geometry.segment_tokens
        to_limit = math.inf if self.limit_tokens is None else self.limit_tokens - self.length
        to_boundary = segment - self.length % segment if self._has_windows else math.inf
        return int(min(to_limit, to_boundary))

    def stage(self, count: int) -> None:
        """Give the next `count` positions their slots. They are not committed yet."""
        assert self.staged == 0 and 0 < count <= self.room(), (self.staged, count, self.room())
        positions = np.arange(self.length, self.length + count, dtype=np.int64)
        for group in self.groups:
            opened, needed = (self._open_rows(group, length) for length in (self.length, self.length + count))
            self._wipe(group, np.arange(opened, needed, dtype=np.int64))
            if (group.held[group.layout.slots(positions)] >= 0).any():
                raise InvariantViolated("INV1", f"a slot for positions from {self.length} is still held")
        for group in self.groups:
            group.held[group.layout.slots(positions)] = positions
        self.staged = count

    def commit(self, length: int) -> None:
        """Keep staged rows below `length`, wipe the others, and evict what no later query may see."""
        if not self.length <= length <= self.length + self.staged:
            raise InvariantViolated("INV2", f"commit to {length} of {self.length} and {self.staged} staged positions")
        rejected = np.arange(length, self.length + self.staged, dtype=np.int64)
        before = self.length
        self.length, self.staged = length, 0
        if length // self.context.geometry.segment_tokens > before // self.context.geometry.segment_tokens:
            self.evicted = self.strategy.evicted(self.context.geometry, length)
        # The tables first, the device second: should the device fail, the tables are right.
        for group in self.groups:
            group.held[group.layout.slots(rejected)] = -1
        for group in self.groups:
            self._wipe(group, group.layout.slots(rejected))
            if group.layout.horizon(length) > group.layout.horizon(before):
                self._evict(group)

    def check(self) -> None:
        """INV-1: per layer, resident and evicted positions add up to the cached length."""
        for group in self.groups:
            resident = int(np.count_nonzero(group.held >= 0))
            gone = max(0, group.layout.horizon(self.length) - group.layout.sink)
            if resident + gone != self.length + self.staged:
                raise InvariantViolated(
                    "INV1", f"{resident} resident and {gone} evicted positions where {self.length} are cached"
                )

    def release(self) -> None:
        """Give the slab back. Safe to call twice; the session's rows are unreachable afterwards."""
        if self.groups:
            self.context.pool.release(self._demands, self._starts)
            self.groups = ()

    # -- facts ------------------------------------------------------------------------------------------------------

    def footprint(self) -> Footprint:
        """Bytes of opened pages, and of the sink's second copies."""
        itemsize = self.context.geometry.itemsize
        rows = copies = 0
        for group in self.groups:
            row_bytes = 2 * group.kv_heads * group.head_dim * itemsize * len(group.layers)
            rows += self._open_rows(group, self.length + self.staged) * row_bytes
            copies += min(group.layout.spare, self.length + self.staged) * row_bytes
        return Footprint({"rows": rows, "sink_copy": copies})

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _open_rows(self, group: LayerGroup, length: int) -> int:
        page = self.context.geometry.page_tokens
        if self.context.geometry.key_quantum > 1 and length:
            # Padded keys are read (and masked), so they are opened with the rows they pad.
            page = math.lcm(page, self.context.geometry.key_quantum)
        return min(group.layout.capacity, -(-group.open_slots(length) // page) * page)

    def _wipe(self, group: LayerGroup, slots: Positions) -> None:
        if len(slots):
            rows = torch.from_numpy(group.rows(slots).reshape(-1)).to(self.context.device)
            arena = self.context.pool.arenas[group.head_dim]
            arena.keys.index_fill_(0, rows, 0)
            arena.values.index_fill_(0, rows, 0)

    def _evict(self, group: LayerGroup) -> None:
        layout = group.layout
        leaving = np.flatnonzero((group.held >= layout.sink) & (group.held < layout.horizon(self.length)))
        group.held[leaving] = -1
        self._wipe(group, leaving)
        shift = layout.sink_shift(self.length)
        if shift:
            self._move_sink(group, shift)

    def _move_sink(self, group: LayerGroup, shift: int) -> None:
        """Let the sink's keys stand `shift` positions after their own. Always from the copies, so no error adds up."""
        layout, device = group.layout, self.context.device
        sink = np.arange(layout.sink, dtype=np.int64)
        source = group.rows(layout.capacity + sink).transpose(0, 2, 1)  # [layers, Hkv, sink]
        target = group.rows(sink).transpose(0, 2, 1).reshape(-1)
        keys = self.context.pool.arenas[group.head_dim].keys
        own = keys[torch.from_numpy(source.reshape(-1).copy()).to(device)].view(-1, layout.sink, group.head_dim)
        moved = self.context.move_keys(own, shift, group.rotary)
        keys.index_copy_(0, torch.from_numpy(target.copy()).to(device), moved.reshape(-1, group.head_dim))


def _group_layers(layouts: tuple[Layout, ...], geometry: Geometry, starts: tuple[int, ...]) -> tuple[LayerGroup, ...]:
    members: dict[tuple[Layout, int, int, str], list[int]] = {}
    for index, (layer, layout) in enumerate(zip(geometry.layers, layouts, strict=True)):
        members.setdefault((layout, layer.kv_heads, layer.head_dim, layer.rotary), []).append(index)
    return tuple(
        LayerGroup(
            layers=np.array(layers, dtype=np.int64),
            starts=np.array([starts[index] for index in layers], dtype=np.int64),
            layout=layout,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary=rotary,
        )
        for (layout, kv_heads, head_dim, rotary), layers in members.items()
    )
