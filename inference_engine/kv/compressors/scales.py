"""Scales in sixteen bits that neither overflow nor vanish.

A half-precision number ends at 65,504. These have the exponent of a float32 and its nine leading bits; none is
negative, so no sign is stored. A scale is at most 2^-9 of itself away from what was asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inference_engine.kv.compressors.bits import pack, unpack

SCALE_BYTES = 2
_DROPPED = 15  # bits of a float32: those behind its nine leading ones


def round_scales(scales: Tensor) -> Tensor:
    """float32 -> float32, what `load_scales(store_scales(…))` gives."""
    return (_rounded_bits(scales) << _DROPPED).view(torch.float32)


def store_scales(scales: Tensor) -> Tensor:
    """float32 [G, N], not negative -> uint8 [2 G, N]."""
    return pack(_rounded_bits(scales), 16)


def load_scales(stored: Tensor, count: int) -> Tensor:
    """uint8 [2 count, N] -> float32 [count, N]."""
    return (unpack(stored, count, 16) << _DROPPED).to(torch.int32).view(torch.float32)


def _rounded_bits(scales: Tensor) -> Tensor:
    return (scales.view(torch.int32) + (1 << (_DROPPED - 1))) >> _DROPPED
