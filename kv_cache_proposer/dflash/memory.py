"""A DFlash drafter's cache for one session: K and V of the last `context_window` positions, in every draft layer.

    buffer of K   [layers, Hkv, window, D]   a position's slot is its remainder by the window
    buffer of V   likewise

The memory is part of the sessions' pool and reserved while the session exists. Its slots are overwritten as the history
grows. `held` gives the position in each slot: where a position was never observed the slot keeps an older one, which is
masked. Slots that were never written are zeroed where they are read beside others: the pool's memory may hold NaN,
which a mask does not remove.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kv.context import DraftMemory, KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.memory.pool import Demand, Pool
from kv_cache_proposer.dflash.config import DFlashConfig

Positions = NDArray[np.int64]


def memory_demand(config: DFlashConfig, geometry: Geometry) -> Demand:
    """One session's share of the pool: its entries, and room to begin them at a multiple of their size."""
    head_dim = geometry.layers[0].head_dim
    elements = config.elements_per_position * config.context_window + config.head_dim
    unit = geometry.alignment
    return Demand(head_dim=head_dim, elements=-(-elements // unit) * unit)


class RingMemory(DraftMemory):
    """One session's entries. Only the engine's thread accesses them; `reserve` may be called from any thread."""

    def __init__(self, config: DFlashConfig, context: KVContext, demand: Demand, starts: tuple[int, ...]) -> None:
        self._config = config
        self._context = context
        self._demand = demand
        self._starts: tuple[int, ...] | None = starts
        # In vectors of the drafter's head size, whatever the buffer's is.
        self.first_vector = -(-starts[0] * demand.head_dim // config.head_dim)
        self.held: Positions = np.full(config.context_window, -1, dtype=np.int64)
        self.used = 0  # slots before this one have been written or zeroed

    @staticmethod
    def reserve(config: DFlashConfig, context: KVContext) -> RingMemory | None:
        """None, with nothing reserved, if the pool has no room."""
        demand = memory_demand(config, context.geometry)
        starts = context.pool.reserve((demand,))
        return None if starts is None else RingMemory(config, context, demand, starts)

    @property
    def pool(self) -> Pool:
        """Where it lies."""
        return self._context.pool

    def held_bytes(self) -> int:
        page = self._context.geometry.page_tokens
        slots = min(self._config.context_window, -(-self.used // page) * page)
        return slots * 2 * self._config.elements_per_position * self._context.geometry.itemsize

    def clear(self) -> None:
        self.held[:] = -1
        self.used = 0

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
        return places, slots

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


def buffers_of(config: DFlashConfig, context: KVContext) -> tuple[Tensor, Tensor]:
    """All of the pool, K and V, as vectors of the drafter's head size: [R, D] each."""
    buffer, size = context.pool.buffers[context.geometry.layers[0].head_dim], config.head_dim
    whole = buffer.keys.numel() // size * size
    return buffer.keys.view(-1)[:whole].view(-1, size), buffer.values.view(-1)[:whole].view(-1, size)


def write_index(memories: Sequence[RingMemory], slots: Sequence[Positions]) -> Positions:
    """[layers · Hkv, n], vectors of the buffers, memory after memory."""
    indices = [memory.index(own).reshape(-1, len(own)) for memory, own in zip(memories, slots, strict=True)]
    return np.concatenate(indices, axis=1)


def write_entries(memory: RingMemory, index: Positions, keys: Tensor, values: Tensor) -> None:
    """Write keys and values [layers, Hkv, n, D] at `index`. memory: that of any session."""
    where = torch.from_numpy(index.reshape(-1)).to(keys.device)
    for buffer, states in zip(memory.buffers(), (keys, values), strict=True):
        buffer.index_copy_(0, where, states.to(buffer.dtype).reshape(-1, buffer.shape[1]))
