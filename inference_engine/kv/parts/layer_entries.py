"""The entries of alike layers of one session: which are written, read and evicted.

Slots are wiped when they are opened, rejected or evicted, so that the regions' bytes are a function of the committed
entries alone. Entries are evicted at segment boundaries, whole segments at once (`kv/layout.py` says which). The sink
then moves up to the oldest entry that stays. What a strategy adds, such as a block index, is a `LayerPart`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.errors import InvariantViolated
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerSet, Layout, Positions
from inference_engine.kv.memory.allocation import Allocation
from inference_engine.kv.memory.pool import Demand, Run
from inference_engine.kv.numbers import Indexes
from inference_engine.kv.part import Held, Need, Part, Saved
from inference_engine.kv.parts.layer_part import LayerPart, mechanisms_of
from inference_engine.kv.parts.recurrent import PrefixStates
from inference_engine.kv.parts.shared_prefix import Piece, PrefixEntries, SharedPrefix
from inference_engine.kv.slots import LayerSlots
from inference_engine.kv.views import LEAST_LONG, CausalView, DenseView, StagedQueries, StepReads, View


def region_demand(geometry: Geometry, layers: LayerSet, layout: Layout) -> Demand:
    """The memory that the regions of one layer of the set need."""
    width = layers.entry.width
    return Demand.of(geometry, layers.kv_heads * layout.region * width, width)


@dataclass(kw_only=True, slots=True, eq=False)
class LayerEntries(LayerSlots, Part):
    """A set of alike layers, and the mechanisms that belong to them.

    allocation: of the regions. prefixes: of a fork, where its history begins. staged: the slots that were given to
    positions last.
    """

    allocation: Allocation
    parts: list[LayerPart] = field(default_factory=list)
    prefixes: tuple[SharedPrefix, ...] = ()
    staged: Indexes = field(init=False)

    @classmethod
    def need(cls, geometry: Geometry, layers: LayerSet, layout: Layout) -> Need:
        """The memory of a set: each layer's regions, then its parts."""
        regions = Need(demands=(region_demand(geometry, layers, layout),) * len(layers.layers))
        return sum((each.need(geometry, layers, layout) for each in mechanisms_of(layout)), start=regions)

    @classmethod
    def reserve(
        cls, context: KVContext, layers: LayerSet, layout: Layout, prefix: SharedPrefix | None = None
    ) -> LayerEntries | None:
        """Reserve the regions; None, and nothing taken, if the pool has no room.

        prefix: where the entries before `layout.base` lie; the caller borrows its allocations. Raises Overloaded, with
        nothing taken, if the second tier has no room after all.
        """
        assert layout.base == (0 if prefix is None else prefix.end)
        need = cls.need(context.geometry, layers, layout)
        allocation = Allocation.reserve(context.pool, need.demands, itemsize=context.geometry.itemsize)
        if allocation is None:
            return None
        count = len(layers.layers)
        entries = cls(
            context=context,
            layer_set=layers,
            layout=layout,
            allocation=allocation,
            starts=np.array(allocation.starts[:count], dtype=np.int64),
        )
        try:
            for mechanism in mechanisms_of(layout):
                end = count + len(mechanism.need(context.geometry, layers, layout).demands)
                entries.parts.append(mechanism.open(entries, allocation.starts[count:end]))
                count = end
        except BaseException:
            entries.release()
            raise
        if prefix is not None:
            entries.prefixes = (prefix,)
            entries.parts.append(PrefixEntries(entries, prefix))
        return entries

    @property
    def runs(self) -> Sequence[Run]:
        return self.allocation.runs

    def release(self) -> None:
        with ExitStack() as stack:
            stack.callback(self.allocation.release)
            for part in self.parts:
                stack.callback(part.release)

    # -- entries that other sessions read --------------------------------------------------------------------------

    def piece(self, length: int) -> Piece:
        """The entries of a history of `length` in these regions, for a fork to read. None of them may be evicted."""
        base = self.layout.base
        return Piece(allocation=self.allocation, region=self.region, base=base, first=base, last=length)

    def prefix_of(self, pieces: Sequence[Piece], states: PrefixStates | None = None) -> SharedPrefix:
        """A prefix of these pieces, for layers like these. states: as SharedPrefix has them."""
        return SharedPrefix(pieces, self.buffer, entry_bytes=self.entry_bytes, states=states)

    @property
    def floor(self) -> int:
        """`forget` keeps entries of positions below this one: other sessions read or own them."""
        return max(self.layout.base, self.allocation.lent_until if self.allocation.is_lent else 0)

    # -- a step ----------------------------------------------------------------------------------------------------

    def stage(self, positions: Positions, generated: NDArray[np.bool_]) -> int:
        first, count = int(positions[0]), len(positions)
        self._open_pages(first, count)
        if count == 1:
            slot = self.layout.slot(first)
            self.staged = slice(slot, slot + 1)
        else:
            self.staged = self.layout.slots(positions)
        if True in (self.held[self.staged] >= 0):
            raise InvariantViolated("INV1", f"a slot for positions from {first} is still held")
        # The sink's keys are copied when they are committed.
        until = first if first < self.layout.spare else sys.maxsize
        for part in self.parts:
            until = min(until, part.stage(positions, generated))
        return until

    def enter(self, positions: Positions) -> None:
        """Enter the staged positions in the table, now that every part has room for them."""
        self.held[self.staged] = positions

    def _open_pages(self, first: int, count: int) -> None:
        """Open those of `count` positions from `first` on that are not open yet."""
        if count > 1 or not (first - self.layout.base) % self.context.geometry.opening_tokens:
            opened, needed = self.paged_slots(first), self.paged_slots(first + count)
            if needed > opened:
                self.open(opened, needed)

    def advance(self, position: int) -> None:
        """Stage and enter a position for which no part has anything else to do. Raises InvariantViolated."""
        layout = self.layout
        if not (position - layout.base) % self.context.geometry.opening_tokens:
            self._open_pages(position, 1)
        slot = position - layout.base if layout.window is None else layout.slot(position)
        if self.held[slot] >= 0:
            raise InvariantViolated("INV1", f"a slot for position {position} is still held")
        self.held[slot] = position

    def read(self, queries: StagedQueries, step: StepReads) -> int:
        is_one = len(queries.positions) == 1
        if is_one:
            vectors = self.vectors + self.layout.slot(queries.first)
            step.numbers.write_one(self.kv_heads, self.place_index, queries.real.start, vectors)
        else:
            targets = self.region_offsets(self.layout.slots(queries.staged))
            step.numbers.write(self.kv_heads, self.place_index, queries.real, self.starts, targets)
        if by_numbers := self._by_numbers(queries, step):
            count = min(self.layout.capacity + self.layout.base, queries.end)
            if is_one:
                line = self.lines.of_one(queries.first, count=count)
                step.numbers.attend_one(self.layer_index, queries.real.start, self.starts, line)
                until = queries.first if step.is_fixed_shape else self.lines.grow_until(queries.first)
            else:
                lines = self.lines.of(queries.positions, last=int(queries.positions[-1]), count=count)
                step.numbers.attend(self.layer_index, queries.real, self.starts, lines)
                until = queries.first
            for part in self.parts:
                until = min(until, part.read(queries, step))
            if by_numbers < len(queries.positions):
                step.numbers.read_nothing(
                    self.layer_index, slice(queries.packed.start + by_numbers, queries.packed.stop)
                )
                others = replace(self._causal_view(queries, step), first=by_numbers)
                queries.views.update(dict.fromkeys(self.layer_set.layers, others))
                queries.has_halves = True
            return until
        view: Callable[[], View] = partial(self._dense_view, queries, step)
        for part in self.parts:
            view = partial(part.view, queries, step, view)
        queries.views.update(dict.fromkeys(self.layer_set.layers, view()))
        return queries.first

    def _by_numbers(self, queries: StagedQueries, step: StepReads) -> int:
        """How many of these queries, the first ones, read by numbers, in the step's one operation over regions?

        The others are the most of a long chunk, and read by a causal view.
        """
        if step.geometry.is_split and self.parts and queries.has_generated:
            return len(queries.positions)  # however many, for ranks have numbers alone where some choose
        is_long = queries.end - queries.first > step.most_queries
        if not step.attends_together or (is_long and (self.reads_causally or not step.has_causal_views_only)):
            return 0
        count = len(queries.positions)
        own = count
        if (
            count > 1
            and step.is_long(queries)
            and self._is_causal(queries.positions, self.slot_count(queries.end), step)
        ):
            # Some mechanism may serve generated ones in the operation, which do not read all.
            own = queries.generated_end - queries.packed.start if self.parts and queries.has_generated else 0
            if own and (count - own < LEAST_LONG or any(each.appended for each in self.layout.mechanisms)):
                own = count
        if not own or (self.parts and not all(part.has_numbers(queries, step) for part in self.parts)):
            return 0
        return own

    def _dense_view(self, queries: StagedQueries, step: StepReads) -> View:
        """The view of queries that read every entry, all of them in regions."""
        count = self.slot_count(queries.end)
        if self._is_causal(queries.positions, count, step):
            return self._causal_view(queries, step)
        return DenseView(region=self.region, count=count, mask=self.mask(queries.positions, count, step))

    def _causal_view(self, queries: StagedQueries, step: StepReads) -> CausalView:
        return CausalView(region=self.region, count=self.slot_count(queries.end), attend_causal=step.attend_causal)

    def _is_causal(self, positions: Positions, count: int, step: StepReads) -> bool:
        """Do the first `count` slots hold all positions up to the last query, and does each query see all up to its
        own?

        Only where the device's fused operations are used: without a mask, results differ in their last bits.
        """
        if not step.attends_together or len(positions) == 1:
            return False
        return self.reads_causally and count == int(positions[-1]) + 1

    @property
    def reads_causally(self) -> bool:
        """Is every entry in the slot of its position, and seen by all queries behind it?"""
        layout = self.layout
        return layout.window is None and layout.native_window is None and not layout.base

    def reject(self, positions: Positions) -> None:
        """Remove the last staged positions from the table. Their slots on the device are wiped in `commit`."""
        self.held[self.layout.slots(positions)] = -1

    def commit(self, before: int, length: int, rejected: Positions) -> None:
        self.settle(before, length, rejected)
        if self.layout.window is not None:
            self.evict(before, length)

    def settle(self, before: int, length: int, rejected: Positions) -> None:
        """As `commit`, but nothing leaves yet."""
        if len(rejected):
            self.wipe(self.layout.slots(rejected))
        if before < self.layout.spare:
            self._keep_sink(before, length)
        for part in self.parts:
            part.commit(before, length, rejected)

    def evict(self, before: int, length: int) -> None:
        """Evict what no query of a history of `length` reads here; move the sink up to the oldest entry that stays."""
        if self.layout.horizon(length) > self.layout.horizon(before):
            slots = self.layout.slots(self.leaving(before, length))
            self.held[slots] = -1
            self.wipe(slots)
            self._move_sink(length)

    def _keep_sink(self, before: int, length: int) -> None:
        """Copy new keys of the sink to the spare slots, rotated at their own positions."""
        end, copies, keys = min(length, self.layout.spare), self.layout.capacity, self.buffer.keys
        pairs = zip(self._views(keys, copies + before, copies + end), self._views(keys, before, end), strict=True)
        for (_, to), (_, of) in pairs:
            self.context.pool.copy(to, of)

    def _move_sink(self, length: int) -> None:
        """Rotate the sink's keys to right before the oldest entry. Always from the copies, so no error adds up."""
        shift = self.layout.sink_shift(length)
        if not shift:
            return
        sink = np.arange(self.layout.sink, dtype=np.int64)
        own = self.gather(self.buffer.keys, self.layout.capacity + sink).transpose(1, 2)  # [layers, Hkv, sink, D]
        shifts = torch.full((self.layout.sink,), shift, dtype=torch.long)
        moved = self.context.rotate(own.flatten(0, 1), shifts, self.layer_set.rotary)
        self.put(self.buffer.keys, sink, moved.view(own.shape).transpose(1, 2))
        end, copies, keys = self.layout.sink, self.layout.capacity, self.buffer.keys
        pairs = zip(self._views(keys, 0, end), self._views(keys, copies, copies + end), strict=True)
        for (_, to), (_, of) in pairs:
            if (mirror := self.context.pool.mirror) is not None:
                mirror.turned(to, of, shift, self.layer_set.rotary)

    # -- as a whole ------------------------------------------------------------------------------------------------

    def copy_from(self, other: LayerEntries, length: int) -> None:
        if not self._has_slots_of(other):
            Part.copy_from(self, other, length)  # a class with slots has no `super()` before it is made anew
            return
        paged = self.paged_slots(length)
        self.copy_slots(other, 0, 0, paged)
        self.copy_slots(other, self.layout.capacity, other.layout.capacity, min(self.layout.spare, length))
        held = min(len(self.held), len(other.held))
        self.held[:held] = other.held[:held]
        later = np.flatnonzero(self.held >= length)
        self.held[later] = -1
        self.wipe(later[later < paged])
        theirs = {type(part): part for part in other.parts}
        for part in self.parts:
            if type(part) in theirs:
                part.copy_from(theirs[type(part)], length)

    def _has_slots_of(self, other: LayerEntries) -> bool:
        """Do both have each position in the same slot?"""
        ours, theirs = self.layout, other.layout
        return ours.base == theirs.base and (ours.window is None or ours.capacity == theirs.capacity)

    def save(self, length: int) -> Saved:
        saved: Saved = {"entries": self._saved_entries(length)}
        for part in self.parts:
            saved = {**saved, **part.save(length)}
        return saved

    def _saved_entries(self, length: int) -> Iterator[tuple[Tensor, ...]]:
        """Positions [n] below `length`, keys and values [layers, n, Hkv, D], one segment at a time.

        Keys and values that share numbers are one tensor.
        """
        entry = self.layer_set.entry
        for positions, keys, values in self._segments(length):
            yield (positions, entry.join(keys, values)) if entry.shared else (positions, keys, values)

    def _segments(self, length: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        step = self.context.geometry.segment_tokens
        for prefix in self.prefixes:
            for positions, keys, values in prefix.until(length).entries(
                self.layer_set.layers, step, self.context.pool.mirror
            ):
                yield torch.from_numpy(positions), keys, values
        held = np.sort(self.held[(self.held >= self.layout.base) & (self.held < length)])
        for first in range(0, len(held), step):
            positions = held[first : first + step]
            yield torch.from_numpy(positions), *self.read_entries(positions)

    def load(self, length: int, saved: Saved) -> None:
        self.wipe(np.arange(self.paged_slots(length), dtype=np.int64))
        for positions, *parts in saved["entries"]:
            # Older copies have keys and values apart.
            keys, values = parts if len(parts) == 2 else self.layer_set.entry.split(parts[0])
            own = positions.numpy() >= self.layout.base  # the others lie in a shared prefix
            if own.any():
                first = int(own.argmax())
                self.write_entries(positions.numpy()[first:], keys[:, first:], values[:, first:])
        self._move_sink(length)
        for part in self.parts:
            part.load(length, saved)

    def can_rewind(self, at: int, length: int) -> bool:
        """As long as the window would begin where it does, no entry that it would have has left."""
        layout = self.layout
        has_all = max(layout.sink, layout.horizon(at)) == max(layout.sink, layout.horizon(length))
        return has_all and all(part.can_rewind(at, length) for part in self.parts)

    def forget(self, at: int, length: int) -> None:
        slots = np.flatnonzero(self.held >= at)
        copies = self.layout.capacity + np.arange(min(self.layout.spare, at), min(self.layout.spare, length))
        self.held[slots] = -1
        with ExitStack() as stack:
            for part in self.parts:
                stack.callback(part.forget, at, length)
            stack.callback(self.wipe, np.concatenate([slots, copies]))

    # -- facts -----------------------------------------------------------------------------------------------------

    def report(self, held: Held, length: int, end: int) -> None:
        held.add(
            entries=self.paged_slots(end) * self.entry_bytes, sink_copy=min(self.layout.spare, end) * self.entry_bytes
        )
        for part in self.parts:
            part.report(held, length, end)

    def check(self, length: int, cached: int) -> None:
        """Raise InvariantViolated unless resident and evicted positions add up to `cached`, of which `length` are
        committed."""
        resident = int(np.count_nonzero(self.held >= 0)) + (
            0 if self.moved_out is None else len(self.moved_out.positions)
        )
        gone = max(0, self.layout.horizon(length) - self.layout.sink) + self.layout.base
        if resident + gone != cached:
            raise InvariantViolated(
                "INV1", f"{resident} resident and {gone} evicted positions where {cached} are cached"
            )
