"""Leaving aside, from the garbage collector, what was there before a test."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def left_aside() -> Iterator[None]:
    """What was there before is left aside within: looking through it takes longer than all else."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # `tests/conftest.py` wants it so: no collection looks through what was imported
