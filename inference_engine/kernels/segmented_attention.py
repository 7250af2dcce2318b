"""Segmented attention: one session's queries over entries in several places, under one softmax.

    queries [T, Hq, D] · parts, each keys and values [Hkv, S, D] and a mask [T, S] or None

The result is that of `attend` over the concatenated parts, but no part is copied: only scores are concatenated. For few
queries this takes a fraction of the operations of merging states (`kernels/merge.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class AttentionSegment(NamedTuple):
    """mask: additive, -inf where a query does not see a key; None where each of them sees each."""

    keys: Tensor
    values: Tensor
    mask: Tensor | None = None


def attend_parts(
    queries: Tensor,
    parts: Sequence[AttentionSegment],
    *,
    scaling: float,
    softcap: float | None = None,
    head_sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention over all parts; [T, Hq, D] in float32, in which everything is computed, or in float64 if the
    queries are.

    softcap, head_sinks: as in `attend`. Every query must see a key.
    """
    query_count, query_heads, head_dim = queries.shape
    kv_heads, dtype = parts[0].keys.shape[0], torch.promote_types(queries.dtype, torch.float32)
    folded = queries.transpose(0, 1).reshape(kv_heads, -1, head_dim).to(dtype) * scaling  # [Hkv, group · T, D]
    scores = [_scores(folded, part, query_count, softcap) for part in parts]
    if head_sinks is not None:
        column = head_sinks.to(dtype).view(kv_heads, -1, 1).expand(-1, -1, query_count)
        scores.append(column.reshape(kv_heads, -1, 1))
    weights = (torch.cat(scores, dim=-1) if len(scores) > 1 else scores[0]).softmax(dim=-1)
    shares = torch.split(weights, [part.shape[-1] for part in scores], dim=-1)
    out: Tensor = shares[0] @ parts[0].values.to(dtype)
    for part, share in zip(parts[1:], shares[1:], strict=False):
        out = torch.baddbmm(out, share, part.values.to(dtype))
    return out.reshape(query_heads, query_count, -1).transpose(0, 1)


def _scores(folded: Tensor, part: AttentionSegment, query_count: int, softcap: float | None) -> Tensor:
    """[Hkv, group · T, S]"""
    scores = folded @ part.keys.to(folded.dtype).transpose(-1, -2)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if part.mask is not None:
        scores.view(scores.shape[0], -1, query_count, scores.shape[-1]).add_(part.mask)
    return scores
