"""Whether an error means that there was no memory, whoever says so."""

from __future__ import annotations

import torch

# torch has a type for devices only; its allocator for the CPU raises this in a RuntimeError.
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Of the error itself, or of what it was raised from."""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error):
            return True
        error = error.__cause__
    return False
