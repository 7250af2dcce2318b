"""Damage in a write-ahead log, told from a torn end.

SQLite reads its log up to the first frame whose checksum is wrong, and takes the rest for what a crash left half
written. One flipped bit therefore ends the log early without a word, and what was told is gone. A torn end is the last
commit, and no other: where two commits of the same log or more follow the first wrong frame, or the header is wrong
with commits behind it, the log was damaged. (One damaged frame in the last commit cannot be told from a torn end.)
Format: https://www.sqlite.org/fileformat2.html#walformat
"""

from __future__ import annotations

import struct
from pathlib import Path

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
            if found != salts or running != (first, second):
                wrong_at = at
        if wrong_at is not None and found == salts and size:
            commits_behind += 1
    return wrong_at if commits_behind >= 2 else None


def _checksum(order: str, data: bytes, start: tuple[int, int]) -> tuple[int, int]:
    low, high = start
    for first, second in struct.iter_unpack(f"{order}2I", data):
        low = (low + first + high) & 0xFFFFFFFF
        high = (high + second + low) & 0xFFFFFFFF
    return low, high
