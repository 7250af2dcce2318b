"""Layers whose old rows are restored: what a session asks of them, whichever way the rows come back.

Rows leave the exact window at a segment boundary, whole segments at once, and go into the archive (`kv/restorer.py`).
The two kinds differ in how later queries read them: from lanes into which they were restored (`kv/sleeping.py`), or
from the archive itself, chunk by chunk (`kv/streaming.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from inference_engine.errors import NonFiniteRows, RestorationFailed
from inference_engine.kv.context import KVContext
from inference_engine.kv.lanes import LaneGroup, LayerSet
from inference_engine.kv.layout import Layout, Positions
from inference_engine.kv.restorer import Archive, RowBlock
from inference_engine.kv.strategy import Placement
from inference_engine.kv.transfers import TransferTotals


@dataclass(frozen=True, slots=True, eq=False)
class ExactRows:
    """One set of alike layers: the lanes that their exact rows are kept in, and which positions leave them."""

    layers: LayerSet
    lanes: LaneGroup
    window: int | None  # how far back rows can be read

    @property
    def layout(self) -> Layout:
        return self.lanes.layout

    def positions(self, length: int) -> Positions:
        """The exact positions of a history of `length`."""
        sink = np.arange(min(self.layout.sink, length), dtype=np.int64)
        recent = np.arange(max(self.layout.horizon(length), len(sink)), length, dtype=np.int64)
        return np.concatenate([sink, recent])

    def leaving(self, before: int, length: int) -> Positions:
        """Readable positions that leave the exact window while the history goes from `before` to `length`."""
        first = max(self.layout.sink, self.layout.horizon(before))
        if self.window is not None:
            first = max(first, self.layout.segment_start(length) - self.window)
        return np.arange(first, max(first, self.layout.horizon(length)), dtype=np.int64)

    def wipe(self) -> None:
        self.lanes.wipe(np.flatnonzero(self.lanes.held >= 0))
        self.lanes.held[:] = -1

    def moved(self, keys: Tensor, shifts: Positions) -> Tensor:
        """Keys [layers, n, Hkv, D] of any of these layers, each moved by its shift."""
        if not len(shifts):
            return keys
        by_head = keys.transpose(1, 2)
        flat = by_head.reshape(-1, len(shifts), keys.shape[-1])
        moved = self.lanes.context.rotate(flat, torch.from_numpy(shifts), self.layers.rotary)
        return moved.view(by_head.shape).transpose(1, 2)


def reserve_exact_rows(context: KVContext, placement: Placement) -> list[ExactRows] | None:
    """Take the lanes of exact rows from the pool; None, and nothing taken, if there is no room."""
    taken: list[ExactRows] = []
    for layers, sleeping in placement.sleeping:
        lanes = LaneGroup.reserve(context, layers, sleeping.exact)
        if lanes is None:
            for rows in taken:
                rows.lanes.release()
            return None
        taken.append(ExactRows(layers, lanes, sleeping.awake.window))
    return taken


class ArchivedRows(ABC):
    """The layers of one session whose old rows are restored."""

    def __init__(self, context: KVContext, sets: Sequence[ExactRows], archive: Archive, replays: bool) -> None:
        self._context = context
        self._sets = sets
        self._archive = archive
        self._replays = replays  # rows come back by running the model again

    @classmethod
    def reserve(cls, context: KVContext, placement: Placement, *, sustained: KVContext) -> ArchivedRows | None:
        """Take what is sustained from the pool; None, and nothing taken, if there is no room.

        sustained: the context whose pool it is taken from. What waking takes comes from that of `context`.
        """
        assert placement.restorer is not None
        sets = reserve_exact_rows(sustained, placement)
        if sets is None:
            return None
        archive = None
        try:
            archive = placement.restorer.open(sustained, placement.kept)
        finally:
            if archive is None:
                for rows in sets:
                    rows.lanes.release()
        return None if archive is None else cls(context, sets, archive, placement.restorer.replays)

    @property
    @abstractmethod
    def lanes(self) -> tuple[LaneGroup, ...]:
        """The lanes that attention reads: one for each set of layers while the session is awake."""

    @abstractmethod
    def wake(self, placement: Placement, length: int) -> bool:
        """Get ready to be read. False, and nothing taken, if the pool has no room now.

        Raises RestorationFailed, and nothing is taken.
        """

    @abstractmethod
    def sleep(self, length: int | None) -> None:
        """Keep the exact rows, give back what waking took. None: rows are still being computed again, none are new."""

    def replay_end(self, length: int) -> int:
        """Rows below this are computed again; every layer has its exact rows from there on."""
        return min(rows.layout.horizon(length) for rows in self._sets) if self._replays else 0

    def end_replay(self, replayed: int, length: int) -> None:
        """Rows below `replayed` have been computed again: let the exact ones join them."""
        raise AssertionError("nothing is computed again")

    def archive(self, before: int, length: int) -> None:
        """Rows that left the exact window go into the archive, and are read as it gives them back.

        Raises RestorationFailed; the rows are then of no use any more. Whether they are finite is found out later.
        """
        if length > before:
            self.require_finite()
        leaving = [rows.leaving(before, length) for rows in self._sets]
        if not self._replays and any(len(positions) for positions in leaving):
            self._keep(leaving, before, length)
        self._archive.commit(length)
        self._archive.ask_finite()

    def ask_finite(self) -> None:
        self._archive.ask_finite()

    def require_finite(self) -> None:
        """Raise RestorationFailed if rows that left or came back, and were asked for, are not finite: of no use."""
        try:
            self._archive.require_finite()
        except NonFiniteRows as error:
            raise RestorationFailed(error) from error

    def _keep(self, leaving: Sequence[Positions], before: int, length: int) -> None:
        try:
            firsts = [
                _first_positions(rows, lanes, before, length)
                for rows, lanes in zip(self._sets, self.lanes, strict=True)
            ]
            if any(len(positions) for positions in firsts):
                self._archive.begin(self._blocks(firsts))
            self._archive.keep(self._blocks(leaving))
            self._replace(leaving)
        except Exception as error:
            raise RestorationFailed(error) from error

    @abstractmethod
    def _replace(self, leaving: Sequence[Positions]) -> None:
        """See to it that these rows are read as the archive gives them back."""

    def copy_from(self, other: Self, length: int) -> None:
        """Keep what another session of the same rule keeps, asleep, after a history of `length`. Raises OSError."""
        for rows, theirs in zip(self._sets, other._sets, strict=True):
            rows.lanes.copy_from(theirs.lanes, length)
        self._archive.copy_from(other._archive, [rows.leaving(0, length) for rows in self._sets])

    def forget(self) -> None:
        """Go back to an empty history, asleep."""
        for rows in self._sets:
            rows.wipe()
        self._archive.forget()

    def release(self) -> None:
        """Give everything back, though some of it fail."""
        with ExitStack() as stack:
            stack.callback(self._archive.release)
            for rows in self._sets:
                stack.callback(rows.lanes.release)

    @abstractmethod
    def held_bytes(self, length: int, staged_length: int) -> dict[str, int]:
        """By kind: exact rows, the archive, and what waking took. Lanes that attention reads reach `staged_length`."""

    def tier_bytes(self, length: int) -> int:
        """Bytes of the archive that lie in the second tier."""
        return self._archive.tier_bytes(self._counts(length))

    def transfers(self) -> TransferTotals:
        """What was moved between the device and the second tier."""
        return self._archive.transfers()

    def _counts(self, length: int) -> list[int]:
        return [max(0, rows.layout.horizon(length) - rows.layout.sink) for rows in self._sets]

    def _blocks(self, positions: Sequence[Positions]) -> list[RowBlock]:
        blocks = []
        for rows, lanes, wanted in zip(self._sets, self.lanes, positions, strict=True):
            keys, values = lanes.read(wanted)
            blocks.append(RowBlock(wanted, rows.moved(keys.float(), -wanted), values.float()))
        return blocks


def _first_positions(rows: ExactRows, lanes: LaneGroup, before: int, length: int) -> Positions:
    """If these layers' first rows leave the exact window now: every position after the sink that the lanes hold."""
    layout = rows.layout
    if not layout.horizon(before) <= layout.sink < layout.horizon(length):
        return np.zeros(0, dtype=np.int64)
    first = max(layout.sink, lanes.layout.horizon(length - 1))
    return np.arange(first, layout.segment_start(length), dtype=np.int64)
