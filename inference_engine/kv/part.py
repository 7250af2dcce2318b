"""The part interface: one mechanism's share of a session.

A session's entries of alike layers are a part, and so is what a drafter remembers of it; an index of blocks or a cache
of past queries is a part of the layers it belongs to (`parts/layer_part.py`). `SessionKV` is a loop over parts: a new
mechanism is one file in `parts/` and, where it belongs to layers, a name in the list of those in `layer_entries.py`.

    wake    idle     what an idle session does without: taken from the pool, given back
    prepare stage    the next positions are to be computed: room is made, then the tables say so
    read             how the step's queries read the part: plan numbers, or a view
    reject  commit   staged positions stay, or were never there: the tables first, the device second
    evict            entries that no later query reads leave, at a segment boundary
    save    load     what a history left, as tensors: for a fork's copy, or a file
    forget  release  back to an empty history; back to the pool
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.mac import MatchTotals
from inference_engine.kv.layout import Positions
from inference_engine.kv.memory.pool import Demand
from inference_engine.kv.memory.transfers import TransferTotals
from inference_engine.kv.views import StagedQueries, StepReads

# By name, what a part saved: tensors in an order that `load` reads again. Made while it is read, a piece at a time.
Saved = Mapping[str, Iterable[tuple[Tensor, ...]]]


def under(index: int, saved: Saved) -> Saved:
    """What one of several parts saved, under its number."""
    return {f"{index}/{name}": tensors for name, tensors in saved.items()}


def saved_under(index: int, saved: Saved) -> Saved:
    """The inverse."""
    head = f"{index}/"
    return {name.removeprefix(head): tensors for name, tensors in saved.items() if name.startswith(head)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What a part takes: runs of the pool, and bytes of the second tier."""

    demands: tuple[Demand, ...] = ()
    tier_bytes: int = 0

    @property
    def elements(self) -> int:
        """Numbers of K, and as many of V."""
        return sum(demand.elements for demand in self.demands)

    def __add__(self, other: Need) -> Need:
        return Need(demands=self.demands + other.demands, tier_bytes=self.tier_bytes + other.tier_bytes)


@dataclass(kw_only=True, slots=True)
class Held:
    """Bytes in use: of the pool by kind, and of the second tier."""

    by_kind: dict[str, int] = field(default_factory=dict)
    tier_bytes: int = 0

    def add(self, **by_kind: int) -> None:
        for kind, count in by_kind.items():
            self.by_kind[kind] = self.by_kind.get(kind, 0) + count


class Part(ABC):
    """One mechanism's share of a session. Everything but `release` runs on the engine's thread."""

    # Is something of the pool taken to wake, and given back when the session is idle?
    takes_room: ClassVar[bool] = False

    # -- idle and active --------------------------------------------------------------------------------------------

    def wake(self, tokens: int, length: int) -> bool:
        """Get ready for histories of up to `tokens`, after one of `length`. False, and nothing taken, if the pool has
        no room now. Raises RestorationFailed, and nothing is taken."""
        return True

    def idle(self, length: int | None) -> None:
        """Give back what `wake` took. None: entries are still being computed again, none are new."""

    def replay_end(self, length: int) -> int:
        """Entries below this are computed again before the session goes on from `length`."""
        return 0

    def end_replay(self, replayed: int, length: int) -> None:
        """Entries below `replayed` have been computed again."""

    # -- a step -----------------------------------------------------------------------------------------------------

    def prepare(self, positions: Positions, generated: NDArray[np.bool_]) -> None:
        """Make room for consecutive positions; generated: [n], which of them the model generated.

        Raises InvariantViolated.
        """

    def stage(self, positions: Positions) -> None:
        """The positions that were prepared are staged now."""

    def read(self, queries: StagedQueries, step: StepReads) -> None:
        """Say where K and V of the staged positions go, and how their queries read: in numbers, or by a view."""

    @property
    def fits_numbers(self) -> bool:
        """Can its reads be plan numbers alone, whatever is staged?"""
        return True

    def reject(self, positions: Positions) -> None:
        """Staged positions, the last ones, are not kept: the tables forget them. The device is cleaned in `commit`."""

    def commit(self, before: int, length: int, rejected: Positions, *, is_replay: bool = False) -> None:
        """The history, or its replay, went from `before` to `length`; `rejected` are wiped.

        Raises RestorationFailed if entries that leave cannot be kept.
        """

    def evict(self, before: int, length: int) -> None:
        """Entries that no query of a history of `length` reads leave. Raises RestorationFailed."""

    def ask_finite(self) -> None:
        """Let the device tell whether old entries that were read or left so far are finite. Nothing waits for it."""

    def require_finite(self) -> None:
        """Raise RestorationFailed if some of those asked for are not."""

    # -- as a whole -------------------------------------------------------------------------------------------------

    def copy_from(self, other: Self, length: int) -> None:
        """Hold what `other`, of the same strategy, holds after a history of `length`. Only while empty.

        Raises OSError if the second tier cannot take its part.
        """
        self.load(length, other.save(length))

    def save(self, length: int) -> Saved:
        """What a history of `length` left here, while it is idle: enough to go on to the bit."""
        return {}

    def load(self, length: int, saved: Saved) -> None:
        """Hold what was saved after a history of `length`. Only while empty. Raises OSError."""

    @property
    def floor(self) -> int:
        """Entries of positions below this one are not its own to forget: other sessions read them, or hold them."""
        return sys.maxsize

    @abstractmethod
    def forget(self, floor: int, length: int) -> None:
        """Forget what is from `floor` on of a history that reached `length`; idle afterwards."""

    @abstractmethod
    def release(self) -> None:
        """Give everything back, though some of it fail. Called once."""

    # -- facts ------------------------------------------------------------------------------------------------------

    def add_footprint(self, held: Held, length: int, end: int) -> None:
        """Add the bytes in use after a history of `length`, staged positions up to `end` included."""

    def transfers(self) -> TransferTotals:
        """What moved between the device and the second tier."""
        return TransferTotals()

    def match_totals(self) -> Mapping[int, MatchTotals]:
        """What matching past queries saved and missed, by layer."""
        return {}

    def check(self, length: int, cached: int) -> None:
        """Raise InvariantViolated unless resident and evicted positions add up to `cached`, of which `length` are
        committed."""
