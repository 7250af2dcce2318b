"""`kernels/lane_attention.py` in Triton: split over keys, then merged.

A program serves one row, one KV head and one part of the slots; the query heads of the group share what it reads. The
parts are merged by their log-sum-exp (Flash-Decoding: Dao et al., 2023). Loops run to numbers read on the device, so a
launch depends on the number of rows alone and can be part of a CUDA graph. Sums are float32; float32 inputs are
multiplied as float32, not in TF32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference_engine.kernels.lane_attention import FIELDS

_PROGRAMS = 256  # enough to fill a GPU; fewer rows are split into more parts
_MOST_SPLITS = 32
_LEAST = 16  # rows and columns that a matrix product of Triton has at least


def attend_lanes(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lanes: Tensor,
    *,
    kv_heads: int,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """See `LaneAttention`."""
    rows, query_heads, head_dim = queries.shape
    group = query_heads // kv_heads
    splits = min(_MOST_SPLITS, triton.next_power_of_2(max(1, _PROGRAMS // (rows * kv_heads))))
    queries, lanes = queries.contiguous(), lanes.contiguous()
    parts = torch.empty((rows, query_heads, splits, head_dim), dtype=torch.float32, device=queries.device)
    sums = torch.empty((rows, query_heads, splits), dtype=torch.float32, device=queries.device)
    out = torch.empty_like(queries)
    width = max(_LEAST, triton.next_power_of_2(head_dim))
    _attend_part[(rows, kv_heads, splits)](
        queries,
        keys,
        values,
        lanes,
        parts,
        sums,
        scaling,
        0.0 if softcap is None else softcap,
        FIELDS=FIELDS,
        SPLITS=splits,
        GROUP=group,
        D=head_dim,
        HAS_CAP=softcap is not None,
        BLOCK_G=max(_LEAST, triton.next_power_of_2(group)),
        BLOCK_D=width,
        BLOCK_S=64 if width <= 128 else 32,
    )
    _merge_parts[(rows * query_heads,)](parts, sums, out, SPLITS=splits, D=head_dim, BLOCK_D=width)
    return out


@triton.jit
def _attend_part(
    p_queries,
    p_keys,
    p_values,
    p_lanes,
    p_parts,
    p_sums,
    scaling,
    softcap,
    FIELDS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    heads = tl.num_programs(1)
    p_line = p_lanes + row * FIELDS
    start = tl.load(p_line)
    lane = tl.load(p_line + 1)
    count = tl.load(p_line + 2)
    sink = tl.load(p_line + 3)
    ring = tl.load(p_line + 4)
    last = tl.load(p_line + 5)
    upto = tl.load(p_line + 6)
    floor = tl.load(p_line + 7)
    sink_floor = tl.load(p_line + 8)

    part = tl.cdiv(tl.cdiv(count, SPLITS), BLOCK_S) * BLOCK_S
    first = split * part
    end = tl.minimum(count, first + part)

    o_g = tl.arange(0, BLOCK_G)
    o_d = tl.arange(0, BLOCK_D)
    m_g = o_g < GROUP
    m_d = o_d < D
    o_q = ((row * heads + head) * GROUP + o_g)[:, None] * D + o_d[None, :]
    b_q = tl.load(p_queries + o_q, mask=m_g[:, None] & m_d[None, :], other=0.0)

    b_top = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros((BLOCK_G,), dtype=tl.float32)
    b_out = tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32)
    base = (start + head * lane) * D
    step = tl.maximum(ring, 1)
    own_floor = tl.where(ring > 0, tl.maximum(floor, sink), tl.maximum(floor, 0))
    for s in range(first, end, BLOCK_S):
        o_s = s + tl.arange(0, BLOCK_S)
        m_s = o_s < end
        o_kv = base + o_s[:, None] * D + o_d[None, :]
        m_kv = m_s[:, None] & m_d[None, :]
        b_k = tl.load(p_keys + o_kv, mask=m_kv, other=0.0)
        b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scaling
        if HAS_CAP:
            b_power = tl.exp(-2.0 * tl.abs(b_scores / softcap))
            b_tanh = (1.0 - b_power) / (1.0 + b_power)
            b_scores = softcap * tl.where(b_scores < 0, -b_tanh, b_tanh)
        in_sink = o_s < sink
        # A slot past `last` was opened and never written: its remainder is negative, its position past `upto`.
        position = tl.where(in_sink | (ring == 0), o_s, last - (last - o_s) % step)
        m_seen = m_s & (position <= upto) & (position >= tl.where(in_sink, sink_floor, own_floor))
        b_scores = tl.where(m_seen[None, :], b_scores, float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_scores, axis=1))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_weights = tl.exp(b_scores - b_safe[:, None])
        b_keep = tl.exp(b_top - b_safe)
        b_v = tl.load(p_values + o_kv, mask=m_kv, other=0.0)
        b_sum = b_sum * b_keep + tl.sum(b_weights, axis=1)
        b_out = b_out * b_keep[:, None] + tl.dot(b_weights.to(b_v.dtype), b_v, input_precision="ieee")
        b_top = b_new

    b_some = tl.where(b_sum > 0, b_sum, 1.0)
    o_h = (row * heads + head) * GROUP + o_g
    o_part = (o_h * SPLITS + split)[:, None] * D + o_d[None, :]
    tl.store(p_parts + o_part, b_out / b_some[:, None], mask=m_g[:, None] & m_d[None, :])
    b_lse = tl.where(b_sum > 0, b_top + tl.log(b_some), float("-inf"))
    tl.store(p_sums + o_h * SPLITS + split, b_lse, mask=m_g)


@triton.jit
def _merge_parts(p_parts, p_sums, p_out, SPLITS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, SPLITS)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_lse = tl.load(p_sums + head * SPLITS + o_p)
    b_top = tl.max(b_lse, axis=0)
    b_weights = tl.exp(b_lse - tl.where(b_top == float("-inf"), 0.0, b_top))
    b_all = tl.sum(b_weights, axis=0)
    b_parts = tl.load(p_parts + (head * SPLITS + o_p)[:, None] * D + o_d[None, :], mask=m_d[None, :], other=0.0)
    b_out = tl.sum(b_parts * b_weights[:, None], axis=0) / tl.where(b_all > 0, b_all, 1.0)
    tl.store(p_out + head * D + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)
