"""The memory of a set of layers in the pool, held by the session it was reserved for and by forks that read it.

`nbytes` is what is granted for it: all of it, or, if memory is granted as the history grows, what its entries need.

It is released when the last holder releases it. Lent entries are not written any more: the session continues behind
them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from inference_engine.kv.memory.pool import Demand, Pool, Run


class Allocation:
    """Runs of the pool that `Pool.reserve` returned. Safe from any thread."""

    def __init__(self, pool: Pool, demands: Sequence[Demand], starts: Sequence[int], *, nbytes: int) -> None:
        self._pool = pool
        self._demands = tuple(demands)
        self.starts = tuple(starts)
        self.nbytes = nbytes
        self.lent_until = 0  # entries of positions below this one are lent, if any are
        self._borrowers = 0
        self._is_owned = True
        self._lock = threading.Lock()

    @staticmethod
    def reserve(pool: Pool, demands: Sequence[Demand], *, itemsize: int) -> Allocation | None:
        """None, and nothing taken, if the pool has no room."""
        starts = pool.reserve(demands)
        if starts is None:
            return None
        nbytes = allocation_bytes(demands, itemsize=itemsize) if pool.takes_grants else 0
        return Allocation(pool, demands, starts, nbytes=nbytes)

    @property
    def runs(self) -> list[Run]:
        return self._pool.runs(self._demands, self.starts)

    @property
    def is_lent(self) -> bool:
        return self._borrowers > 0

    def borrow(self, until: int) -> None:
        """Hold it, to read the entries of positions below `until`."""
        with self._lock:
            assert self._is_owned or self._borrowers
            self._borrowers += 1
            self.lent_until = max(self.lent_until, until)

    def give_back(self) -> None:
        """A borrower releases it."""
        with self._lock:
            self._borrowers -= 1
            assert self._borrowers >= 0
            is_over = not self._borrowers and not self._is_owned
        if is_over:
            self._end()

    def release(self) -> None:
        """The session that it was reserved for releases it."""
        with self._lock:
            assert self._is_owned, "released twice"
            self._is_owned = False
            is_over = not self._borrowers
        if is_over:
            self._end()

    def _end(self) -> None:
        self._pool.release(self._demands, self.starts)
        if not self._pool.takes_grants:
            self._pool.ungrant(self.nbytes)


def allocation_bytes(demands: Sequence[Demand], *, itemsize: int) -> int:
    return itemsize * sum(demand.elements for demand in demands)
