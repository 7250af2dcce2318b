"""A token's heads, normed and rotated, to where a step's entries lie, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.fused import RopeTable, RowNorm
from inference_engine.kernels.triton.dependent_launch import chained

_FEW = 64  # tokens of a step, up to which each has programs of its own
_TOKENS = 16  # of a program, where there are more


def place_heads(
    heads: Tensor,
    keys: Tensor,
    values: Tensor,
    writes: Tensor,
    *,
    query_heads: int,
    kv_heads: int,
    norms: tuple[RowNorm, RowNorm] | None = None,
    turn: RopeTable | None = None,
    value_epsilon: float | None = None,
    values_are_keys: bool = False,
    shared: tuple[int, ...] = (),
) -> Tensor:
    """See `PlaceHeads`."""
    count, head_dim = len(heads), keys.shape[-1]
    assert keys.stride() == values.stride()
    turned = (head_dim - len(shared)) // 2
    assert not shared or shared == tuple(each for each in range(head_dim) if each % (head_dim // 2) >= turned), shared
    queries = torch.empty((count, query_heads, head_dim), dtype=heads.dtype, device=heads.device)
    cos, sin = (heads, heads) if turn is None else (turn.cos, turn.sin)
    rows = writes if turn is None or turn.rows is None else turn.rows
    # The norm of a head is summed in one order for any number of tokens; without norms several share a program.
    tokens = _TOKENS if count > _FEW and norms is None and value_epsilon is None else 1
    _place_heads[(triton.cdiv(count, tokens), query_heads + 2 * kv_heads)](
        heads,
        keys,
        values,
        writes,
        queries,
        cos,
        sin,
        rows,
        heads if norms is None else norms[0].weights,
        heads if norms is None else norms[1].weights,
        0.0 if norms is None else norms[0].epsilon,
        0.0 if norms is None else norms[1].epsilon,
        value_epsilon or 0.0,
        count,
        TOKENS=tokens,
        QUERY_HEADS=query_heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        TURNED=head_dim if turn is None else 2 * turn.cos.shape[1],
        ROW=keys.stride(0),
        HAS_NORMS=norms is not None,
        ADDS_ONE=norms is not None and norms[0].adds_one,
        NORMS_VALUES=value_epsilon is not None,
        VALUES_ARE_KEYS=values_are_keys,
        SHARED=len(shared),
        HAS_TURN=turn is not None,
        HAS_ROWS=turn is not None and turn.rows is not None,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=1 if tokens == 1 else 4,
        **chained(heads.device),
    )
    return queries


@triton.jit(do_not_specialize=["tokens"])
def _place_heads(
    p_heads,
    p_keys,
    p_values,
    p_writes,
    p_queries,
    p_cos,
    p_sin,
    p_rows,
    p_query_norm,
    p_key_norm,
    query_epsilon,
    key_epsilon,
    value_epsilon,
    tokens,
    TOKENS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    TURNED: tl.constexpr,
    ROW: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_TURN: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHAINED: tl.constexpr,
):
    o_token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    m_token = o_token < tokens
    head = tl.program_id(1)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    m_tile = m_token[:, None] & m_d[None, :]
    o_other = tl.where(o_d < TURNED // 2, o_d + TURNED // 2, o_d - TURNED // 2)
    o_other = tl.where(o_d < TURNED, o_other, o_d)
    # What no kernel of the chain writes is on its way while the one before ends.
    is_moved = head < QUERY_HEADS + KV_HEADS
    given = head
    GIVEN: tl.constexpr = QUERY_HEADS + (KV_HEADS if VALUES_ARE_KEYS else 2 * KV_HEADS)
    if VALUES_ARE_KEYS:
        given = tl.where(is_moved, head, head - KV_HEADS)
    p_head = p_heads + (o_token * GIVEN + given)[:, None] * D
    b_cos = tl.zeros((TOKENS, BLOCK_D), dtype=tl.float32)
    b_sin = b_cos
    if HAS_TURN:
        o_row = o_token
        if HAS_ROWS:
            o_row = tl.load(p_rows + o_token, mask=m_token, other=0)
        m_turn = m_tile & is_moved & (o_d < TURNED)[None, :]
        o_turn = o_row[:, None] * (TURNED // 2) + (o_d % (TURNED // 2))[None, :]
        b_cos = tl.load(p_cos + o_turn, mask=m_turn, other=0.0).to(tl.float32)
        b_sin = tl.load(p_sin + o_turn, mask=m_turn, other=0.0).to(tl.float32)
        b_cos = tl.where(o_d < TURNED, b_cos, 1.0)
    kv_head = tl.where(is_moved, head - QUERY_HEADS, head - QUERY_HEADS - KV_HEADS)
    b_entry = tl.load(p_writes + o_token * KV_HEADS + kv_head, mask=m_token & (head >= QUERY_HEADS), other=0)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    b_head = tl.load(p_head + o_d[None, :], mask=m_tile, other=0.0).to(tl.float32)
    if is_moved:
        b_other = tl.load(p_head + o_other[None, :], mask=m_tile, other=0.0).to(tl.float32)
        if HAS_NORMS:
            epsilon = tl.where(head < QUERY_HEADS, query_epsilon, key_epsilon)
            b_scale = tl.rsqrt(tl.sum(b_head * b_head, axis=1) / D + epsilon)
            m_query = m_d & (head < QUERY_HEADS)
            m_key = m_d & (head >= QUERY_HEADS)
            b_factor = tl.load(p_query_norm + o_d, mask=m_query, other=0.0).to(tl.float32)
            b_factor += tl.load(p_key_norm + o_d, mask=m_key, other=0.0).to(tl.float32)
            b_other_factor = tl.load(p_query_norm + o_other, mask=m_query, other=0.0).to(tl.float32)
            b_other_factor += tl.load(p_key_norm + o_other, mask=m_key, other=0.0).to(tl.float32)
            if ADDS_ONE:
                b_factor += 1.0
                b_other_factor += 1.0
            b_head *= b_scale[:, None] * b_factor[None, :]
            b_other *= b_scale[:, None] * b_other_factor[None, :]
        if HAS_TURN:
            b_head = b_head * b_cos + tl.where(o_d < TURNED // 2, -b_other, b_other) * b_sin
    o_query = o_d
    o_value = o_d
    m_key = m_tile
    if SHARED > 0:
        # The numbers of both halves that are turned, and those that are not, which entries hold once.
        HALF: tl.constexpr = D // 2
        TURNED_HALF: tl.constexpr = (D - SHARED) // 2
        is_turned = o_d % HALF < TURNED_HALF
        o_turned = tl.where(o_d < HALF, o_d, o_d - HALF + TURNED_HALF)
        o_still = tl.where(o_d < HALF, o_d - TURNED_HALF, o_d - 2 * TURNED_HALF)
        o_query = tl.where(is_turned, SHARED + o_turned, o_still)
        o_value = tl.where(is_turned, o_turned, 2 * TURNED_HALF + o_still)
        m_key = m_tile & is_turned[None, :]
        if head < QUERY_HEADS:
            b_factor = tl.load(p_key_norm + o_d, mask=m_d & ~is_turned, other=1.0).to(tl.float32)
            b_head *= b_factor[None, :]
    if head < QUERY_HEADS:
        p_out = p_queries + (o_token * QUERY_HEADS + head)[:, None] * D
        tl.store(p_out + o_query[None, :], b_head.to(p_queries.dtype.element_ty), mask=m_tile)
    elif is_moved:
        tl.store(p_keys + b_entry[:, None] * ROW + o_query[None, :], b_head.to(p_keys.dtype.element_ty), mask=m_key)
    else:
        if NORMS_VALUES:
            b_head *= tl.rsqrt(tl.sum(b_head * b_head, axis=1) / D + value_epsilon)[:, None]
        tl.store(
            p_values + b_entry[:, None] * ROW + o_value[None, :], b_head.to(p_values.dtype.element_ty), mask=m_tile
        )
