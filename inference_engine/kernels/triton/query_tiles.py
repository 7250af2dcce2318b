"""Attention of a step in which neighbouring queries read one region: `kernels/ragged_attention.py` in Triton.

    queries    a b c c | c c c c | c c d d | 0 0        windows of four
    tiles      a b c c | c c c c | c c d d |            neighbours of one session that are in one window
    reads      0 … 90  | 0 … 94  |                      of a tile, cut into parts of equal length
    states     ■ ■ ■   | ■ ■ ■   |                      of the parts, merged by their log-sum-exps

A turn of an agent, a chunk of a prefill and the draft tokens of a session are many queries over one history: read once
for a tile of them, it costs arithmetic, no longer memory. The parts of all tiles are given out to as many programs as
the device runs at once. How long a part is follows from all of them, so that programs end together, be it one chunk on
a long history or many sessions of all lengths (Flash-Decoding, Dao et al., 2023, for tiles).

Blocks of which every query sees every slot are brought by descriptors (the tensor memory accelerator, where there is
one) and need no mask; others, at the ends and in rings, are loaded under one. Where tiles, parts and blocks begin are
numbers that each program works out of the lines, so a launch depends on the number of queries alone and can be part of
a CUDA graph. In what order a query's sums are made depends on the queries beside it. Sums are float32; float32 inputs
are multiplied as float32, not in TF32. The kernels are launched in a chain (`triton/dependent_launch.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from inference_engine.kernels.reads import FIELDS, AttentionCall
from inference_engine.kernels.triton.block_selection import width_of
from inference_engine.kernels.triton.dependent_launch import chained
from inference_engine.kernels.triton.line import in_line

_PROCESSORS = 132  # of a large GPU
_SLOTS = 3  # parts of tiles, for each program at most
_LEAST_PART = 4  # blocks
_QUERIES = (64, 512, 1024)  # of a launch, whose programs count through so many
_MERGED, _MERGED_OF_FEW, _FEW = 8, 32, 64  # states that a program reads at once, of many queries and of few


class Tiling(NamedTuple):
    """rows: queries and their heads of a tile. slots: of a block. programs: that a processor runs at once.

    Of those tried on an H200 the fastest, with 28 query and 4 KV heads of 128, for 17 and for 257 queries on 1,024 to
    120,000 entries; smaller programs, two at once on a processor, gain 4 % on the longest, and lose elsewhere.
    """

    rows: int
    slots: int
    warps: int
    stages: int
    programs: int


_OF_FEW, _OF_MANY = Tiling(32, 64, 4, 3, 2), Tiling(128, 64, 8, 3, 1)
_OF_WIDE, _OF_WIDEST, _OF_FLOATS = Tiling(64, 64, 4, 2, 1), Tiling(64, 32, 8, 2, 1), Tiling(32, 32, 4, 1, 1)


def _tiling(rows: int, width: int, itemsize: int) -> Tiling:
    """rows: that there are. width: numbers of a key."""
    if itemsize > 2:
        return _OF_FLOATS
    if width > 256:
        return _OF_WIDEST  # as much as fits beside the queries
    if width > 128:
        return _OF_WIDE
    return _OF_FEW if rows <= _OF_FEW.rows else _OF_MANY


def attend_tiles(call: AttentionCall, out: torch.Tensor) -> None:
    """Implements RegionKernel."""
    for first in range(0, len(out), _QUERIES[-1]):
        some = slice(first, first + _QUERIES[-1])
        _attend_some(call.of(some), out[some])


def _attend_some(call: AttentionCall, out: torch.Tensor) -> None:
    queries, regions, kv_heads, group = call.queries, call.lines, call.kv_heads, call.group
    query_count, query_heads, head_dim = queries.shape
    width = width_of(head_dim)
    tiling = _tiling(query_count * group, width, queries.element_size())
    rows = max(tiling.rows, triton.next_power_of_2(group))
    tile = rows // group
    programs = max(1, _PROCESSORS * tiling.programs // kv_heads)
    slots = _SLOTS * programs
    states = torch.empty((kv_heads, slots, rows, head_dim), dtype=torch.float32, device=queries.device)
    lses = torch.empty((kv_heads, slots, rows), dtype=torch.float32, device=queries.device)
    # Of each query: the first state of its tile, how many there are, and its row in them.
    places = torch.empty((query_count, 3), dtype=torch.int32, device=queries.device)
    is_described = all(
        (part.data_ptr() | part.stride(0) * part.element_size()) % 16 == 0 for part in (call.keys, call.values)
    )
    block = [tiling.slots, width]
    described = [
        TensorDescriptor.from_tensor(part, block) if is_described else part for part in (call.keys, call.values)
    ]
    shared = {"FIELDS": FIELDS, "GROUP": group, "D": head_dim, "SLOTS": slots, "ROWS": rows, **chained(queries.device)}
    _attend_tiles[(kv_heads, programs)](
        queries,
        call.keys,
        call.values,
        *described,
        regions,
        states,
        lses,
        places,
        out,
        query_count,
        call.scaling,
        call.cap,
        IS_DESCRIBED=is_described,
        LEAST_PART=_LEAST_PART,
        TILE=tile,
        ROW=call.row,
        HAS_CAP=call.softcap is not None,
        BLOCK_N=_QUERIES[bisect_left(_QUERIES, query_count)],
        BLOCK_T=triton.next_power_of_2(tile),
        BLOCK_D=width,
        BLOCK_S=tiling.slots,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        **shared,
    )
    _merge_tiles[(query_count, query_heads)](
        regions,
        states,
        lses,
        places,
        out,
        BLOCK_D=width,
        BLOCK_R=_MERGED_OF_FEW if query_count <= _FEW else _MERGED,
        num_warps=4 if query_count <= _FEW else 1,
        **shared,
    )


@triton.jit
def _tiles_of(
    p_regions, query_count, FIELDS: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Of each query: is the next one in its tile? and if it is not, how many blocks the tile reads."""
    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < query_count
    p_lines = p_regions + o_n * FIELDS
    b_start = tl.load(p_lines + in_line("START"), mask=m_n, other=0)
    b_count = tl.load(p_lines + in_line("COUNT"), mask=m_n, other=0).to(tl.int32)
    b_upto = tl.load(p_lines + in_line("UPTO"), mask=m_n, other=0).to(tl.int32)
    m_real = m_n & (b_count > 0) & (tl.load(p_lines + in_line("KIND"), mask=m_n, other=0) == 0)
    m_next = m_real & (o_n + 1 < query_count) & ((o_n + 1) % TILE != 0)
    p_next = p_lines + FIELDS
    m_next &= tl.load(p_next + in_line("START"), mask=m_next, other=0) == b_start
    m_next &= tl.load(p_next + in_line("COUNT"), mask=m_next, other=0).to(tl.int32) == b_count
    m_next &= tl.load(p_next + in_line("UPTO"), mask=m_next, other=0).to(tl.int32) == b_upto + 1
    m_next &= tl.load(p_next + in_line("KIND"), mask=m_next, other=1) == 0
    is_ring = tl.load(p_lines + in_line("RING"), mask=m_n, other=0) > 0
    # Where slots are positions, none after the last query's own is read.
    b_seen = tl.where(is_ring, b_count, tl.minimum(b_count, b_upto + 1))
    return m_next, tl.where(m_real & ~m_next, tl.cdiv(b_seen, BLOCK_S), 0)


