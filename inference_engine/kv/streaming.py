"""Old rows that are read where they are kept: decoded in attention, a chunk of one layer at a time.

    asleep   exact rows (sink, window) · the archive: codes of the rows between        sustained
    awake    the same, and room for a chunk of one layer: four segments, decoded       until it sleeps

Attention reads the exact rows in their lanes, which are there at any time, and merges the others in, as described in
`kv/chunk_view.py`. So waking costs nothing, and each step decodes every old row again, in each layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from inference_engine.errors import RestorationFailed
from inference_engine.kv.archived_rows import ArchivedRows, ExactRows
from inference_engine.kv.context import KVContext
from inference_engine.kv.lanes import LaneGroup
from inference_engine.kv.layout import Positions
from inference_engine.kv.restorer import Archive, chunk_demand
from inference_engine.kv.strategy import Placement


class StreamingRows(ArchivedRows):
    """The layers of one session whose old rows stay in the archive: their lanes' `RowSource`."""

    def __init__(self, context: KVContext, sets: Sequence[ExactRows], archive: Archive, replays: bool) -> None:
        assert not replays, "rows that are computed again are not local in position"
        super().__init__(context, sets, archive, replays)
        self._set_of = {layer: rows for rows in sets for layer in rows.layers.layers}
        self._room: _ChunkRoom | None = None
        for rows in sets:
            rows.lanes.source = self

    @property
    def lanes(self) -> tuple[LaneGroup, ...]:
        return tuple(rows.lanes for rows in self._sets)

    def wake(self, placement: Placement, length: int) -> bool:
        self._room = _ChunkRoom.reserve(self._context, placement)
        return self._room is not None

    def sleep(self, length: int | None) -> None:
        self._drop_room()

    def forget(self) -> None:
        self._drop_room()
        super().forget()

    def release(self) -> None:
        try:
            self._drop_room()
        finally:
            super().release()

    def chunk(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """The rows of [first, last) in `layer`, as they would be in lanes: [Hkv, n, D], in the arena's type."""
        assert self._room is not None, "the session sleeps"
        positions = np.arange(first, last, dtype=np.int64)
        try:
            keys, values = self._archive.restore_layer(layer, positions)
            turned = self._set_of[layer].moved(keys[None], positions)[0]
            return self._room.hold(turned, values)
        except Exception as error:
            raise RestorationFailed(error) from error

    def _replace(self, leaving: Sequence[Positions]) -> None:
        """Rows that leave the lanes are read from the archive from then on."""

    def _drop_room(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.release()

    def held_bytes(self, length: int, staged_length: int) -> dict[str, int]:
        archived = self._counts(length)
        return {
            "rows": sum(rows.lanes.open_rows(staged_length) * rows.lanes.row_bytes for rows in self._sets),
            "archive": self._archive.held_bytes(archived),
            "restored": self._room.nbytes if self._room is not None and any(archived) else 0,
        }


class _ChunkRoom:
    """Room in the pool for one decoded chunk. Sets of layers of any shape take turns in it."""

    def __init__(self, context: KVContext, placement: Placement, start: int) -> None:
        self._context = context
        self._demand = chunk_demand(context.geometry, placement.kept)
        self._start = start
        arena = context.pool.arenas[self._demand.head_dim]
        first = start * self._demand.head_dim
        self._halves = [states.view(-1)[first : first + self._demand.elements] for states in (arena.keys, arena.values)]

    @staticmethod
    def reserve(context: KVContext, placement: Placement) -> _ChunkRoom | None:
        starts = context.pool.reserve([chunk_demand(context.geometry, placement.kept)])
        return None if starts is None else _ChunkRoom(context, placement, starts[0])

    @property
    def nbytes(self) -> int:
        return sum(half.nbytes for half in self._halves)

    def hold(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [n, Hkv, D] as [Hkv, n, D], here until the next are held."""
        held = []
        for half, rows in zip(self._halves, (keys, values), strict=True):
            place = half[: rows.numel()].view(rows.shape[1], rows.shape[0], rows.shape[2])
            held.append(place.copy_(rows.transpose(0, 1)))
        return held[0], held[1]

    def release(self) -> None:
        self._context.pool.release([self._demand], [self._start])
