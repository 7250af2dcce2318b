"""A drafting network's cache for one session: K and V of the last `window` positions, in every draft layer.

    buffer of K   [layers, Hkv, window, D]   a position's slot is its remainder by the window
                  [Hkv, block, D]            of the block that is drafted, where the drafter keeps it: layer after layer
    buffer of V   likewise
    behind both   [carried]                  of the last position, what its entry will be made of, where that needs the
                                             token after it

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

Positions = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class RingShape:
    """layers, kv_heads, head_dim: of the entries. window: positions in the ring buffer.

    block: places of a block whose entries lie behind it; 0: none. carried: numbers that lie behind those.
    """

    layers: int
    kv_heads: int
    head_dim: int
    window: int
    block: int = 0
    carried: int = 0

    @property
    def elements_per_position(self) -> int:
        """Numbers of K, and as many of V."""
        return self.layers * self.kv_heads * self.head_dim

    @property
    def block_vectors(self) -> int:
        return self.kv_heads * self.block

    @property
    def carried_vectors(self) -> int:
        """Each has room for a key and a value."""
        return -(-self.carried // (2 * self.head_dim))


@dataclass(frozen=True, slots=True)
class Sight:
    """What a block sees of a ring buffer: the slots [0, before) and [since, end). A run of positions may go round."""

    before: int
    since: int
    end: int


def memory_demand(shape: RingShape, geometry: Geometry) -> Demand:
    """One session's share of the pool: its entries, and room to begin them at a multiple of their size."""
    vectors = shape.layers * shape.kv_heads * shape.window + shape.block_vectors + shape.carried_vectors
    return Demand.of(geometry, 2 * shape.head_dim * (vectors + 1))


