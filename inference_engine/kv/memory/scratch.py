"""Host memory for integers, reused by later steps: new memory would come from the system page by page."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
_MOST_KEPT = 2


class Scratch:
    """Safe from any thread."""

    def __init__(self) -> None:
        self._free: list[Numbers] = []

    def take(self, count: int, *, is_zeroed: bool = True) -> Numbers:
        """At least `count` numbers, the first `count` of them zeros unless they need not be."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(0, dtype=np.int64)
        if len(memory) < count:
            memory = np.zeros(count, dtype=np.int64)
        elif is_zeroed:
            memory[:count] = 0
        return memory

    def give_back(self, memory: Numbers) -> None:
        """It is used again: no view of it may be used any more."""
        if len(self._free) < _MOST_KEPT:
            self._free.append(memory)
