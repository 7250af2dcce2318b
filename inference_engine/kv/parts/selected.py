"""Old entries of which a generated token chooses some, and has these restored one by one.

    idle     exact entries (sink, window) · latents and the index of keys of the entries before      sustained
    active   the same, and caches of restored entries; room for a chunk of one layer                 until it is idle

A generated token scores the index, restores the chosen entries that its cache does not hold, and attends over sink,
window and choice. Most of what a token chooses was chosen by the one before. An entry is restored to the same bits
whenever it is, so what a restore cache holds changes no result. The index is made of exact keys, before they leave.

Appended tokens read every entry, chunk by chunk (`streamed.py`): what the cache holds of a chunk is copied, and what is
restored stays there, if rooms beyond the bound have a slot left. Or they choose, too, each for itself. On a CPU queries
of one session then restore one after another, so that a step of many restores no more at once than one token does; and
as none reads a chunk, there is no room for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from inference_engine.errors import NonFiniteEntries, RestorationFailed
from inference_engine.kernels.kv_dtype import as_kept
from inference_engine.kv.archives.finite import FiniteCheck
from inference_engine.kv.archives.restorer import Archive, restore_cache_slots
from inference_engine.kv.context import HeldEntries, KVContext, RestoreCache
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import Positions
from inference_engine.kv.memory.pool import Demand, SpareRoom
from inference_engine.kv.part import Held, Need
from inference_engine.kv.parts.archived import Asked, ExactEntries
from inference_engine.kv.parts.component_index import ComponentIndex
from inference_engine.kv.parts.streamed import StreamedEntries, StreamedReads
from inference_engine.kv.strategy import KVStrategy, Placement
from inference_engine.kv.views import Region, StagedQueries, StepReads, chunks_between


class SelectedReads(StreamedReads):
    """The reads of tokens that read everything. Those of tokens that choose are the index's."""

    def has_numbers(self, queries: StagedQueries, step: StepReads) -> bool:
        all_choose = any(mechanism.appended for mechanism in self._slots.layout.mechanisms)
        return all_choose or not queries.has_appended or super().has_numbers(queries, step)


