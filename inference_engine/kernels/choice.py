"""Which operations a device has that are faster than plain torch."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

from inference_engine.errors import BackendError
from inference_engine.kernels import noise
from inference_engine.kernels.lane_attention import LaneAttention
from inference_engine.kernels.noise import NoiseOfAll
from inference_engine.kernels.trellis import PLAIN, Trellis


def open_lane_attention(choice: str, device: torch.device) -> LaneAttention | None:
    """The kernel for `device`; None where rows are attended to session by session (`plain`, and `auto` off a GPU).

    Raises BackendError if `triton` is asked for and cannot be had.
    """
    kernels = _kernels("lane_attention", choice, device)
    if kernels is None:
        return None
    opened: LaneAttention = kernels.attend_lanes
    return opened


def open_noise(choice: str, device: torch.device) -> NoiseOfAll:
    """The kernel for `device`, or plain torch's where `open_lane_attention` has none. Raises what that raises."""
    kernels = _kernels("noise", choice, device)
    if kernels is None:
        return noise.noise_of_all
    opened: NoiseOfAll = kernels.noise_of_all
    return opened


def open_trellis(choice: str, device: torch.device) -> Trellis:
    """As `open_noise`."""
    kernels = _kernels("trellis", choice, device)
    return PLAIN if kernels is None else Trellis(kernels.choose, kernels.levels_of)


def _kernels(name: str, choice: str, device: torch.device) -> ModuleType | None:
    """The module of Triton's of that name, or None for plain torch."""
    if choice == "plain" or (choice == "auto" and device.type != "cuda"):
        return None
    try:
        return import_module(f"inference_engine.kernels.triton.{name}")
    except ImportError as error:
        raise BackendError(
            f"kernels={choice} on {device} needs the package triton, which cannot be imported ({error}); "
            "install it, or start with kernels=plain"
        ) from error
