"""Scales in sixteen bits that neither overflow nor vanish.

A half-precision number ends at 65,504. These have the exponent of a float32 and its leading bits: nine of them (the
sign is known and not stored), or eight where the sign is needed (then it is a bfloat16). A scale is at most 2^-9, or
2^-8, of itself away from what was asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inference_engine.kv.compressors.bits import pack, unpack

SCALE_BYTES = 2


def round_scales(scales: Tensor, *, is_signed: bool = False) -> Tensor:
    """float32 -> float32, what `load_scales(store_scales(…))` gives."""
    shift = _dropped_bits(is_signed)
    return ((_rounded_bits(scales, shift) >> shift) << shift).view(torch.float32)


def store_scales(scales: Tensor, *, is_signed: bool = False) -> Tensor:
    """float32 [G, N], not negative unless `is_signed` -> uint8 [2 G, N]."""
    shift = _dropped_bits(is_signed)
    return pack(_rounded_bits(scales, shift) >> shift, 16)


def load_scales(stored: Tensor, count: int, *, is_signed: bool = False) -> Tensor:
    """uint8 [2 count, N] -> float32 [count, N]."""
    bits = unpack(stored, count, 16) << _dropped_bits(is_signed)
    return bits.to(torch.int32).view(torch.float32)


def _dropped_bits(is_signed: bool) -> int:
    return 16 if is_signed else 15


def _rounded_bits(scales: Tensor, dropped: int) -> Tensor:
    return scales.view(torch.int32) + (1 << (dropped - 1))
