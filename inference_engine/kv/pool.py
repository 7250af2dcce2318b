"""The memory all sessions share: one arena for K, one for V, and the slabs cut out of them.

    arena [R, D]     slab of a layer: `lane` consecutive rows for each KV head, head after head

Layers with heads of different sizes D see the same memory as rows of their own size. A slab is taken when a session is
created, whole, and given back when it ends: what was promised is there. On a CPU the arena is address space; pages of
it become memory when rows are first written. Row 0 takes the writes of padding rows.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from inference_engine.kv.geometry import Geometry

TRASH_UNITS = 1


class RunAllocator:
    """First-fit allocation of runs of units, neighbours merged when freed."""

    def __init__(self, total: int) -> None:
        self._starts = [0] if total else []
        self._lengths = [total] if total else []
        self.total = total
        self.free = total

    def take(self, count: int) -> int | None:
        """The start of a free run of `count` units, now taken; None if there is none that long."""
        if not count:
            return 0  # nothing is taken, so that nothing can lie inside a free run
        for index, length in enumerate(self._lengths):
            if length >= count:
                start = self._starts[index]
                if length == count:
                    del self._starts[index], self._lengths[index]
                else:
                    self._starts[index] += count
                    self._lengths[index] -= count
                self.free -= count
                return start
        return None

    def give_back(self, start: int, count: int) -> None:
        if not count:
            return
        index = bisect_left(self._starts, start)
        assert index == len(self._starts) or start + count <= self._starts[index], "freed twice"
        assert index == 0 or self._starts[index - 1] + self._lengths[index - 1] <= start, "freed twice"
        self._starts.insert(index, start)
        self._lengths.insert(index, count)
        self.free += count
        for left in (index, index - 1):
            if 0 <= left < len(self._starts) - 1 and self._starts[left] + self._lengths[left] == self._starts[left + 1]:
                self._lengths[left] += self._lengths[left + 1]
                del self._starts[left + 1], self._lengths[left + 1]


@dataclass(frozen=True, slots=True)
class Arena:
    """The whole memory as rows of one head size: K and V, [R, D] each."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What one layer needs: room for `elements` numbers of K and as many of V, in rows of `head_dim`."""

    head_dim: int
    elements: int  # a multiple of the geometry's alignment


class Pool:
    """All rows of K and V there are.

    `reserve` and `release` are safe from any thread; arrays are the engine's alone.
    """

    def __init__(self, geometry: Geometry, capacity_bytes: int, allocate: Callable[[int], Tensor]) -> None:
        """`allocate(n)` gives n zeros on the device, in the dtype of K and V."""
        self._lock = threading.Lock()
        self._itemsize = geometry.itemsize
        head_dims = sorted({layer.head_dim for layer in geometry.layers})
        self._unit = geometry.alignment
        units = capacity_bytes // (2 * self._unit * geometry.itemsize)
        self._runs = RunAllocator(units)
        keys, values = (allocate((units + TRASH_UNITS) * self._unit) for _ in range(2))
        self.arenas = {dim: Arena(keys.view(-1, dim), values.view(-1, dim)) for dim in head_dims}

    @property
    def capacity_bytes(self) -> int:
        return self._bytes(self._runs.total)

    @property
    def reserved_bytes(self) -> int:
        with self._lock:
            return self._bytes(self._runs.total - self._runs.free)

    def reserve(self, demands: Sequence[Demand]) -> tuple[int, ...] | None:
        """The first arena row of each layer's slab, or None (and nothing taken) if there is no room.

        Layers lie wherever there is room for one of them, so that a pool in pieces still serves.
        """
        with self._lock:
            starts: list[int] = []
            for demand in demands:
                start = self._runs.take(self._units(demand))
                if start is None:
                    self._give_back(demands, starts)
                    return None
                starts.append(start)
        return tuple(
            (start + TRASH_UNITS) * self._unit // demand.head_dim for start, demand in zip(starts, demands, strict=True)
        )

    def release(self, demands: Sequence[Demand], starts: Sequence[int]) -> None:
        """Give a slab back, as `reserve` answered it."""
        pairs = zip(starts, demands, strict=True)
        units = [start * demand.head_dim // self._unit - TRASH_UNITS for start, demand in pairs]
        with self._lock:
            self._give_back(demands, units)

    def _give_back(self, demands: Sequence[Demand], starts: Sequence[int]) -> None:
        for demand, start in zip(demands, starts, strict=False):
            self._runs.give_back(start, self._units(demand))

    def _units(self, demand: Demand) -> int:
        assert demand.elements % self._unit == 0
        return demand.elements // self._unit

    def _bytes(self, units: int) -> int:
        return 2 * units * self._unit * self._itemsize
