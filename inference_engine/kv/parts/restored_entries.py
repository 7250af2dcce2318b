"""Old entries that are restored into regions when the session becomes active.

    idle     exact entries (sink, window) · the archive: codes of the entries between        sustained
    active   the same, and regions that hold every readable entry, the old ones restored     until it is idle

While the session is active, attention reads the regions alone. Entries that leave the exact window are archived at
once, and the regions get what the archive restores: a session reads the same entries whether it was idle or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np

from inference_engine.errors import RestorationFailed
from inference_engine.kv.archives.restorer import Archive
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import Positions
from inference_engine.kv.part import Held, Need, Saved
from inference_engine.kv.parts.archived import ArchivedEntries, ExactEntries
from inference_engine.kv.parts.layer_entries import LayerEntries
from inference_engine.kv.strategy import KVStrategy, Placement, needed

_FLOAT32_BYTES = 4
# Decoded entries made at once on an accelerator. In single segments, launching would take longer than the work.
_DECODED_BYTES = 128 * 2**20


class RestoredEntries(ArchivedEntries):
    """The archived layers of one session. With a restorer that replays, their old entries are staged again."""

    by_view: ClassVar[bool] = False

    def __init__(
        self, context: KVContext, strategy: KVStrategy, sets: Sequence[ExactEntries], archive: Archive
    ) -> None:
        super().__init__(context, strategy, sets, archive)
        self._regions: tuple[LayerEntries, ...] = ()
        self._idle_length = 0  # the length when the session was last idle

    @classmethod
    def active_need(cls, geometry: Geometry, placement: Placement) -> Need:
        return needed(geometry, [(layers, pair.active) for layers, pair in placement.archived])

    @property
    def regions(self) -> tuple[LayerEntries, ...]:
        return self._regions

    # -- active and idle --------------------------------------------------------------------------------------------

    def wake(self, tokens: int, length: int) -> bool:
        placement = self._strategy.placement(self._context.geometry, tokens)
        regions: list[LayerEntries] = []
        for exact, (layers, pair) in zip(self._sets, placement.archived, strict=True):
            assert exact.layers == layers
            group = LayerEntries.reserve(self._context, layers, pair.active)
            if group is None:
                for other in regions:
                    other.release()
                return False
            regions.append(group)
        self._regions = tuple(regions)
        if self.replay_end(length):
            return True
        try:
            self._open(0, length)
            if not self._replays:
                self._restore(length)
                self._archive.ask_finite()
            self._take_exact_entries(length)
        except Exception as error:
            self._archive.dismiss()
            self._drop_regions()
            raise RestorationFailed(error) from error
        return True

    def end_replay(self, replayed: int, length: int) -> None:
        self._open(replayed, length)
        self._take_exact_entries(length)

    def idle(self, length: int | None) -> None:
        self._archive.settle()
        if length is not None:
            for exact, regions in zip(self._sets, self._regions, strict=True):
                positions = exact.positions(length)
                exact.wipe()
                exact.regions.write_entries(positions, *regions.read_entries(positions))
            self._idle_length = length
        self._drop_regions()

    def copy_from(self, other: Self, length: int) -> None:
        super().copy_from(other, length)
        self._idle_length = length

    def load(self, length: int, saved: Saved) -> None:
        super().load(length, saved)
        self._idle_length = length

    def forget(self, at: int, length: int) -> None:
        self._drop_regions()
        super().forget(at, length)
        self._idle_length = at

    def release(self) -> None:
        try:
            self._drop_regions()
        finally:
            super().release()

    def _open(self, opened: int, length: int) -> None:
        """Wipe the pages that a history of `length` has beyond those of one of `opened`."""
        for regions in self._regions:
            regions.open(regions.paged_slots(opened), regions.paged_slots(length))

    def _restore(self, length: int) -> None:
        # In parts: decoding needs memory beside its result.
        step = self._tokens_at_once()
        ranges = [exact.leaving(0, length) for exact in self._sets]
        for first in range(0, max(len(positions) for positions in ranges), step):
            self._replace([positions[first : first + step] for positions in ranges])

    def _tokens_at_once(self) -> int:
        """How many positions are restored together: a whole number of segments."""
        geometry = self._context.geometry
        if self._archive.restores_all_directly(self._regions):
            return geometry.trained_positions  # all: decoding takes no memory beside its result
        if self._context.device.type == "cpu" or geometry.token_quantum > 1:
            return geometry.segment_tokens
        sets = [exact.layers for exact in self._sets]
        numbers = sum(2 * len(layers.layers) * layers.kv_heads * layers.head_dim for layers in sets)
        segments = _DECODED_BYTES // (numbers * _FLOAT32_BYTES * geometry.segment_tokens)
        return max(1, segments) * geometry.segment_tokens

    def _take_exact_entries(self, length: int) -> None:
        """Copy the exact entries into the regions, and evict what a history of `length` cannot read any more."""
        for exact, regions in zip(self._sets, self._regions, strict=True):
            held = exact.regions.held
            positions = np.sort(held[held >= 0])
            # A layer with a narrower native window has no slots for the strategy's sink.
            horizon = regions.layout.horizon(length)
            positions = positions[(positions < regions.layout.sink) | (positions >= horizon)]
            regions.write_entries(positions, *exact.regions.read_entries(positions))
            regions.evict(0, length)

    def _drop_regions(self) -> None:
        dropped, self._regions = self._regions, ()
        for regions in dropped:
            regions.release()

    # -- entries that leave the exact window ------------------------------------------------------------------------

    def _replace(self, leaving: Sequence[Positions]) -> None:
        """Write these archived entries, restored, into the regions."""
        self._archive.restore_into(self._regions, leaving)

    # -- facts ------------------------------------------------------------------------------------------------------

    def report(self, held: Held, length: int, end: int) -> None:
        held.add(
            entries=sum(
                exact.regions.paged_slots(self._idle_length) * exact.regions.entry_bytes for exact in self._sets
            ),
            archive=self._archive.held_bytes(self._counts(length)),
            restored=sum(
                (regions.paged_slots(end) + min(regions.layout.spare, end)) * regions.entry_bytes
                for regions in self._regions
            ),
        )
        held.tier_bytes += self._archive.tier_bytes(self._counts(length))
