"""The part interface: one mechanism's share of a session.

A session's entries in a set of alike layers are a part, and so is a drafter's memory of it. A block index is a part of
the layers it belongs to (`parts/layer_part.py`). `SessionKV` is a loop over parts: a new mechanism is one file in
`parts/`, or in any package; where it belongs to layers, a strategy's rule names it (`Mechanism` in `layout.py`).

                     what a part does                                               llama.cpp's `llama_memory_i`
    stage            makes room for the next positions                              init_batch
    read             says how the step's queries read: plan numbers, or a view      apply
    commit           keeps what was accepted, wipes the rest, evicts                seq_rm
    save    load     its state as tensors, to a file and back                       state_write, state_read
    copy_from        the same from another session, for a fork                      seq_cp
    forget           goes back to an earlier length (can_rewind), or to none        seq_rm, clear
    release          gives everything back                                          (the destructor)
    runs    report   what it holds of the pool; bytes in use, and what it counts    memory_breakdown

What it takes is a `Need`, known before there is a session, as from vLLM's `KVCacheSpec`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kv.layout import Positions
from inference_engine.kv.memory.pool import Demand, Run
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
    """Bytes in use: of the pool by kind, and of the second tier. counted: what mechanisms count, by layer."""

    by_kind: dict[str, int] = field(default_factory=dict)
    tier_bytes: int = 0
    counted: dict[int, Any] = field(default_factory=dict)

    def add(self, **by_kind: int) -> None:
        for kind, count in by_kind.items():
            self.by_kind[kind] = self.by_kind.get(kind, 0) + count


class Part(ABC):
    """One mechanism's share of a session. Everything but `release` runs on the engine's thread."""

    @property
    def runs(self) -> Sequence[Run]:
        """Those of the pool that it holds while the session is idle."""
        return ()

    # -- a step -----------------------------------------------------------------------------------------------------

    def stage(self, positions: Positions, generated: NDArray[np.bool_]) -> int:
        """Make room for consecutive positions; generated: [n], which of them the model generated.

        Returns until which position the part is neither asked to stage nor to commit generated tokens, one at a time:
        they change nothing but the tables of regions, and the pages that are open. The first position itself: each may
        change more. Raises InvariantViolated; RestorationFailed if entries that leave within the step cannot be
        archived.
        """
        return int(positions[0])

    def read(self, queries: StagedQueries, step: StepReads) -> int:
        """Set where K and V of the staged positions go, and how their queries read: by numbers, or by a view.

        Returns until which position numbers of generated tokens differ from one to the next as those of the first two
        do; the first position itself: they are always worked out.
        """
        return queries.first

    def commit(self, before: int, length: int, rejected: Positions) -> None:
        """The history, or its replay, went from `before` to `length`. Wipe `rejected`, which are in no table any more,
        and let leave what no query of a history of `length` reads.

        Raises RestorationFailed if entries that leave cannot be archived.
        """

    # -- as a whole -------------------------------------------------------------------------------------------------

    def copy_from(self, other: Self, length: int) -> None:
        """Copy what `other`, of the same strategy, would hold after a history of `length`, which is its own, or one to
        which it can rewind. Only while empty.

        Raises OSError if the second tier cannot store its part.
        """
        self.load(length, other.save(length))

    def save(self, length: int) -> Saved:
        """The state after a history of `length`, its own or one to which it can rewind, while idle: enough to continue
        bit for bit."""
        return {}

    def load(self, length: int, saved: Saved) -> None:
        """Restore what was saved after a history of `length`. Only while empty. Raises OSError."""

    def can_rewind(self, at: int, length: int) -> bool:
        """Is all there, while idle after a history of `length`, that would be there after its first `at` tokens?"""
        return False

    @abstractmethod
    def forget(self, at: int, length: int) -> None:
        """Go back to the state after the first `at` tokens of a history that reached `length`. Idle afterwards.

        at: one to which it can rewind; what other sessions read ends there; or 0, as an empty session.
        """

    @abstractmethod
    def release(self) -> None:
        """Give all memory back; a failure does not stop the rest. Called once."""

    # -- facts ------------------------------------------------------------------------------------------------------

    def report(self, held: Held, length: int, end: int) -> None:
        """Add what is in use after a history of `length`, staged positions up to `end` included, and what it counts."""
