"""The part interface: one mechanism's share of a session.

A session's entries in a set of alike layers are a part, and so is a drafter's memory of it. A block index is a part of
the layers it belongs to (`parts/layer_part.py`). `SessionKV` is a loop over parts: a new mechanism is one file in
`parts/`, or in any package; where it belongs to layers, a strategy's rule names it (`Mechanism` in `layout.py`).

    wake    idle     take what only an active session needs from the pool; give it back
    prepare stage    make room for the next positions; enter them in the tables
    read             how the step's queries read the part: plan numbers, or a view
    advance          the same for a decoded token, where it is no more than an entry in the tables
    reject  commit   drop staged positions, or keep them: the tables first, the device second
    evict            remove entries that no later query reads, at a segment boundary
    save    load     the part's state as tensors, for a fork's copy or a file
    forget  release  go back to an empty history; give everything back to the pool
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kv.layout import Positions
from inference_engine.kv.memory.pool import Demand, Run
from inference_engine.kv.memory.transfers import TransferTotals
from inference_engine.kv.views import StagedQueries, StepReads

# By name, what a part saved: tensors in the order that `load` reads. They are made while they are read, one by one.
Saved = Mapping[str, Iterable[tuple[Tensor, ...]]]


def under(index: int, saved: Saved) -> Saved:
    """What one of several parts saved, with its number before each name."""
    return {f"{index}/{name}": tensors for name, tensors in saved.items()}


def saved_under(index: int, saved: Saved) -> Saved:
    """The inverse of `under`."""
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

    # Does waking take room in the pool, which the idle session gives back?
    takes_room: ClassVar[bool] = False
    # Until `steady_until`, does its footprint change with the open pages alone?
    grows_by_pages: ClassVar[bool] = True

    @property
    def runs(self) -> Sequence[Run]:
        """Those of the pool that it holds while the session is idle."""
        return ()

    # -- idle and active --------------------------------------------------------------------------------------------

    def wake(self, tokens: int, length: int) -> bool:
        """Prepare for histories of up to `tokens`, after one of `length`. False, and nothing taken, if the pool has no
        room now. Raises RestorationFailed, with nothing taken."""
        return True

    def idle(self, length: int | None) -> None:
        """Give back what `wake` took. None: entries are still being recomputed, none are new."""

    # -- a step -----------------------------------------------------------------------------------------------------

    def prepare(self, positions: Positions, generated: NDArray[np.bool_]) -> None:
        """Make room for consecutive positions; generated: [n], which of them the model generated.

        Raises InvariantViolated; RestorationFailed if entries that leave within the step cannot be archived.
        """

    def stage(self, positions: Positions) -> None:
        """The positions that were prepared are staged now."""

    def quiet_until(self, position: int) -> int:
        """`position` is staged. Until this one, to commit a token is nothing, to stage the next is to enter it in the
        tables and to open its page (`advance`). `position` itself: it always may be more.
        """
        return position

    def advance(self, position: int) -> None:
        """As `prepare` and `stage`, for one of these positions. Raises InvariantViolated."""

    def read(self, queries: StagedQueries, step: StepReads) -> int:
        """Set where K and V of the staged positions go, and how their queries read: by numbers, or by a view.

        Returns until which position numbers of generated tokens differ from one to the next as those of the first two
        do; the first position itself: they are always worked out.
        """
        return queries.first

    @property
    def fits_numbers(self) -> bool:
        """Can all its reads be plan numbers?"""
        return True

    def reject(self, positions: Positions) -> None:
        """Remove the last staged positions from the tables. Their slots on the device are wiped in `commit`."""

    def commit(self, before: int, length: int, rejected: Positions, *, is_replay: bool = False) -> None:
        """The history, or its replay, went from `before` to `length`; `rejected` are wiped.

        Raises RestorationFailed if entries that leave cannot be archived.
        """

    def evict(self, before: int, length: int) -> None:
        """Evict entries that no query of a history of `length` reads. Raises RestorationFailed."""

    # -- as a whole -------------------------------------------------------------------------------------------------

    def copy_from(self, other: Self, length: int) -> None:
        """Copy what `other`, of the same strategy, holds of a history of `length`. Only while empty.

        Raises OSError if the second tier cannot store its part.
        """
        self.load(length, other.save(length))

    def save(self, length: int) -> Saved:
        """The state after a history of `length`, while idle: enough to continue bit for bit."""
        return {}

    def load(self, length: int, saved: Saved) -> None:
        """Restore what was saved after a history of `length`. Only while empty. Raises OSError."""

    @property
    def floor(self) -> int:
        """`forget` keeps entries of positions below this one: other sessions read or own them."""
        return sys.maxsize

    @abstractmethod
    def forget(self, floor: int, length: int) -> None:
        """Forget entries from `floor` on of a history that reached `length`. Idle afterwards."""

    @abstractmethod
    def release(self) -> None:
        """Give all memory back; a failure does not stop the rest. Called once."""

    # -- facts ------------------------------------------------------------------------------------------------------

    def add_footprint(self, held: Held, length: int, end: int) -> None:
        """Add the bytes in use after a history of `length`, staged positions up to `end` included."""

    def transfers(self) -> TransferTotals:
        """What moved between the device and the second tier."""
        return TransferTotals()

    def statistics(self) -> Mapping[int, Any]:
        """What its mechanism counts, by layer."""
        return {}

    def check(self, length: int, cached: int) -> None:
        """Raise InvariantViolated unless resident and evicted positions add up to `cached`, of which `length` are
        committed."""
