"""A summary of each block of entries, and queries that read only the blocks with the highest scores.

A block's summary lies in the regions, behind the entries: the smallest and largest of each key channel, in the key and
in the value of a slot, or in two keys, where key and value share numbers. It is made from committed keys when the block
is full. Generated tokens read the sink, the window and the blocks with the highest scores (`kernels/gather.py`);
appended tokens read everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.bounds import block_bounds, bounds_scores
from inference_engine.kernels.gather import Always, always_read, distant_blocks, gather_attend, select
from inference_engine.kernels.reads import SINK, BlockRead
from inference_engine.kernels.topk import Largest
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerSet, Layout, Positions
from inference_engine.kv.memory.pool import KVBuffer
from inference_engine.kv.numbers import Numbers, most_blocks
from inference_engine.kv.part import Held, Need, Saved
from inference_engine.kv.parts.layer_part import LayerMechanism, LayerPart
from inference_engine.kv.slots import LayerSlots, RegionPlaces
from inference_engine.kv.views import Region, Scoring, StagedQueries, StepReads, View

_MOST_SELECTING_QUERIES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSelector(LayerMechanism):
    """What a generated token reads in a layer that keeps every entry: sink, window, and the blocks of highest scores.

    The sink and the start of the window are rounded to whole blocks. count: distant blocks per KV head.
    """

    block: int
    sink: int
    window: int
    count: int

    @property
    def sink_tokens(self) -> int:
        return -(-self.sink // self.block) * self.block

    def local_starts(self, positions: Positions) -> Positions:
        """The first position of each query's window."""
        return np.maximum(0, (positions - self.window) // self.block * self.block)

    @property
    def most_entries(self) -> int:
        """The most entries that a query reads, its own included."""
        return self.sink_tokens + self.window + self.block + self.count * self.block

    def laid_out(self, layout: Layout, geometry: Geometry, limit_tokens: int | None) -> Layout:
        return replace(layout, blocks=-(-layout.capacity // self.block))

    def need(self, geometry: Geometry, layers: LayerSet, layout: Layout) -> Need:
        """Nothing: summaries lie in the regions."""
        return Need()

    def open(self, slots: LayerSlots, starts: Sequence[int]) -> LayerPart:
        return BlockIndex(slots, self)


def choose_blocks(
    lines: Numbers, record: BlockRead, layout: Layout, selector: BlockSelector, queries: Positions, **others: Any
) -> None:
    """Make the queries of these lines [..., n, FIELDS] read only the blocks that the selector chooses."""
    lines[..., SINK] = selector.sink_tokens
    local, bounds = selector.local_starts(queries), layout.summaries_from
    record.fill(lines, kept=selector.count, local=local, block=selector.block, bounds=bounds, **others)


class BlockIndex(LayerPart):
    """The summaries of the blocks of a set of layers."""

    def __init__(self, slots: LayerSlots, selector: BlockSelector) -> None:
        self._slots = slots
        self._selector = selector

    # -- a step ----------------------------------------------------------------------------------------------------

    def has_numbers(self, queries: StagedQueries, step: StepReads) -> bool:
        if not queries.has_generated:
            return True
        if self._slots.layer_set.entry.shared:
            return False  # it knows no other places of summaries
        if queries.has_appended and step.attends_in_one_order:
            return False  # these have the order of views
        if step.geometry.is_split:
            return True  # other ranks know no such views
        is_few = int(np.count_nonzero(queries.generated)) <= _MOST_SELECTING_QUERIES
        return is_few and self._slots.layout.blocks <= most_blocks(step.geometry)

    def read(self, queries: StagedQueries, step: StepReads) -> int:
        """The window begins with whole blocks."""
        if not queries.has_generated:
            return queries.first
        record = BlockRead(blocks=most_blocks(step.geometry))
        lines = step.numbers.regions[self._slots.layer_index, queries.real]
        chosen = lines[:, queries.generated]
        choose_blocks(chosen, record, self._slots.layout, self._selector, queries.staged[queries.generated])
        lines[:, queries.generated] = chosen
        step.numbers.regions[self._slots.layer_index, queries.real] = lines
        step.records.add(record, queries.generated_end)
        return self._window_moves(queries.first)

    def _window_moves(self, position: int) -> int:
        """Behind `position`, the first one whose window begins with another block."""
        block, window = self._selector.block, self._selector.window
        return window + max(1, (position - window) // block + 1) * block

    def stage(self, positions: Positions, generated: NDArray[np.bool_]) -> int:
        """A full block is summarised."""
        return (int(positions[0]) // self._selector.block + 1) * self._selector.block

    def view(self, queries: StagedQueries, step: StepReads, inner: Callable[[], View]) -> View:
        if not queries.has_generated:
            return inner()
        return self.gather_view(queries, step, inner() if queries.has_appended else None)

    def gather_view(self, queries: StagedQueries, step: StepReads, dense: View | None) -> GatherView:
        """dense: the view of queries that read everything; None if there are none."""
        selector, layout = self._selector, self._slots.layout
        generated = queries.generated_queries
        positions = queries.positions[generated]
        width = selector.sink_tokens + selector.window + selector.block if step.is_fixed_shape else None
        always = always_read(
            positions, selector.local_starts(positions), sink=selector.sink_tokens, device=step.device, width=width
        )
        return GatherView(
            region=self._slots.region,
            selector=selector,
            capacity=layout.capacity,
            summaries_from=(layout.summaries_from, layout.highs_from),
            generated=torch.from_numpy(generated).to(step.device),
            always=always,
            candidates=distant_blocks(always, block=selector.block, count=layout.blocks),
            one_by_one=step.is_fixed_shape,
            dense=dense,
            largest=step.largest,
        )

    def commit(self, before: int, length: int, rejected: Positions) -> None:
        first, last = before // self._selector.block, length // self._selector.block
        if first == last:
            return
        mirror, context = self._slots.context.pool.mirror, self._slots.context
        if mirror is None:
            _summarise(self._slots, self._selector.block, first, last)
        else:
            mirror.done(partial(_summarise_there, self._slots.places, self._selector.block, first, last), context)

    # -- as a whole ------------------------------------------------------------------------------------------------

    def save(self, length: int) -> Saved:
        return {"block_index": self._saved(length)}

    def _saved(self, length: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The summaries of all blocks, [layers, B, Hkv, D] each."""
        blocks = self._blocks(length)
        (lows, first), (highs, behind) = _summaries(self._slots)
        yield self._slots.gather_all(lows, first + blocks), self._slots.gather_all(highs, behind + blocks)

    def load(self, length: int, saved: Saved) -> None:
        for pair in saved["block_index"]:
            for (states, first), summary in zip(_summaries(self._slots), pair, strict=True):
                self._slots.put_all(states, first + self._blocks(length), summary)

    def can_rewind(self, at: int, length: int) -> bool:
        return True

    def forget(self, at: int, length: int) -> None:
        blocks = self._blocks(length)[at // self._selector.block :]
        for first in {first for _, first in _summaries(self._slots)}:
            self._slots.wipe(first + blocks)

    def report(self, held: Held, length: int, end: int) -> None:
        slots = length // self._selector.block * self._slots.layout.summary_slots
        held.add(bounds=slots * self._slots.entry_bytes)

    def _blocks(self, length: int) -> Positions:
        """All whole blocks."""
        return np.arange(length // self._selector.block, dtype=np.int64)


def _summarise_there(places: RegionPlaces, block: int, first: int, last: int, context: KVContext) -> None:
    _summarise(places.slots(context), block, first, last)


def _summarise(slots: LayerSlots, block: int, first: int, last: int) -> None:
    """The blocks from number `first` to `last`, from their keys."""
    whole = np.arange(first, last, dtype=np.int64)
    entries = slots.layout.slots((whole[:, None] * block + np.arange(block)).reshape(-1))
    keys = slots.gather(slots.buffer.keys, entries).transpose(1, 2)  # [layers, Hkv, n · block, D]
    for (states, place), summary in zip(_summaries(slots), block_bounds(keys, block), strict=True):
        slots.put(states, place + whole, summary.transpose(1, 2))


def _summaries(slots: LayerSlots) -> tuple[tuple[Tensor, int], tuple[Tensor, int]]:
    """Where the lower ends lie, and the upper ones: states of the buffer, and the slot of the first block's."""
    layout, buffer = slots.layout, slots.buffer
    return (buffer.keys, layout.summaries_from), (_highs(buffer), layout.highs_from)


def _highs(buffer: KVBuffer) -> Tensor:
    """In which the upper ends of blocks lie."""
    return buffer.keys if buffer.shares else buffer.values


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherView(View):
    """Reads the chosen blocks for the queries `generated`, and as `dense` for the others."""

    region: Region
    selector: BlockSelector
    capacity: int
    summaries_from: tuple[int, int]  # first slots of the lower and of the upper ends of blocks
    generated: Tensor  # indexes of queries [G]
    always: Always  # of these queries
    candidates: Tensor  # [G, B]
    one_by_one: bool  # shapes that do not depend on which queries share a step
    dense: View | None  # None: every query is generated
    largest: Largest

    def read(self, layer: int, queries: Tensor, buffer: KVBuffer, scoring: Scoring) -> Tensor:
        out = torch.zeros_like(queries) if self.dense is None else self.dense.read(layer, queries, buffer, scoring)
        indexes = range(len(self.generated)) if self.one_by_one else (slice(None),)
        for index in indexes:
            some = slice(index, index + 1) if isinstance(index, int) else index
            place = self.generated[some]
            out[place] = self.gather(layer, queries[place], some, buffer, scoring).to(out.dtype)
        return out

    def gather(self, layer: int, queries: Tensor, some: slice, buffer: KVBuffer, scoring: Scoring) -> Tensor:
        """[T, Hq, D] for the generated queries `some`."""
        out, _ = gather_attend(
            queries,
            self.region.slots(buffer.keys, layer, 0, self.capacity),
            self.region.slots(buffer.values, layer, 0, self.capacity),
            self.select(layer, queries, some, buffer, scoring),
            self.always.of(some),
            block=self.selector.block,
            scaling=scoring.scaling,
            softcap=scoring.softcap,
            head_sinks=scoring.head_sinks,
        )
        return out

    def select(self, layer: int, queries: Tensor, some: slice, buffer: KVBuffer, scoring: Scoring) -> Tensor:
        """The distant blocks that these queries read: [T, Hkv, K], -1 for none."""
        blocks = self.candidates.shape[1]
        low = self.region.slots(buffer.keys, layer, self.summaries_from[0], blocks)
        high = self.region.slots(_highs(buffer), layer, self.summaries_from[1], blocks)
        scores = bounds_scores(queries, low, high, scoring.scaling)
        return select(scores, self.candidates[some], self.selector.count, largest=self.largest)
