"""Numbers of the host to a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """The numbers as a tensor there. The host goes on at once; a copy from ordinary memory to a GPU is waited for."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