class SelectedEntries(StreamedEntries):
    """The layers of one session whose generated tokens choose old entries: `FarEntries` for their index."""

    READS: ClassVar[type[StreamedReads]] = SelectedReads

    def __init__(
        self, context: KVContext, strategy: KVStrategy, sets: Sequence[ExactEntries], archive: Archive
    ) -> None:
        super().__init__(context, strategy, sets, archive)
        self._finite = FiniteCheck()  # of what the device's operation restored by itself
        self._indexes = [part for exact in sets for part in exact.regions.parts if isinstance(part, ComponentIndex)]
        for index in self._indexes:
            index.far = self
        self._cache = _RestoreCache(context, self._indexes)

    @classmethod
    def active_need(cls, geometry: Geometry, placement: Placement) -> Need:
        caches = placement.restorer.restore_caches(geometry, placement.kept)
        return super().active_need(geometry, placement) + Need(demands=caches)

    def wake(self, tokens: int, length: int) -> bool:
        if not super().wake(tokens, length):
            return False
        placement = self._strategy.placement(self._context.geometry, tokens)
        try:
            is_open = self._cache.open(placement, self._archive)
        except Exception as error:
            self._drop_room()
            self._cache.release()
            raise RestorationFailed(error) from error
        if not is_open:
            self._drop_room()
            return False
        self._spare = self._cache.regions
        self._cache.grow(max(self._counts(length)))
        return True

    def idle(self, length: int | None) -> None:
        super().idle(length)
        self._cache.rest()

    def _lend_spare(self) -> None:
        for index in self._indexes:
            index.forget_restored()

    def _held(self, layer: int) -> HeldEntries | None:
        regions = self._set_of[layer].regions
        number = next((index.restores_in(layer) for index in self._indexes if layer in index.layers), 0)
        return HeldEntries(index=number, keys=regions.buffer.keys, values=regions.buffer.values) if number else None

    def some(self, layer: int, positions: Positions) -> tuple[Tensor, Tensor]:
        regions = self._set_of[layer].regions
        try:
            keys, values = self._archive.restore_some(layer, positions)
            turned = regions.moved(keys[None], positions)[0]
            dtype = regions.buffer.keys.dtype
            turned, values = (as_kept(states.transpose(0, 1), dtype).to(dtype) for states in (turned, values))
            return turned, values
        except Exception as error:
            raise RestorationFailed(error) from error

    def forget(self, at: int, length: int) -> None:
        if at:
            self._cache.rest()  # what is archived after a rewind was archived before it
        else:
            self._cache.release()
        super().forget(at, length)
        self._finite.forget()

    def release(self) -> None:
        try:
            super().release()
        finally:
            self._cache.release()

    @property
    def spare_bytes(self) -> int:
        return self._cache.spare_bytes

    def shrink(self) -> None:
        self._cache.release()

    def commit(self, before: int, length: int, rejected: Positions) -> None:
        super().commit(before, length, rejected)
        self._ask_finite()
        segment = self._context.geometry.segment_tokens
        if length // segment > before // segment:
            archived = max(self._counts(length))
            self._cache.grow(archived)
            if self._cache.holds(archived) and self._strategy.restorer().reads_chunks:
                self._restore_left(before, length)

    def _restore_left(self, before: int, length: int) -> None:
        """Into the restore cache, for tokens would soon choose them in many steps: all at once, the matrix of a layer
        is read once."""
        size = self._context.geometry.segments_in_a_chunk * self._context.geometry.segment_tokens
        for exact in self._sets:
            leaving = exact.leaving(before, length)
            for layer in exact.layers.layers if len(leaving) and self._held(exact.layers.layers[0]) else ():
                for chunk in chunks_between(int(leaving[0]), int(leaving[-1]) + 1, size):
                    self.chunk(layer, chunk.start, chunk.stop)

    def ask_finite(self) -> Asked:
        return (*super().ask_finite(), self._ask_finite())

    def _ask_finite(self) -> int:
        for index in self._indexes:
            if index.found is not None:
                self._finite.note(index.layers, index.found, come_back=True)
        return self._finite.send()

    def require_finite(self, asked: Asked | None = None) -> None:
        super().require_finite(asked)
        try:
            self._finite.require(None if asked is None else asked[1])
        except NonFiniteEntries as error:
            raise RestorationFailed(error) from error
        for index in self._indexes:
            if (layer := index.not_finite()) is not None:
                broken = NonFiniteEntries(layer, "entries", come_back=True)
                raise RestorationFailed(broken) from broken

    def _drop_room(self) -> None:
        super()._drop_room()
        self._spare = ()

    def report(self, held: Held, length: int, end: int) -> None:
        super().report(held, length, end)
        if any(self._counts(length)):
            held.add(restored=self._cache.nbytes)
        for exact in self._sets:
            for part in exact.regions.parts:
                part.report(held, length, end)