class RingMemory(DraftMemory):
    """One session's entries. Only the engine's thread accesses them; `reserve` may be called from any thread."""

    def __init__(self, shape: RingShape, context: KVContext, demand: Demand, starts: tuple[int, ...]) -> None:
        self._shape = shape
        self._context = context
        self._demand = demand
        self._starts: tuple[int, ...] | None = starts
        # In vectors of the drafter's head size, whatever the model's is.
        self.first_vector = -(-starts[0] // (2 * shape.head_dim))
        self.held: Positions = np.full(shape.window, -1, dtype=np.int64)
        self.used = 0  # slots before this one have been written or zeroed
        self._run = 0, 0  # the last positions that were observed without a gap: the first, and one past the last
        self._has_block = False
        self.carried_at: int | None = None  # the position that what is carried is of

    @staticmethod
    def reserve(shape: RingShape, context: KVContext) -> RingMemory | None:
        """None, with nothing reserved, if the pool has no room."""
        demand = memory_demand(shape, context.geometry)
        starts = context.pool.reserve((demand,))
        return None if starts is None else RingMemory(shape, context, demand, starts)

    @property
    def pool(self) -> Pool:
        """Where it lies."""
        return self._context.pool

    @property
    def runs(self) -> Sequence[Run]:
        return () if self._starts is None else self._context.pool.runs((self._demand,), self._starts)

    def held_bytes(self) -> int:
        page, shape = self._context.geometry.page_tokens, self._shape
        slots = min(shape.window, -(-self.used // page) * page)
        vectors = shape.block_vectors if self._has_block else 0
        vectors += shape.carried_vectors if self.carried_at is not None else 0
        elements = slots * shape.elements_per_position + vectors * shape.head_dim
        return 2 * elements * self._context.geometry.itemsize

    def clear(self) -> None:
        self.held[:] = -1
        self.used = 0
        self._run = 0, 0
        self._has_block = False
        self.carried_at = None

    def release(self) -> None:
        if self._starts is not None:
            self._context.pool.release((self._demand,), self._starts)
            self._starts = None

    def hold(self, first: int, count: int) -> tuple[Positions, Positions]:
        """Make room for `count` positions from `first` on, and mark them as held.

        Returns which of the `count` entries are to be written, the last ones, and their slots. The caller writes them.
        """
        window = self._shape.window
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
        assert self._shape.block, "this memory has no room for a block"
        self._has_block = True
        shape = self._shape
        return self._behind_ring + np.arange(shape.block_vectors).reshape(shape.kv_heads, shape.block)

    def carry(self, position: int, vector: Tensor) -> None:
        """Keep the vector [carried] of a position, in the place of what was carried."""
        self.carried()[:] = vector
        self.carried_at = position

    def carried(self) -> Tensor:
        """A view: [carried]."""
        first = self._behind_ring + self._shape.block_vectors
        vectors = _buffer_of(self._shape.head_dim, self._context).vectors
        return vectors[first : first + self._shape.carried_vectors].view(-1)[: self._shape.carried]

    @property
    def _behind_ring(self) -> int:
        return self.first_vector + self._shape.layers * self._shape.kv_heads * self._shape.window

    def sight(self, position: int, since: int = 0) -> Sight:
        """The slots of the last positions before `position` that were observed without a gap, of a window at most, from
        position `since` on.
        """
        window = self._shape.window
        first, end = max(self._run[0], position - window, self._run[1] - window, since), self._run[1]
        if first >= end:
            return Sight(0, 0, 0)
        start, last = first % window, (end - 1) % window
        return Sight(0, start, last + 1) if start <= last else Sight(last + 1, start, window)

    def index(self, slots: Positions) -> NDArray[np.int64]:
        """Vectors of the buffer: for each layer and head, those of the slots; flat."""
        head_starts = np.arange(self._shape.layers * self._shape.kv_heads, dtype=np.int64) * self._shape.window
        return (self.first_vector + head_starts[:, None] + slots[None, :]).reshape(-1)

    def states(self, count: int) -> tuple[Tensor, Tensor]:
        """K and V of the first `count` slots: [layers, Hkv, count, D] each, views."""
        shape = self._shape
        whole = (shape.layers, shape.kv_heads, shape.window, shape.head_dim)
        own = slice(self.first_vector, self._behind_ring)
        keys, values = (part[own].view(whole)[:, :, :count] for part in self.buffers())
        return keys, values

    def visible(self, position: int, count: int) -> NDArray[np.bool_]:
        """Which of the first `count` slots a block that begins at `position` sees: those of the window before it."""
        held = self.held[:count]
        return (held >= 0) & (held < position) & (held >= position - self._shape.window)

    def buffers(self) -> tuple[Tensor, Tensor]:
        """See `buffers_of`."""
        return buffers_of(self._shape.head_dim, self._context)


def buffers_of(head_dim: int, context: KVContext) -> tuple[Tensor, Tensor]:
    """All of the pool, K and V, as vectors of the drafter's head size: [R, D] each."""
    buffer = _buffer_of(head_dim, context)
    return buffer.keys, buffer.values


def _buffer_of(head_dim: int, context: KVContext) -> KVBuffer:
    return KVBuffer.over(context.pool.memory, EntryShape(head_dim, head_dim))


def write_index(memories: Sequence[RingMemory], slots: Sequence[Positions]) -> Positions:
    """[layers · Hkv, n], vectors of the buffers, memory after memory."""
    indices = [memory.index(own).reshape(-1, len(own)) for memory, own in zip(memories, slots, strict=True)]
    return np.concatenate(indices, axis=1)


def write_entries(memory: RingMemory, index: Positions, keys: Tensor, values: Tensor) -> None:
    """Write keys and values [layers, Hkv, n, D] at `index`. memory: that of any session."""
    where = torch.from_numpy(index.reshape(-1)).to(keys.device)
    for buffer, states in zip(memory.buffers(), (keys, values), strict=True):
        buffer.index_copy_(0, where, states.to(buffer.dtype).reshape(-1, buffer.shape[1]))
