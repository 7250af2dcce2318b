"""Where the numbers of a query's line lie, for kernels: as the plain modules have them, which a test compares.

A name among a kernel's globals would be compared at each launch, and a module's attribute is no part of what a compiled
kernel is cached by. The text of a function that is called while compiling is.
"""

from __future__ import annotations

import triton


@triton.constexpr_function
def in_line(name):
    """Of a line of `kernels/reads.py`: those of its header, then those of the records that kernels here serve."""
    return {
        "START": 0,
        "HEAD_SLOTS": 1,
        "COUNT": 2,
        "SINK": 3,
        "RING": 4,
        "LAST": 5,
        "UPTO": 6,
        "FLOOR": 7,
        "SINK_FLOOR": 8,
        "KIND": 9,
        "PREFIX_START": 10,
        "PREFIX_HEAD_SLOTS": 11,
        "BASE": 12,
        "KEPT": 13,
        "LOCAL": 14,
        "BLOCK": 15,
        "BOUNDS": 16,
        "PLACES": 17,
        "OFFLOADED_END": 18,
        "SHAPE": 15,
        "INDEX": 16,
    }[name]


@triton.constexpr_function
def number_of(record):
    """What is in KIND of lines that read so."""
    return {"RegionRead": 0, "BlockRead": 1, "OffloadedBlockRead": 2, "TokenRead": 3}[record]


@triton.constexpr_function
def in_record(name):
    """Of a line of `kernels/offloaded.py`, whose first number is TABLE."""
    return {
        "TABLE": 0,
        "CHUNK_TOKENS": 1,
        "LAYER_BYTES": 2,
        "PLACES": 3,
        "PLACE_COUNT": 4,
        "FETCHED_FROM": 5,
        "COUNTS": 6,
    }[name]
