"""Attention with its log-sum-exp: attention over parts of the entries is merged into attention over all of them.

    state of a set of entries = (out, lse)     out = Σ softmax(s)_i · v_i,   lse = ln Σ exp(s_i),   s = a query's scores

    merge(state of A, state of B) = state of A ∪ B, for disjoint A and B, in any order and any grouping

The state of no entries is (0, -inf), and merging it changes nothing, to the bit. All arithmetic is in float32, except
that a GPU's fused operation rounds each out to the dtype of the keys; with scores of size m an lse is exact to about
1e-7 · m, and the weights of a merge as well. Source: Milakov and Gimelshein, Online normalizer calculation for softmax,
arXiv 1805.02867.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


def attend_state(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the entries that a query sees: (out [T, Hq, D], lse [T, Hq]), both float32.

    queries: [T, Hq, D] · keys, values: [Hkv, S, D], S may be 0.
    mask: additive, [T, S], or [T, Hq, S] when heads see different entries; None when every query sees every key.
    softcap: as in `attend`.
    A query that sees no key has out 0 and lse -inf.
    """
    if mask is None and softcap is None and _is_fused(queries, keys):
        return _attend_fused(queries, keys, values, scaling)
    scores = attention_scores(queries, keys, scaling=scaling, softcap=softcap)
    if mask is not None:
        scores = scores + (mask if mask.ndim == scores.ndim else mask[:, None])
    return reduce_scores(scores, values)


def attend_causal_state(
    queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """`attend_state`, where the queries stand at the last T of the keys' S positions and see none behind their own.

    On a GPU in half precision, out has the dtype of the keys.
    """
    count, length = len(queries), keys.shape[1]
    if softcap is None and queries.dtype in (torch.float16, torch.bfloat16) and _is_fused(queries, keys):
        return by_flash(queries.transpose(0, 1)[None], keys[None], values[None], scaling, is_causal=True)
    last = torch.arange(length - count, length, device=keys.device)
    is_behind = torch.arange(length, device=keys.device) > last[:, None]
    mask = torch.zeros(is_behind.shape, device=keys.device).masked_fill_(is_behind, float("-inf"))
    return attend_state(queries, keys, values, mask, scaling=scaling, softcap=softcap)


def by_flash(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """`attend_causal_state` by torch's operation, of queries [1, Hq, T, D], keys and values [1, Hkv, S, D] on a GPU.

    is_causal: else every query sees every key.
    """
    group, (_, kv_heads, count, head_dim) = queries.shape[1] // keys.shape[1], keys.shape
    shared = (kv_heads, group, count, head_dim)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        queries.reshape(kv_heads, group, -1, head_dim),
        keys[0, :, None].expand(shared),
        values[0, :, None].expand(shared),
        0.0,
        is_causal,
        scale=scaling,
    )
    return out.flatten(0, 1).transpose(0, 1), lse.reshape(queries.shape[1], queries.shape[2]).T


class MergingStates(Protocol):
    """The state of some entries, to which those of others are added. The first one must cover at least one entry."""

    def __init__(self, out: Tensor, lse: Tensor) -> None: ...

    def add(self, out: Tensor, lse: Tensor) -> None: ...

    def state(self) -> tuple[Tensor, Tensor]:
        """The state of all entries so far, float32."""


class Merging:
    """States merged in half the operations of `merge_states`: they are divided by their weights in the end."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self._sum, self._top, self._weight = out, lse, torch.ones_like(lse)

    def add(self, out: Tensor, lse: Tensor) -> None:
        top = torch.maximum(self._top, lse)
        before, fresh = torch.exp(self._top - top), torch.exp(lse - top)
        self._sum = torch.addcmul(out * fresh[..., None], self._sum, before[..., None])
        self._weight = torch.addcmul(fresh, self._weight, before)
        self._top = top

    def state(self) -> tuple[Tensor, Tensor]:
        """See `MergingStates`."""
        return self._sum / self._weight[..., None], self._top + torch.log(self._weight)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of entries into attention over their union.

    out_* [..., D], lse_* [...], float32; returns (out, lse) of the same shapes.
    A side without entries has lse -inf and does not contribute; if both are empty, out is 0 and lse is -inf.
    """
    top = _finite(torch.maximum(lse_a, lse_b))
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = weight_a + weight_b
    out = weight_a[..., None] * out_a + weight_b[..., None] * out_b
    return out / total.masked_fill(total == 0, 1)[..., None], top + torch.log(total)


def with_head_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Let one logit per head, which carries no value, join each query's softmax (gpt-oss).

    out [T, Hq, D] or [Hq, D], lse without D, sinks [Hq]. A sink counts once: fold it into the whole, never into parts
    that are merged later.
    """
    return merge_states(out, lse, torch.zeros_like(out), sinks.float().expand_as(lse))


def attention_scores(queries: Tensor, keys: Tensor, *, scaling: float, softcap: float | None = None) -> Tensor:
    """Scores [T, Hq, S] in float32 of queries [T, Hq, D] against keys [Hkv, S, D], before any mask."""
    query_count, query_heads, head_dim = queries.shape
    kv_heads, count = keys.shape[:2]
    folded = queries.transpose(0, 1).reshape(kv_heads, -1, head_dim)  # [Hkv, group · T, D]
    scores = folded.float() @ keys.float().transpose(-1, -2) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return scores.reshape(query_heads, query_count, count).transpose(0, 1)


def reduce_scores(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of scores [T, Hq, S], -inf where unseen, over values [Hkv, S, D]: (out [T, Hq, D], lse [T, Hq])."""
    query_count, query_heads, count = scores.shape
    kv_heads, _, head_dim = values.shape
    lse = torch.logsumexp(scores, dim=-1)
    # A softmax over nothing is 0/0. Only that is set to 0: a NaN from elsewhere stays visible.
    weights = scores.softmax(dim=-1).masked_fill(lse.isneginf()[..., None], 0)
    folded = weights.transpose(0, 1).reshape(kv_heads, query_heads // kv_heads * query_count, count)
    out = (folded @ values.float()).reshape(query_heads, query_count, head_dim)
    return out.transpose(0, 1), lse


def _is_fused(queries: Tensor, keys: Tensor) -> bool:
    """Is there one operation that gives out and lse? Those of torch take half precision, or float32 in another one."""
    head_dim = queries.shape[-1]
    is_fitting = queries.dtype == keys.dtype and head_dim % 8 == 0 and head_dim <= 256
    return queries.is_cuda and is_fitting and keys.shape[1] > 0


def _attend_fused(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    query_count, query_heads, head_dim = queries.shape
    kv_heads = keys.shape[0]
    folded = queries.transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
    if queries.dtype == torch.float32:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            folded, keys[None], values[None], None, True, scale=scaling
        )
        lse = lse[..., : folded.shape[2]]  # rounded up to whole blocks
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            folded, keys[None], values[None], scale=scaling
        )
    by_head = out.reshape(query_heads, query_count, head_dim), lse.reshape(query_heads, query_count)
    return by_head[0].transpose(0, 1).float(), by_head[1].transpose(0, 1).float()


def _finite(lse: Tensor) -> Tensor:
    """0 in the place of -inf, so that -inf can be subtracted from without becoming NaN."""
    return lse.masked_fill(lse.isneginf(), 0)
