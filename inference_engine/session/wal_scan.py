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
_SUMMED = 8  # bytes of a frame's head that its checksum is of
_MAGIC = 0x377F0682  # and one more: checksums of big-endian numbers


def find_damage(path: Path) -> int | None:
    """The offset of the first wrong byte range of a log that is damaged; None: it is whole, torn at its end, or not
    there."""
    if not path.exists():
        return None
    log = path.read_bytes()
    if len(log) < _HEADER:
        return None
    magic, _, page_bytes, _, *salts = (int(word) for word in struct.unpack(">6I", log[:24]))
    order = ">" if magic & 1 else "<"
    running = _checksum(order, log[:24], (0, 0))
    if magic | 1 != _MAGIC | 1 or running != struct.unpack(">2I", log[24:32]):
        # Nothing behind it can be trusted; a log that was never synced has no commits behind it either.
        return 0 if len(log) > _HEADER + _FRAME else None
    frame_bytes: int = _FRAME + page_bytes
    count = (len(log) - _HEADER) // frame_bytes
    frames = np.frombuffer(log, dtype=np.uint8, count=count * frame_bytes, offset=_HEADER).reshape(count, frame_bytes)
    heads: list[list[int]] = np.ascontiguousarray(frames[:, :_FRAME]).view(">u4").tolist()
    weights, of_start = _weights((_SUMMED + page_bytes) // 8)
    # A frame's checksum is of the start of its head, and of its page.
    left_out = np.zeros((2, (_FRAME - _SUMMED) // 4), dtype=np.uint32)
    weights = np.concatenate((weights[:, : _SUMMED // 4], left_out, weights[:, _SUMMED // 4 :]), axis=1)
    added: list[list[int]] = _added(order, frames, weights).tolist()
    wrong_at: int | None = None
    commits_behind = 0
    for number, ((_, size, *found, first, second), sums) in enumerate(zip(heads, added, strict=True)):
        if wrong_at is None:
            running = _after(of_start, running, sums)
            if running != (first, second):
                wrong_at = _HEADER + number * frame_bytes
            elif found != salts:  # a frame of an older log would have another checksum
                return _HEADER + number * frame_bytes
        if wrong_at is not None and found == salts and size:
            commits_behind += 1
    return wrong_at if commits_behind >= 2 else None


def _checksum(order: str, data: bytes, start: tuple[int, int]) -> tuple[int, int]:
    """SQLite's checksum: `low += first + high; high += second + low` over pairs of numbers, of 32 bits.

    It is linear, so that a whole page is a product with weights that depend on its length only.
    """
    weights, of_start = _weights(len(data) // 8)
    (sums,) = _added(order, np.frombuffer(data, dtype=np.uint8)[None], weights).tolist()
    return _after(of_start, start, sums)


def _added(order: str, rows: NDArray[np.uint8], weights: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """What each row of bytes [N, B] adds to low and high [N, 2], with the weights of its words [2, B / 4]."""
    words = rows.view(f"{order}u4").astype(np.uint32, copy=False)
    found: NDArray[np.uint32] = np.einsum("nw,sw->ns", words, weights)
    return found


def _after(of_start: NDArray[np.uint32], start: tuple[int, int], added: list[int]) -> tuple[int, int]:
    (low_low, low_high), (high_low, high_high) = of_start.tolist()
    low, high = start
    return (
        (low_low * low + low_high * high + added[0]) & 0xFFFFFFFF,
        (high_low * low + high_high * high + added[1]) & 0xFFFFFFFF,
    )


@lru_cache(8)
def _weights(pairs: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """What each word adds to low and high [2, 2·pairs], and what the two were before [2, 2]."""
    weights, step = np.empty((2, 2 * pairs), dtype=np.uint32), np.array([[1, 1], [1, 2]], dtype=np.uint32)
    power = np.eye(2, dtype=np.uint32)
    for pair in reversed(range(pairs)):
        weights[:, 2 * pair : 2 * pair + 2] = power @ np.array([[1, 0], [1, 1]], dtype=np.uint32)
        power = power @ step
    return weights, power
