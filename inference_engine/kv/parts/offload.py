"""KV offload of one session and set of layers: entries in the second tier, and the blocks fetched from it.

    keep      store entries that leave the device, at a segment boundary
    chunk     read all entries of a layer, chunk by chunk, for tokens that read everything
    fetch     copy the blocks that a generated token reads into slots of the session's own regions

A fetched block stays in its place until another one needs it, so a token that reads the blocks of the token before
fetches nothing. Where views fetch, which block is in which place is a function of the committed tokens alone: when a
draft token is rejected, the blocks that it fetched leave and those that it displaced come back.

Where the device's operation reads blocks that are not on the device (`kernels/offloaded.py`), generated tokens read by
numbers, and it fetches blocks itself: the host neither knows nor asks which. Whenever views and the operation take
turns, places begin empty. What the operation moved is counted when entries leave, which waits for the device anyway.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.errors import RestorationFailed
from inference_engine.kernels.gather import attend_entries, gather_vectors
from inference_engine.kernels.offloaded import OffloadedRecord
from inference_engine.kernels.reads import FLOOR, OffloadedBlockRead
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import SEGMENTS_IN_A_CHUNK, EntryShape, Geometry
from inference_engine.kv.layout import LayerSet, Layout, Positions, TierLayout
from inference_engine.kv.memory.events import event_now
from inference_engine.kv.memory.inbound import Inbound
from inference_engine.kv.memory.pool import KVBuffer
from inference_engine.kv.memory.tier import ChunkShape
from inference_engine.kv.numbers import most_blocks
from inference_engine.kv.part import Held, Need, Saved
from inference_engine.kv.parts.block_index import BlockIndex, BlockSelector, GatherView, choose_blocks
from inference_engine.kv.parts.layer_part import LayerPart
from inference_engine.kv.slots import LayerSlots
from inference_engine.kv.views import Scoring, StagedQueries, StepReads, View, chunks_between

# That are attended to together, where copies from the host's memory need not be waited for: few operations for many
# entries, and twice so many are on the device while appended tokens read.
_CHUNKS_IN_A_PIECE = 4

Blocks = NDArray[np.int64]  # block numbers of the history; -1 for none


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadingSelector(BlockSelector):
    """resident: how many of the last entries stay on the device. Older ones, except the sink, go to the second tier and
    are fetched to be read.
    """

    by_view: ClassVar[bool] = True

    resident: int

    def laid_out(self, layout: Layout, geometry: Geometry, limit_tokens: int | None) -> Layout:
        assert limit_tokens is not None, "a layer that keeps every entry needs a length limit"
        return replace(_tiered(self, geometry, limit_tokens), summary_slots=layout.summary_slots)

    def need(self, geometry: Geometry, layers: LayerSet, layout: Layout) -> Need:
        entries = layout.tier.chunks * layout.tier.chunk
        entry_bytes = layers.kv_heads * layers.entry.width * geometry.itemsize * len(layers.layers)
        return Need(tier_bytes=entries * entry_bytes)

    def open(self, slots: LayerSlots, starts: Sequence[int]) -> LayerPart:
        offloaded = OffloadedEntries(
            slots.context,
            slots.layout,
            slots.layout.tier,
            layers=slots.layer_set.layers,
            starts=tuple(slots.starts.tolist()),
            kv_heads=slots.kv_heads,
            entry=slots.layer_set.entry,
        )
        return OffloadedBlocks(slots, self, offloaded)


def _tiered(selector: OffloadingSelector, geometry: Geometry, limit_tokens: int) -> Layout:
    """Entries leave in whole blocks, so each block is in one place, and in one piece where the ring buffer wraps."""
    block, segment = selector.block, geometry.segment_tokens
    resident = _round_up(selector.resident, block)
    step = segment * geometry.segments_at_once
    # A segment may begin within a block, whose first entries then stay as long as its last.
    ring = _round_up(resident + step + block - math.gcd(block, segment), block)
    before_end = limit_tokens - limit_tokens % segment - resident
    entries = max(0, before_end // block * block - selector.sink_tokens)
    return Layout(
        sink=selector.sink_tokens,
        window=resident,
        native_window=None,
        segment=segment,
        capacity=min(geometry.round_up(limit_tokens), selector.sink_tokens + ring),
        spare=0,
        mechanisms=(selector,),
        blocks=-(-limit_tokens // block),
        longest=geometry.round_up(limit_tokens),
        tier=TierLayout(
            block=block,
            blocks=-(-limit_tokens // block),
            entries=entries,
            chunk=_round_up(SEGMENTS_IN_A_CHUNK * segment, block),
            fetched=min(selector.count, entries // block),
            step=step,
        ),
    )


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


class OffloadedEntries:
    """Everything but construction and `release` runs on the engine's thread."""

    def __init__(
        self,
        context: KVContext,
        layout: Layout,
        tier: TierLayout,
        *,
        layers: tuple[int, ...],
        starts: tuple[int, ...],
        kv_heads: int,
        entry: EntryShape,
    ) -> None:
        """Opens a store for the entries. starts: the first buffer vector of each layer's regions. Raises Overloaded."""
        self._buffer: KVBuffer = context.pool.buffers[layers[0]]
        self._device = context.device
        self.layout = layout
        self._tier = tier
        self._index = {layer: index for index, layer in enumerate(layers)}
        self._starts = dict(zip(layers, starts, strict=True))
        self._store = context.tier.open(
            chunk_shape(tier, layers=len(layers), kv_heads=kv_heads, entry=entry, dtype=self._buffer.keys.dtype)
        )
        self._entry = entry
        # What an entry is kept in: a key and a value, or one vector of both.
        self._targets = (self._buffer.vectors,) if entry.shared else (self._buffer.keys, self._buffer.values)
        self._head_bytes = entry.width * context.geometry.itemsize  # of one entry's KV head in one layer
        self.end = layout.sink  # the first position after the sink that is not stored
        self._count = context.tier.count
        places = np.full((kv_heads, tier.fetched), -1, dtype=np.int64)
        self._places: dict[int, Blocks] = {layer: places.copy() for layer in layers}
        # By layer, for the running step: the block in each place before it, and after each generated token.
        self._trail: dict[int, list[tuple[int, Blocks]]] = {}
        self._record: OffloadedRecord | None = None
        ops, read = context.ops, OffloadedBlockRead(blocks=most_blocks(context.geometry))
        if ops.attends_together and ops.attend_ragged.supports(read) and tier.chunks and not entry.shared:
            self._record = OffloadedRecord.of(
                layers=len(layers),
                kv_heads=kv_heads,
                places=tier.fetched,
                fetched_from=layout.fetched_from,
                chunks=tier.chunks,
                chunk_tokens=tier.chunk,
                layer_bytes=kv_heads * tier.chunk * self._head_bytes,
                device=self._device,
            )
        self._inbound = context.tier.inbound
        self._expected: deque[tuple[int, range]] = deque()  # layer and positions of what is asked for next
        self._kept: torch.cuda.Event | None = None  # when all that was kept is stored
        self._recorded = 0  # chunks whose addresses the record has
        self._counted = 0  # of the blocks that the record says were fetched
        self._is_by_numbers = False  # does the operation fill the places?

    # -- entries that leave ----------------------------------------------------------------------------------------

    def keep(self, positions: Positions, keys: Tensor, values: Tensor) -> None:
        """Store entries [layers, n, Hkv, D] of `positions`, which follow those stored so far.

        Raises RestorationFailed; the session's entries are then unusable.
        """
        assert positions[0] == self.end and positions[-1] == self.end + len(positions) - 1
        parts = [self._entry.join(keys, values)] if self._entry.shared else [keys, values]
        states = torch.stack(parts, dim=1).transpose(2, 3)  # [layers, parts, Hkv, n, D]
        first, last = (int(at) - self.layout.sink for at in (positions[0], positions[-1] + 1))
        try:
            for chunk in range(first // self._tier.chunk, -(-last // self._tier.chunk)):
                base = chunk * self._tier.chunk
                begin, end = max(first, base), min(last, base + self._tier.chunk)
                self._store.write(chunk, begin - base, states[:, :, :, begin - first : end - first])
        except OSError as error:
            raise RestorationFailed(error) from error
        self.end += len(positions)
        self._tell()
        self._count_fetched()
        if self._inbound is not None:
            self._kept = event_now(self._device)
        self._count("kept", states.nbytes)

    def save(self) -> Iterator[tuple[Tensor]]:
        """The stored entries, [layers, parts, Hkv, n, D] of a chunk at a time: views. Without the fetched blocks."""
        count = self.end - self.layout.sink
        for chunk, first in enumerate(range(0, count, self._tier.chunk)):
            yield (self._store.read(chunk)[:, :, :, : min(self._tier.chunk, count - first)],)

    def load(self, chunks: Iterable[tuple[Tensor, ...]]) -> None:
        """Store what another session of the same rule saved. Raises OSError."""
        for chunk, (states,) in enumerate(chunks):
            self._store.write(chunk, 0, states)
            self.end += states.shape[3]
        self._tell()

    # -- entries that an operation of the device reads ----------------------------------------------------------------

    @property
    def is_read_by_numbers(self) -> bool:
        """Can the device's operation read them?"""
        return self._record is not None

    def read_by_numbers(self) -> Sequence[int]:
        """An operation will read them. Returns the address of each layer's numbers."""
        assert self._record is not None
        if not self._is_by_numbers:
            for places in self._places.values():
                places.fill(-1)
            self._is_by_numbers = True
        return self._record.addresses

    def _read_by_views(self) -> None:
        if self._is_by_numbers:
            assert self._record is not None
            self._count_fetched()
            self._record.places.fill_(-1)
            self._is_by_numbers = False

    def _tell(self) -> None:
        """Write the addresses of new chunks to the record."""
        chunks = -(-(self.end - self.layout.sink) // self._tier.chunk)
        if self._record is not None and chunks > self._recorded:
            fresh = [self._store.lend(chunk).data_ptr() for chunk in range(self._recorded, chunks)]
            self._record.table[self._recorded : chunks] = torch.tensor(fresh)
            self._recorded = chunks

    def _count_fetched(self) -> None:
        """Count what the operation fetched since the last time. Waits for the device."""
        if not self._is_by_numbers:
            return
        assert self._record is not None
        before, self._counted = self._counted, int(self._record.counts[..., 1].sum())
        self._count("fetched", (self._counted - before) * self._tier.block * self._head_bytes)

    # -- entries that are read -------------------------------------------------------------------------------------

    @property
    def piece(self) -> int:
        """Entries that are read together: whole chunks."""
        return self._tier.chunk * (1 if self._inbound is None else _CHUNKS_IN_A_PIECE)

    def expect(self, layer: int, chunks: Sequence[range]) -> None:
        """See `EntrySource`."""
        if self._inbound is not None:
            self._inbound.forget()
            self._expected = deque((layer, chunk) for chunk in chunks)
            self._bring_next(self._inbound)

    def _bring_next(self, inbound: Inbound) -> None:
        if self._expected:
            layer, positions = self._expected.popleft()
            sink, size, index = self.layout.sink, self._tier.chunk, self._index[layer]
            numbers = range((positions.start - sink) // size, (positions.stop - sink - 1) // size + 1)
            # All of each chunk: for a part of one, which is in several pieces, the host would wait for the device.
            inbound.start([self._store.lend(number)[index] for number in numbers], self._kept)

    def chunk(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the positions [first, last), which lie in one piece: [Hkv, n, D] each, on the device.

        first: where a chunk begins. Asked for in the order of `expect`.
        """
        number, begin = divmod(first - self.layout.sink, self._tier.chunk)
        assert number >= 0 and not begin and last - first <= self.piece and last <= self.end
        if self._inbound is None:
            states = self._store.read(number)[self._index[layer]][:, :, : last - first]
            self._count("streamed", states.nbytes)
            return self._pair(states.to(self._device))
        chunks = self._inbound.take()  # [n, parts, Hkv, chunk, D]
        self._count("streamed", chunks.nbytes)
        self._bring_next(self._inbound)
        return self._pair(chunks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : last - first])

    def _pair(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of what is kept of entries, [parts, …]."""
        if self._entry.shared:
            return self._entry.split(states[0])
        keys, values = states
        return keys, values

    def fetch(self, layer: int, position: int, wanted: Blocks) -> Positions:
        """Have the blocks [Hkv, K] in the regions, for the query at `position`. Returns their first slots, 0 for none.

        Blocks that never left the device stay in their own slots.
        """
        self._read_by_views()
        size = self._tier.block
        here = (wanted >= 0) & (wanted * size < self.end)
        places = self._places[layer]
        trail = self._trail.setdefault(layer, [(-1, places.copy())])
        before = places.copy()
        for asked, held in zip(np.where(here, wanted, -1), places, strict=True):
            _make_room(asked, held)
        self._load(layer, before)
        trail.append((position, places.copy()))
        at = (wanted[:, :, None] == places[:, None, :]).argmax(-1) if places.size else np.zeros_like(wanted)
        resident = self.layout.slots(np.maximum(wanted, 0) * size)
        slots: Positions = np.where(here, self.layout.fetched_from + at * size, np.where(wanted >= 0, resident, 0))
        return slots

    def _load(self, layer: int, before: Blocks) -> None:
        """Copy blocks to the places that differ from `before`; wipe those that became empty."""
        places, size = self._places[layer], self._tier.block
        heads, changed = np.nonzero(places != before)
        if not len(heads):
            return
        blocks = places[heads, changed]
        starts = self._starts[layer] + heads * self.layout.region + self.layout.fetched_from + changed * size
        targets = torch.from_numpy((starts[:, None] + np.arange(size)).reshape(-1)).to(self._device)
        states = torch.stack(
            [self._block(layer, *place) for place in zip(heads.tolist(), blocks.tolist(), strict=True)]
        )
        for target, source in zip(self._targets, states.to(self._device).unbind(1), strict=True):
            target.index_copy_(0, targets, source.reshape(-1, target.shape[-1]))
        self._count("fetched", int(np.count_nonzero(blocks >= 0)) * size * self._head_bytes)

    def _block(self, layer: int, head: int, block: int) -> Tensor:
        """What is kept of one KV head's entries, [parts, block, D]; zeros for no block."""
        size = self._tier.block
        if block < 0:
            shape = (len(self._targets), size, self._targets[0].shape[-1])
            return torch.zeros(shape, dtype=self._buffer.keys.dtype)
        number, begin = divmod(block * size - self.layout.sink, self._tier.chunk)
        return self._store.read(number)[self._index[layer], :, head, begin : begin + size]

    # -- the end of a step ------------------------------------------------------------------------------------------

    def commit(self, length: int) -> None:
        """Restore the places as the last generated token below `length` left them."""
        for layer, trail in self._trail.items():
            after = next(places for position, places in reversed(trail) if position < length)
            before, self._places[layer] = self._places[layer], after
            self._load(layer, before)
        self._trail.clear()

    def forget(self, at: int) -> None:
        """The history ends at `at`, behind all that is stored, or nowhere: then nothing is stored any more.

        Fetched blocks leave: later tokens have chosen them.
        """
        was_by_numbers = self._is_by_numbers
        self._read_by_views()
        for layer, places in self._places.items():
            # What the operation fetched is not known: every place is wiped.
            before = np.zeros_like(places) if was_by_numbers else places
            self._places[layer] = np.full_like(places, -1)
            self._load(layer, before)
        self._trail.clear()
        if not at:
            self.end = self.layout.sink
            self._recorded = 0
            self._store.clear()

    def release(self) -> None:
        self._store.close()

    # -- facts ------------------------------------------------------------------------------------------------------

    def held_bytes(self) -> int:
        """Bytes in the second tier."""
        return self._store.held_bytes(self.end - self.layout.sink)

    def fetched_bytes(self) -> int:
        """Bytes of fetched blocks in the regions; if the device's operation fetches them, of all that may be there."""
        if self._is_by_numbers:
            offloaded = (self.end - self.layout.sink) // self._tier.block
            heads = sum(len(places) for places in self._places.values())
            return heads * min(self._tier.fetched, offloaded) * self._tier.block * self._head_bytes
        held = sum(int(np.count_nonzero(places >= 0)) for places in self._places.values())
        return held * self._tier.block * self._head_bytes


def chunk_shape(tier: TierLayout, *, layers: int, kv_heads: int, entry: EntryShape, dtype: torch.dtype) -> ChunkShape:
    """The chunks that a set of so many layers needs in the second tier."""
    return ChunkShape(
        chunks=tier.chunks,
        layers=layers,
        parts=1 if entry.shared else 2,
        kv_heads=kv_heads,
        chunk_tokens=tier.chunk,
        head_dim=entry.width if entry.shared else entry.key,
        dtype=dtype,
    )


def _make_room(asked: Blocks, held: Blocks) -> None:
    """Put the blocks `asked` for [K] (-1: none) that are not in `held` [P] in places of blocks not asked for."""
    missing = np.setdiff1d(asked[asked >= 0], held)
    free = np.flatnonzero(~np.isin(held, asked[asked >= 0]))
    # Empty places first: the other blocks may be asked for again.
    free = free[np.argsort(held[free] >= 0, kind="stable")]
    held[free[: len(missing)]] = missing


class OffloadedBlocks(BlockIndex):
    """The block index of layers whose distant entries lie in the second tier, and those entries."""

    def __init__(self, slots: LayerSlots, selector: BlockSelector, offloaded: OffloadedEntries) -> None:
        super().__init__(slots, selector)
        self._offloaded = offloaded

    # -- a step ----------------------------------------------------------------------------------------------------

    def stage(self, positions: Positions, generated: NDArray[np.bool_]) -> int:
        """Blocks are fetched while a step runs; or, if the device's operation does it, entries leave."""
        return self._until(int(positions[0]), super().stage(positions, generated))

    def has_numbers(self, queries: StagedQueries, step: StepReads) -> bool:
        # Appended queries read blocks that are not at hand.
        is_read = self._offloaded.is_read_by_numbers and queries.has_generated and not queries.has_appended
        if self._has_left and not is_read:
            return False
        return super().has_numbers(queries, step)

    @property
    def _has_left(self) -> bool:
        return self._offloaded.end > self._slots.layout.sink

    def read(self, queries: StagedQueries, step: StepReads) -> int:
        # Entries leave in whole blocks: some are seen although they are before the window.
        layers = self._slots.layer_index
        step.numbers.regions[layers, queries.real, FLOOR] = 0
        if not self._has_left or not queries.has_generated:
            return self._until(queries.first, super().read(queries, step))
        record = OffloadedBlockRead(blocks=most_blocks(step.geometry))
        # Of a session and step only one query may change which blocks are at hand.
        end = self._offloaded.end if queries.count == 1 else -self._offloaded.end
        places = np.array(self._offloaded.read_by_numbers(), dtype=np.int64)[:, None]
        lines = step.numbers.regions[layers, queries.real]
        own = {"places": places, "offloaded_end": end}
        choose_blocks(lines, record, self._slots.layout, self._selector, queries.positions, **own)
        step.numbers.regions[layers, queries.real] = lines
        step.records.add(record, queries.real.stop)
        return self._until(queries.first, self._window_moves(queries.first))

    def _until(self, position: int, until: int) -> int:
        """Entries may leave, and then queries read otherwise."""
        if not self._offloaded.is_read_by_numbers:
            return position
        return min(until, self._slots.layout.segment_end(position))

    def view(self, queries: StagedQueries, step: StepReads, inner: Callable[[], View]) -> View:
        def dense() -> View:
            chunks = self._chunks(queries.first)
            return self._slots.chunk_view(queries, step, self._offloaded, chunks) if chunks else inner()

        if not queries.has_generated:
            return dense()
        view = self.gather_view(queries, step, dense() if queries.has_appended else None)
        return TierView.of(view, self._offloaded, queries.positions[queries.generated_queries])

    def _chunks(self, position: int) -> tuple[range, ...]:
        """The chunks of positions that queries in the segment of `position` read from the second tier."""
        layout = self._slots.layout
        return chunks_between(layout.sink, layout.horizon(position), self._offloaded.piece)

    def commit(self, before: int, length: int, rejected: Positions) -> None:
        super().commit(before, length, rejected)
        leaving = self._slots.leaving(before, length)
        size = self._slots.layout.segment  # at once: copies of all that a long step lets leave would be large
        for first in range(0, len(leaving), size):
            some = leaving[first : first + size]
            self._offloaded.keep(some, *self._slots.read_entries(some))
        self._offloaded.commit(length)

    # -- as a whole ------------------------------------------------------------------------------------------------

    def save(self, length: int) -> Saved:
        return {**super().save(length), "offloaded": self._offloaded.save()}

    def load(self, length: int, saved: Saved) -> None:
        super().load(length, saved)
        self._offloaded.load(saved["offloaded"])

    def forget(self, at: int, length: int) -> None:
        with ExitStack() as stack:
            stack.callback(self._offloaded.forget, at)
            super().forget(at, length)

    def release(self) -> None:
        self._offloaded.release()

    def report(self, held: Held, length: int, end: int) -> None:
        super().report(held, length, end)
        held.add(fetched=self._offloaded.fetched_bytes())
        held.tier_bytes += self._offloaded.held_bytes()


@dataclass(frozen=True, kw_only=True, slots=True)
class TierView(GatherView):
    """Reads each query's blocks from the regions; blocks in the second tier are fetched into them first.

        position   0 … 127 | 128 … 255 | 256 … 383 | 384 … 895 | 896 … 1500     sink, window 512, resident from 896 on
        a block    at hand | fetched   |           | fetched   | at hand

    It reads the same entries in the same order as `GatherView`, one query at a time: the regions have room for the
    fetched blocks of one query. The host must know which blocks to ask the second tier for: one synchronisation for
    each layer and query.
    """

    tier: OffloadedEntries
    positions: tuple[int, ...]  # of the generated queries
    always_slots: Tensor  # [G, A]: slots of the entries that are always read; 0 for padding

    @staticmethod
    def of(view: GatherView, tier: OffloadedEntries, positions: Positions) -> TierView:
        """`view` over entries in two tiers."""
        given = {field.name: getattr(view, field.name) for field in fields(view)}
        always = view.always.positions
        slots = torch.from_numpy(tier.layout.slots(always.clamp(min=0).cpu().numpy())).to(always.device)
        return TierView(
            **{**given, "one_by_one": True}, tier=tier, positions=tuple(positions.tolist()), always_slots=slots
        )

    def gather(self, layer: int, queries: Tensor, some: slice, buffer: KVBuffer, scoring: Scoring) -> Tensor:
        kept = self.select(layer, queries, some, buffer, scoring)  # [1, Hkv, K]
        firsts = self.tier.fetch(layer, self.positions[some.start], kept[0].cpu().numpy())
        size = self.selector.block
        in_blocks = torch.from_numpy(firsts).to(kept.device)[None, :, :, None] + torch.arange(size, device=kept.device)
        always = self.always.positions[some, None].expand(-1, kept.shape[1], -1)
        # Sink and window are whole blocks here, so a distant block is read whole.
        meant = (kept >= 0)[..., None].expand(-1, -1, -1, size)
        slots = torch.cat([self.always_slots[some, None].expand_as(always), in_blocks.flatten(2)], dim=-1)
        seen = torch.cat([always >= 0, meant.flatten(2)], dim=-1)
        slots = slots.where(seen, 0)
        keys, values = (
            gather_vectors(self.region.slots(states, layer, 0, self.region.region), slots)
            for states in (buffer.keys, buffer.values)
        )
        out, _ = attend_entries(queries, keys, values, seen, scoring.scaling, scoring.softcap, scoring.head_sinks)
        return out
