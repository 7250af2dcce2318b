"""A token's heads, normed and rotated, to where a step's entries lie, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.fused import RowNorm
from inference_engine.kernels.triton.chained import chained


def place_heads(
    heads: Tensor,
    keys: Tensor,
    values: Tensor,
    writes: Tensor,
    *,
    query_heads: int,
    kv_heads: int,
    norms: tuple[RowNorm, RowNorm] | None = None,
    turn: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See `PlaceHeads`."""
    count, head_dim = len(heads), keys.shape[-1]
    queries = torch.empty((count, query_heads, head_dim), dtype=heads.dtype, device=heads.device)
    cos, sin = (heads, heads) if turn is None else turn
    _place_heads[(count, query_heads + 2 * kv_heads)](
        heads,
        keys,
        values,
        writes,
        queries,
        cos,
        sin,
        heads if norms is None else norms[0].weights,
        heads if norms is None else norms[1].weights,
        0.0 if norms is None else norms[0].epsilon,
        0.0 if norms is None else norms[1].epsilon,
        QUERY_HEADS=query_heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        HAS_NORMS=norms is not None,
        ADDS_ONE=norms is not None and norms[0].adds_one,
        HAS_TURN=turn is not None,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=1,
        **chained(heads.device),
    )
    return queries


@triton.jit
def _place_heads(
    p_heads,
    p_keys,
    p_values,
    p_writes,
    p_queries,
    p_cos,
    p_sin,
    p_query_norm,
    p_key_norm,
    query_epsilon,
    key_epsilon,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    HAS_TURN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    p_head = p_heads + (token * (QUERY_HEADS + 2 * KV_HEADS) + head) * D
    b_head = tl.load(p_head + o_d, mask=m_d, other=0.0).to(tl.float32)
    if head < QUERY_HEADS + KV_HEADS:
        o_other = tl.where(o_d < D // 2, o_d + D // 2, o_d - D // 2)
        b_other = tl.load(p_head + o_other, mask=m_d, other=0.0).to(tl.float32)
        if HAS_NORMS:
            epsilon = tl.where(head < QUERY_HEADS, query_epsilon, key_epsilon)
            b_scale = tl.rsqrt(tl.sum(b_head * b_head, axis=0) / D + epsilon)
            m_query = m_d & (head < QUERY_HEADS)
            m_key = m_d & (head >= QUERY_HEADS)
            b_factor = tl.load(p_query_norm + o_d, mask=m_query, other=0.0).to(tl.float32)
            b_factor += tl.load(p_key_norm + o_d, mask=m_key, other=0.0).to(tl.float32)
            b_other_factor = tl.load(p_query_norm + o_other, mask=m_query, other=0.0).to(tl.float32)
            b_other_factor += tl.load(p_key_norm + o_other, mask=m_key, other=0.0).to(tl.float32)
            if ADDS_ONE:
                b_factor += 1.0
                b_other_factor += 1.0
            b_head *= b_scale * b_factor
            b_other *= b_scale * b_other_factor
        if HAS_TURN:
            b_cos = tl.load(p_cos + token * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_sin = tl.load(p_sin + token * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_head = b_head * b_cos + tl.where(o_d < D // 2, -b_other, b_other) * b_sin
    if head < QUERY_HEADS:
        p_out = p_queries + (token * QUERY_HEADS + head) * D
        tl.store(p_out + o_d, b_head.to(p_queries.dtype.element_ty), mask=m_d)
    elif head < QUERY_HEADS + KV_HEADS:
        entry = tl.load(p_writes + token * KV_HEADS + head - QUERY_HEADS)
        tl.store(p_keys + entry * D + o_d, b_head.to(p_keys.dtype.element_ty), mask=m_d)
    else:
        entry = tl.load(p_writes + token * KV_HEADS + head - QUERY_HEADS - KV_HEADS)
        tl.store(p_values + entry * D + o_d, b_head.to(p_values.dtype.element_ty), mask=m_d)
