"""Old rows that are restored into lanes when the session wakes.

    asleep   exact rows (sink, window) · the archive: codes of the rows between        sustained
    awake    the same, and lanes that hold every readable row, the old ones restored   until it sleeps

Awake, the lanes are all that attention and the life of rows know of. Rows that leave the exact window are put into the
archive at once, and replaced in the lanes by what the archive gives back: a session that was woken reads what one that
never slept reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from inference_engine.errors import RestorationFailed
from inference_engine.kv.archives.restorer import Archive
from inference_engine.kv.context import KVContext
from inference_engine.kv.layout import Positions
from inference_engine.kv.part import Held, Saved
from inference_engine.kv.parts.archived import ArchivedEntries, ExactRows
from inference_engine.kv.parts.layer_entries import LayerEntries
from inference_engine.kv.strategy import KVStrategy

_FLOAT32_BYTES = 4
# Decoded rows that an accelerator makes at once: by segments the host would take longer than the device.
_DECODED_BYTES = 128 * 2**20


class RestoredEntries(ArchivedEntries):
    """The layers of one session that sleep. Those of a restorer that replays get their old rows by staging."""

    def __init__(self, context: KVContext, strategy: KVStrategy, sets: Sequence[ExactRows], archive: Archive) -> None:
        super().__init__(context, strategy, sets, archive)
        self._lanes: tuple[LayerEntries, ...] = ()
        self._slept = 0  # the length when exact rows were last put away

    @property
    def lanes(self) -> tuple[LayerEntries, ...]:
        return self._lanes

    # -- waking and sleeping ----------------------------------------------------------------------------------------

    def wake(self, tokens: int, length: int) -> bool:
        placement = self._strategy.placement(self._context.geometry, tokens)
        lanes: list[LayerEntries] = []
        for rows, (layers, sleeping) in zip(self._sets, placement.sleeping, strict=True):
            assert rows.layers == layers
            group = LayerEntries.reserve(self._context, layers, sleeping.awake)
            if group is None:
                for other in lanes:
                    other.release()
                return False
            lanes.append(group)
        self._lanes = tuple(lanes)
        if self.replay_end(length):
            return True
        try:
            self._open(0, length)
            if not self._replays:
                self._restore(length)
                self._archive.ask_finite()
                self._archive.require_finite()
            self._take_exact_rows(length)
        except Exception as error:
            self._archive.dismiss()
            self._drop_lanes()
            raise RestorationFailed(error) from error
        return True

    def end_replay(self, replayed: int, length: int) -> None:
        self._open(replayed, length)
        self._take_exact_rows(length)

    def idle(self, length: int | None) -> None:
        if length is not None:
            for rows, lanes in zip(self._sets, self._lanes, strict=True):
                positions = rows.positions(length)
                rows.wipe()
                rows.lanes.write_entries(positions, *lanes.read_entries(positions))
            self._slept = length
        self._drop_lanes()

    def copy_from(self, other: Self, length: int) -> None:
        super().copy_from(other, length)
        self._slept = length

    def load(self, length: int, saved: Saved) -> None:
        super().load(length, saved)
        self._slept = length

    def forget(self, floor: int, length: int) -> None:
        self._drop_lanes()
        super().forget(floor, length)
        self._slept = 0

    def release(self) -> None:
        try:
            self._drop_lanes()
        finally:
            super().release()

    def _open(self, opened: int, length: int) -> None:
        """Wipe the pages a history of `length` has beyond those of one of `opened`."""
        for lanes in self._lanes:
            lanes.open(lanes.open_rows(opened), lanes.open_rows(length))

    def _restore(self, length: int) -> None:
        # Not all at once: decoding needs some room beside the result.
        step = self._rows_at_once()
        ranges = [rows.leaving(0, length) for rows in self._sets]
        for first in range(0, max(len(positions) for positions in ranges), step):
            self._replace([positions[first : first + step] for positions in ranges])

    def _rows_at_once(self) -> int:
        """How many positions are restored together: a whole number of segments."""
        geometry = self._context.geometry
        if self._context.device.type == "cpu" or geometry.row_quantum > 1:
            return geometry.segment_tokens
        numbers = sum(2 * len(rows.layers.layers) * rows.layers.kv_heads * rows.layers.head_dim for rows in self._sets)
        segments = _DECODED_BYTES // (numbers * _FLOAT32_BYTES * geometry.segment_tokens)
        return max(1, segments) * geometry.segment_tokens

    def _take_exact_rows(self, length: int) -> None:
        """Put the exact rows into the lanes, and let leave what a history of `length` cannot read any more."""
        for rows, lanes in zip(self._sets, self._lanes, strict=True):
            held = rows.lanes.held
            positions = np.sort(held[held >= 0])
            # A layer with a narrower window of its own has no place for the strategy's sink.
            horizon = lanes.layout.horizon(length)
            positions = positions[(positions < lanes.layout.sink) | (positions >= horizon)]
            lanes.write_entries(positions, *rows.lanes.read_entries(positions))
            lanes.let_leave(length)

    def _drop_lanes(self) -> None:
        dropped, self._lanes = self._lanes, ()
        for lanes in dropped:
            lanes.release()

    # -- rows that leave the exact window ---------------------------------------------------------------------------

    def _replace(self, leaving: Sequence[Positions]) -> None:
        """Put these archived rows into the lanes."""
        for rows, lanes, block in zip(self._sets, self._lanes, self._archive.restore(leaving), strict=True):
            lanes.write_entries(block.positions, rows.moved(block.keys, block.positions), block.values)

    # -- facts ------------------------------------------------------------------------------------------------------

    def add_footprint(self, held: Held, length: int, end: int) -> None:
        held.add(
            rows=sum(rows.lanes.open_rows(self._slept) * rows.lanes.row_bytes for rows in self._sets),
            archive=self._archive.held_bytes(self._counts(length)),
            restored=sum(
                (lanes.open_rows(end) + min(lanes.layout.spare, end)) * lanes.row_bytes for lanes in self._lanes
            ),
        )
        held.tier_bytes += self._archive.tier_bytes(self._counts(length))
