"""Attention over regions in steps in which queries read selected blocks: `kernels/ragged_attention.py` in Triton.

    bounds ─ score ─▶ scores [N, Hkv, blocks] ─ select ─▶ block ids [N, Hkv, blocks] ─ read ─▶ parts ─ merge ─▶ out

What a query reads is counted through, and cut into tiles. Nothing else is loaded:

    read number   0 … sink-1 | sink …                 | …                  a query of the block size 0 reads slots
    slot          its number | of the listed blocks   | local … upto       0 … count-1

Lengths, and how much is kept, are read on the device, so launches depend on the number of queries alone: the step can
be part of a CUDA graph. Tile t goes to part t modulo `_PARTS`, and parts are merged in their order: the sums of a query
follow from its own numbers, whatever queries are beside it. Sums are float32; float32 inputs are multiplied as float32.

The kernels are launched in a chain (`triton/chained.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.ragged_attention import FIELDS
from inference_engine.kernels.triton.chained import chained
from inference_engine.kernels.triton.topk import in_order, lowest_of, places_of

_PARTS = 128  # of one query and KV head
_SCORING_PROGRAMS = 1024
_LEAST = 16  # rows and columns that a matrix product of Triton has at least
MOST_BLOCKS = 2**14  # that a selection holds in registers
_NARROW = 1024  # blocks that a selection takes fewer registers for


class Tile(NamedTuple):
    """What a program works on at once: so many slots or blocks, of at most so many bytes of K. stages: under way."""

    rows: int
    most_bytes: int
    warps: int
    stages: int

    def rows_of(self, width: int, itemsize: int) -> int:
        return max(_LEAST, min(self.rows, self.most_bytes // (width * itemsize)))


_SCORE = Tile(64, 2**14, 4, 3)
_SELECT_WARPS = 8
_READ = Tile(64, 2**14, 4, 2)


def attend_selecting(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    regions: Tensor,
    *,
    kv_heads: int,
    scaling: float,
    softcap: float | None = None,
    blocks: int,
) -> Tensor:
    """See `RaggedAttention`; blocks > 0, and few queries."""
    queries, regions = queries.contiguous(), regions.contiguous()
    scores = score_blocks(queries, keys, values, regions, scaling=scaling, kv_heads=kv_heads, blocks=blocks)
    listed = select_blocks(scores, regions)
    return attend_listed(queries, keys, values, regions, listed, scaling=scaling, softcap=softcap)


def score_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, regions: Tensor, *, scaling: float, kv_heads: int, blocks: int
) -> Tensor:
    """The bounds of `kernels/bounds.py`, [N, Hkv, blocks] float32, of each query's candidates. Others are undefined."""
    query_count, query_heads, head_dim = queries.shape
    assert blocks <= MOST_BLOCKS, blocks
    group, width = query_heads // kv_heads, _width(head_dim)
    scores = torch.empty((query_count, kv_heads, blocks), dtype=torch.float32, device=queries.device)
    tile = _SCORE.rows_of(width, keys.element_size())
    programs = max(1, min(triton.cdiv(blocks, tile), _SCORING_PROGRAMS // (query_count * kv_heads)))
    _score_blocks[(programs, kv_heads, query_count)](
        queries,
        keys,
        values,
        regions,
        scores,
        scaling,
        FIELDS=FIELDS,
        BLOCKS=blocks,
        GROUP=group,
        D=head_dim,
        BLOCK_G=max(_LEAST, triton.next_power_of_2(group)),
        BLOCK_D=width,
        BLOCK_B=tile,
        num_warps=_SCORE.warps,
        num_stages=_SCORE.stages,
        **chained(queries.device),
    )
    return scores


def select_blocks(scores: Tensor, regions: Tensor) -> Tensor:
    """The blocks that each query reads, ascending, [N, Hkv, blocks] int32; undefined behind the last of them.

    Those of the highest scores, NaN above all, of equal ones the first: as `kernels/gather.py` selects.
    """
    query_count, kv_heads, blocks = scores.shape
    listed = torch.empty((query_count, kv_heads, blocks), dtype=torch.int32, device=scores.device)
    _select_blocks[(kv_heads, query_count)](
        scores,
        listed,
        regions,
        FIELDS=FIELDS,
        BLOCKS=blocks,
        NARROW=min(_NARROW, triton.next_power_of_2(blocks)),
        WIDE=triton.next_power_of_2(blocks),
        num_warps=_SELECT_WARPS,
        **chained(scores.device),
    )
    return listed


def attend_listed(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    regions: Tensor,
    listed: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """Attention of each query to its sink, its listed blocks, and what is local; of others, to all that they see.

    listed: [N, Hkv, any] int32, as many valid ones as the line keeps, or as there are candidates if these are fewer.
    """
    query_count, query_heads, head_dim = queries.shape
    kv_heads = listed.shape[1]
    group, width = query_heads // kv_heads, _width(head_dim)
    out = torch.empty_like(queries)
    parts = torch.empty((query_count, query_heads, _PARTS, head_dim), dtype=torch.float32, device=queries.device)
    sums = torch.empty((query_count, query_heads, _PARTS), dtype=torch.float32, device=queries.device)
    tile = _READ.rows_of(width, keys.element_size())
    _attend_part[(_PARTS, kv_heads, query_count)](
        queries,
        keys,
        values,
        regions,
        listed,
        parts,
        sums,
        scaling,
        0.0 if softcap is None else softcap,
        FIELDS=FIELDS,
        BLOCKS=listed.shape[2],
        PARTS=_PARTS,
        GROUP=group,
        D=head_dim,
        HAS_CAP=softcap is not None,
        BLOCK_G=max(_LEAST, triton.next_power_of_2(group)),
        BLOCK_D=width,
        BLOCK_S=tile,
        num_warps=_READ.warps,
        num_stages=_READ.stages,
        **chained(queries.device),
    )
    _merge_parts[(triton.cdiv(head_dim, 64), query_heads, query_count)](
        parts,
        sums,
        out,
        regions,
        FIELDS=FIELDS,
        PARTS=_PARTS,
        D=head_dim,
        BLOCK_D=64,
        BLOCK_S=tile,
        num_warps=4,
        **chained(queries.device),
    )
    return out


def _width(head_dim: int) -> int:
    return max(_LEAST, int(triton.next_power_of_2(head_dim)))


@triton.jit
def _candidates(p_line):
    """A line's block size, at least 1, its first candidate, and the block after its last; none if it selects none."""
    sink = tl.load(p_line + 3)
    block = tl.load(p_line + 9)
    local = tl.load(p_line + 11)
    size = tl.maximum(block, 1)
    first = sink // size
    end = tl.where((block > 0) & (sink < local), tl.cdiv(local, size), first)
    return size.to(tl.int32), first.to(tl.int32), end.to(tl.int32)


@triton.jit
def _reads(p_line):
    """How a line's reads are counted through: those of the sink, then of listed blocks, and all. See the module."""
    size, first, end = _candidates(p_line)
    count = tl.load(p_line + 2)
    sink = tl.load(p_line + 3)
    block = tl.load(p_line + 9)
    local = tl.load(p_line + 11)
    seen = tl.minimum(count, tl.load(p_line + 6) + 1)
    before = tl.where(block > 0, tl.minimum(tl.minimum(sink, local), seen), count).to(tl.int32)
    listed = tl.minimum(tl.load(p_line + 10).to(tl.int32), end - first) * size
    behind = tl.where(block > 0, tl.maximum(seen - local, 0), 0).to(tl.int32)
    return before, before + listed, before + listed + behind


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
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    query = tl.program_id(2).to(tl.int64)
    p_line = p_regions + query * FIELDS
    _, first, end = _candidates(p_line)
    start = tl.load(p_line) + head * tl.load(p_line + 1) + tl.load(p_line + 12)
    # Where all candidates are read, scores do not matter.
    end = tl.where(tl.load(p_line + 10) < end - first, end, first)

    o_g = tl.arange(0, BLOCK_G)
    o_d = tl.arange(0, BLOCK_D)
    m_g = o_g < GROUP
    m_d = o_d < D
    o_q = ((query * heads + head) * GROUP + o_g)[:, None] * D + o_d[None, :]
    b_q = tl.load(p_queries + o_q, mask=m_g[:, None] & m_d[None, :], other=0.0)
    b_up = tl.maximum(b_q, 0.0).to(b_q.dtype)
    b_down = tl.minimum(b_q, 0.0).to(b_q.dtype)
    for b in range(first + tl.program_id(0) * BLOCK_B, end, tl.num_programs(0) * BLOCK_B):
        o_b = b + tl.arange(0, BLOCK_B)
        m_b = o_b < end
        o_kv = (start + o_b)[:, None] * D + o_d[None, :]
        m_kv = m_b[:, None] & m_d[None, :]
        b_high = tl.load(p_values + o_kv, mask=m_kv, other=0.0)
        b_low = tl.load(p_keys + o_kv, mask=m_kv, other=0.0)
        b_scores = tl.dot(b_up, tl.trans(b_high), input_precision="ieee")
        b_scores = tl.dot(b_down, tl.trans(b_low), b_scores, input_precision="ieee")
        b_best = tl.max(tl.where(m_g[:, None], b_scores, float("-inf")), axis=0) * scaling
        # The largest of some numbers is not NaN if one of them is; their sum is.
        b_sum = tl.sum(tl.where(m_g[:, None], b_scores, 0.0), axis=0)
        b_best = tl.where(b_sum != b_sum, b_sum, b_best)  # noqa: PLR0124
        tl.store(p_scores + (query * heads + head) * BLOCKS + o_b, b_best, mask=m_b)


@triton.jit
def _select_blocks(
    p_scores,
    p_listed,
    p_regions,
    FIELDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(0)
    query = tl.program_id(1).to(tl.int64)
    p_line = p_regions + query * FIELDS
    _, first, end = _candidates(p_line)
    kept = tl.load(p_line + 10).to(tl.int32)
    o_row = (query * tl.num_programs(0) + head) * BLOCKS
    count = end - first
    if kept >= count:
        for b in range(0, count, NARROW):
            o_b = b + tl.arange(0, NARROW)
            tl.store(p_listed + o_row + o_b, first + o_b, mask=o_b < count)
    elif kept > 0:
        if count <= NARROW:
            _select_of(p_scores + o_row + first, p_listed + o_row, first, count, kept, NARROW)
        else:
            _select_of(p_scores + o_row + first, p_listed + o_row, first, count, kept, WIDE)


@triton.jit
def _select_of(p_scores, p_listed, first, count, kept, WIDTH: tl.constexpr):
    """List the `kept` of the first `count` scores, fewer than these: whose lowest is searched."""
    GROUPS: tl.constexpr = 128 if WIDTH > 128 else WIDTH  # noqa: FURB136 - no such function there
    o_b = tl.arange(0, WIDTH)
    m_b = o_b < count
    b_order = tl.where(m_b, in_order(tl.load(p_scores + o_b, mask=m_b, other=0.0)), -2147483648)
    # At least `kept` scores reach the one that is so high among the largest of each group.
    b_best = tl.max(tl.reshape(b_order, (GROUPS, WIDTH // GROUPS)), axis=1)
    o_g = tl.arange(0, GROUPS)
    is_before = (b_best[None, :] > b_best[:, None]) | (
        (b_best[None, :] == b_best[:, None]) & (o_g[None, :] < o_g[:, None])
    )
    b_rank = tl.sum(is_before.to(tl.int32), axis=1)
    low = tl.max(tl.where(b_rank == kept - 1, b_best, -2139095041), axis=0)  # what no score is below: minus infinity
    reached = tl.sum((b_order >= low).to(tl.int32), axis=0)
    low, _ = lowest_of(b_order, kept, low, tl.max(b_best, axis=0) + 1, reached, tl.full((), 0, tl.int32))
    room = kept - tl.sum((b_order > low).to(tl.int32), axis=0)
    o_place, m_chosen = places_of(b_order, low, room)
    tl.store(p_listed + o_place, first + o_b, mask=m_chosen)


@triton.jit
def _attend_part(
    p_queries,
    p_keys,
    p_values,
    p_regions,
    p_listed,
    p_parts,
    p_sums,
    scaling,
    softcap,
    FIELDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHAINED: tl.constexpr,
):
    # Everything but the list was written before the scores were.
    part = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    query = tl.program_id(2).to(tl.int64)
    p_line = p_regions + query * FIELDS
    start = tl.load(p_line)
    region = tl.load(p_line + 1)
    sink = tl.load(p_line + 3).to(tl.int32)
    ring = tl.load(p_line + 4).to(tl.int32)
    last = tl.load(p_line + 5).to(tl.int32)
    upto = tl.load(p_line + 6).to(tl.int32)
    floor = tl.load(p_line + 7).to(tl.int32)
    sink_floor = tl.load(p_line + 8).to(tl.int32)
    local = tl.load(p_line + 11).to(tl.int32)
    prefix = tl.load(p_line + 13) + head * tl.load(p_line + 14)
    begin = tl.load(p_line + 15)
    size, _, _ = _candidates(p_line)
    to_listed, to_local, end = _reads(p_line)

    o_g = tl.arange(0, BLOCK_G)
    o_d = tl.arange(0, BLOCK_D)
    m_g = o_g < GROUP
    m_d = o_d < D
    o_q = ((query * heads + head) * GROUP + o_g)[:, None] * D + o_d[None, :]
    b_q = tl.load(p_queries + o_q, mask=m_g[:, None] & m_d[None, :], other=0.0)
    b_top = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros((BLOCK_G,), dtype=tl.float32)
    b_out = tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32)
    own = start + head * region - begin
    step = tl.maximum(ring, 1)
    own_floor = tl.where(ring > 0, tl.maximum(floor, sink), tl.maximum(floor, 0))
    p_list = p_listed + (query * heads + head) * BLOCKS
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    for r in range(part * BLOCK_S, end, PARTS * BLOCK_S):
        o_r = r + tl.arange(0, BLOCK_S)
        m_listed = (o_r >= to_listed) & (o_r < to_local)
        o_in = o_r - to_listed
        b_block = tl.load(p_list + o_in // size, mask=m_listed, other=0)
        o_s = tl.where(o_r < to_listed, o_r, tl.where(m_listed, b_block * size + o_in % size, o_r - to_local + local))
        in_sink = o_s < sink
        # A slot past `last` was opened and never written: its remainder is negative, its position past `upto`.
        position = tl.where(in_sink | (ring == 0), o_s, last - (last - o_s) % step)
        m_s = (o_r < end) & (position <= upto) & (position >= tl.where(in_sink, sink_floor, own_floor))
        # A block that the sink or the window cuts is listed for the rest of it.
        m_s = m_s & ~(m_listed & (in_sink | (o_s >= local)))
        o_slot = o_s.to(tl.int64)
        o_kv = (tl.where(o_slot < begin, prefix, own) + o_slot)[:, None] * D + o_d[None, :]
        m_kv = m_s[:, None] & m_d[None, :]
        b_k = tl.load(p_keys + o_kv, mask=m_kv, other=0.0)
        b_v = tl.load(p_values + o_kv, mask=m_kv, other=0.0)
        b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scaling
        if HAS_CAP:
            b_power = tl.exp(-2.0 * tl.abs(b_scores / softcap))
            b_tanh = (1.0 - b_power) / (1.0 + b_power)
            b_scores = softcap * tl.where(b_scores < 0, -b_tanh, b_tanh)
        b_scores = tl.where(m_s[None, :], b_scores, float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_scores, axis=1))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_weights = tl.exp(b_scores - b_safe[:, None])
        b_keep = tl.exp(b_top - b_safe)
        b_sum = b_sum * b_keep + tl.sum(b_weights, axis=1)
        b_out = b_out * b_keep[:, None] + tl.dot(b_weights.to(b_v.dtype), b_v, input_precision="ieee")
        b_top = b_new

    if part * BLOCK_S < end:
        b_some = tl.where(b_sum > 0, b_sum, 1.0)
        o_part = ((query * heads + head) * GROUP + o_g) * PARTS + part
        tl.store(
            p_parts + o_part[:, None] * D + o_d[None, :], b_out / b_some[:, None], mask=m_g[:, None] & m_d[None, :]
        )
        tl.store(p_sums + o_part, tl.where(b_sum > 0, b_top + tl.log(b_some), float("-inf")), mask=m_g)


@triton.jit
def _merge_parts(
    p_parts,
    p_sums,
    p_out,
    p_regions,
    FIELDS: tl.constexpr,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHAINED: tl.constexpr,
):
    query = tl.program_id(2).to(tl.int64)
    o_head = query * tl.num_programs(1) + tl.program_id(1)
    p_line = p_regions + query * FIELDS
    _, _, end = _reads(p_line)
    o_p = tl.arange(0, PARTS)
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_p = o_p * BLOCK_S < end
    m_d = o_d < D
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    b_lse = tl.load(p_sums + o_head * PARTS + o_p, mask=m_p, other=float("-inf"))
    b_parts = tl.load(
        p_parts + (o_head * PARTS + o_p)[:, None] * D + o_d[None, :], mask=m_p[:, None] & m_d[None, :], other=0.0
    )
    b_top = tl.max(b_lse, axis=0)
    b_weights = tl.exp(b_lse - tl.where(b_top == float("-inf"), 0.0, b_top))
    b_all = tl.sum(b_weights, axis=0)
    b_out = tl.sum(b_parts * b_weights[:, None], axis=0) / tl.where(b_all > 0, b_all, 1.0)
    tl.store(p_out + o_head * D + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)
