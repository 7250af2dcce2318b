"""A DFlash drafter's cache for one session: K and V of the last `context_window` positions, in every draft layer.

    buffer of K   [layers, Hkv, window, D]   a position's slot is its remainder by the window
                  [Hkv, block, D]            of the block that is drafted, where the drafter keeps it: layer after layer
    buffer of V   likewise

The memory is part of the sessions' pool and reserved while the session exists. Its slots are overwritten as the history
grows. `held` gives the position in each slot: where a position was never observed the slot keeps an older one, which is
masked. Slots that were never written are zeroed where they are read beside others: the pool's memory may hold NaN,
which a mask does not remove.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kv.context import DraftMemory, KVContext
from inference_engine.kv.geometry import EntryShape, Geometry
from inference_engine.kv.memory.pool import Demand, KVBuffer, Pool, Run
from kv_cache_proposer.dflash.drafter_config import DFlashConfig

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sight:
    """What a block sees of a ring buffer: the slots [0, before) and [since, end). A run of positions may go round."""

    before: int
    since: int
    end: int


def memory_demand(config: DFlashConfig, geometry: Geometry, *, keeps_block: bool = False) -> Demand:
    """One session's share of the pool: its entries, and room to begin them at a multiple of their size."""
    elements = config.elements_per_position * config.context_window + config.head_dim
    elements += _block_elements(config) if keeps_block else 0
    return Demand.of(geometry, 2 * elements)


