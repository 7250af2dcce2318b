"""Exact Top-K of each row of scores.

Order of values: NaN > inf > … > -inf, as `torch.topk` has it, so a NaN is chosen and shows, never dropped; -0 equals 0;
among equals the lowest index comes first. `topk_by_sorting` is the definition; `triton/topk.py` has the kernel.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

_FLOATS = {torch.int32: torch.float32, torch.int64: torch.float64}
_INFINITY = {torch.int32: 0x7F80_0000, torch.int64: 0x7FF0_0000_0000_0000}


class Largest(Protocol):
    """The k largest of each row, as `topk_by_sorting` finds them."""

    def __call__(self, scores: Tensor, k: int, *, candidates: Tensor | None = None) -> Tensor: ...


def topk_by_sorting(scores: Tensor, k: int, *, candidates: Tensor | None = None) -> Tensor:
    """The k largest of each row of `scores` [..., N]: their indices [..., min(k, N)] int64, ascending.

    candidates: [..., N] bool, broadcast over the rows; only these may be chosen. None: all. Where a row has fewer than
    k, -1 fills up the end. It sorts whole rows, which is fast where they are short, and never waits for a device.
    """
    shape, count = scores.shape[:-1], scores.shape[-1]
    if scores.numel() == 0:
        return torch.zeros((*shape, min(k, count)), dtype=torch.int64, device=scores.device)
    keys = _keys(scores, candidates)
    order = keys.sort(dim=-1, descending=True, stable=True)
    nothing = order.values[:, :k] == torch.iinfo(keys.dtype).min
    indices = order.indices[:, :k].masked_fill(nothing, count).sort(dim=-1).values
    return indices.masked_fill(indices == count, -1).view(*shape, min(k, count))


def _keys(scores: Tensor, candidates: Tensor | None) -> Tensor:
    """[R, N] integers in the order of the scores; the smallest integer of all is no candidate."""
    keys = _keys_of_values(scores, torch.int64 if scores.dtype == torch.float64 else torch.int32)
    if candidates is not None:
        keys = keys.masked_fill(~candidates, torch.iinfo(keys.dtype).min)
    return keys.expand(scores.shape).reshape(-1, scores.shape[-1])


def _keys_of_values(values: Tensor, dtype: torch.dtype) -> Tensor:
    """IEEE numbers as integers of the same order: a negative number's bits are turned round; NaN is next to inf."""
    floats = values.to(_FLOATS[dtype]) + 0.0  # -0 becomes 0
    return _turned(floats.view(dtype)).masked_fill(floats.isnan(), _INFINITY[dtype] + 1)


def _turned(bits: Tensor) -> Tensor:
    limits = torch.iinfo(bits.dtype)
    negative: Tensor = bits >> (limits.bits - 1)  # all ones
    return bits.bitwise_xor(negative & limits.max)
