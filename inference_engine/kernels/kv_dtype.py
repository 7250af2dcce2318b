"""The KV cache's dtype: K and V as they are kept, maybe in a smaller range than they are computed in."""

from __future__ import annotations

import torch
from torch import Tensor


def as_kept(states: Tensor, dtype: torch.dtype) -> Tensor:
    """`states`, ready to be copied to memory of `dtype`: what is too large for it is NaN.

    It would become infinite there, and an infinite key may just take its token out of a softmax, unnoticed. NaN reaches
    the logits of every token that reads the entry.
    """
    if dtype != torch.float16 or states.dtype == dtype:
        return states  # bfloat16 has the range of float32
    rounded = states.to(dtype)
    return rounded.masked_fill_(rounded.isinf(), float("nan"))
