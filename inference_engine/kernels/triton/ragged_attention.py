"""`kernels/ragged_attention.py` in Triton: split over keys, then merged (flash decoding).

`attend_ragged` is for speed: tiles of neighbouring queries by `triton/query_tiles.py`, a step of few queries that are
all of other sessions by `triton/few_queries.py`. In what order they add up depends on all queries of the step.

The kernels here are those of `attend_invariant`, which gives a query the same bits whatever is beside it. A program
serves one query, one KV head and one part of the slots; the query heads of the group share what it reads. The parts are
merged by their log-sum-exp (Flash-Decoding: Dao et al., 2023). Of many queries most belong to a chunk of some prefill:
they are cut into tiles, and where all queries of a tile look at one region, a program serves the tile.

    queries  a b c c | c c c c | c c c 0      tiles of four; the first is served query by query

How a query's slots are cut into parts follows from how many there are for it to see, parts are merged in their order,
and a tile multiplies as a single query does. A program may serve several parts; where there are enough programs anyway,
each goes through all parts, and merges them as it goes.

Which tiles there are, and how far loops run, are numbers read on the device, so a launch depends on the number of
queries alone and can be part of a CUDA graph. Sums are float32; float32 inputs are multiplied as float32, not in TF32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.reads import FIELDS, AttentionByRecord, AttentionCall
from inference_engine.kernels.triton.dependent_launch import chained
from inference_engine.kernels.triton.few_queries import attend_few
from inference_engine.kernels.triton.latent_entries import attend_latent
from inference_engine.kernels.triton.line import in_line
from inference_engine.kernels.triton.query_tiles import attend_tiles
from inference_engine.kernels.triton.tiles import shared_bytes

_PROGRAMS = 128  # tiles and heads that fill a GPU; of fewer, parts are served by programs of their own
_PROGRAMS_OF_TWO = 512  # tiles of twice as many rows and heads that fill it
_PROGRAMS_OF_PARTS = 512  # that a launch has at least, if there are as many parts
_MOST_PARTS = 32
_MERGED_AT_ONCE = 8
_STAGES = 3  # blocks of keys and values that are under way
_LEAST_PART = 128  # slots; a multiple of all tiles
_LEAST = 16  # rows and columns that a matrix product of Triton has at least
_FEW_QUERIES = 64  # up to these many, each is likely to look at a region of its own


def _attend_regions(call: AttentionCall, out: Tensor) -> None:
    """Implements RegionKernel."""
    attend = attend_tiles if call.has_chunks or len(call.queries) > _FEW_QUERIES else attend_few
    attend(call, out)


def _attend_in_one_order(call: AttentionCall, out: Tensor) -> None:
    """Implements RegionKernel: what each query sees is cut into parts, also where a program goes through all."""
    queries, regions, kv_heads, group = call.queries, call.lines, call.kv_heads, call.group
    query_count, query_heads, head_dim = queries.shape
    width = max(_LEAST, triton.next_power_of_2(head_dim))
    is_narrow = width * queries.element_size() <= 256 and queries.element_size() == 2
    # Single queries, too, fill a tile with their group: other tiles multiply and add in another order.
    block = max(64 if is_narrow else 32, triton.next_power_of_2(group))
    tile, block_of_tile = 1, block
    if query_count > _FEW_QUERIES:
        has_two = (
            is_narrow and width > 64 and triton.cdiv(query_count, 2 * block // group) * kv_heads >= _PROGRAMS_OF_TWO
        )
        block_of_tile = 2 * block if has_two else block
        tile = max(1, block_of_tile // group)
    tiles = triton.cdiv(query_count, tile)
    has_parts = tile == 1 or tiles * kv_heads < _PROGRAMS
    parts = triton.next_power_of_2(triton.cdiv(_PROGRAMS_OF_PARTS, tiles * kv_heads))
    parts = min(_MOST_PARTS, parts) if has_parts else 1
    # Beside the queries, each stage is a block of keys and one of values.
    row = width * queries.element_size()
    block_s = 64 if is_narrow else 32
    room = shared_bytes(queries.device) - block_of_tile * row
    stages = max(1, min(_STAGES, room // (2 * block_s * row)))
    held = torch.empty(
        (query_count, query_heads, _MOST_PARTS, head_dim) if has_parts else (0,),
        dtype=torch.float32,
        device=queries.device,
    )
    # Of each part the largest score, and the sum of what is above it.
    sums = torch.empty(
        (2, query_count, query_heads, _MOST_PARTS) if has_parts else (0,), dtype=torch.float32, device=queries.device
    )
    tensors = (queries, call.keys, call.values, regions, held, sums, out)
    numbers = (query_count, call.scaling, call.cap)
    constants = {
        "FIELDS": FIELDS,
        "PARTS": _MOST_PARTS,
        "LEAST_PART": _LEAST_PART,
        "HAS_PARTS": has_parts,
        "GROUP": group,
        "TILE": tile,
        "BLOCK_T": triton.next_power_of_2(tile),
        "D": head_dim,
        "ROW": call.row,
        "HAS_CAP": call.softcap is not None,
        "BLOCK_D": width,
        "BLOCK_S": block_s,
        "num_stages": stages,
        **chained(queries.device),
    }
    _attend_one[(query_count, kv_heads, parts)](*tensors, *numbers, BLOCK_Q=block, **constants)
    if tile > 1:
        _attend_tile[(tiles, kv_heads, parts)](
            *tensors,
            *numbers,
            BLOCK_Q=block_of_tile,
            num_warps=4 * block_of_tile // block,
            **constants,
        )
    if has_parts:
        _merge_parts[(query_count * query_heads,)](
            held,
            sums,
            regions,
            out,
            query_count,
            FIELDS=FIELDS,
            PARTS=_MOST_PARTS,
            LEAST_PART=_LEAST_PART,
            AT_ONCE=min(_MERGED_AT_ONCE, _MOST_PARTS),
            HEADS=query_heads,
            D=head_dim,
            BLOCK_D=width,
            num_warps=1,
            **chained(queries.device),
        )


attend_ragged = AttentionByRecord(
    name="triton", regions=_attend_regions, alone_upto=_FEW_QUERIES, is_even=True, latent=attend_latent
)
# Queries of each record are served in one way, however many there are.
attend_invariant = AttentionByRecord(name="triton in one order", regions=_attend_in_one_order, is_even=True)


@triton.jit
def _part_of(p_line, PARTS: tl.constexpr, LEAST_PART: tl.constexpr):
    """Slots of a part for the query of a line: the same whenever it sees the same slots."""
    ring = tl.load(p_line + in_line("RING")).to(tl.int32)
    slots = tl.where(
        ring > 0,
        tl.load(p_line + in_line("SINK")).to(tl.int32) + ring,
        tl.load(p_line + in_line("UPTO")).to(tl.int32) + 1,
    )
    part = slots * 0 + LEAST_PART
    while part * PARTS < slots:
        part *= 2
    return part


@triton.jit
def _is_shared(
    p_regions, o_first, query_count, FIELDS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    LEAST_PART: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Do all queries of a tile look at one region, cut into the same parts? Padding behind them looks at nothing."""
    o_query = o_first + tl.arange(0, BLOCK_T)
    m_tile = (o_query < o_first + TILE) & (o_query < query_count)
    p_lines = p_regions + o_query * FIELDS
    m_real = tl.load(p_lines + in_line("COUNT"), mask=m_tile, other=0) > 0
    p_first = p_regions + o_first * FIELDS
    b_start = tl.load(p_lines, mask=m_real, other=0)
    b_kind = tl.load(p_lines + in_line("KIND"), mask=m_real, other=0)
    m_other = m_real & ((b_start != tl.load(p_first)) | (b_kind != 0))
    p_last = p_regions + tl.max(tl.where(m_real, o_query, o_first), axis=0) * FIELDS
    is_one = (tl.load(p_first + in_line("COUNT")) > 0) & (tl.max(m_other.to(tl.int32), axis=0) == 0)
    return is_one & (_part_of(p_first, PARTS, LEAST_PART) == _part_of(p_last, PARTS, LEAST_PART))


