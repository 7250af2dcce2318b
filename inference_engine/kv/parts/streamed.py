"""Old entries that stay in the archive: attention decodes them, a chunk of one layer at a time.

    idle     exact entries (sink, window) · the archive: codes of the entries between        sustained
    active   the same, and room for a chunk of one layer, decoded                           until it is idle

Attention reads the exact entries in their regions, which are always resident, and merges the decoded chunks in
(`kv/views.py`). So waking costs little, and each step decodes every old entry again, in each layer.

Two segments in one step. What tokens of the next segment read of the archive besides was committed long ago, for the
window is no shorter than a segment. So appended tokens may go on behind the end of theirs, and each chunk is restored
once for both: what will leave is archived ahead, and entries that only the first segment reads give their slots to the
tokens of the second one. Until the step is over they lie in memory that the session has and the step does not use;
without such memory (`_spare`) a step has one segment.

    exact        ■ ■ ■ ■         | ■ ■ ■ | ■ ■ ■ ■ a a | b b      a: tokens of the open segment, b: of the next one
    a reads      └──┘  └ chunks ┘ └───────────────────┘
    b reads      └──┘  └─── chunks ──────┘ └────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.errors import RestorationFailed
from inference_engine.kernels.kv_dtype import as_kept
from inference_engine.kv.archives.restorer import Archive
from inference_engine.kv.context import HeldEntries, KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import Layout, Positions
from inference_engine.kv.memory.pool import Demand
from inference_engine.kv.part import Held, Need
from inference_engine.kv.parts.archived import ArchivedEntries, ExactEntries
from inference_engine.kv.parts.layer_entries import LayerEntries
from inference_engine.kv.parts.layer_part import LayerPart
from inference_engine.kv.slots import LayerSlots
from inference_engine.kv.strategy import KVStrategy, Placement
from inference_engine.kv.views import EntrySource, Region, StagedQueries, StepReads, View, chunks_between


class StreamedReads(LayerPart):
    """The reads of a set of layers whose old entries are decoded chunk by chunk."""

    def __init__(self, slots: LayerSlots, source: EntrySource) -> None:
        self._slots = slots
        self._source = source

    def has_numbers(self, queries: StagedQueries, step: StepReads) -> bool:
        return not self.chunks(queries.first)

    def read(self, queries: StagedQueries, step: StepReads) -> int:
        """Nothing: there are no chunks, until at the segment's end there may be."""
        return self._slots.layout.segment_end(queries.first)

    def view(self, queries: StagedQueries, step: StepReads, inner: Callable[[], View]) -> View:
        if self._slots.moved_out is not None:
            chunks = self.chunks(queries.end - 1)
            return self._slots.view_of_two_segments(queries, step, self._source, chunks, self._slots.moved_out)
        chunks = self.chunks(queries.first)
        return self._slots.chunk_view(queries, step, self._source, chunks) if chunks else inner()

    def chunks(self, position: int) -> tuple[range, ...]:
        """The chunks of positions that queries in the segment of `position` read from the archive."""
        layout = self._slots.layout
        geometry = self._slots.context.geometry
        size = geometry.segments_in_a_chunk * geometry.segment_tokens
        return chunks_between(layout.sink, layout.horizon(position), size)

    def stage(self, positions: Positions, generated: NDArray[np.bool_]) -> int:
        return self._slots.layout.segment_end(int(positions[0]))

    def can_rewind(self, at: int, length: int) -> bool:
        return True

    def forget(self, at: int, length: int) -> None:
        """Nothing to do: the archive forgets."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Ahead:
    """What a step of two segments, of which the second begins at `boundary`, has archived before it is computed.

    leaving: by set of layers.
    """

    boundary: int
    leaving: Sequence[Positions]


class StreamedEntries(ArchivedEntries):
    """The layers of one session whose old entries stay in the archive: an `EntrySource` for their regions."""

    by_view: ClassVar[bool] = True
    READS: ClassVar[type[StreamedReads]] = StreamedReads

    def __init__(
        self, context: KVContext, strategy: KVStrategy, sets: Sequence[ExactEntries], archive: Archive
    ) -> None:
        super().__init__(context, strategy, sets, archive)
        assert not self._replays, "entries that are computed again are not local in position"
        self._set_of = {layer: exact for exact in sets for layer in exact.layers.layers}
        self._room: _ChunkRoom | None = None
        self._ahead: _Ahead | None = None  # of a step of two segments
        # By set of layers: memory that a step in which no token chooses does not use.
        self._spare: Sequence[Region] = ()
        segment = context.geometry.segment_tokens
        self._joins_segments = (
            context.geometry.joins_segments
            and context.ops.attends_together  # in the order of positions, without a mask
            and strategy.restorer().reads_chunks
            and all(
                exact.window is None
                and exact.layout.native_window is None
                and exact.layout.window is not None
                and exact.layout.window - _kept_longer(exact.layout) >= segment
                and not exact.layout.spare
                for exact in sets
            )
        )
        self._reads = [self.READS(exact.regions, self) for exact in sets]
        for exact, reads in zip(sets, self._reads, strict=True):
            exact.regions.parts.insert(0, reads)  # before what chooses among the entries

    @classmethod
    def active_need(cls, geometry: Geometry, placement: Placement) -> Need:
        return Need(demands=placement.restorer.chunk_demands(geometry, placement.kept))

    @property
    def regions(self) -> tuple[LayerEntries, ...]:
        return tuple(exact.regions for exact in self._sets)

    def wake(self, tokens: int, length: int) -> bool:
        placement = self._strategy.placement(self._context.geometry, tokens)
        self._room = _ChunkRoom.reserve(self._context, placement)
        return self._room is not None

    def idle(self, length: int | None) -> None:
        assert self._ahead is None, "entries are out of their slots"
        self._archive.settle()
        self._drop_room()

    def forget(self, at: int, length: int) -> None:
        self._ahead = None
        for regions in self.regions:
            regions.moved_out = None
        self._drop_room()
        super().forget(at, length)

    def release(self) -> None:
        try:
            self._drop_room()
        finally:
            super().release()

    # -- a step of two segments --------------------------------------------------------------------------------------

    def room_beyond(self, position: int) -> int:
        segment = self._context.geometry.segment_tokens
        has_room = self._spare and all(region.region >= segment for region in self._spare)
        joins = has_room and self._joins_segments and self._archive.gives_back
        return segment if joins and all(reads.chunks(position) for reads in self._reads) else 0

    def stage(self, positions: Positions, generated: NDArray[np.bool_]) -> int:
        layout, first, last = self._sets[0].layout, int(positions[0]), int(positions[-1])
        boundary = layout.segment_start(last)
        if boundary > first:
            self._begin_ahead(first, boundary, positions[positions >= boundary])
        return super().stage(positions, generated)

    def _begin_ahead(self, first: int, boundary: int, behind: Positions) -> None:
        leaving = [exact.leaving(first, boundary) for exact in self._sets]
        try:
            self._archive.keep_from(self.regions, leaving)
            self._ahead = _Ahead(boundary=boundary, leaving=leaving)
            self._lend_spare()
            for regions, spare in zip(self.regions, self._spare, strict=True):
                regions.move_out(behind, spare)
        except Exception as error:
            raise RestorationFailed(error) from error

    def take_back(self, first: int) -> None:
        self._end_ahead(first)

    def _lend_spare(self) -> None:
        """What is in `_spare` is about to be overwritten."""

    def _end_ahead(self, length: int) -> None:
        """The step is over, with a history of `length`: if that ends before the boundary, nothing leaves."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        for regions in self.regions:
            if length < ahead.boundary:
                regions.move_back()
            regions.moved_out = None
        if length < ahead.boundary:
            self._archive.take_back(ahead.leaving)

    def _keep(self, leaving: Sequence[Positions], before: int, length: int) -> None:
        if self._ahead is not None:  # the first of them are archived
            leaving = [own[len(kept) :] for own, kept in zip(leaving, self._ahead.leaving, strict=True)]
        if any(len(positions) for positions in leaving):
            super()._keep(leaving, before, length)

    def expect(self, layer: int, chunks: Sequence[range]) -> None:
        """Nothing to do: a chunk is decoded where it is read."""

    def chunk(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """The entries of [first, last) in `layer`, as regions would hold them: [Hkv, n, D], in the buffer's dtype."""
        assert self._room is not None, "the session is idle"
        regions = self._set_of[layer].regions
        try:
            if self._archive.restores_directly(layer, regions.layer_set.rotary):
                place = self._room.of(regions.kv_heads, last - first, regions.head_dim)
                self._archive.restore_to([layer], regions.layer_set.rotary, [place], first, self._held(layer))
                return place
            positions = np.arange(first, last, dtype=np.int64)
            keys, values = self._archive.restore_layer(layer, positions)
            return self._room.hold(regions.moved(keys[None], positions)[0], values)
        except Exception as error:
            raise RestorationFailed(error) from error

    def _held(self, layer: int) -> HeldEntries | None:
        """Where some of these entries may be restored already."""
        return None

    def _replace(self, leaving: Sequence[Positions]) -> None:
        """Nothing to do: entries that leave the regions are read from the archive."""

    def commit(self, before: int, length: int, rejected: Positions) -> None:
        try:
            super().commit(before, length, rejected)
        finally:
            self._end_ahead(length)

    def _drop_room(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.release()

    def report(self, held: Held, length: int, end: int) -> None:
        archived = self._counts(length)
        held.add(
            entries=sum(exact.regions.paged_slots(end) * exact.regions.entry_bytes for exact in self._sets),
            archive=self._archive.held_bytes(archived),
            restored=self._room.nbytes if self._room is not None and any(archived) else 0,
        )
        held.tier_bytes += self._archive.tier_bytes(archived)


def _kept_longer(layout: Layout) -> int:
    """How many more entries than the strategy's window are exact."""
    return sum(mechanism.kept_longer for mechanism in layout.mechanisms)


class _ChunkRoom:
    """Room in the pool for one decoded chunk, shared by sets of layers of any shape; none if no token reads chunks."""

    def __init__(self, context: KVContext, demands: Sequence[Demand], starts: Sequence[int]) -> None:
        self._context = context
        self._demands, self._starts = demands, starts
        self._runs = [context.pool.run(demand, start) for demand, start in zip(demands, starts, strict=True)]

    @staticmethod
    def reserve(context: KVContext, placement: Placement) -> _ChunkRoom | None:
        demands = placement.restorer.chunk_demands(context.geometry, placement.kept)
        starts = context.pool.reserve(demands)
        return None if starts is None else _ChunkRoom(context, demands, starts)

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self._runs)

    def of(self, heads: int, count: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Room for keys and values, [heads, count, head_dim] each."""
        (run,) = self._runs
        keys, values = run[: 2 * heads * count * head_dim].view(2, heads, count, head_dim)
        return keys, values

    def hold(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Copy keys and values [n, Hkv, D] here as [Hkv, n, D]. The next call overwrites them."""
        count, heads, head_dim = keys.shape
        own = self.of(heads, count, head_dim)
        for place, fresh in zip(own, (keys, values), strict=True):
            place.copy_(as_kept(fresh.transpose(0, 1), place.dtype))
        return own

    def release(self) -> None:
        self._context.pool.release(self._demands, self._starts)
