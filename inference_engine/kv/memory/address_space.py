"""Address space for the KV cache on a host: far more of it than memory; pages become memory when entries are written.

Reserved without memory or swap behind it (`MAP_NORESERVE`). What is discarded reads as zeros again, and its pages go
back to the system.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

import numpy as np
import torch
from torch import Tensor

from inference_engine.errors import BackendError

_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0x40
_MADV_DONTNEED = 4
# The largest buffer. x86-64 and ARM give a process 128 TiB or more.
MOST_BYTES = 2**45

_libc = ctypes.CDLL(None, use_errno=True)


def reserve_zeros(count: int, dtype: torch.dtype, *, is_sparse: bool) -> Tensor:
    """`count` zeros. Raises BackendError if the system gives no such address space.

    is_sparse: only small parts of it may be written. Pages are small then: huge ones would take 2 MB for each region
    that a session begins to write. Otherwise pages are huge where the system has them, and attention is faster.
    """
    nbytes = count * dtype.itemsize
    try:
        space = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except (OSError, ValueError, OverflowError) as error:
        raise BackendError(
            f"the system gives this process no {nbytes} bytes of address space ({error}); a limit on virtual memory "
            "(ulimit -v, or vm.overcommit_memory=2) does that. Raise it, or start with --growth guaranteed, which "
            "takes no more of it than kv_bytes"
        ) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            space.madvise(mmap.MADV_NOHUGEPAGE if is_sparse else mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(space, dtype=np.uint8)).view(dtype)


def discard(states: Tensor) -> None:
    """Zero a contiguous part of what `reserve_zeros` gave. Whole pages go back to the system."""
    first, nbytes = states.data_ptr(), states.numel() * states.itemsize
    page = mmap.PAGESIZE
    start, end = -(-first // page) * page, (first + nbytes) // page * page
    if sys.platform != "linux" or end <= start:  # elsewhere the same advice need not zero
        states.zero_()
        return
    flat = states.view(torch.uint8)
    flat[: start - first].zero_()
    flat[end - first :].zero_()
    if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED):
        states.zero_()
