"""A set of layers' share of the pool, and who holds it: the session it was reserved for, and forks that read it.

`nbytes` is what is granted for it: all of it, or, of a session that is granted memory as it grows, what its rows need.

It goes back when the last of them lets go. What was lent is not written any more: the session goes on behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from inference_engine.kv.memory.pool import Demand, Pool


class Allocation:
    """Runs of the pool, as `Pool.reserve` answered them. Safe from any thread."""

    def __init__(self, pool: Pool, demands: Sequence[Demand], starts: Sequence[int], *, nbytes: int) -> None:
        self._pool = pool
        self._demands = tuple(demands)
        self.starts = tuple(starts)
        self.nbytes = nbytes
        self.lent_until = 0  # rows of positions below this one are lent, if any are
        self._borrowers = 0
        self._is_owned = True
        self._lock = threading.Lock()

    @staticmethod
    def reserve(pool: Pool, demands: Sequence[Demand], *, itemsize: int) -> Allocation | None:
        """None, and nothing taken, if there is no room."""
        starts = pool.reserve(demands)
        if starts is None:
            return None
        nbytes = allocation_bytes(demands, itemsize=itemsize) if pool.takes_grants else 0
        return Allocation(pool, demands, starts, nbytes=nbytes)

    @property
    def is_lent(self) -> bool:
        return self._borrowers > 0

    def borrow(self, until: int) -> None:
        """Hold it, to read the rows of positions below `until`."""
        with self._lock:
            assert self._is_owned or self._borrowers
            self._borrowers += 1
            self.lent_until = max(self.lent_until, until)

    def give_back(self) -> None:
        """One who borrowed it lets go."""
        with self._lock:
            self._borrowers -= 1
            assert self._borrowers >= 0
            is_over = not self._borrowers and not self._is_owned
        if is_over:
            self._end()

    def release(self) -> None:
        """The session it was reserved for lets go."""
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
    """Bytes of K and V together."""
    return 2 * itemsize * sum(demand.elements for demand in demands)
