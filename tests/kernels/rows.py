"""Keys and values as the pool has them: those of one entry of one KV head side by side."""

from __future__ import annotations

import torch
from torch import Tensor


def in_rows(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The same vectors [R, Dk] and [R, Dv], as two views of rows [R, Dk + Dv]."""
    rows, at = torch.cat((keys, values), dim=-1), keys.shape[-1]
    return rows[..., :at], rows[..., at:]