@triton.jit
def _parts_of(b_blocks, programs, LEAST_PART: tl.constexpr):
    """How many parts of equal length each tile has: those with which the programs end earliest."""
    total = tl.sum(b_blocks, axis=0)
    best = tl.where(b_blocks > 0, 1, 0)
    least = total + 1
    # As many parts as programs, and up to three times as many: with one each, programs may be left without any.
    for halves in tl.static_range(2, 7):
        part = tl.maximum(tl.cdiv(2 * total, programs * halves), LEAST_PART)
        b_parts = tl.where(b_blocks > 0, tl.maximum(b_blocks // part, 1), 0)
        longest = tl.max(tl.cdiv(b_blocks, tl.maximum(b_parts, 1)), axis=0)
        time = tl.cdiv(tl.sum(b_parts, axis=0), programs) * longest
        best = tl.where(time < least, b_parts, best)
        least = tl.minimum(time, least)
    return best


@triton.jit
def _capped(b_scores, scaling, softcap):
    b_scores *= scaling
    b_power = tl.exp(-2.0 * tl.abs(b_scores / softcap))
    b_tanh = (1.0 - b_power) / (1.0 + b_power)
    return softcap * tl.where(b_scores < 0, -b_tanh, b_tanh)


@triton.jit(do_not_specialize=["query_count"])
def _attend_tiles(
    p_queries,
    p_keys,
    p_values,
    keys,
    values,
    p_regions,
    p_states,
    p_lses,
    p_places,
    p_out,
    query_count,
    scaling,
    softcap,
    FIELDS: tl.constexpr,
    IS_DESCRIBED: tl.constexpr,
    LEAST_PART: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """CHAINED: the kernel before wrote the queries, and some of the keys and values; lines were there before."""
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    programs = tl.num_programs(1)
    m_next, b_blocks = _tiles_of(p_regions, query_count, FIELDS, TILE, BLOCK_N, BLOCK_S)
    b_parts = _parts_of(b_blocks, programs, LEAST_PART)
    b_held = tl.where(b_parts > 1, b_parts, 0)
    b_upto_parts = tl.cumsum(b_parts, axis=0)
    b_upto_held = tl.cumsum(b_held, axis=0)
    o_n = tl.arange(0, BLOCK_N)
    o_q = tl.arange(0, ROWS)
    o_i = tl.arange(0, BLOCK_S)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    o_tile = o_i[:, None] * ROW + o_d[None, :]
    # Powers of two are what the device computes; scores are scaled to them as the largest is subtracted.
    to_power = 1.4426950408889634 if HAS_CAP else scaling * 1.4426950408889634
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    for item in range(tl.program_id(1), tl.sum(b_parts, axis=0), programs):
        last_query = tl.sum((b_upto_parts <= item).to(tl.int32), axis=0)
        m_last = o_n == last_query
        parts = tl.sum(tl.where(m_last, b_parts, 0), axis=0)
        blocks = tl.sum(tl.where(m_last, b_blocks, 0), axis=0)
        number = item - tl.sum(tl.where(m_last, b_upto_parts, 0), axis=0) + parts
        slot = tl.sum(tl.where(m_last, b_upto_held - b_held, 0), axis=0)
        first_query = tl.max(tl.where(m_next | (o_n >= last_query), -1, o_n), axis=0) + 1
        p_line = p_regions + first_query * FIELDS
        sink = tl.load(p_line + in_line("SINK")).to(tl.int32)
        ring = tl.load(p_line + in_line("RING")).to(tl.int32)
        last = tl.load(p_line + in_line("LAST")).to(tl.int32)
        begin = tl.load(p_line + in_line("BASE")).to(tl.int32)
        prefix = tl.load(p_line + in_line("PREFIX_START")) + head * tl.load(p_line + in_line("PREFIX_HEAD_SLOTS"))
        own = tl.load(p_line) + head * tl.load(p_line + in_line("HEAD_SLOTS")) - begin
        behind = (prefix - own) * ROW
        o_query = first_query + o_q // GROUP
        m_q = o_query <= last_query
        p_lines = p_regions + o_query * FIELDS
        b_upto = tl.load(p_lines + in_line("UPTO"), mask=m_q, other=-1).to(tl.int32)
        b_floor = tl.load(p_lines + in_line("FLOOR"), mask=m_q, other=0).to(tl.int32)
        b_sink_floor = tl.load(p_lines + in_line("SINK_FLOOR"), mask=m_q, other=0).to(tl.int32)
        b_floor = tl.maximum(b_floor, tl.where(ring > 0, sink, 0))
        count = tl.load(p_line + in_line("COUNT")).to(tl.int32)
        end = tl.where(ring > 0, count, tl.minimum(count, tl.max(b_upto, axis=0) + 1))
        all_from = tl.max(tl.maximum(b_floor, b_sink_floor), axis=0)
        all_until = tl.where(ring > 0, 0, tl.min(tl.where(m_q, b_upto, end), axis=0) + 1)
        o_h = (o_query.to(tl.int64) * heads + head) * GROUP + o_q % GROUP
        m_out = m_q[:, None] & m_d[None, :]
        b_q = tl.load(p_queries + o_h[:, None] * D + o_d[None, :], mask=m_out, other=0.0)
        b_top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros((ROWS,), dtype=tl.float32)
        b_out = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
        # Its blocks; in those of [whole, whole + before) and [behind_base, behind_base + after) all is seen.
        part = tl.cdiv(blocks, parts)
        from_block = tl.minimum(number * part, blocks)
        to_block = tl.minimum(blocks, from_block + part)
        whole = to_block
        until = to_block
        if IS_DESCRIBED:
            whole = tl.minimum(tl.maximum(tl.cdiv(all_from, BLOCK_S), from_block), to_block)
            until = tl.maximum(tl.minimum(all_until // BLOCK_S, to_block), whole)
        before = tl.maximum(tl.minimum(until, begin // BLOCK_S) - whole, 0)
        behind_base = tl.maximum(whole + before, tl.minimum(until, tl.cdiv(begin, BLOCK_S)))
        after = until - behind_base
        if IS_DESCRIBED:
            for number_of in tl.range(0, before + after, num_stages=STAGES):
                in_prefix = number_of < before
                block = tl.where(in_prefix, whole, behind_base - before) + number_of
                row = (tl.where(in_prefix, prefix, own) + block * BLOCK_S).to(tl.int32)
                b_k = keys.load([row, 0])
                b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
                if HAS_CAP:
                    b_scores = _capped(b_scores, scaling, softcap)
                b_new = tl.maximum(b_top, tl.max(b_scores, axis=1) * to_power)
                b_weights = tl.exp2(tl.fma(b_scores, to_power, -b_new[:, None]))
                b_keep = tl.exp2(b_top - b_new)
                b_sum = tl.fma(b_sum, b_keep, tl.sum(b_weights, axis=1))
                b_v = values.load([row, 0])
                b_out = tl.dot(b_weights.to(b_v.dtype), b_v, b_out * b_keep[:, None], input_precision="ieee")
                b_top = b_new
        ahead = whole - from_block
        between = behind_base - whole - before
        for number_of in tl.range(0, to_block - from_block - before - after, num_stages=STAGES):
            block = (
                from_block
                + number_of
                + tl.where(number_of < ahead, 0, before)
                + tl.where(number_of < ahead + between, 0, after)
            )
            s = block * BLOCK_S
            o_s = s + o_i
            m_s = o_s < end
            m_kv = m_s[:, None] & m_d[None, :]
            o_kv = (own + s) * ROW + tl.where(o_s < begin, behind, 0)[:, None] + o_tile
            b_k = tl.load(p_keys + o_kv, mask=m_kv, other=0.0)
            b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
            if HAS_CAP:
                b_scores = _capped(b_scores, scaling, softcap)
            in_sink = o_s < sink
            # A slot past `last` was opened and never written: its remainder is negative, its position past `upto`.
            position = tl.where(in_sink | (ring == 0), o_s, last - (last - o_s) % tl.maximum(ring, 1))
            b_from = tl.where(in_sink[None, :], b_sink_floor[:, None], b_floor[:, None])
            m_seen = m_s[None, :] & (position[None, :] <= b_upto[:, None]) & (position[None, :] >= b_from)
            b_scores = tl.where(m_seen, b_scores, float("-inf"))
            b_new = tl.maximum(b_top, tl.max(b_scores, axis=1) * to_power)
            b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_weights = tl.exp2(tl.fma(b_scores, to_power, -b_safe[:, None]))
            b_keep = tl.exp2(b_top - b_safe)
            b_sum = tl.fma(b_sum, b_keep, tl.sum(b_weights, axis=1))
            b_v = tl.load(p_values + o_kv, mask=m_kv, other=0.0)
            b_out = tl.dot(b_weights.to(b_v.dtype), b_v, b_out * b_keep[:, None], input_precision="ieee")
            b_top = b_new
        b_some = tl.where(b_sum > 0, b_sum, 1.0)
        b_out = b_out / b_some[:, None]
        if parts == 1:
            tl.store(p_out + o_h[:, None] * D + o_d[None, :], b_out.to(p_out.dtype.element_ty), mask=m_out)
        else:
            o_state = (head.to(tl.int64) * SLOTS + slot + number) * ROWS + o_q
            tl.store(p_states + o_state[:, None] * D + o_d[None, :], b_out, mask=m_out)
            tl.store(p_lses + o_state, tl.where(b_sum > 0, b_top + tl.log2(b_some), float("-inf")), mask=m_q)
        if (head == 0) & (number == 0):
            o_t = tl.arange(0, BLOCK_T)
            p_place = p_places + (first_query + o_t) * 3
            m_t = o_t <= last_query - first_query
            tl.store(p_place, slot + o_t * 0, mask=m_t)
            tl.store(p_place + 1, parts + o_t * 0, mask=m_t)
            tl.store(p_place + 2, o_t * GROUP, mask=m_t)


@triton.jit
def _merge_tiles(
    p_regions,
    p_states,
    p_lses,
    p_places,
    p_out,
    FIELDS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Of a query whose tile has several parts, for one head; zeros for a query that is another kernel's."""
    query = tl.program_id(0)
    query_head = tl.program_id(1)
    p_line = p_regions + query * FIELDS
    is_real = (tl.load(p_line + in_line("COUNT")) > 0) & (tl.load(p_line + in_line("KIND")) == 0)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    parts = tl.load(p_places + query * 3 + 1, mask=is_real, other=0)
    if parts != 1:
        o_d = tl.arange(0, BLOCK_D)
        m_d = o_d < D
        slot = tl.load(p_places + query * 3, mask=is_real, other=0)
        row = tl.load(p_places + query * 3 + 2, mask=is_real, other=0) + query_head % GROUP
        o_first = ((query_head // GROUP).to(tl.int64) * SLOTS + slot) * ROWS + row
        top = float("-inf")
        whole = 0.0
        b_out = tl.zeros((BLOCK_D,), dtype=tl.float32)
        for some in range(0, parts, BLOCK_R):
            o_r = some + tl.arange(0, BLOCK_R)
            m_r = o_r < parts
            o_state = o_first + o_r * ROWS
            b_lse = tl.load(p_lses + o_state, mask=m_r, other=float("-inf"))
            b_states = tl.load(
                p_states + o_state[:, None] * D + o_d[None, :], mask=m_r[:, None] & m_d[None, :], other=0.0
            )
            new = tl.maximum(top, tl.max(b_lse, axis=0))
            safe = tl.where(new == float("-inf"), 0.0, new)
            keep = tl.exp2(top - safe)
            b_weights = tl.exp2(b_lse - safe)
            whole = whole * keep + tl.sum(b_weights, axis=0)
            b_out = b_out * keep + tl.sum(b_states * b_weights[:, None], axis=0)
            top = new
        b_out = b_out / tl.where(whole > 0, whole, 1.0)
        o_out = (query.to(tl.int64) * tl.num_programs(1) + query_head) * D
        tl.store(p_out + o_out + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)
