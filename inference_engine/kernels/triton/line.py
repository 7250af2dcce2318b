"""Where the numbers of a query's line lie, for kernels: as the plain modules have them, which a test compares.

A name among a kernel's globals would be compared at each launch, and a module's attribute is no part of what a compiled
kernel is cached by. The text of a function that is called while compiling is.
"""

from __future__ import annotations

import triton


@triton.constexpr_function
def in_line(name):
    """Of a line of `kernels/ragged_attention.py`, whose first number is START."""
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
        "BLOCK": 9,
        "KEPT": 10,
        "LOCAL": 11,
        "BOUNDS": 12,
        "PREFIX_START": 13,
        "PREFIX_HEAD_SLOTS": 14,
        "BASE": 15,
        "CHOOSER": 13,
        "RECORD": 14,
        "OFFLOADED_END": 15,
    }[name]


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
