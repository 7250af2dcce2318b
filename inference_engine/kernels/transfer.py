"""Numbers of the host to a device."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """The numbers as a tensor there. The host goes on at once; a copy from ordinary memory to a GPU is waited for."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def ids_of_bits(packed: Tensor, vocab: int) -> Tensor:
    """Bool [n, V] of uint8 [n, at least ⌈V / 8⌉], a bit for each id, the lowest first."""
    return (packed[:, :, None] & _places(packed.device)).ne(0).flatten(1)[:, :vocab]


@lru_cache(maxsize=8)
def _places(device: torch.device) -> Tensor:
    return 1 << torch.arange(8, dtype=torch.uint8, device=device)
