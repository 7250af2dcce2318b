"""How one session's queries of a step read its entries, in one set of layers; and what a layer with a state gives.

Where the device has an operation for it, they read by plan numbers (`kv/numbers.py`). Otherwise they read by a view,
which is made once a step, on the host, and then read layer after layer. A view holds no session. The views of a
mechanism lie beside it in `parts/`; those here read every entry, in regions or chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.attention import CausalAttention, attend, attend_causal
from inference_engine.kernels.expanded_attention import WholeEntries
from inference_engine.kernels.merge import Merging, MergingStates, attend_causal_state, attend_state, with_head_sinks
from inference_engine.kernels.prefill_attention import AttendEntries, attend_piece
from inference_engine.kernels.reads import RaggedAttention, ReadRecord, StagedReads
from inference_engine.kernels.topk import Largest, topk_by_sorting
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import Positions
from inference_engine.kv.memory.pool import KVBuffer
from inference_engine.kv.numbers import StepNumbers

LEAST_LONG = 128  # queries of a chunk that an operation for long ones takes
# A layer's recurrent state, as `Recurrent` in `geometry.py` describes it.
State = tuple[Tensor, ...]
# mixer(hidden [1, n, H], state before or None) -> (output [1, n, H], state after); the state before stays as it is.
Mixer = Callable[[Tensor, State | None], tuple[Tensor, State]]


class StatesOfStep(NamedTuple):
    """Where the kernels of a step find the recurrent states of a session, and where they write.

    before: [bytes], the states; entries are written behind theirs. after: those behind the step; None: entries alone.
    """

    before: Tensor
    after: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """How scores become weights in a layer; see `kernels/attention.py`."""

    scaling: float
    softcap: float | None
    head_sinks: Tensor | None


class View(Protocol):
    """`read(layer, queries [T, Hq, D], buffer, scoring)` gives [T, Hq, D].

    The step's own entries are written before.
    """

    def read(self, layer: int, queries: Tensor, buffer: KVBuffer, scoring: Scoring) -> Tensor: ...

    def whole(self, layer: int, buffer: KVBuffer) -> WholeEntries | None:
        """What `read` reads, if it is known before the queries are."""
        return None


@dataclass(kw_only=True, slots=True)
class StagedQueries:
    """What one session has staged in a step.

    packed, real: where its tokens lie in the step, with padding and without. quantum: `packed` is as many whole ones.
    positions, staged: those of `packed`, and those of `real`, from `first` to `end`. generated: [end - first], which of
    them the model generated. views: by layer; none where the queries read by numbers.
    has_halves: are some of these views of the last queries only?
    """

    positions: Positions
    staged: Positions
    packed: slice
    real: slice
    quantum: int
    first: int
    end: int
    generated: NDArray[np.bool_]
    has_generated: bool
    has_appended: bool
    views: dict[int, View] = field(default_factory=dict)
    has_halves: bool = False

    @property
    def count(self) -> int:
        return self.end - self.first

    @property
    def generated_queries(self) -> NDArray[np.int64]:
        """Indexes of the queries that the model generated, counted from `packed.start`."""
        queries: NDArray[np.int64] = self.real.start - self.packed.start + np.flatnonzero(self.generated)
        return queries

    @property
    def generated_end(self) -> int:
        """Where in the step those end that the model generated, of which there is one."""
        start: int = self.real.start
        return start + int(np.flatnonzero(self.generated)[-1]) + 1

    @property
    def staged_queries(self) -> NDArray[np.int64]:
        """As `generated_queries`, of all that are staged."""
        first = self.real.start - self.packed.start
        return np.arange(first, first + self.count, dtype=np.int64)


@dataclass(kw_only=True, slots=True)
class StepReads:
    """What all sessions of a step share to plan their reads.

    attends_together: may queries read by numbers, in one operation of the device? Otherwise every session has views.
    most_queries: sessions that stage more queries have views, too; has_causal_views_only: if these are causal.
    attends_in_one_order, long_reads: see `DeviceOps`, and for attend_generated, of generated queries of a session that
    has views.
    largest: chooses blocks for queries that read by views. attend_causal: of long chunks that read all entries.
    attend_piece, attend_causal_state, merging: of reads chunk by chunk.
    attention: the operation. records: how the queries that read by numbers do so, those apart that read all they see.
    """

    geometry: Geometry
    device: torch.device
    mask_dtype: torch.dtype
    attends_together: bool
    most_queries: int
    attends_in_one_order: bool
    long_reads: int | None
    numbers: StepNumbers
    attention: RaggedAttention
    has_causal_views_only: bool = False
    largest: Largest = topk_by_sorting
    attend_causal: CausalAttention = attend_causal
    attend_piece: AttendEntries = attend_piece
    attend_causal_state: AttendEntries = attend_causal_state
    merging: type[MergingStates] = Merging
    attend_generated: RaggedAttention | None = None
    records: StagedReads = field(default_factory=StagedReads)

    def is_long(self, queries: StagedQueries) -> bool:
        """Is attend_causal the faster one for a chunk of these?"""
        if self.long_reads is None or queries.count < LEAST_LONG:
            return False
        return queries.count * queries.end >= self.long_reads

    @property
    def is_fixed_shape(self) -> bool:
        return self.geometry.key_quantum > 1

    def supports(self, record: ReadRecord) -> bool:
        """May queries read so, by numbers?"""
        return self.attends_together and self.attention.supports(record)


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Where the keys of one session lie in a set of layers: `region` slots for each KV head, from a layer's start."""

    starts: Mapping[int, int]  # first buffer vector, by layer
    heads: int
    region: int

    def slots(self, states: Tensor, layer: int, first: int, count: int) -> Tensor:
        """[Hkv, count, D], the slots from `first` on: a view."""
        width = states.stride(0)
        offset = states.storage_offset() + (self.starts[layer] + first) * width
        return states.as_strided((self.heads, count, states.shape[1]), (self.region * width, width, 1), offset)

    def pair(self, buffer: KVBuffer, layer: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """`slots` of the keys and of the values."""
        return self.slots(buffer.keys, layer, first, count), self.slots(buffer.values, layer, first, count)


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseView(View):
    """Reads the first `count` slots under a mask [T, count] (None: each query sees each key)."""

    region: Region
    count: int
    mask: Tensor | None

    def whole(self, layer: int, buffer: KVBuffer) -> WholeEntries:
        return WholeEntries(*self.region.pair(buffer, layer, 0, self.count), self.mask)

    def read(self, layer: int, queries: Tensor, buffer: KVBuffer, scoring: Scoring) -> Tensor:
        return attend(
            queries,
            self.region.slots(buffer.keys, layer, 0, self.count),
            self.region.slots(buffer.values, layer, 0, self.count),
            self.mask,
            scaling=scoring.scaling,
            softcap=scoring.softcap,
            head_sinks=scoring.head_sinks,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalView(View):
    """Reads the first `count` slots, where slot i holds position i and the step's own entries are the last.

    first: so many of its session's queries in the step read by numbers; it is of those behind them.
    """

    region: Region
    count: int
    attend_causal: CausalAttention
    first: int = 0

    def whole(self, layer: int, buffer: KVBuffer) -> WholeEntries:
        return WholeEntries(*self.region.pair(buffer, layer, 0, self.count), None, is_causal=True)

    def read(self, layer: int, queries: Tensor, buffer: KVBuffer, scoring: Scoring) -> Tensor:
        return self.attend_causal(
            queries,
            self.region.slots(buffer.keys, layer, 0, self.count),
            self.region.slots(buffer.values, layer, 0, self.count),
            scaling=scoring.scaling,
            softcap=scoring.softcap,
            head_sinks=scoring.head_sinks,
        )


# -- entries that are read chunk by chunk ------------------------------------------------------------------------------


class EntrySource(Protocol):
    """Gives the entries of a session that its regions do not hold."""

    def expect(self, layer: int, chunks: Sequence[range]) -> None:
        """These chunks will be asked for next, in this order: a source may begin to bring the first one."""

    def chunk(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys, rotated at their own positions, and values of the positions [first, last): [Hkv, n, D] each.

        In any float dtype, and valid until the next call. Raises RestorationFailed if they cannot be restored.
        """


def chunks_between(first: int, last: int, size: int) -> tuple[range, ...]:
    """The positions [first, last) in chunks of `size`, counted from `first`; the last one may be shorter."""
    return tuple(range(start, min(start + size, last)) for start in range(first, last, size))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Moved:
    """Entries of ascending positions that have left their slots for a step: the first ones of `region` hold them."""

    positions: Positions
    region: Region


@dataclass(frozen=True, kw_only=True, slots=True)
class Portion:
    """Consecutive queries of the step that are computed in one operation: the first `count` slots under a mask.

    mask: additive, [T, count]; None if each query sees each key.
    recent: [n], or None: further slots, of consecutive positions, the last T those of the queries, and each query sees
    those up to its own. Without a mask, a device's fused operation reads both.
    upto: the position before which it reads entries of chunks. None: it reads whole chunks.
    moved: entries of the positions right before those of `recent`, which have given their slots to others.
    """

    queries: slice
    count: int
    mask: Tensor | None
    recent: Tensor | None = None
    upto: int | None = None
    moved: Moved | None = None

    def of_chunk(self, chunk: range) -> int:
        """How many entries of a chunk, its first ones, the queries read."""
        return len(chunk) if self.upto is None else max(0, min(chunk.stop, self.upto) - chunk.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkView(View):
    """Reads resident entries as `DenseView` does, and merges in those of `source`, chunk by chunk.

        regions      ■ ■ ■ ■                       | ■ ■ ■ ■ ■      resident, one state
        elsewhere            | c c c | c c c | c |                a state for each chunk: fetched, attended to, dropped

    The states are merged by their log-sum-exps (`kernels/merge.py`), so the result is attention over all entries, and
    only one chunk of one layer is decoded at a time. Where chunks begin and end is a function of positions alone. Each
    query sees every entry of every chunk that its portion reads: chunks lie in earlier segments.

    portions: all queries of the step. One portion, or one for each of two segments, whose windows begin at different
    places; in fixed-shape mode one for each token quantum, so that the shape of each operation depends on positions
    alone.
    """

    region: Region
    portions: Sequence[Portion]
    source: EntrySource
    chunks: Sequence[range]
    attend_piece: AttendEntries = attend_piece
    attend_causal_state: AttendEntries = attend_causal_state
    merging: type[MergingStates] = Merging

    def read(self, layer: int, queries: Tensor, buffer: KVBuffer, scoring: Scoring) -> Tensor:
        self.source.expect(layer, self.chunks)
        states = [
            self._read_regions(layer, queries[portion.queries], portion, buffer, scoring) for portion in self.portions
        ]
        for chunk in self.chunks:
            keys, values = self.source.chunk(layer, chunk.start, chunk.stop)
            for portion, state in zip(self.portions, states, strict=True):
                if count := portion.of_chunk(chunk):
                    own, seen = queries[portion.queries], (keys[:, :count], values[:, :count])
                    state.add(*self.attend_piece(own, *seen, scaling=scoring.scaling, softcap=scoring.softcap))
        out, lse = (torch.cat(parts) for parts in zip(*(state.state() for state in states), strict=True))
        if scoring.head_sinks is not None:
            out, _ = with_head_sinks(out, lse, scoring.head_sinks)
        return out.to(queries.dtype)

    def _read_regions(
        self, layer: int, queries: Tensor, portion: Portion, buffer: KVBuffer, scoring: Scoring
    ) -> MergingStates:
        keys, values = self.region.pair(buffer, layer, 0, portion.count)
        if portion.recent is None:
            return self.merging(*_attend(queries, keys, values, portion.mask, scoring))
        recent = [
            part.index_select(1, portion.recent) for part in self.region.pair(buffer, layer, 0, self.region.region)
        ]
        if (moved := portion.moved) is not None:
            before = moved.region.pair(buffer, layer, 0, len(moved.positions))
            recent = [torch.cat(parts, dim=1) for parts in zip(before, recent, strict=True)]
        state = self.attend_causal_state(queries, *recent, scaling=scoring.scaling, softcap=scoring.softcap)
        merging = self.merging(*state)
        if portion.count:
            merging.add(*_attend(queries, keys, values, portion.mask, scoring))
        return merging


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """The state of these queries, without head sinks: those are added once, in the end."""
    return attend_state(queries, keys, values, mask, scaling=scoring.scaling, softcap=scoring.softcap)
