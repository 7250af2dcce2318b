"""Arrays of MLX as tensors of torch and back: the same bytes where possible, for a Mac's GPU shares the host's memory.

torch writes into shared memory only while MLX computes nothing that reads it: between steps, or after `mx.eval`.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import torch
from torch import Tensor

MLX_DTYPES = {torch.float32: mx.float32, torch.bfloat16: mx.bfloat16, torch.float16: mx.float16}


def as_torch(array: mx.array) -> Tensor:
    """The same memory as a tensor, which keeps it alive. Waits until it is computed; it must lie in one piece."""
    if array.dtype == mx.bfloat16:  # numpy has no such numbers
        return torch.from_numpy(np.array(mx.view(array, mx.uint16), copy=False).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array, copy=False))


def as_mlx(tensor: Tensor) -> mx.array:
    """A copy."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return mx.view(mx.array(tensor.view(torch.int16).numpy().view(np.uint16)), mx.bfloat16)
    return mx.array(tensor.numpy())
