"""The numbers that a step's layers read: where the K and V of each token go, and which region its query reads.

They travel to the device together, as one run of integers. A step whose queries all read regions is nothing but these
numbers, so a recorded forward can be replayed with others of the same shape (`backends/graphs.py`).

    writes [Ln, N, Hkv] for each number of KV heads, Ln its layers · states [N, STATE_FIELDS] · regions [L, N, FIELDS]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.errors import BackendError
from inference_engine.kernels.expanded_attention import OwnQueries
from inference_engine.kernels.gather import MOST_BLOCKS
from inference_engine.kernels.reads import (
    BASE,
    COUNT,
    FIELDS,
    FLOOR,
    HEAD_SLOTS,
    LAST,
    RING,
    SINK,
    SINK_FLOOR,
    START,
    UPTO,
    AttentionCall,
    RaggedAttention,
    StagedRead,
)
from inference_engine.kernels.states import STATE_FIELDS
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import Layout, Positions
from inference_engine.kv.memory.pool import KVBuffer, Pool
from inference_engine.kv.memory.scratch import Scratch

Numbers = NDArray[np.int64]
Array = TypeVar("Array", Numbers, Tensor)
Indexes = slice | Numbers


class Besides(Protocol):
    """`attention(call)` in a layer, where some queries, or all, have views."""

    def __call__(self, layer: int, call: AttentionCall, attention: RaggedAttention) -> Tensor: ...


class StepNumbers:
    """The numbers on the host. They start as zeros: K and V go to vector 0 of the buffer, and queries read nothing.

    writes: by number of KV heads, [Ln, N, Hkv]. states: [N, STATE_FIELDS] (`kernels/states.py`), or [0, STATE_FIELDS].
    regions: [L, N, FIELDS], or [L, 0, FIELDS] where no query reads a region. The memory of all is used again by later
    steps, so views of it must not outlive this.
    """

    _scratch: Scratch | None = None

    def __init__(
        self,
        geometry: Geometry,
        tokens: int,
        *,
        has_regions: bool,
        scratch: Scratch | None = None,
        is_zeroed: bool = True,
    ) -> None:
        """scratch: where the memory comes from, and goes to when these numbers go; None: the system.

        is_zeroed: False if all of them will be set.
        """
        self.geometry = geometry
        self.tokens = tokens
        count = _count(geometry, tokens, has_regions)
        self._memory = (scratch or Scratch()).take(count, is_zeroed=is_zeroed)
        self._scratch = scratch
        self.all = self._memory[:count]
        self.writes, self.states, self.regions = _split(self.all, geometry, tokens)

    def __del__(self) -> None:
        if self._scratch is not None:
            self._scratch.give_back(self._memory)

    def write(self, kv_heads: int, places: Indexes, tokens: slice, starts: Numbers, region_offsets: Numbers) -> None:
        """Set where the K and V of `tokens` go, in the layers with so many KV heads at `places`.

        starts: [places], of each layer's regions; region_offsets: [tokens · Hkv], counted from there.
        """
        # Tokens and heads as one axis: numpy is slow on short ones.
        writes = self.writes[kv_heads].reshape(len(self.writes[kv_heads]), -1)
        writes[places, tokens.start * kv_heads : tokens.stop * kv_heads] = starts[:, None] + region_offsets

    def attend(self, layers: Indexes, tokens: slice, starts: Numbers, lines: Numbers) -> None:
        """Set what `tokens` see in `layers`. Only the regions' `starts` differ between layers.

        lines: [tokens, FIELDS], see `RegionLines`.
        """
        regions = self.regions.reshape(len(self.regions), -1)
        regions[layers, tokens.start * FIELDS : tokens.stop * FIELDS] = lines.reshape(-1)
        self.regions[layers, tokens, START] = starts[:, None]

    def read_nothing(self, layers: Indexes, tokens: slice) -> None:
        """These tokens read in another way than by numbers."""
        self.regions[layers, tokens] = 0

    def write_one(self, kv_heads: int, places: Indexes, token: int, vectors: Numbers) -> None:
        """As `write`, for one token. vectors: [places, Hkv], those that its K and V go to."""
        self.writes[kv_heads][places, token] = vectors

    def attend_one(self, layers: Indexes, token: int, starts: Numbers, line: Numbers) -> None:
        """As `attend`, for one token. line: [FIELDS]."""
        self.regions[layers, token] = line
        self.regions[layers, token, START] = starts

    def grown(self, growth: StepNumbers, scratch: Scratch) -> StepNumbers:
        """The numbers of a step whose tokens are like these, one position later."""
        following = StepNumbers(self.geometry, self.tokens, has_regions=True, scratch=scratch, is_zeroed=False)
        np.add(self.all, growth.all, out=following.all)
        return following

    def take_difference(self, token: int, later: StepNumbers, earlier: StepNumbers) -> None:
        """Make the numbers of a token those by which `later` ones of it are larger."""
        for heads, writes in self.writes.items():
            writes[:, token] = later.writes[heads][:, token] - earlier.writes[heads][:, token]
        self.regions[:, token] = later.regions[:, token] - earlier.regions[:, token]
        own = slice(token, token + 1)
        self.states[own] = later.states[own] - earlier.states[own]

    def clear(self, token: int) -> None:
        """Make all numbers of a token zeros."""
        for writes in self.writes.values():
            writes[:, token] = 0
        self.regions[:, token] = 0
        self.states[token : token + 1] = 0

    def padded(self, tokens: int, scratch: Scratch) -> StepNumbers:
        """The same numbers with padding tokens added, which read nothing and write to vector 0."""
        if tokens == self.tokens:
            return self
        wider = StepNumbers(self.geometry, tokens, has_regions=True, scratch=scratch)
        for heads, writes in self.writes.items():
            wider.writes[heads][:, : self.tokens] = writes
        wider.regions[:, : self.tokens] = self.regions
        wider.states[: self.tokens] = self.states
        return wider


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTables:
    """The numbers on the device, and the attention of each layer by them. Implements AttentionPlan."""

    geometry: Geometry
    pool: Pool
    attention: RaggedAttention
    reads: tuple[StagedRead, ...]  # these two as AttentionCall has them
    has_chunks: bool
    writes: tuple[Tensor, ...]  # by layer [N · Hkv]
    states: Tensor  # [N, STATE_FIELDS]
    regions: Tensor
    besides: Besides | None

    @staticmethod
    def over(
        numbers: Tensor,
        geometry: Geometry,
        pool: Pool,
        attention: RaggedAttention,
        *,
        tokens: int,
        reads: Sequence[StagedRead] = (),
        has_chunks: bool = False,
        besides: Besides | None = None,
    ) -> StepTables:
        """Views of `numbers`, which lie on the device as StepNumbers has them. besides: of queries with views."""
        writes, states, regions = _split(numbers, geometry, tokens)
        by_layer = {
            layer: writes[heads][place].reshape(-1)
            for heads, layers in geometry.by_heads.items()
            for place, layer in enumerate(layers)
        }
        ordered = tuple(by_layer[layer] for layer in range(len(geometry.layers)))
        return StepTables(
            geometry=geometry,
            pool=pool,
            attention=attention,
            reads=tuple(reads),
            has_chunks=has_chunks,
            writes=ordered,
            regions=regions,
            states=states,
            besides=besides,
        )

    def buffer(self, layer: int) -> KVBuffer:
        return self.pool.buffers[layer]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write K and V, [1, Hkv, N, D] each, to where `writes` says."""
        buffer = self.buffer(layer)
        buffer.keys.index_copy_(0, self.writes[layer], as_vectors(keys))
        buffer.values.index_copy_(0, self.writes[layer], as_vectors(values))

    def read(
        self, layer: int, queries: Tensor, *, scaling: float, softcap: float | None, head_sinks: Tensor | None
    ) -> Tensor:
        """[N, Hq, D]: attention of each query over its region; zeros without one. queries: [1, Hq, N, D]."""
        if head_sinks is not None:
            raise BackendError("the model's attention has a sink of its own in each head; start with kernels=plain")
        buffer = self.buffer(layer)
        call = AttentionCall(
            queries[0].transpose(0, 1),
            buffer.keys,
            buffer.values,
            self.regions[layer],
            kv_heads=self.geometry.layers[layer].kv_heads,
            scaling=scaling,
            softcap=softcap,
            reads=self.reads,
            has_chunks=self.has_chunks,
        )
        return self.attention(call) if self.besides is None else self.besides(layer, call, self.attention)

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        *,
        scaling: float,
        softcap: float | None = None,
        head_sinks: Tensor | None = None,
        own: OwnQueries | None = None,
    ) -> Tensor:
        """Write K and V of `layer`, if given, and attend. As `StepPlan.attend`, where all queries read regions."""
        if keys is not None and values is not None:
            self.write(layer, keys, values)
        if own is not None:
            queries = own.absorbed(slice(None)).transpose(0, 1)[None]
        out = self.read(layer, queries, scaling=scaling, softcap=softcap, head_sinks=head_sinks)
        return (out if own is None else own.output(out))[None]


