"""Attention of one session's queries over its KV entries, grouped-query (GQA) or multi-head.

    queries [T, Hq, Dk] · keys [Hkv, S, Dk] · values [Hkv, S, Dv]
    mask [T, S] additive, or None when every query sees every key

Query heads come in groups of `Hq // Hkv` per KV head, as in grouped-query attention (Ainslie et al., arXiv
2305.13245). The group is folded into the query dimension, so K and V are read once per KV head, without a copy.
Where they are kept in another dtype than that of the queries, they are converted to it first.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_MOST_SCORES = 2**20  # at once, where the operation holds them: what a processor keeps beside it
_ROOM = 16  # a mask's rows are read by so many numbers at once, at most


class CausalAttention(Protocol):
    """As `attend_causal`."""

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
        head_sinks: Tensor | None = None,
    ) -> Tensor: ...


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
    """Softmax attention; returns [T, Hq, Dv] in the dtype of `queries`.

    mask: 0 where a query sees a key, -inf where not; every query must see at least one key.
    softcap: scores become softcap · tanh(scores / softcap) before the mask (Gemma 2).
    head_sinks: [Hq] logits that join each query's softmax and carry no value (gpt-oss).
    """
    keys, values = keys.to(queries.dtype), values.to(queries.dtype)
    query_count, query_heads, head_dim = queries.shape
    kv_heads = keys.shape[0]
    group = query_heads // kv_heads
    folded = queries.transpose(0, 1).reshape(1, kv_heads, group * query_count, head_dim)
    if mask is not None and group > 1:
        mask = mask.repeat(group, 1)
    if mask is not None and mask.is_cuda:
        mask = _with_room(mask)
    if softcap is None and head_sinks is None:
        out = F.scaled_dot_product_attention(folded, keys[None], values[None], attn_mask=mask, scale=scaling)
    else:
        out = _attend_spelled_out(folded, keys, values, mask, scaling, softcap, head_sinks)
    return out.reshape(query_heads, query_count, -1).transpose(0, 1)


def attend_causal(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    head_sinks: Tensor | None = None,
) -> Tensor:
    """As `attend`, where the queries stand at the last T of the S positions and see all up to their own.

    On a GPU no mask is made, so that it can use fused operations, and nothing after a query's own position is computed.
    """
    keys, values = keys.to(queries.dtype), values.to(queries.dtype)
    query_count, query_heads, head_dim = queries.shape
    kv_heads, count, _ = keys.shape
    if softcap is not None or head_sinks is not None:
        later = torch.ones(query_count, count, dtype=torch.bool, device=queries.device).triu_(count - query_count + 1)
        mask = torch.zeros(query_count, count, dtype=queries.dtype, device=queries.device).masked_fill_(
            later, float("-inf")
        )
        return attend(queries, keys, values, mask, scaling=scaling, softcap=softcap, head_sinks=head_sinks)
    if values.shape[2] != head_dim:
        return _attend_in_pieces(queries, keys, values, scaling)
    # KV heads are the batch, and the heads of a group read the same ones: a stride of 0 instead of a copy.
    group = query_heads // kv_heads
    grouped = queries.transpose(0, 1).reshape(kv_heads, group, query_count, head_dim)
    shared = (kv_heads, group, count, -1)
    out: Tensor = F.scaled_dot_product_attention(
        grouped,
        keys[:, None].expand(shared),
        values[:, None].expand(shared),
        attn_mask=_causal_mask(query_count, count, queries.device),
        is_causal=query_count == count,
        scale=scaling,
    )
    return out.permute(2, 0, 1, 3).reshape(query_count, query_heads, -1)


def _attend_in_pieces(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """As `attend_causal`, where values have another size than keys: no fused operation takes them, and what takes their
    place copies keys for each head of a group, and holds all scores."""
    (query_count, query_heads, _), count = queries.shape, keys.shape[1]
    piece = max(1, _MOST_SCORES // (query_heads * count))
    outs = []
    for first in range(0, query_count, piece):
        own = queries[first : first + piece]
        seen = count - query_count + first + len(own)
        mask = None
        if len(own) > 1:
            later = torch.ones(len(own), seen, dtype=torch.bool, device=queries.device).triu_(seen - len(own) + 1)
            mask = torch.zeros_like(later, dtype=queries.dtype).masked_fill_(later, float("-inf"))
        outs.append(attend(own, keys[:, :seen], values[:, :seen], mask, scaling=scaling))
    return torch.cat(outs)


def _causal_mask(queries: int, keys: int, device: torch.device) -> Tensor | None:
    """What the last `queries` of `keys` positions see; None for all of them, of which the operation knows it."""
    if queries == keys:
        return None
    if device.type == "cpu":
        return torch.ones(queries, keys, dtype=torch.bool).tril_(keys - queries)
    # Knows which fused operation sees what the mask would. It imports torch's compiler: 80 MB.
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(queries, keys)


def _with_room(mask: Tensor) -> Tensor:
    """Torch's and cuDNN's kernels read odd rows beyond their end; of the last one, that would be beyond the tensor."""
    keys = mask.shape[-1]
    return F.pad(mask, (0, -keys % _ROOM))[:, :keys] if keys % _ROOM else mask


def _attend_spelled_out(
    folded: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    head_sinks: Tensor | None,
) -> Tensor:
    """The same in float32, score by score, for options that the fused operation lacks."""
    scores = (folded @ keys.transpose(-1, -2)).float() * scaling  # [1, Hkv, group · T, S]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if head_sinks is not None:
        query_count = folded.shape[2] * folded.shape[1] // head_sinks.numel()
        column = head_sinks.float().view(1, keys.shape[0], -1, 1).expand(-1, -1, -1, query_count)
        scores = torch.cat([scores, column.reshape(1, keys.shape[0], -1, 1)], dim=-1)
    weights = scores.softmax(dim=-1)
    if head_sinks is not None:
        weights = weights[..., :-1]
    return weights.to(values.dtype) @ values
