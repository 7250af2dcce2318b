"""Whether an error means that there was no memory, whoever says so."""

from __future__ import annotations

import torch

# torch has a type for what its own allocator of a device refuses. That of the CPU, and a device's libraries that want
# memory beside it, are told by the text of a RuntimeError.
_SAYINGS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Of the error itself, or of what it was raised from."""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(saying in str(error) for saying in _SAYINGS):
            return True
        error = error.__cause__
    return False
