"""The blocks of its region that a query selects: `kept` of `kernels/ragged_attention.py` in Triton.

    bounds of a query's blocks  ── score ──▶  [N, Hkv, blocks] float32  ── select ──▶  [N, Hkv, blocks], chosen or not

Nothing of it comes to the host, so a step whose queries select blocks can be part of a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference_engine.kernels.ragged_attention import FIELDS


def choose_blocks(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    regions: Tensor,
    scaling: float,
    kv_heads: int,
    blocks: int,
    block_g: int,
    width: int,
) -> Tensor:
    """[N, Hkv, blocks] int8: 1 for the blocks between sink and window that each query reads; queries without any as
    well.

    block_g, width: the query heads of a group and D, filled up to what a matrix product of Triton takes.
    """
    query_count, query_heads, head_dim = queries.shape
    scores = torch.empty((query_count, kv_heads, blocks), dtype=torch.float32, device=queries.device)
    chosen = torch.empty((query_count, kv_heads, blocks), dtype=torch.int8, device=queries.device)
    some = 32 if width <= 128 else 16
    _score_blocks[(query_count, kv_heads, triton.cdiv(blocks, some))](
        queries,
        keys,
        values,
        regions,
        scores,
        scaling,
        FIELDS=FIELDS,
        BLOCKS=blocks,
        GROUP=query_heads // kv_heads,
        D=head_dim,
        BLOCK_G=block_g,
        BLOCK_D=width,
        BLOCK_B=some,
    )
    _select_blocks[(query_count, kv_heads)](
        scores, chosen, regions, FIELDS=FIELDS, BLOCKS=blocks, BLOCK_B=triton.next_power_of_2(blocks)
    )
    return chosen


@triton.jit
def _score_blocks(
    p_queries,
    p_keys,
    p_values,
    p_regions,
    p_scores,
    scaling,
    FIELDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """The bounds of `kernels/bounds.py`; -inf for what is no candidate."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    p_line = p_regions + query * FIELDS
    start = tl.load(p_line)
    region = tl.load(p_line + 1)
    sink = tl.load(p_line + 3)
    block = tl.load(p_line + 9)
    local = tl.load(p_line + 11)
    bounds = tl.load(p_line + 12)

    o_b = tl.program_id(2).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    o_from = tl.maximum(o_b * block, sink)
    m_b = (o_b < BLOCKS) & (o_from < tl.minimum((o_b + 1) * block, local))
    o_g = tl.arange(0, BLOCK_G)
    o_d = tl.arange(0, BLOCK_D)
    m_g = o_g < GROUP
    m_d = o_d < D
    o_q = ((query * heads + head) * GROUP + o_g)[:, None] * D + o_d[None, :]
    b_q = tl.load(p_queries + o_q, mask=m_g[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    o_kv = (start + head * region + bounds + o_b)[:, None] * D + o_d[None, :]
    m_kv = m_b[:, None] & m_d[None, :]
    b_low = tl.load(p_keys + o_kv, mask=m_kv, other=0.0).to(tl.float32)
    b_high = tl.load(p_values + o_kv, mask=m_kv, other=0.0).to(tl.float32)
    b_scores = tl.dot(tl.maximum(b_q, 0.0), tl.trans(b_high), input_precision="ieee")
    b_scores += tl.dot(tl.minimum(b_q, 0.0), tl.trans(b_low), input_precision="ieee")
    b_best = tl.max(tl.where(m_g[:, None], b_scores, float("-inf")), axis=0) * scaling
    o_score = (query * heads + head) * BLOCKS + o_b
    tl.store(p_scores + o_score, tl.where(m_b, b_best, float("-inf")), mask=o_b < BLOCKS)


@triton.jit
def _select_blocks(
    p_scores,
    p_chosen,
    p_regions,
    FIELDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """The `kept` candidates of highest scores, of equal ones the first, by halving the range of their bit patterns."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    p_line = p_regions + query * FIELDS
    sink = tl.load(p_line + 3)
    block = tl.load(p_line + 9)
    kept = tl.load(p_line + 10)
    local = tl.load(p_line + 11)
    o_b = tl.arange(0, BLOCK_B)
    o_from = tl.maximum(o_b * block, sink)
    m_b = (o_b < BLOCKS) & (o_from < tl.minimum((o_b + 1) * block, local))
    o_score = (query * heads + head) * BLOCKS + o_b
    b_scores = tl.load(p_scores + o_score, mask=m_b, other=0.0)
    b_bits = b_scores.to(tl.int32, bitcast=True)
    # Whole numbers in the order of the scores; 0 and -0 are one score.
    b_order = tl.where(b_scores == 0, 0, tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)).to(tl.int64)
    low = tl.full((), -2147483648, dtype=tl.int64)  # at least so much: `kept` of them, if there are so many
    high = tl.full((), 2147483648, dtype=tl.int64)  # at least so much: fewer
    for _ in range(32):
        middle = (low + high) >> 1
        number = tl.sum((m_b & (b_order >= middle)).to(tl.int32), axis=0)
        low = tl.where(number >= kept, middle, low)
        high = tl.where(number >= kept, high, middle)
    m_above = m_b & (b_order > low)
    m_equal = m_b & (b_order == low)
    room = kept - tl.sum(m_above.to(tl.int32), axis=0)
    m_first = m_equal & (tl.cumsum(m_equal.to(tl.int32), axis=0) <= room)
    tl.store(p_chosen + o_score, (m_above | m_first).to(tl.int8), mask=o_b < BLOCKS)
