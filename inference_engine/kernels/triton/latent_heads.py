"""Queries and compressed vectors of latent attention, around it, in Triton: `LatentHeads` of `kernels/fused.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.fused import LatentHeads, RopeTable
from inference_engine.kernels.fused import head_products as by_library
from inference_engine.kernels.triton.dependent_launch import chained

_FEW = 4  # tokens, up to which a head's matrix is read at the memory's speed
_ROWS, _WIDTH = 32, 128


def place_latent(
    queries: Tensor, latent: Tensor, entries: Tensor, writes: Tensor, layer: LatentHeads, turn: RopeTable
) -> Tensor:
    """See `PlaceLatent`."""
    count, heads, rotated = len(queries), layer.heads, entries.shape[1] - layer.rank
    out = torch.empty((count, heads, layer.own + rotated), dtype=queries.dtype, device=queries.device)
    _place_latent[(count, heads + 1)](
        queries,
        latent,
        entries,
        writes,
        out,
        turn.cos,
        turn.sin,
        writes if turn.rows is None else turn.rows,
        layer.norm.weights,
        layer.norm.epsilon,
        queries.stride(0),
        latent.stride(0),
        entries.stride(0),
        HEADS=heads,
        OWN=layer.own,
        RANK=layer.rank,
        ROTATED=rotated,
        PAIRS=layer.pairs,
        KEEPS_PAIRS=layer.keeps_pairs,
        HAS_ROWS=turn.rows is not None,
        BLOCK_OWN=triton.next_power_of_2(layer.own),
        BLOCK_RANK=triton.next_power_of_2(layer.rank),
        BLOCK_HALF=triton.next_power_of_2(rotated // 2),
        num_warps=1,
        **chained(queries.device),
    )
    return out


def head_products(states: Tensor, matrices: Tensor, *, rest: Tensor | None = None) -> Tensor:
    """See `HeadProducts`."""
    count, heads, inputs = states.shape
    if count > _FEW:
        return by_library(states, matrices, rest=rest)
    outputs, more = matrices.shape[2], 0 if rest is None else rest.shape[2]
    behind = states if rest is None else rest
    out = torch.empty((count, heads, outputs + more), dtype=states.dtype, device=states.device)
    _multiply_heads[(triton.cdiv(outputs, _ROWS), heads)](
        states,
        matrices,
        behind,
        out,
        *states.stride()[:2],
        *behind.stride()[:2],
        *matrices.stride(),
        TOKENS=count,
        INPUTS=inputs,
        OUTPUTS=outputs,
        REST=more,
        BLOCK_REST=triton.next_power_of_2(max(1, more)),
        ROWS=_ROWS,
        WIDTH=min(_WIDTH, triton.next_power_of_2(inputs)),
        num_warps=4,
        **chained(states.device),
    )
    return out


@triton.jit(do_not_specialize=["query_row", "latent_row", "entry_row"])
def _place_latent(
    p_queries,
    p_latent,
    p_entries,
    p_writes,
    p_out,
    p_cos,
    p_sin,
    p_rows,
    p_norm,
    epsilon,
    query_row,
    latent_row,
    entry_row,
    HEADS: tl.constexpr,
    OWN: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    PAIRS: tl.constexpr,
    KEEPS_PAIRS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """A program for each query of a token, and one for its entry."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    is_entry = head == HEADS
    HALF: tl.constexpr = ROTATED // 2
    o_half = tl.arange(0, BLOCK_HALF)
    m_half = o_half < HALF
    row = token
    if HAS_ROWS:
        row = tl.load(p_rows + token)
    b_cos = tl.load(p_cos + row * HALF + o_half, mask=m_half, other=0.0).to(tl.float32)
    b_sin = tl.load(p_sin + row * HALF + o_half, mask=m_half, other=0.0).to(tl.float32)
    entry = tl.load(p_writes + token)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    p_from = p_queries + token * query_row + head * (OWN + ROTATED)
    p_to = p_out + (token * HEADS + head) * (OWN + ROTATED)
    if is_entry:
        p_from = p_latent + token * latent_row
        p_to = p_entries + entry * entry_row
        o_rank = tl.arange(0, BLOCK_RANK)
        m_rank = o_rank < RANK
        b_states = tl.load(p_from + o_rank, mask=m_rank, other=0.0).to(tl.float32)
        b_scale = tl.rsqrt(tl.sum(b_states * b_states, axis=0) / RANK + epsilon)
        b_states *= b_scale * tl.load(p_norm + o_rank, mask=m_rank, other=0.0).to(tl.float32)
        tl.store(p_to + o_rank, b_states.to(p_entries.dtype.element_ty), mask=m_rank)
        p_from += RANK
        p_to += RANK
    else:
        o_own = tl.arange(0, BLOCK_OWN)
        m_own = o_own < OWN
        tl.store(p_to + o_own, tl.load(p_from + o_own, mask=m_own, other=0.0), mask=m_own)
        p_from += OWN
        p_to += OWN
    o_first = 2 * o_half if PAIRS else o_half
    o_second = 2 * o_half + 1 if PAIRS else o_half + HALF
    b_first = tl.load(p_from + o_first, mask=m_half, other=0.0).to(tl.float32)
    b_second = tl.load(p_from + o_second, mask=m_half, other=0.0).to(tl.float32)
    o_one = 2 * o_half if KEEPS_PAIRS else o_half
    o_other = 2 * o_half + 1 if KEEPS_PAIRS else o_half + HALF
    b_one = b_first * b_cos - b_second * b_sin
    b_other = b_second * b_cos + b_first * b_sin
    tl.store(p_to + o_one, b_one.to(p_out.dtype.element_ty), mask=m_half)
    tl.store(p_to + o_other, b_other.to(p_out.dtype.element_ty), mask=m_half)


