"""Memory for packed weights: the tiles of a model's matrices lie behind each other, in the order of their use.

A decode step reads all of it once, so what it waits for is memory. Pages are huge where the system has them: a
processor's prefetcher stops where a page ends, and small pages are looked up often.
"""

from __future__ import annotations

import contextlib
import mmap
import sys

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 64  # a cache line, and the widest vector
_HUGE_PAGE = 2 * 2**20
_PIECE = 16 * _HUGE_PAGE  # what has not been written to takes no memory
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0x40


class TileMemory:
    """Hands out parts of large pieces; a piece is freed with the last array in it."""

    def __init__(self) -> None:
        self._left: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def take(self, count: int) -> NDArray[np.uint8]:
        """`count` bytes of zeros that begin at a cache line. Raises MemoryError."""
        if count > len(self._left):
            self._left = _piece(max(count, _PIECE))
        found, self._left = self._left[:count], self._left[-(-count // _ALIGNMENT) * _ALIGNMENT :]
        return found


def _piece(count: int) -> NDArray[np.uint8]:
    """`count` bytes at least, up to the end of a huge page, from the beginning of one on."""
    nbytes = -(-count // _HUGE_PAGE) * _HUGE_PAGE
    try:
        space = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"the system gives this process no {nbytes} bytes for the weights ({error})") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            space.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(space, np.uint8)
    first = -memory.ctypes.data % _HUGE_PAGE
    return memory[first : first + nbytes]
