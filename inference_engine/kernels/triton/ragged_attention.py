"""`kernels/ragged_attention.py` in Triton: split over keys, then merged.

A program serves one query, one KV head and one part of the slots; the query heads of the group share what it reads. The
parts are merged by their log-sum-exp (Flash-Decoding: Dao et al., 2023). Of many queries most belong to a chunk of some
prefill: they are cut into tiles, and where all queries of a tile look at one region, a program serves the tile.

    queries  a b c c | c c c c | c c c 0      tiles of four; the first and the last are served query by query

Which tiles these are, and how far loops run, are numbers read on the device, so a launch depends on the number of
queries alone and can be part of a CUDA graph. Sums are float32; float32 inputs are multiplied as float32, not in TF32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference_engine.kernels.ragged_attention import FIELDS
from inference_engine.kernels.triton.gather import attend_selecting

_PROGRAMS = 256  # enough to fill a GPU; fewer queries are split into more parts
_MOST_SPLITS = 32
_SOME_SPLITS = 8
_LEAST = 16  # rows and columns that a matrix product of Triton has at least
_FEW_QUERIES = 64  # up to these many, each is likely to look at a region of its own


def attend_ragged(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    regions: Tensor,
    *,
    kv_heads: int,
    scaling: float,
    softcap: float | None = None,
    blocks: int = 0,
) -> Tensor:
    """See `RaggedAttention`."""
    queries, regions = queries.contiguous(), regions.contiguous()
    query_count = len(queries)
    out = torch.empty_like(queries)
    is_few = query_count <= _FEW_QUERIES
    if not (blocks and is_few):
        _attend_all(queries, keys, values, regions, out, kv_heads=kv_heads, scaling=scaling, softcap=softcap)
    if blocks:
        attend_selecting(
            queries,
            keys,
            values,
            regions,
            out,
            kv_heads=kv_heads,
            scaling=scaling,
            softcap=softcap,
            blocks=blocks,
            serves_all=is_few,
        )
    return out


def _attend_all(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    regions: Tensor,
    out: Tensor,
    *,
    kv_heads: int,
    scaling: float,
    softcap: float | None,
) -> None:
    """For queries that read all that they see; others get zeros."""
    query_count, query_heads, head_dim = queries.shape
    group = query_heads // kv_heads
    width = max(_LEAST, triton.next_power_of_2(head_dim))
    is_narrow = width * queries.element_size() <= 256
    block_q = 64 if is_narrow and queries.element_size() == 2 else 32
    tile = 1 if query_count <= _FEW_QUERIES else max(1, block_q // group)
    tiles = triton.cdiv(query_count, tile)
    if tile == 1:
        splits = min(_MOST_SPLITS, triton.next_power_of_2(max(1, _PROGRAMS // (query_count * kv_heads))))
    else:  # one of two numbers: each is a kernel that has to be compiled
        splits = _SOME_SPLITS if tiles * kv_heads < _PROGRAMS // 2 else 1
    parts = torch.empty((query_count, query_heads, splits, head_dim), dtype=torch.float32, device=queries.device)
    sums = torch.empty((query_count, query_heads, splits), dtype=torch.float32, device=queries.device)
    block_g = max(_LEAST, triton.next_power_of_2(group))
    tensors = (queries, keys, values, regions, parts, sums)
    numbers = (scaling, 0.0 if softcap is None else softcap)
    constants = {
        "FIELDS": FIELDS,
        "SPLITS": splits,
        "GROUP": group,
        "TILE": tile,
        "D": head_dim,
        "HAS_CAP": softcap is not None,
        "BLOCK_D": width,
    }
    _attend_part[(query_count, kv_heads, splits)](
        *tensors, *numbers, BLOCK_G=block_g, BLOCK_S=64 if is_narrow else 32, **constants
    )
    if tile > 1:
        _attend_tile_part[(tiles, kv_heads, splits)](
            *tensors, query_count, *numbers, BLOCK_Q=block_q, BLOCK_S=block_q, **constants
        )
    _merge_parts[(query_count * query_heads,)](parts, sums, out, SPLITS=splits, D=head_dim, BLOCK_D=width)


@triton.jit
def _attend_part(
    p_queries,
    p_keys,
    p_values,
    p_regions,
    p_parts,
    p_sums,
    scaling,
    softcap,
    FIELDS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    heads = tl.num_programs(1)
    p_line = p_regions + query * FIELDS
    start = tl.load(p_line)
    region = tl.load(p_line + 1)
    count = tl.load(p_line + 2)
    sink = tl.load(p_line + 3)
    ring = tl.load(p_line + 4)
    last = tl.load(p_line + 5)
    upto = tl.load(p_line + 6)
    floor = tl.load(p_line + 7)
    sink_floor = tl.load(p_line + 8)
    block = tl.load(p_line + 9)
    prefix = tl.load(p_line + 13) + head * tl.load(p_line + 14)
    begin = tl.load(p_line + 15)

    count = tl.where(block == 0, count, 0)

    o_g = tl.arange(0, BLOCK_G)
    m_g = o_g < GROUP
    m_own = m_g
    if TILE > 1:
        # What a tile shares is left to the program that serves the tile.
        o_first = query // TILE * TILE
        o_last = tl.minimum(o_first + TILE, tl.num_programs(0)) - 1
        is_shared = tl.load(p_regions + o_first * FIELDS) == tl.load(p_regions + o_last * FIELDS)
        # Padding queries look alike, and a real one may be between them.
        is_shared = is_shared & (tl.load(p_regions + o_first * FIELDS + 2) > 0) & (block == 0)
        count = tl.where(is_shared, 0, count)
        m_own = m_g & (o_g < tl.where(is_shared, 0, GROUP))

    part = tl.cdiv(tl.cdiv(count, SPLITS), BLOCK_S) * BLOCK_S
    first = split * part
    end = tl.minimum(count, first + part)

    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    o_q = ((query * heads + head) * GROUP + o_g)[:, None] * D + o_d[None, :]
    b_q = tl.load(p_queries + o_q, mask=m_g[:, None] & m_d[None, :], other=0.0)

    b_top = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros((BLOCK_G,), dtype=tl.float32)
    b_out = tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32)
    own = start + head * region - begin
    step = tl.maximum(ring, 1)
    own_floor = tl.where(ring > 0, tl.maximum(floor, sink), tl.maximum(floor, 0))
    for s in range(first, end, BLOCK_S):
        o_s = s + tl.arange(0, BLOCK_S)
        m_s = o_s < end
        in_sink = o_s < sink
        # A slot past `last` was opened and never written: its remainder is negative, its position past `upto`.
        position = tl.where(in_sink | (ring == 0), o_s, last - (last - o_s) % step)
        m_seen = m_s & (position <= upto) & (position >= tl.where(in_sink, sink_floor, own_floor))
        o_entry = tl.where(o_s < begin, prefix, own) + o_s
        o_kv = o_entry[:, None] * D + o_d[None, :]
        m_kv = m_s[:, None] & m_d[None, :]
        b_k = tl.load(p_keys + o_kv, mask=m_kv, other=0.0)
        b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scaling
        if HAS_CAP:
            b_power = tl.exp(-2.0 * tl.abs(b_scores / softcap))
            b_tanh = (1.0 - b_power) / (1.0 + b_power)
            b_scores = softcap * tl.where(b_scores < 0, -b_tanh, b_tanh)
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
    o_h = (query * heads + head) * GROUP + o_g
    o_part = (o_h * SPLITS + split)[:, None] * D + o_d[None, :]
    tl.store(p_parts + o_part, b_out / b_some[:, None], mask=m_own[:, None] & m_d[None, :])
    b_lse = tl.where(b_sum > 0, b_top + tl.log(b_some), float("-inf"))
    tl.store(p_sums + o_h * SPLITS + split, b_lse, mask=m_own)


@triton.jit(do_not_specialize=["query_count"])
def _attend_tile_part(
    p_queries,
    p_keys,
    p_values,
    p_regions,
    p_parts,
    p_sums,
    query_count,
    scaling,
    softcap,
    FIELDS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """As `_attend_part`, for queries of a tile that look at one region: their lines differ only in what they see."""
    o_first = tl.program_id(0).to(tl.int64) * TILE
    head = tl.program_id(1)
    split = tl.program_id(2)
    heads = tl.num_programs(1)
    o_last = tl.minimum(o_first + TILE, query_count) - 1
    p_line = p_regions + o_first * FIELDS
    start = tl.load(p_line)
    region = tl.load(p_line + 1)
    count = tl.load(p_line + 2).to(tl.int32)
    sink = tl.load(p_line + 3).to(tl.int32)
    ring = tl.load(p_line + 4).to(tl.int32)
    last = tl.load(p_line + 5).to(tl.int32)
    prefix = tl.load(p_line + 13) + head * tl.load(p_line + 14)
    begin = tl.load(p_line + 15)
    is_shared = (start == tl.load(p_regions + o_last * FIELDS)) & (count > 0) & (tl.load(p_line + 9) == 0)

    # The query heads of the group, query after query.
    o_q = tl.arange(0, BLOCK_Q)
    o_query = o_first + o_q // GROUP
    m_q = (o_q < tl.where(is_shared, TILE * GROUP, 0)) & (o_query <= o_last)
    o_h = (o_query * heads + head) * GROUP + o_q % GROUP
    b_upto = tl.load(p_regions + o_query * FIELDS + 6, mask=m_q, other=-1).to(tl.int32)
    b_floor = tl.load(p_regions + o_query * FIELDS + 7, mask=m_q, other=0).to(tl.int32)
    b_sink_floor = tl.load(p_regions + o_query * FIELDS + 8, mask=m_q, other=0).to(tl.int32)
    b_floor = tl.where(ring > 0, tl.maximum(b_floor, sink), tl.maximum(b_floor, 0))
    # Where slots are positions, no query reads those after the last query's own.
    count = tl.where(ring > 0, count, tl.minimum(count, tl.max(b_upto, axis=0) + 1))
    count = tl.where(is_shared, count, 0)

    part = tl.cdiv(tl.cdiv(count, SPLITS), BLOCK_S) * BLOCK_S
    first = split * part
    end = tl.minimum(count, first + part)

    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_q = tl.load(p_queries + o_h[:, None] * D + o_d[None, :], mask=m_q[:, None] & m_d[None, :], other=0.0)
    b_top = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    b_out = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
    own = start + head * region - begin
    step = tl.maximum(ring, 1)
    for s in range(first, end, BLOCK_S):
        o_s = s + tl.arange(0, BLOCK_S)
        m_s = o_s < end
        o_slot = o_s.to(tl.int64)
        o_kv = (tl.where(o_slot < begin, prefix, own) + o_slot)[:, None] * D + o_d[None, :]
        m_kv = m_s[:, None] & m_d[None, :]
        b_k = tl.load(p_keys + o_kv, mask=m_kv, other=0.0)
        b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scaling
        if HAS_CAP:
            b_power = tl.exp(-2.0 * tl.abs(b_scores / softcap))
            b_tanh = (1.0 - b_power) / (1.0 + b_power)
            b_scores = softcap * tl.where(b_scores < 0, -b_tanh, b_tanh)
        in_sink = o_s < sink
        position = tl.where(in_sink | (ring == 0), o_s, last - (last - o_s) % step)
        b_from = tl.where(in_sink[None, :], b_sink_floor[:, None], b_floor[:, None])
        m_seen = m_s[None, :] & (position[None, :] <= b_upto[:, None]) & (position[None, :] >= b_from)
        b_scores = tl.where(m_seen, b_scores, float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_scores, axis=1))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_weights = tl.exp(b_scores - b_safe[:, None])
        b_keep = tl.exp(b_top - b_safe)
        b_v = tl.load(p_values + o_kv, mask=m_kv, other=0.0)
        b_sum = b_sum * b_keep + tl.sum(b_weights, axis=1)
        b_out = b_out * b_keep[:, None] + tl.dot(b_weights.to(b_v.dtype), b_v, input_precision="ieee")
        b_top = b_new

    b_some = tl.where(b_sum > 0, b_sum, 1.0)
    o_part = (o_h * SPLITS + split)[:, None] * D + o_d[None, :]
    tl.store(p_parts + o_part, b_out / b_some[:, None], mask=m_q[:, None] & m_d[None, :])
    b_lse = tl.where(b_sum > 0, b_top + tl.log(b_some), float("-inf"))
    tl.store(p_sums + o_h * SPLITS + split, b_lse, mask=m_q)


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
