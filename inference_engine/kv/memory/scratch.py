"""Host memory for integers, reused by later steps: new memory would come from the system page by page."""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
_MOST_KEPT = 2


class Scratch:
    """Memory is reused after its holder is freed, so views of it must not outlive the holder. Safe from any thread."""

    def __init__(self) -> None:
        self._free: list[Numbers] = []

    def zeros(self, count: int, holder: object) -> Numbers:
        """`count` zeros, valid while `holder` exists."""
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
