"""Old entries of which a generated token chooses some, and has these restored one by one.

    idle     exact entries (sink, window) · latents and the index of keys of the entries before      sustained
    active   the same, and caches of restored entries; room for a chunk of one layer                 until it is idle

A generated token scores the index, restores the chosen entries that its cache does not hold, and attends over sink,
window and choice. Most of what a token chooses was chosen by the one before. An entry is restored to the same bits
whenever it is, so what a restore cache holds changes no result. The index is made of exact keys, before they leave.

Appended tokens read every entry, chunk by chunk (`streamed.py`), or choose, too, each for itself. On a CPU queries of
one session restore one after another, so that a step of many restores no more at once than one token does; and as none
reads a chunk, there is no room for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from inference_engine.errors import NonFiniteEntries, RestorationFailed
from inference_engine.kernels.kv_dtype import as_kept
from inference_engine.kv.archives.finite import FiniteCheck
from inference_engine.kv.archives.restorer import Archive, restore_cache_slots
from inference_engine.kv.context import KVContext, RestoreCache
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import Positions
from inference_engine.kv.memory.allocation import allocation_bytes
from inference_engine.kv.memory.pool import Demand
from inference_engine.kv.part import Held, Need
from inference_engine.kv.parts.archived import Asked, ExactEntries
from inference_engine.kv.parts.component_index import ComponentIndex
from inference_engine.kv.parts.streamed import StreamedEntries, StreamedReads
from inference_engine.kv.strategy import KVStrategy, Placement
from inference_engine.kv.views import Region, StagedQueries, StepReads


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
        self._caches: tuple[Demand, ...] = ()
        self._starts: list[int] = []
        self._finite = FiniteCheck()  # of what the device's operation restored by itself
        self._indexes = [part for exact in sets for part in exact.regions.parts if isinstance(part, ComponentIndex)]
        for index in self._indexes:
            index.far = self

    @classmethod
    def active_need(cls, geometry: Geometry, placement: Placement) -> Need:
        caches = placement.restorer.restore_caches(geometry, placement.kept)
        return super().active_need(geometry, placement) + Need(demands=caches)

    def wake(self, tokens: int, length: int) -> bool:
        if not super().wake(tokens, length):
            return False
        geometry = self._context.geometry
        placement = self._strategy.placement(geometry, tokens)
        caches = placement.restorer.restore_caches(geometry, placement.kept)
        starts = self._context.pool.reserve(list(caches))
        if starts is None:
            self._drop_room()
            return False
        self._caches, self._starts = caches, list(starts)
        spare: list[Region] = []
        try:
            remaining = iter(self._starts)
            for index, group in zip(self._indexes, placement.kept, strict=True):
                layers, slots = group.layers.layers, restore_cache_slots(group, placement.restorer.held(geometry))
                own = [next(remaining) for _ in layers] if caches else []
                index.restore_from(
                    [self._archive.decoded_by(layer) for layer in layers],
                    [RestoreCache(start=start, slots=slots) for start in own] or [None] * len(layers),
                )
                if own:
                    starts_of = dict(zip(layers, own, strict=True))
                    spare.append(Region(starts=starts_of, heads=group.layers.kv_heads, region=slots))
        except Exception as error:
            self._drop_room()
            raise RestorationFailed(error) from error
        self._spare = spare
        return True

    def _lend_spare(self) -> None:
        for index in self._indexes:
            index.forget_restored()

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
        super().forget(at, length)
        self._finite.forget()

    def commit(self, before: int, length: int, rejected: Positions) -> None:
        super().commit(before, length, rejected)
        self._ask_finite()

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
        caches, starts, self._caches, self._starts, self._spare = self._caches, self._starts, (), [], ()
        for index in self._indexes:
            index.restore_no_more()
        if starts:
            self._context.pool.release(list(caches), starts)

    def report(self, held: Held, length: int, end: int) -> None:
        super().report(held, length, end)
        if self._caches and any(self._counts(length)):
            held.add(restored=allocation_bytes(self._caches, itemsize=self._context.geometry.itemsize))
        for exact in self._sets:
            for part in exact.regions.parts:
                part.report(held, length, end)