class _RestoreCache:
    """The restored entries that a session holds: in a room that its bound has, and further ones, a choice each, of what
    is free (`Rooms` of `kv/memory/pool.py`).

        active   │ first room │ further │ further │     the first is reserved, the others are spare
        idle     │ first room │ further │ further │     all of them are spare

    Implements RoomHolder.
    """

    def __init__(self, context: KVContext, indexes: Sequence[ComponentIndex]) -> None:
        self._context = context
        self._indexes = indexes
        self._rooms = context.pool.rooms
        self._first: SpareRoom | None = None  # while it is reserved
        self._demands: tuple[Demand, ...] = ()  # of the first room
        self._further: tuple[Demand, ...] = ()  # of each other one
        self._slots = self._choice = 0  # of the first room, and of a choice: those of the set that has most
        self._most = 0  # further rooms
        self._count = 0  # rooms, the first one among them; other threads lower it
        self.regions: Sequence[Region] = ()  # of the first room, by set of layers

    def open(self, placement: Placement, archive: Archive) -> bool:
        """For a Generate. False, and nothing taken, if the pool has no room for the first."""
        geometry, restorer, kept = self._context.geometry, placement.restorer, placement.kept
        demands = restorer.restore_caches(geometry, kept)
        if self._demands == demands and demands and (first := self._rooms.claim(self)) is not None:
            self._first = first
            return True
        self.release()
        pool = self._context.pool
        starts = pool.reserve(demands, is_last=True)
        if starts is None:
            return False
        self._demands, self._first, self._count = demands, SpareRoom(demands, starts, pool.bytes_of(demands), 0), 1
        self._further = restorer.restore_room(geometry, kept)
        remaining, regions, most = iter(starts), [], []
        for index, group in zip(self._indexes, kept, strict=True):
            layers = group.layers.layers
            slots, each = (restore_cache_slots(group, held) for held in (restorer.held(geometry), restorer.choice))
            codes = [archive.decoded_by(layer) for layer in layers]
            own = [next(remaining) for _ in layers] if demands else []
            archived = max((len(code.halves[0]) for code in codes if code is not None), default=0)
            rooms = -(-archived // each) if each else 0  # enough for all: chunks leave nothing in the first
            caches = [RestoreCache(start=start, slots=slots, each=each, most_rooms=rooms) for start in own]
            index.restore_from(codes, caches or [None] * len(layers))
            most.append(rooms if index.restores else 0)
            self._slots, self._choice = max(self._slots, slots), max(self._choice, each)
            if own:
                starts_of = dict(zip(layers, own, strict=True))
                regions.append(Region(starts=starts_of, heads=group.layers.kv_heads, region=slots))
        self.regions, self._most = regions, min(most, default=0) if demands else 0
        return True

    def grow(self, archived: int) -> None:
        """Take room for choices of as many archived entries from what is free: some at once, then one more."""
        rooms, capacity = self._rooms, self._context.pool.capacity_bytes
        while rooms.choices and self._count <= self._most:
            is_more = self._slots + (self._count - 1) * self._choice >= rooms.choices * self._choice
            if self.holds(archived):
                return
            leave = capacity // 4 if is_more else 0
            if not rooms.add(self, self._further, self._use, leave=leave) or is_more:
                return

    def holds(self, archived: int) -> bool:
        """Are there slots for as many entries in further rooms?"""
        return (self._count - 1) * self._choice >= archived

    def _use(self, starts: Sequence[int]) -> int:
        remaining = iter(starts)
        for index in self._indexes:
            index.add_restored([next(remaining) for _ in index.layers])
        self._count += 1
        return self._count - 1

    def keep_rooms(self, count: int) -> None:
        self._count = count
        for index in self._indexes:
            index.keep_restored(max(0, count - 1))

    def rest(self) -> None:
        """The Generate is over: what is held stays until the memory is needed."""
        first, self._first = self._first, None
        if first is None:
            return
        if self._rooms.choices and all(index.restores for index in self._indexes):
            self._rooms.lend(self, first)
        else:
            self._first = first
            self.release()

    def release(self) -> None:
        """Give all of it back."""
        self._rooms.release(self)
        for index in self._indexes:
            index.restore_no_more()
        first, self._first, self._demands, self._count, self.regions = self._first, None, (), 0, ()
        self._slots = self._choice = self._most = 0
        if first is not None:
            self._context.pool.release(first.demands, first.starts)

    @property
    def nbytes(self) -> int:
        """Bytes of the session's bound."""
        return 0 if self._first is None else self._first.nbytes

    @property
    def spare_bytes(self) -> int:
        """Bytes beyond it."""
        return self._rooms.bytes_of(self)
