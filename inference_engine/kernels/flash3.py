"""FlashAttention-3 of the package `fa3-fwd`: one operation for a chunk of any length over a history of any length.

It takes keys and values where they lie, their last dimension contiguous, and is for Hopper and bfloat16. Source: Shah
et al., FlashAttention-3, arXiv 2407.08608.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

_MODULE = "fa3_fwd_interface"
_HOPPER = (9, 0)  # compute capability
_SPLIT = 512  # queries, up to which a history is cut into parts, as many as fill the device


def why_absent(device: torch.device, dtype: torch.dtype) -> str:
    """Why it cannot be had on this GPU; nothing: it is installed. Imports nothing."""
    if torch.cuda.get_device_capability(device) != _HOPPER:
        return "it is for Hopper GPUs"
    if dtype != torch.bfloat16:
        return "it is for bfloat16"
    if find_spec(_MODULE) is None:
        return "the package fa3-fwd is not installed"
    return ""


def by_flash3(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """(out [T, Hq, D], lse [T, Hq]) of queries [T, Hq, D], keys and values [Hkv, S, D].

    is_causal: the queries stand at the last T of the S positions and see none behind their own; else each sees all.
    Raises what an import raises if the package does not fit this torch.
    """
    # The operation itself: its wrappers in Python take the host several times as long.
    out, lse, *_ = import_module(_MODULE).fa3_fwd_cuda.fwd(
        queries[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        softmax_scale=scaling,
        is_causal=is_causal,
        num_splits=0 if len(queries) <= _SPLIT else 1,
    )
    return out[0], lse[0].T