class RegionLines:
    """Lines for queries that read every slot they see in regions of this layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._alike = np.zeros((1, FIELDS), dtype=np.int64)  # what all its lines have in common
        self._alike[0, HEAD_SLOTS] = layout.region
        self._alike[0, SINK] = layout.sink
        self._alike[0, RING] = 0 if layout.window is None else max(1, layout.capacity - layout.sink)
        self._alike[0, BASE] = layout.base

    def of(self, queries: Positions, *, last: int, count: int) -> Numbers:
        """[n, FIELDS]: a line for each of `queries`. Fields that differ by layer are 0.

        last: the last position that has an entry. count: slots to look at, those before the layout's base included. A
        query sees a slot if `layout.visible` says so of the position that the slot holds.
        """
        window, native = self._layout.window, self._layout.native_window
        lines = self._alike.repeat(len(queries), axis=0)
        lines[:, COUNT] = count
        lines[:, LAST] = last
        lines[:, UPTO] = queries
        if native is not None:
            lines[:, FLOOR] = lines[:, SINK_FLOOR] = np.maximum(0, queries - native + 1)
        if window is not None:
            horizons = queries - queries % self._layout.segment - window
            lines[:, FLOOR] = np.maximum(lines[:, FLOOR], horizons)
        return lines

    def of_one(self, query: int, *, count: int) -> Numbers:
        """[FIELDS]: as `of`, the line of a query that is itself the last position with an entry."""
        window, native = self._layout.window, self._layout.native_window
        line: Numbers = self._alike[0].copy()
        line[COUNT], line[LAST], line[UPTO] = count, query, query
        floor = 0
        if native is not None:
            line[SINK_FLOOR] = floor = max(0, query - native + 1)
        if window is not None:
            floor = max(floor, query - query % self._layout.segment - window)
        line[FLOOR] = floor
        return line

    def grow_until(self, query: int) -> int:
        """Until this query, lines grow from one to the next as from this one to the next, and slots by one."""
        layout = self._layout
        if layout.window is None:
            return layout.base + layout.capacity
        if layout.native_window not in (None, layout.window):
            return query
        ring = max(1, layout.capacity - layout.sink)
        lap_end = layout.sink + (max(0, query - layout.sink) // ring + 1) * ring
        end = min(lap_end, layout.segment_end(query))
        # The first queries of a native window all see position 0.
        return min(end, layout.window) if self._sees_all(query) else end

    def _sees_all(self, query: int) -> bool:
        """Does the next query, too, see position 0, by a native window?"""
        native = self._layout.native_window
        return native is not None and query < native - 1


def most_blocks(geometry: Geometry) -> int:
    """The most blocks that a query can choose from: blocks of the smallest size in the longest history, capped.

    It does not depend on the sessions of a step, so a recorded step fits all of them.
    """
    return min(MOST_BLOCKS, -(-geometry.trained_positions // geometry.page_tokens))


def places_of(geometry: Geometry) -> Numbers:
    """Each layer's index among the layers with the same number of KV heads."""
    places = np.zeros(len(geometry.layers), dtype=np.int64)
    for layers in geometry.by_heads.values():
        places[list(layers)] = np.arange(len(layers))
    return places


