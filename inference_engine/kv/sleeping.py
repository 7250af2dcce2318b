"""Layers whose old rows are restored: what they keep while the session sleeps, and their lanes while it is awake.

    asleep   exact rows (sink, window) · the archive: codes of the rows between        sustained
    awake    the same, and lanes that hold every readable row, the old ones restored   until it sleeps

Awake, the lanes are all that attention and the life of rows know of. Rows that leave the exact window are put into the
archive at once, and replaced in the lanes by what the archive gives back: a session that was woken reads what one that
never slept reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference_engine.errors import RestorationFailed
from inference_engine.kv.context import KVContext
from inference_engine.kv.lanes import LaneGroup, LayerSet
from inference_engine.kv.layout import Positions
from inference_engine.kv.restorer import Archive, RowBlock
from inference_engine.kv.strategy import Placement


@dataclass(slots=True, eq=False)
class _Sleeper:
    """One set of alike layers."""

    layers: LayerSet
    exact: LaneGroup
    window: int | None  # how far back rows can be read
    lanes: LaneGroup | None = None

    @property
    def awake(self) -> LaneGroup:
        assert self.lanes is not None, "the session sleeps"
        return self.lanes

    def exact_positions(self, length: int) -> Positions:
        layout = self.exact.layout
        sink = np.arange(min(layout.sink, length), dtype=np.int64)
        recent = np.arange(max(layout.horizon(length), len(sink)), length, dtype=np.int64)
        return np.concatenate([sink, recent])

    def archived_positions(self, before: int, length: int) -> Positions:
        """Readable positions that leave the exact window while the history goes from `before` to `length`."""
        layout = self.exact.layout
        first = max(layout.sink, layout.horizon(before))
        if self.window is not None:
            first = max(first, layout.segment_start(length) - self.window)
        return np.arange(first, max(first, layout.horizon(length)), dtype=np.int64)


class SleepingRows:
    """The layers of one session that sleep."""

    def __init__(self, context: KVContext, sleepers: Sequence[_Sleeper], archive: Archive, replays: bool) -> None:
        self._context = context
        self._sleepers = sleepers
        self._archive = archive
        self.replays = replays  # rows come back by running the model again
        self._slept = 0  # the length when exact rows were last put away

    @staticmethod
    def reserve(context: KVContext, placement: Placement) -> SleepingRows | None:
        """Take what is sustained from the pool; None, and nothing taken, if there is no room."""
        assert placement.restorer is not None
        sleepers: list[_Sleeper] = []
        for layers, sleeping in placement.sleeping:
            exact = LaneGroup.reserve(context, layers, sleeping.exact)
            if exact is None:
                break
            sleepers.append(_Sleeper(layers, exact, sleeping.awake.window))
        archive = None
        if len(sleepers) == len(placement.sleeping):
            archive = placement.restorer.open(context, placement.kept)
        if archive is None:
            for sleeper in sleepers:
                sleeper.exact.release()
            return None
        return SleepingRows(context, sleepers, archive, placement.restorer.replays)

    def release(self) -> None:
        self.drop_lanes()
        for sleeper in self._sleepers:
            sleeper.exact.release()
        self._archive.release()

    @property
    def lanes(self) -> tuple[LaneGroup, ...]:
        return tuple(sleeper.lanes for sleeper in self._sleepers if sleeper.lanes is not None)

    # -- waking and sleeping ----------------------------------------------------------------------------------------

    def reserve_lanes(self, placement: Placement) -> bool:
        """Take lanes for every readable row; False, and nothing taken, if the pool has no room now."""
        for sleeper, (layers, sleeping) in zip(self._sleepers, placement.sleeping, strict=True):
            assert sleeper.layers == layers
            sleeper.lanes = LaneGroup.reserve(self._context, layers, sleeping.awake)
            if sleeper.lanes is None:
                self.drop_lanes()
                return False
        return True

    def drop_lanes(self) -> None:
        for sleeper in self._sleepers:
            if sleeper.lanes is not None:
                sleeper.lanes.release()
                sleeper.lanes = None

    def replay_end(self, length: int) -> int:
        """Rows below this are computed again; every layer has its exact rows from there on."""
        return min(sleeper.exact.layout.horizon(length) for sleeper in self._sleepers) if self.replays else 0

    def restore(self, length: int) -> None:
        """Put the archived rows into the lanes."""
        # A segment at a time: decoding needs some room beside the result.
        step = self._context.geometry.segment_tokens
        ranges = [sleeper.archived_positions(0, length) for sleeper in self._sleepers]
        for first in range(0, max(len(positions) for positions in ranges), step):
            self._write(self._archive.restore([positions[first : first + step] for positions in ranges]))

    def open_lanes(self, opened: int, length: int) -> None:
        """Wipe the pages a history of `length` has beyond those of one of `opened`."""
        for lanes in self.lanes:
            lanes.wipe(np.arange(lanes.open_rows(opened), lanes.open_rows(length), dtype=np.int64))

    def take_exact_rows(self, length: int) -> None:
        """Put the exact rows into the lanes, and let leave what a history of `length` cannot read any more."""
        for sleeper in self._sleepers:
            lanes, held = sleeper.awake, sleeper.exact.held
            positions = np.sort(held[held >= 0])
            # A layer with a narrower window of its own has no place for the strategy's sink.
            horizon = lanes.layout.horizon(length)
            positions = positions[(positions < lanes.layout.sink) | (positions >= horizon)]
            lanes.write(positions, *sleeper.exact.read(positions))
            lanes.evict(length)

    def put_exact_rows_away(self, length: int) -> None:
        for sleeper in self._sleepers:
            exact, positions = sleeper.exact, sleeper.exact_positions(length)
            exact.wipe(np.flatnonzero(exact.held >= 0))
            exact.held[:] = -1
            exact.write(positions, *sleeper.awake.read(positions))
        self._slept = length

    # -- rows that leave the exact window ---------------------------------------------------------------------------

    def archive(self, before: int, length: int) -> None:
        """Rows that left the exact window go into the archive, and are read as it gives them back.

        Raises RestorationFailed; the rows are then of no use any more.
        """
        leaving = [sleeper.archived_positions(before, length) for sleeper in self._sleepers]
        if self.replays or not any(len(positions) for positions in leaving):
            return
        try:
            firsts = [self._first_positions(sleeper, before, length) for sleeper in self._sleepers]
            if any(len(positions) for positions in firsts):
                self._archive.begin(self._blocks(firsts))
            self._write(self._archive.keep(self._blocks(leaving)))
        except Exception as error:
            raise RestorationFailed(error) from error

    def forget(self) -> None:
        """Go back to an empty history, asleep."""
        self.drop_lanes()
        for sleeper in self._sleepers:
            sleeper.exact.wipe(np.flatnonzero(sleeper.exact.held >= 0))
            sleeper.exact.held[:] = -1
        self._slept = 0

    def _first_positions(self, sleeper: _Sleeper, before: int, length: int) -> Positions:
        """If these layers' first rows leave the exact window now: every position after the sink that the lanes hold."""
        layout = sleeper.exact.layout
        if not layout.horizon(before) <= layout.sink < layout.horizon(length):
            return np.zeros(0, dtype=np.int64)
        first = max(layout.sink, sleeper.awake.layout.horizon(length - 1))
        return np.arange(first, layout.segment_start(length), dtype=np.int64)

    def _blocks(self, positions: Sequence[Positions]) -> list[RowBlock]:
        blocks = []
        for sleeper, wanted in zip(self._sleepers, positions, strict=True):
            keys, values = sleeper.awake.read(wanted)
            blocks.append(RowBlock(wanted, self._moved(sleeper, keys.float(), -wanted), values.float()))
        return blocks

    def _write(self, blocks: Sequence[RowBlock]) -> None:
        for sleeper, block in zip(self._sleepers, blocks, strict=True):
            keys = self._moved(sleeper, block.keys, block.positions)
            sleeper.awake.write(block.positions, keys, block.values)

    def _moved(self, sleeper: _Sleeper, keys: Tensor, shifts: Positions) -> Tensor:
        """Keys [layers, n, Hkv, D], each moved by its shift."""
        if not len(shifts):
            return keys
        by_head = keys.transpose(1, 2)
        flat = by_head.reshape(-1, len(shifts), keys.shape[-1])
        moved = self._context.rotate(flat, torch.from_numpy(shifts).to(keys.device), sleeper.layers.rotary)
        return moved.view(by_head.shape).transpose(1, 2)

    # -- facts ------------------------------------------------------------------------------------------------------

    def held_bytes(self, length: int, staged_length: int) -> dict[str, int]:
        """By kind: exact rows, the archive, and the lanes of a woken session, which reach to `staged_length`."""
        layouts = [sleeper.exact.layout for sleeper in self._sleepers]
        counts = [max(0, layout.horizon(length) - layout.sink) for layout in layouts]
        return {
            "rows": sum(sleeper.exact.open_rows(self._slept) * sleeper.exact.row_bytes for sleeper in self._sleepers),
            "archive": self._archive.held_bytes(counts),
            "restored": sum(
                (lanes.open_rows(staged_length) + min(lanes.layout.spare, staged_length)) * lanes.row_bytes
                for lanes in self.lanes
            ),
        }
