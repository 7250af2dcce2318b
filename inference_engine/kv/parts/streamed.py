"""Old entries that stay in the archive: attention decodes them, a chunk of one layer at a time.

    idle     exact entries (sink, window) · the archive: codes of the entries between        sustained
    active   the same, and room for a chunk of one layer, decoded                           until it is idle

Attention reads the exact entries in their regions, which are always resident, and merges the decoded chunks in
(`kv/views.py`). So waking costs nothing, and each step decodes every old entry again, in each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from inference_engine.errors import RestorationFailed
from inference_engine.kernels.kept import as_kept
from inference_engine.kv.archives.restorer import Archive
from inference_engine.kv.context import KVContext
from inference_engine.kv.layout import Positions
from inference_engine.kv.memory.pool import Demand
from inference_engine.kv.part import Held
from inference_engine.kv.parts.archived import ArchivedEntries, ExactEntries
from inference_engine.kv.parts.layer_entries import LayerEntries
from inference_engine.kv.parts.layer_part import LayerPart
from inference_engine.kv.slots import LayerSlots
from inference_engine.kv.strategy import KVStrategy, Placement
from inference_engine.kv.views import EntrySource, StagedQueries, StepReads, View, chunks_between


class StreamedReads(LayerPart):
    """The reads of a set of layers whose old entries are decoded chunk by chunk."""

    def __init__(self, slots: LayerSlots, source: EntrySource) -> None:
        self._slots = slots
        self._source = source

    @property
    def fits_numbers(self) -> bool:
        return False

    def has_numbers(self, queries: StagedQueries, step: StepReads) -> bool:
        return not self.chunks(queries.first)

    def view(self, queries: StagedQueries, step: StepReads, inner: Callable[[], View]) -> View:
        chunks = self.chunks(queries.first)
        return self._slots.chunk_view(queries, step, self._source, chunks) if chunks else inner()

    def chunks(self, position: int) -> tuple[range, ...]:
        """The chunks of positions that queries in the segment of `position` read from the archive."""
        layout = self._slots.layout
        geometry = self._slots.context.geometry
        size = geometry.segments_in_a_chunk * geometry.segment_tokens
        return chunks_between(layout.sink, layout.horizon(position), size)

    def quiet_until(self, position: int) -> int:
        """Entries leave at the end of a segment."""
        layout = self._slots.layout
        return layout.segment_start(position) + layout.segment

    def amends_until(self, position: int) -> int:
        """From then on there may be more chunks."""
        return self.quiet_until(position)

    def forget(self, floor: int, length: int) -> None:
        """Nothing to do: the archive forgets."""


class StreamedEntries(ArchivedEntries):
    """The layers of one session whose old entries stay in the archive: an `EntrySource` for their regions."""

    READS: ClassVar[type[StreamedReads]] = StreamedReads

    def __init__(
        self, context: KVContext, strategy: KVStrategy, sets: Sequence[ExactEntries], archive: Archive
    ) -> None:
        super().__init__(context, strategy, sets, archive)
        assert not self._replays, "entries that are computed again are not local in position"
        self._set_of = {layer: exact for exact in sets for layer in exact.layers.layers}
        self._room: _ChunkRoom | None = None
        for exact in sets:
            exact.regions.parts.insert(0, self.READS(exact.regions, self))  # before what chooses among the entries

    @property
    def regions(self) -> tuple[LayerEntries, ...]:
        return tuple(exact.regions for exact in self._sets)

    def wake(self, tokens: int, length: int) -> bool:
        placement = self._strategy.placement(self._context.geometry, tokens)
        self._room = _ChunkRoom.reserve(self._context, placement)
        return self._room is not None

    def idle(self, length: int | None) -> None:
        self._drop_room()

    def forget(self, floor: int, length: int) -> None:
        self._drop_room()
        super().forget(floor, length)

    def release(self) -> None:
        try:
            self._drop_room()
        finally:
            super().release()

    def expect(self, layer: int, chunks: Sequence[range]) -> None:
        """Nothing to do: a chunk is decoded where it is read."""

    def chunk(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """The entries of [first, last) in `layer`, as regions would hold them: [Hkv, n, D], in the buffer's dtype."""
        assert self._room is not None, "the session is idle"
        regions = self._set_of[layer].regions
        try:
            if self._archive.restores_directly(layer, regions.layer_set.rotary):
                place = self._room.of(regions.kv_heads, last - first, regions.head_dim)
                self._archive.restore_to([layer], regions.layer_set.rotary, [place], first)
                return place
            positions = np.arange(first, last, dtype=np.int64)
            keys, values = self._archive.restore_layer(layer, positions)
            return self._room.hold(regions.moved(keys[None], positions)[0], values)
        except Exception as error:
            raise RestorationFailed(error) from error

    def _replace(self, leaving: Sequence[Positions]) -> None:
        """Nothing to do: entries that leave the regions are read from the archive."""

    def _drop_room(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.release()

    def add_footprint(self, held: Held, length: int, end: int) -> None:
        archived = self._counts(length)
        held.add(
            rows=sum(exact.regions.paged_slots(end) * exact.regions.entry_bytes for exact in self._sets),
            archive=self._archive.held_bytes(archived),
            restored=self._room.nbytes if self._room is not None and any(archived) else 0,
        )
        held.tier_bytes += self._archive.tier_bytes(archived)


class _ChunkRoom:
    """Room in the pool for one decoded chunk, shared by sets of layers of any shape; none if no token reads chunks."""

    def __init__(self, context: KVContext, demands: Sequence[Demand], starts: Sequence[int]) -> None:
        self._context = context
        self._demands, self._starts = demands, starts
        self._halves: list[Tensor] = []
        for demand, start in zip(demands, starts, strict=True):
            buffer, first = context.pool.buffers[demand.head_dim], start * demand.head_dim
            self._halves += [
                states.view(-1)[first : first + demand.elements] for states in (buffer.keys, buffer.values)
            ]

    @staticmethod
    def reserve(context: KVContext, placement: Placement) -> _ChunkRoom | None:
        assert placement.restorer is not None
        demands = placement.restorer.chunk_demands(context.geometry, placement.kept)
        starts = context.pool.reserve(demands)
        return None if starts is None else _ChunkRoom(context, demands, starts)

    @property
    def nbytes(self) -> int:
        return sum(half.nbytes for half in self._halves)

    def of(self, heads: int, count: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Room for keys and values, [heads, count, head_dim] each."""
        keys, values = (half[: heads * count * head_dim].view(heads, count, head_dim) for half in self._halves)
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