class RingMemory(DraftMemory):
    """One session's entries. Only the engine's thread accesses them; `reserve` may be called from any thread."""

    def __init__(
        self, config: DFlashConfig, context: KVContext, demand: Demand, starts: tuple[int, ...], *, keeps_block: bool
    ) -> None:
        self._config = config
        self._block_bytes = 2 * _block_elements(config) * context.geometry.itemsize if keeps_block else 0
        self._context = context
        self._demand = demand
        self._starts: tuple[int, ...] | None = starts
        # In vectors of the drafter's head size, whatever the model's is.
        self.first_vector = -(-starts[0] // (2 * config.head_dim))
        self.held: Positions = np.full(config.context_window, -1, dtype=np.int64)
        self.used = 0  # slots before this one have been written or zeroed
        self._run = 0, 0  # the last positions that were observed without a gap: the first, and one past the last
        self._has_block = False

    @staticmethod
    def reserve(config: DFlashConfig, context: KVContext, *, keeps_block: bool = False) -> RingMemory | None:
        """None, with nothing reserved, if the pool has no room.

        keeps_block: entries of the block that is drafted lie behind the ring buffer.
        """
        demand = memory_demand(config, context.geometry, keeps_block=keeps_block)
        starts = context.pool.reserve((demand,))
        return None if starts is None else RingMemory(config, context, demand, starts, keeps_block=keeps_block)

    @property
    def pool(self) -> Pool:
        """Where it lies."""
        return self._context.pool

    @property
    def runs(self) -> Sequence[Run]:
        return () if self._starts is None else self._context.pool.runs((self._demand,), self._starts)

    def held_bytes(self) -> int:
        page = self._context.geometry.page_tokens
        slots = min(self._config.context_window, -(-self.used // page) * page)
        entries = slots * 2 * self._config.elements_per_position * self._context.geometry.itemsize
        return entries + (self._block_bytes if self._has_block else 0)

    def clear(self) -> None:
        self.held[:] = -1
        self.used = 0
        self._run = 0, 0
        self._has_block = False

    def release(self) -> None:
        if self._starts is not None:
            self._context.pool.release((self._demand,), self._starts)
            self._starts = None

    def hold(self, first: int, count: int) -> tuple[Positions, Positions]:
        """Make room for `count` positions from `first` on, and mark them as held.

        Returns which of the `count` entries are to be written, the last ones, and their slots. The caller writes them.
        """
        window = self._config.context_window
        places = np.arange(max(0, count - window), count, dtype=np.int64)
        slots = (first + places) % window
        reach = int(slots.max()) + 1
        if reach > self.used:
            if np.count_nonzero(slots >= self.used) < reach - self.used:
                skipped = np.setdiff1d(np.arange(self.used, reach), slots)
                index = torch.from_numpy(self.index(skipped)).to(self._context.device)
                for buffer in self.buffers():
                    buffer.index_fill_(0, index, 0)
            self.used = reach
        self.held[slots] = first + places
        self._run = self._run[0] if first == self._run[1] else first, first + count
        return places, slots

    def block_vectors(self) -> Positions:
        """[Hkv, block], where entries of a block go. They count as held from now on."""
        assert self._block_bytes, "this memory has no room for a block"
        self._has_block = True
        config = self._config
        first = self.first_vector + config.layers * config.kv_heads * config.context_window
        return first + np.arange(config.kv_heads * config.block_size).reshape(config.kv_heads, config.block_size)

    def sight(self, position: int, since: int = 0) -> Sight:
        """The slots of the last positions before `position` that were observed without a gap, of a window at most, from
        position `since` on.
        """
        window = self._config.context_window
        first, end = max(self._run[0], position - window, self._run[1] - window, since), self._run[1]
        if first >= end:
            return Sight(0, 0, 0)
        start, last = first % window, (end - 1) % window
        return Sight(0, start, last + 1) if start <= last else Sight(last + 1, start, window)

    def index(self, slots: Positions) -> NDArray[np.int64]:
        """Vectors of the buffer: for each layer and head, those of the slots; flat."""
        head_starts = (
            np.arange(self._config.layers * self._config.kv_heads, dtype=np.int64) * self._config.context_window
        )
        return (self.first_vector + head_starts[:, None] + slots[None, :]).reshape(-1)

    def states(self, count: int) -> tuple[Tensor, Tensor]:
        """K and V of the first `count` slots: [layers, Hkv, count, D] each, views."""
        config = self._config
        shape = (config.layers, config.kv_heads, config.context_window, config.head_dim)
        own = slice(self.first_vector, self.first_vector + config.layers * config.kv_heads * config.context_window)
        keys, values = (part[own].view(shape)[:, :, :count] for part in self.buffers())
        return keys, values

    def visible(self, position: int, count: int) -> NDArray[np.bool_]:
        """Which of the first `count` slots a block that begins at `position` sees: those of the window before it."""
        held = self.held[:count]
        return (held >= 0) & (held < position) & (held >= position - self._config.context_window)

    def buffers(self) -> tuple[Tensor, Tensor]:
        """See `buffers_of`."""
        return buffers_of(self._config, self._context)


def _block_elements(config: DFlashConfig) -> int:
    return config.kv_heads * config.block_size * config.head_dim


def buffers_of(config: DFlashConfig, context: KVContext) -> tuple[Tensor, Tensor]:
    """All of the pool, K and V, as vectors of the drafter's head size: [R, D] each."""
    buffer = KVBuffer.over(context.pool.memory, EntryShape(config.head_dim, config.head_dim))
    return buffer.keys, buffer.values


def write_index(memories: Sequence[RingMemory], slots: Sequence[Positions]) -> Positions:
    """[layers · Hkv, n], vectors of the buffers, memory after memory."""
    indices = [memory.index(own).reshape(-1, len(own)) for memory, own in zip(memories, slots, strict=True)]
    return np.concatenate(indices, axis=1)


def write_entries(memory: RingMemory, index: Positions, keys: Tensor, values: Tensor) -> None:
    """Write keys and values [layers, Hkv, n, D] at `index`. memory: that of any session."""
    where = torch.from_numpy(index.reshape(-1)).to(keys.device)
    for buffer, states in zip(memory.buffers(), (keys, values), strict=True):
        buffer.index_copy_(0, where, states.to(buffer.dtype).reshape(-1, buffer.shape[1]))
