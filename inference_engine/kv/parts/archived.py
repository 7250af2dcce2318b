"""Layers whose old entries are archived and restored: what the two kinds have in common.

Entries leave the exact window at a segment boundary, whole segments at once, and go into the archive
(`kv/archives/restorer.py`). Later queries read them from regions into which they were restored (`restored.py`), or
from the archive itself, chunk by chunk (`streamed.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.errors import NonFiniteEntries, RestorationFailed
from inference_engine.kv.archives.restorer import Archive, ArchivedPart
from inference_engine.kv.context import KVContext
from inference_engine.kv.layout import LayerSet, Layout, Positions
from inference_engine.kv.memory.pool import Run
from inference_engine.kv.part import Saved, saved_under, under
from inference_engine.kv.parts.layer_entries import LayerEntries
from inference_engine.kv.strategy import KVStrategy, Placement
from inference_engine.kv.views import StagedQueries, StepReads


@dataclass(frozen=True, slots=True, eq=False)
class ExactEntries:
    """One set of alike layers: the regions that hold their exact entries, and which positions leave them."""

    layers: LayerSet
    regions: LayerEntries
    window: int | None  # how far back entries can be read

    @property
    def layout(self) -> Layout:
        return self.regions.layout

    def positions(self, length: int) -> Positions:
        """The exact positions of a history of `length`."""
        sink = np.arange(min(self.layout.sink, length), dtype=np.int64)
        recent = np.arange(max(self.layout.horizon(length), len(sink)), length, dtype=np.int64)
        return np.concatenate([sink, recent])

    def leaving(self, before: int, length: int) -> Positions:
        """Readable positions that leave the exact window as the history grows from `before` to `length`."""
        first = max(self.layout.sink, self.layout.horizon(before))
        if self.window is not None:
            first = max(first, self.layout.segment_start(length) - self.window)
        return np.arange(first, max(first, self.layout.horizon(length)), dtype=np.int64)

    def wipe(self) -> None:
        self.regions.wipe(np.flatnonzero(self.regions.held >= 0))
        self.regions.held[:] = -1


def reserve_exact_entries(context: KVContext, placement: Placement) -> list[ExactEntries] | None:
    """Reserve the regions of exact entries; None, and nothing taken, if the pool has no room."""
    taken: list[ExactEntries] = []
    for layers, pair in placement.archived:
        regions = LayerEntries.reserve(context, layers, pair.exact)
        if regions is None:
            for exact in taken:
                exact.regions.release()
            return None
        taken.append(ExactEntries(layers, regions, pair.active.window))
    return taken


# Of each kind of check how many were started: which ones `require_finite` waits for.
Asked = tuple[int, ...]


class ArchivedEntries(ArchivedPart):
    """The layers of one session whose old entries are restored."""

    def __init__(
        self, context: KVContext, strategy: KVStrategy, sets: Sequence[ExactEntries], archive: Archive
    ) -> None:
        self._context = context
        self._strategy = strategy
        self._sets = sets
        self._archive = archive
        self._replays = strategy.restorer().replays  # entries are recomputed by the model

    @classmethod
    def reserve(
        cls, context: KVContext, strategy: KVStrategy, placement: Placement, *, sustained: KVContext
    ) -> ArchivedEntries | None:
        sets = reserve_exact_entries(sustained, placement)
        if sets is None:
            return None
        archive = None
        try:
            archive = placement.restorer.open(sustained, placement.kept)
        finally:
            if archive is None:
                for exact in sets:
                    exact.regions.release()
        return None if archive is None else cls(context, strategy, sets, archive)

    @property
    @abstractmethod
    def regions(self) -> tuple[LayerEntries, ...]:
        """The regions that attention reads: one for each set of layers while the session is active."""

    # -- a step ----------------------------------------------------------------------------------------------------

    def room_beyond(self, position: int) -> int:
        """How many appended tokens behind the end of the segment of `position` may share a step with those in it."""
        return 0

    def stage(self, positions: Positions, generated: NDArray[np.bool_]) -> int:
        return min([regions.stage(positions, generated) for regions in self.regions])

    def read(self, queries: StagedQueries, step: StepReads) -> int:
        return min([regions.read(queries, step) for regions in self.regions], default=queries.first)

    def commit(self, before: int, length: int, rejected: Positions) -> None:
        """Archive the entries that left the exact window. From then on, queries read what the archive restores.

        `require_finite` reports later whether they are finite.
        """
        for regions in self.regions:
            regions.settle(before, length, rejected)
        if not self._replays:
            if length > before:
                self.require_finite()
            leaving = [exact.leaving(before, length) for exact in self._sets]
            if any(len(positions) for positions in leaving):
                self._keep(leaving, before, length)
            self._archive.ask_finite()
        for regions in self.regions:
            regions.evict(before, length)

    def keep_taps(self, first: int, taps: Tensor) -> None:
        """Before `commit` of tokens from position `first` on, if the restorer `reads_taps`: [n, taps, hidden]."""
        try:
            self._archive.keep_taps(first, taps)
        except Exception as error:
            raise RestorationFailed(error) from error

    def take_back(self, first: int) -> None:
        """The step from `first` on is not staged: another part has no room. Put back what `stage` has moved."""

    def end_replay(self, replayed: int, length: int) -> None:
        """Entries below `replayed` have been recomputed."""

    def replay_end(self, length: int) -> int:
        """Entries below this position are recomputed before the session continues from `length`: from there on, every
        layer has its exact entries.
        """
        return min(exact.layout.horizon(length) for exact in self._sets) if self._replays else 0

    def ask_finite(self) -> Asked:
        """Start a check on the device that archived and restored entries are finite. Nothing waits for it."""
        return (self._archive.ask_finite(),)

    def require_finite(self, asked: Asked | None = None) -> None:
        """Raise RestorationFailed if a check of `ask_finite` failed; asked: that one, or one before it."""
        try:
            self._archive.require_finite(None if asked is None else asked[0])
        except NonFiniteEntries as error:
            raise RestorationFailed(error) from error

    def _keep(self, leaving: Sequence[Positions], before: int, length: int) -> None:
        try:
            firsts = [
                _first_positions(exact, regions, before, length)
                for exact, regions in zip(self._sets, self.regions, strict=True)
            ]
            if any(len(positions) for positions in firsts):
                self._archive.begin_from(self.regions, firsts)
            self._archive.keep_from(self.regions, leaving)
            self._replace(leaving)
        except Exception as error:
            raise RestorationFailed(error) from error

    @abstractmethod
    def _replace(self, leaving: Sequence[Positions]) -> None:
        """Make later queries read these entries as the archive restores them."""

    # -- as a whole ------------------------------------------------------------------------------------------------

    def copy_from(self, other: Self, length: int) -> None:
        for exact, theirs in zip(self._sets, other._sets, strict=True):
            exact.regions.copy_from(theirs.regions, length)
        kept = self._kept(length)
        self._archive.load(kept, other._archive.save(kept, length))

    def save(self, length: int) -> Saved:
        """The exact entries, and what the archive keeps."""
        saved: Saved = {"archive": self._archive.save(self._kept(length), length)}
        for index, exact in enumerate(self._sets):
            saved = {**saved, **under(index, exact.regions.save(length))}
        return saved

    def load(self, length: int, saved: Saved) -> None:
        for index, exact in enumerate(self._sets):
            exact.regions.load(length, saved_under(index, saved))
        self._archive.load(self._kept(length), saved["archive"])

    def can_rewind(self, at: int, length: int) -> bool:
        """What was archived since is exact nowhere."""
        return all(exact.regions.can_rewind(at, length) for exact in self._sets)

    def _kept(self, length: int) -> list[Positions]:
        """The archived positions of a history of `length`, per set of layers."""
        return [exact.leaving(0, length) for exact in self._sets]

    def forget(self, at: int, length: int) -> None:
        with ExitStack() as stack:
            for exact in self._sets:
                stack.callback(exact.regions.forget, at, length)
            stack.callback(self._archive.rewind, at) if at else stack.callback(self._archive.forget)

    def shrink(self) -> None:
        """Give back what it has beyond the session's bound."""

    @property
    def spare_bytes(self) -> int:
        """Bytes beyond the session's bound, which are given back when they are needed. Any thread."""
        return 0

    @property
    def runs(self) -> Sequence[Run]:
        return [*(run for exact in self._sets for run in exact.regions.runs), *self._archive.runs]

    def release(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._archive.release)
            for exact in self._sets:
                stack.callback(exact.regions.release)

    def _counts(self, length: int) -> list[int]:
        return [max(0, exact.layout.horizon(length) - exact.layout.sink) for exact in self._sets]


def _first_positions(exact: ExactEntries, regions: LayerEntries, before: int, length: int) -> Positions:
    """Every position after the sink in the regions, if the first entries of these layers leave now; otherwise none."""
    layout = exact.layout
    if not layout.horizon(before) <= layout.sink < layout.horizon(length):
        return np.zeros(0, dtype=np.int64)
    first = max(layout.sink, regions.layout.horizon(length - 1))
    return np.arange(first, layout.segment_start(length), dtype=np.int64)