@triton.jit
def _merged(b_top, b_sum, b_out, b_next_top, b_next_sum, b_next_out):
    """Attention so far, and that to the next part. The products are rounded at the same places wherever this stands."""
    b_new = tl.maximum(b_top, b_next_top)
    b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_keep = tl.exp2(b_top - b_safe)
    b_add = tl.exp2(b_next_top - b_safe)
    b_sum = tl.fma(b_sum, b_keep, b_next_sum * b_add)
    b_out = tl.fma(b_out, tl.expand_dims(b_keep, 1), b_next_out * tl.expand_dims(b_add, 1))
    return b_new, b_sum, b_out


@triton.jit
def _attend_rows(
    p_queries,
    p_keys,
    p_values,
    p_regions,
    p_held,
    p_sums,
    p_out,
    query_count,
    p_line,
    o_query,
    o_h,
    m_q,
    count,
    part,
    scaling,
    softcap,
    FIELDS: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Rows of queries and their heads that look at one region: a run of its parts, or all of them.

    CHAINED: the kernel before wrote the queries, and some of the keys and values; lines were there before.
    """
    head = tl.program_id(1)
    region = tl.load(p_line + in_line("HEAD_SLOTS"))
    sink = tl.load(p_line + in_line("SINK")).to(tl.int32)
    ring = tl.load(p_line + in_line("RING")).to(tl.int32)
    last = tl.load(p_line + in_line("LAST")).to(tl.int32)
    prefix = tl.load(p_line + in_line("PREFIX_START")) + head * tl.load(p_line + in_line("PREFIX_HEAD_SLOTS"))
    begin = tl.load(p_line + in_line("BASE"))
    own = tl.load(p_line) + head * region - begin
    behind = (prefix - own) * ROW
    b_upto = tl.load(p_regions + o_query * FIELDS + in_line("UPTO"), mask=m_q, other=-1).to(tl.int32)
    m_real = tl.load(p_regions + o_query * FIELDS + in_line("COUNT"), mask=m_q, other=0) > 0
    b_floor = tl.load(p_regions + o_query * FIELDS + in_line("FLOOR"), mask=m_q, other=0).to(tl.int32)
    b_sink_floor = tl.load(p_regions + o_query * FIELDS + in_line("SINK_FLOOR"), mask=m_q, other=0).to(tl.int32)
    b_floor = tl.where(ring > 0, tl.maximum(b_floor, sink), tl.maximum(b_floor, 0))
    # Where slots are positions: no query reads those after the last query's own, and between these two all are seen.
    end = tl.where(ring > 0, count, tl.minimum(count, tl.max(tl.where(m_real, b_upto, -1), axis=0) + 1))
    all_until = tl.where(ring > 0, 0, tl.min(tl.where(m_real, b_upto, end), axis=0) + 1)
    all_from = tl.max(tl.maximum(b_floor, b_sink_floor), axis=0)
    first = end * 0
    if HAS_PARTS:
        run = tl.cdiv(tl.cdiv(end, part), tl.num_programs(2)) * part
        first = tl.program_id(2) * run
        end = tl.minimum(end, first + run)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    m_out = m_q[:, None] & m_d[None, :]
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    o_i = tl.arange(0, BLOCK_S)
    o_tile = o_i[:, None] * ROW + o_d[None, :]
    b_q = tl.load(p_queries + o_h[:, None] * D + o_d[None, :], mask=m_out, other=0.0)
    # Powers of two are what the device computes; scores are scaled to them as the largest is subtracted.
    to_power = 1.4426950408889634 if HAS_CAP else scaling * 1.4426950408889634
    b_all_top = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
    b_all_sum = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    b_all_out = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
    for start in range(first, end, part):
        b_top = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros((BLOCK_Q,), dtype=tl.float32)
        b_out = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
        for s in range(start, tl.minimum(end, start + part), BLOCK_S):
            m_s = o_i < end - s
            m_kv = m_s[:, None] & m_d[None, :]
            o_before = tl.where(o_i < begin - s, behind, 0)
            o_kv = (own + s) * ROW + o_before[:, None] + o_tile
            b_k = tl.load(p_keys + o_kv, mask=m_kv, other=0.0)
            b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
            if HAS_CAP:
                b_scores *= scaling
                b_power = tl.exp(-2.0 * tl.abs(b_scores / softcap))
                b_tanh = (1.0 - b_power) / (1.0 + b_power)
                b_scores = softcap * tl.where(b_scores < 0, -b_tanh, b_tanh)
            if (s < all_from) | (s + BLOCK_S > all_until):
                o_s = s + o_i
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
            b_v = tl.load(p_values + o_kv, mask=m_kv, other=0.0)
            b_sum = tl.fma(b_sum, b_keep, tl.sum(b_weights, axis=1))
            b_out = tl.dot(b_weights.to(b_v.dtype), b_v, b_out * b_keep[:, None], input_precision="ieee")
            b_top = b_new
        if HAS_PARTS:
            _hold(p_held, p_sums, o_h, start // part, m_q, b_top, b_sum, b_out, query_count, PARTS, GROUP, D)
        else:
            b_all_top, b_all_sum, b_all_out = _merged(b_all_top, b_all_sum, b_all_out, b_top, b_sum, b_out)
    # Of padding, where all is seen and nothing masked, sums were made, too.
    b_all_sum = tl.where(m_real, b_all_sum, 0.0)
    b_all_out = tl.where(m_real[:, None], b_all_out, 0.0)
    if not HAS_PARTS:
        b_all_out = b_all_out / tl.where(b_all_sum > 0, b_all_sum, 1.0)[:, None]
        tl.store(p_out + o_h[:, None] * D + o_d[None, :], b_all_out.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def _hold(
    p_held,
    p_sums,
    o_h,
    number,
    m_q,
    b_top,
    b_sum,
    b_out,
    query_count,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
):
    """Store what a part gave, for `_merge_parts`."""
    o_part = o_h * PARTS + number
    o_sums = query_count.to(tl.int64) * tl.num_programs(1) * GROUP * PARTS
    o_d = tl.arange(0, b_out.shape[1])
    tl.store(p_held + o_part[:, None] * D + o_d[None, :], b_out, mask=m_q[:, None] & (o_d < D)[None, :])
    tl.store(p_sums + o_part, b_top, mask=m_q)
    tl.store(p_sums + o_sums + o_part, b_sum, mask=m_q)


@triton.jit(do_not_specialize=["query_count"])
def _attend_one(
    p_queries,
    p_keys,
    p_values,
    p_regions,
    p_held,
    p_sums,
    p_out,
    query_count,
    scaling,
    softcap,
    FIELDS: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST_PART: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """A query by itself; what a tile shares is left to the program that serves the tile."""
    query = tl.program_id(0).to(tl.int64)
    p_line = p_regions + query * FIELDS
    is_own = query >= 0
    if TILE > 1:
        o_first = query // TILE * TILE
        is_own = not _is_shared(p_regions, o_first, query_count, FIELDS, TILE, PARTS, LEAST_PART, BLOCK_T)
    if is_own:
        count = tl.where(tl.load(p_line + in_line("KIND")) == 0, tl.load(p_line + in_line("COUNT")), 0).to(tl.int32)
        o_q = tl.arange(0, BLOCK_Q)
        o_h = (query * tl.num_programs(1) + tl.program_id(1)) * GROUP + o_q
        _attend_rows(
            p_queries, p_keys, p_values, p_regions, p_held, p_sums, p_out, query_count, p_line, query + o_q * 0, o_h,
            o_q < GROUP, count, _part_of(p_line, PARTS, LEAST_PART), scaling, softcap, FIELDS, PARTS, HAS_PARTS,
            GROUP, D, ROW, HAS_CAP, BLOCK_D, BLOCK_Q, BLOCK_S, CHAINED,
        )  # fmt: skip
    elif CHAINED:
        gdc_wait()  # what comes later relies on every program to wait
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["query_count"])
def _attend_tile(
    p_queries,
    p_keys,
    p_values,
    p_regions,
    p_held,
    p_sums,
    p_out,
    query_count,
    scaling,
    softcap,
    FIELDS: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST_PART: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Queries of a tile that look at one region: their lines differ only in what they see."""
    o_first = tl.program_id(0).to(tl.int64) * TILE
    o_last = tl.minimum(o_first + TILE, query_count) - 1
    p_line = p_regions + o_first * FIELDS
    if _is_shared(p_regions, o_first, query_count, FIELDS, TILE, PARTS, LEAST_PART, BLOCK_T):
        # The query heads of the group, query after query.
        o_q = tl.arange(0, BLOCK_Q)
        o_query = o_first + o_q // GROUP
        o_h = (o_query * tl.num_programs(1) + tl.program_id(1)) * GROUP + o_q % GROUP
        _attend_rows(
            p_queries, p_keys, p_values, p_regions, p_held, p_sums, p_out, query_count, p_line, o_query, o_h,
            (o_q < TILE * GROUP) & (o_query <= o_last), tl.load(p_line + in_line("COUNT")).to(tl.int32),
            _part_of(p_line, PARTS, LEAST_PART), scaling, softcap, FIELDS, PARTS, HAS_PARTS, GROUP, D, ROW, HAS_CAP,
            BLOCK_D, BLOCK_Q, BLOCK_S, CHAINED,
        )  # fmt: skip
    elif CHAINED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["query_count"])