@triton.jit
def _multiply_heads(
    p_states,
    p_matrices,
    p_rest,
    p_out,
    token_row,
    head_row,
    rest_token_row,
    rest_head_row,
    matrix_row,
    input_row,
    output_row,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Some outputs of a head, of every token: plain sums, so that a token's do not depend on the others."""
    head = tl.program_id(1)
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < OUTPUTS
    p_rows = p_matrices + head.to(tl.int64) * matrix_row + o_row[:, None] * output_row
    o_in = tl.arange(0, WIDTH)
    m_in = o_in < INPUTS
    b_begin = tl.load(p_rows + o_in[None, :] * input_row, mask=m_row[:, None] & m_in[None, :], other=0.0)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    for token in tl.static_range(TOKENS):
        p_token = p_states + token * token_row + head * head_row
        b_states = tl.load(p_token + tl.arange(0, WIDTH), mask=tl.arange(0, WIDTH) < INPUTS, other=0.0)
        b_sums = b_begin.to(tl.float32) * b_states.to(tl.float32)[None, :]
        for first in range(WIDTH, INPUTS, WIDTH):
            o_in = first + tl.arange(0, WIDTH)
            m_in = o_in < INPUTS
            b_states = tl.load(p_token + o_in, mask=m_in, other=0.0)
            b_tile = tl.load(p_rows + o_in[None, :] * input_row, mask=m_row[:, None] & m_in[None, :], other=0.0)
            b_sums += b_tile.to(tl.float32) * b_states.to(tl.float32)[None, :]
        p_to = p_out + (token * tl.num_programs(1) + head) * (OUTPUTS + REST)
        tl.store(p_to + o_row, tl.sum(b_sums, axis=1).to(p_out.dtype.element_ty), mask=m_row)
        if REST > 0:
            o_rest = tl.arange(0, BLOCK_REST)
            m_rest = (o_rest < REST) & (tl.program_id(0) == 0)
            b_rest = tl.load(p_rest + token * rest_token_row + head * rest_head_row + o_rest, mask=m_rest, other=0.0)
            tl.store(p_to + OUTPUTS + o_rest, b_rest, mask=m_rest)
