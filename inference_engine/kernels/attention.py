"""Attention of one session's rows over the rows it holds.

    queries [T, Hq, D] · keys, values [Hkv, S, D] · mask [T, S] additive, or None when every query sees every key

Query heads come in groups of `Hq // Hkv` per KV head, as in grouped-query attention (Ainslie et al., arXiv
2305.13245). The group is folded into the query rows, so K and V are read once per KV head and no copy of them is made.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    head_sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention; returns [T, Hq, D] in the dtype of `queries`.

    mask: 0 where a query sees a key, -inf where not; every query must see at least one key.
    softcap: scores become softcap · tanh(scores / softcap) before the mask (Gemma 2).
    head_sinks: [Hq] logits that join each row's softmax and carry no value (gpt-oss).
    """
    rows, query_heads, head_dim = queries.shape
    kv_heads = keys.shape[0]
    group = query_heads // kv_heads
    folded = queries.transpose(0, 1).reshape(1, kv_heads, group * rows, head_dim)
    if mask is not None and group > 1:
        mask = mask.expand(group, *mask.shape).reshape(group * rows, -1)
    if softcap is None and head_sinks is None:
        out = F.scaled_dot_product_attention(folded, keys[None], values[None], attn_mask=mask, scale=scaling)
    else:
        out = _attend_spelled_out(folded, keys, values, mask, scaling, softcap, head_sinks)
    return out.reshape(query_heads, rows, head_dim).transpose(0, 1)


def _attend_spelled_out(
    folded: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    head_sinks: Tensor | None,
) -> Tensor:
    """The same in float32, score by score, for what the fused operation does not know."""
    scores = (folded @ keys.transpose(-1, -2)).float() * scaling  # [1, Hkv, group · T, S]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if head_sinks is not None:
        rows = folded.shape[2] * folded.shape[1] // head_sinks.numel()
        column = head_sinks.float().view(1, keys.shape[0], -1, 1).expand(-1, -1, -1, rows)
        scores = torch.cat([scores, column.reshape(1, keys.shape[0], -1, 1)], dim=-1)
    weights = scores.softmax(dim=-1)
    if head_sinks is not None:
        weights = weights[..., :-1]
    return weights.to(values.dtype) @ values
