"""The memory all sessions share: two arenas of rows per head size, K and V, and the slabs cut out of them.

    arena [R, D]     slab of a layer: `lane` consecutive rows for each KV head, head after head

A slab is taken when a session is created, whole, and given back when it ends: what was promised is there. On a CPU the arena is
address space; pages of it become memory when rows are first written. Row 0 of every arena takes the writes of padding rows.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from inference_engine.kv.geometry import Geometry

TRASH_ROWS = 1


class RunAllocator:
    """First-fit allocation of runs of rows, neighbours merged when freed."""

    def __init__(self, total: int) -> None:
        self._starts = [0] if total else []
        self._lengths = [total] if total else []
        self.total = total
        self.free_rows = total

    def take(self, rows: int) -> int | None:
        """The start of a free run of `rows`, now taken; None if there is none that long."""
        for index, length in enumerate(self._lengths):
            if length >= rows:
                start = self._starts[index]
                if length == rows:
                    del self._starts[index], self._lengths[index]
                else:
                    self._starts[index] += rows
                    self._lengths[index] -= rows
                self.free_rows -= rows
                return start
        return None

    def give_back(self, start: int, rows: int) -> None:
        index = bisect_left(self._starts, start)
        assert index == len(self._starts) or start + rows <= self._starts[index], "freed twice"
        assert index == 0 or self._starts[index - 1] + self._lengths[index - 1] <= start, "freed twice"
        self._starts.insert(index, start)
        self._lengths.insert(index, rows)
        self.free_rows += rows
        for left in (index, index - 1):
            if 0 <= left < len(self._starts) - 1 and self._starts[left] + self._lengths[left] == self._starts[left + 1]:
                self._lengths[left] += self._lengths[left + 1]
                del self._starts[left + 1], self._lengths[left + 1]


@dataclass(slots=True)
class Arena:
    """Rows of one head size: K and V, [R, D] each."""

    keys: Tensor
    values: Tensor
    runs: RunAllocator


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What one layer needs: `lane` rows for each of `kv_heads` heads of `head_dim`."""

    head_dim: int
    kv_heads: int
    lane: int

    @property
    def rows(self) -> int:
        return self.kv_heads * self.lane


class Pool:
    """All rows of K and V there are. `reserve` and `release` are safe from any thread; arrays are the engine's alone."""

    def __init__(self, geometry: Geometry, capacity_bytes: int, allocate: Callable[[tuple[int, int]], Tensor]) -> None:
        """`allocate(shape)` gives a zeroed tensor on the device. Head sizes share the capacity as the layers use it."""
        self._lock = threading.Lock()
        self._itemsize = geometry.itemsize
        self.arenas: dict[int, Arena] = {}
        for head_dim in sorted({layer.head_dim for layer in geometry.layers}):
            share = sum(layer.row_bytes(geometry.itemsize) for layer in geometry.layers if layer.head_dim == head_dim)
            bytes_here = capacity_bytes * share // geometry.row_bytes
            rows = bytes_here // (2 * head_dim * geometry.itemsize)
            shape = (TRASH_ROWS + rows, head_dim)
            self.arenas[head_dim] = Arena(allocate(shape), allocate(shape), RunAllocator(rows))

    def slab_bytes(self, demands: Sequence[Demand]) -> int:
        return sum(2 * demand.rows * demand.head_dim * self._itemsize for demand in demands)

    @property
    def capacity_bytes(self) -> int:
        return sum(2 * arena.runs.total * dim * self._itemsize for dim, arena in self.arenas.items())

    @property
    def reserved_bytes(self) -> int:
        with self._lock:
            return sum(
                2 * (arena.runs.total - arena.runs.free_rows) * dim * self._itemsize
                for dim, arena in self.arenas.items()
            )

    def reserve(self, demands: Sequence[Demand]) -> tuple[int, ...] | None:
        """The first arena row of each layer's slab, or None (and nothing taken) if there is no room."""
        with self._lock:
            starts: list[int] = []
            for demand in demands:
                start = self.arenas[demand.head_dim].runs.take(demand.rows)
                if start is None:
                    self._give_back(demands, starts)
                    return None
                starts.append(start)
        return tuple(start + TRASH_ROWS for start in starts)

    def release(self, demands: Sequence[Demand], starts: Sequence[int]) -> None:
        with self._lock:
            self._give_back(demands, [start - TRASH_ROWS for start in starts])

    def _give_back(self, demands: Sequence[Demand], starts: Sequence[int]) -> None:
        for demand, start in zip(demands, starts, strict=False):
            self.arenas[demand.head_dim].runs.give_back(start, demand.rows)
