"""Host memory for whole numbers, used again by later steps: new memory is got from the system page by page."""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
_MOST_KEPT = 2


class Scratch:
    """Memory goes back when its holder goes. Nobody may look at it after that. Safe from any thread."""

    def __init__(self) -> None:
        self._free: list[Numbers] = []

    def zeros(self, count: int, holder: object) -> Numbers:
        """So many zeros, for as long as there is a `holder`."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(0, dtype=np.int64)
        if len(memory) < count:
            memory = np.zeros(count, dtype=np.int64)
        else:
            memory[:count] = 0
        weakref.finalize(holder, self._give_back, memory).atexit = False
        return memory[:count]

    def _give_back(self, memory: Numbers) -> None:
        if len(self._free) < _MOST_KEPT:
            self._free.append(memory)
