"""Which operations a device has that are faster than plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inference_engine.errors import BackendError
from inference_engine.kernels.lane_attention import LaneAttention


def open_lane_attention(choice: str, device: torch.device) -> LaneAttention | None:
    """The kernel for `device`; None where rows are attended to session by session (`plain`, and `auto` off a GPU).

    Raises BackendError if `triton` is asked for and cannot be had.
    """
    if choice == "plain" or (choice == "auto" and device.type != "cuda"):
        return None
    try:
        from inference_engine.kernels.triton import lane_attention
    except ImportError as error:
        raise BackendError(
            f"kernels={choice} on {device} needs the package triton, which cannot be imported ({error}); "
            "install it, or start with kernels=plain"
        ) from error
    opened: Callable[..., Tensor] = lane_attention.attend_lanes
    return opened