def _merge_parts(
    p_held,
    p_sums,
    p_regions,
    p_out,
    query_count,
    FIELDS: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST_PART: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHAINED: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    p_line = p_regions + head // HEADS * FIELDS
    part = _part_of(p_line, PARTS, LEAST_PART)
    count = tl.where(tl.load(p_line + in_line("KIND")) == 0, tl.load(p_line + in_line("COUNT")), 0).to(tl.int32)
    count = tl.where(
        tl.load(p_line + in_line("RING")) > 0,
        count,
        tl.minimum(count, tl.load(p_line + in_line("UPTO")).to(tl.int32) + 1),
    )
    parts = tl.cdiv(count, part)
    o_d = tl.arange(0, BLOCK_D)
    o_sums = query_count.to(tl.int64) * HEADS * PARTS
    b_top = tl.full((1,), float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros((1,), dtype=tl.float32)
    b_out = tl.zeros((1, BLOCK_D), dtype=tl.float32)
    o_one = tl.arange(0, 1)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    for some in range(0, parts, AT_ONCE):
        for each in tl.static_range(AT_ONCE):
            m_one = (o_one == 0) & (some + each < parts)
            o_part = head * PARTS + some + each + o_one
            b_next_top = tl.load(p_sums + o_part, mask=m_one, other=float("-inf"))
            b_next_sum = tl.load(p_sums + o_sums + o_part, mask=m_one, other=0.0)
            m_out = m_one[:, None] & (o_d < D)[None, :]
            b_next_out = tl.load(p_held + o_part[:, None] * D + o_d[None, :], mask=m_out, other=0.0)
            b_top, b_sum, b_out = _merged(b_top, b_sum, b_out, b_next_top, b_next_sum, b_next_out)
    b_out = b_out / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    tl.store(p_out + head * D + o_d[None, :], b_out.to(p_out.dtype.element_ty), mask=(o_d < D)[None, :])