def as_slice(indexes: Numbers) -> Indexes:
    """The same indexes, as a slice if they ascend evenly: a slice is faster to look up with."""
    first, last = int(indexes[0]), int(indexes[-1])
    step = int(indexes[1]) - first if len(indexes) > 1 else 1
    is_even = step > 0 and bool((np.diff(indexes) == step).all())
    return slice(first, last + 1, step) if is_even else indexes


def as_vectors(states: Tensor) -> Tensor:
    """[1, H, N, D] -> [N · H, D], a view when the states came from one projection."""
    return states[0].transpose(0, 1).reshape(-1, states.shape[-1])


def _count(geometry: Geometry, tokens: int, has_regions: bool) -> int:
    count = (len(geometry.layers) * FIELDS if has_regions else 0) + geometry.numbers_states * STATE_FIELDS
    for heads, layers in geometry.by_heads.items():
        count += len(layers) * heads
    return tokens * count


def _split(numbers: Array, geometry: Geometry, tokens: int) -> tuple[dict[int, Array], Array, Array]:
    """Views of one run of numbers: the writes by number of KV heads, the states, and the regions of all layers."""
    writes: dict[int, Array] = {}
    first = 0
    for heads, layers in geometry.by_heads.items():
        count = len(layers) * tokens * heads
        writes[heads] = numbers[first : first + count].reshape(len(layers), tokens, heads)
        first += count
    end = first + tokens * geometry.numbers_states * STATE_FIELDS
    states = numbers[first:end].reshape(-1, STATE_FIELDS)
    return writes, states, numbers[end:].reshape(len(geometry.layers), -1, FIELDS)
