"""Damage in a write-ahead log, distinguished from a torn end.

SQLite reads its log up to the first frame whose checksum is wrong, and takes the rest for what a crash left half
written. One flipped bit therefore ends the log early without a word, and what was sent to clients is gone. A torn end
is the last commit, and no other: where two commits of the same log or more follow the first wrong frame, or the header
is wrong with commits behind it, the log was damaged. So it was where a frame is right but for the numbers that say
which log it is of. (Any other damage of the last commit cannot be distinguished from a torn end.)
Format: https://www.sqlite.org/fileformat2.html#walformat
"""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_HEADER, _FRAME = 32, 24
_MAGIC = 0x377F0682  # and one more: checksums of big-endian numbers


def find_damage(path: Path) -> int | None:
    """The offset of the first wrong byte range of a log that is damaged; None: it is whole, torn at its end, or not
    there."""
    if not path.exists():
        return None
    log = path.read_bytes()
    if len(log) < _HEADER:
        return None
    magic, _, page_bytes, _, *salts = struct.unpack(">6I", log[:24])
    order = ">" if magic & 1 else "<"
    running = _checksum(order, log[:24], (0, 0))
    if magic | 1 != _MAGIC | 1 or running != struct.unpack(">2I", log[24:32]):
        # Nothing behind it can be trusted; a log that was never synced has no commits behind it either.
        return 0 if len(log) > _HEADER + _FRAME else None
    wrong_at, commits_behind = None, 0
    for at in range(_HEADER, len(log) - _FRAME - page_bytes + 1, _FRAME + page_bytes):
        _, size, *found, first, second = struct.unpack(">6I", log[at : at + _FRAME])
        if wrong_at is None:
            page = log[at + _FRAME : at + _FRAME + page_bytes]
            running = _checksum(order, page, _checksum(order, log[at : at + 8], running))
            if running != (first, second):
                wrong_at = at
            elif found != salts:  # a frame of an older log would have another checksum
                return at
        if wrong_at is not None and found == salts and size:
            commits_behind += 1
    return wrong_at if commits_behind >= 2 else None


def _checksum(order: str, data: bytes, start: tuple[int, int]) -> tuple[int, int]:
    """SQLite's checksum: `low += first + high; high += second + low` over pairs of numbers, of 32 bits.

    It is linear, so that a whole page is a product with weights that depend on its length only.
    """
    weights, of_start = _weights(len(data) // 8)
    words = np.frombuffer(data, dtype=f"{order}u4").astype(np.uint32)
    low, high = weights @ words + of_start @ np.array(start, dtype=np.uint32)
    return int(low), int(high)


@lru_cache(8)
def _weights(pairs: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """What each word adds to low and high [2, 2·pairs], and what the two were before [2, 2]."""
    weights, step = np.empty((2, 2 * pairs), dtype=np.uint32), np.array([[1, 1], [1, 2]], dtype=np.uint32)
    power = np.eye(2, dtype=np.uint32)
    for pair in reversed(range(pairs)):
        weights[:, 2 * pair : 2 * pair + 2] = power @ np.array([[1, 0], [1, 1]], dtype=np.uint32)
        power = power @ step
    return weights, power
