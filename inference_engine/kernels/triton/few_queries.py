"""Flash decoding, attention of a step of few queries over regions: `kernels/ragged_attention.py` in Triton.

    reads of the queries   0 … | … | … | … 7000     0 … 200     0 … | … 900       a program for each run and KV head
    states                 ■     ■   ■   ■          out         ■     ■           merged by their log-sum-exps

Most of a decode step's attention is reading, and most of the rest is waiting: for a kernel to begin, for the first of
its reads, for states to be stored and read again. So a launch has one or two programs for each processor of the device,
a run is as long as it must be for that, and a program holds one state, however long its run (Flash-Decoding, Dao et
al., 2023, with runs of equal length whatever the lengths of histories). A query of a single run has no state.

What a query reads is counted through; `triton/gather.py` says how where it selects blocks. Lengths are numbers on the
device, so a launch depends on the number of queries alone and can be part of a CUDA graph. Where runs end, and so in
what order a query's sums are made, depends on the queries beside it; `triton/ragged_attention.py` has the operation of
which that is not so. Sums are float32; float32 inputs are multiplied as float32, not in TF32.

The kernels are launched in a chain (`triton/dependent_launch.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.reads import FIELDS, AttentionCall
from inference_engine.kernels.triton.block_selection import LEAST, SelectionTile, candidates, reads_of, width_of
from inference_engine.kernels.triton.dependent_launch import chained
from inference_engine.kernels.triton.line import in_line
from inference_engine.kernels.triton.tiles import shared_bytes

# Programs, if no run were rounded up: one for each processor of a large GPU where there is one narrow query, else two.
_PROGRAMS_OF_ONE, _PROGRAMS = 128, 256
_TILE, _WIDE_TILE = SelectionTile(64, 2**14, 4, 4), SelectionTile(64, 2**15, 4, 3)
_MERGED, _MERGED_OF_MANY = 32, 128  # channels that a program merges
_MOST_MERGED = 2**13  # numbers of states that a program holds
_FEW = 4  # queries, whose states are merged by as many programs as there can be


def _tile_of(width: int, *, is_one: bool, selects: bool) -> tuple[SelectionTile, int]:
    """What a program reads at once, and how many programs there are: the fastest tried on an H200, 1,024 to 120,000
    entries of 256 and of 512 numbers. Of two on a processor each has one stage less. Selected blocks may be small."""
    if width < 256 or selects:
        return _TILE, _PROGRAMS_OF_ONE if is_one else _PROGRAMS
    if is_one and width == 256:
        return _WIDE_TILE, _PROGRAMS_OF_ONE
    return _WIDE_TILE._replace(stages=2), _PROGRAMS


def attend_few(call: AttentionCall, out: Tensor, *, listed: Tensor | None = None) -> None:
    """Implements RegionKernel.

    listed: [N, Hkv, any] int32, the blocks that each query reads; None: queries that select any get zeros.
    """
    queries, regions, kv_heads, group = call.queries, call.lines, call.kv_heads, call.group
    query_count, query_heads, head_dim = queries.shape
    width = width_of(head_dim)
    tile, most_programs = _tile_of(width, is_one=query_count == 1, selects=listed is not None)
    rows, slots = max(LEAST, triton.next_power_of_2(group)), tile.rows_of(width, queries.element_size())
    row = width * queries.element_size()
    stages = max(1, min(tile.stages, (shared_bytes(queries.device) - rows * row) // (2 * slots * row)))
    runs = max(1, most_programs // kv_heads)  # of one KV head
    programs = runs + query_count  # each query's last run may be a short one
    # What each run gives: a sum over its weights, and their log-sum-exp.
    states = torch.empty((programs, query_heads, head_dim), dtype=torch.float32, device=queries.device)
    lses = torch.empty((programs, query_heads), dtype=torch.float32, device=queries.device)
    shared = {
        "FIELDS": FIELDS,
        "RUNS": runs,
        "LEAST_RUN": 1,
        "SELECTS": listed is not None,
        "D": head_dim,
        "BLOCK_N": triton.next_power_of_2(query_count),
        "BLOCK_S": slots,
        **chained(queries.device),
    }
    # Runs that there are come before those that only could be: the first programs begin on a processor each.
    _attend_run[(kv_heads, programs)](
        queries,
        call.keys,
        call.values,
        regions,
        regions if listed is None else listed,
        states,
        lses,
        out,
        query_count,
        call.scaling,
        call.cap,
        LISTED=0 if listed is None else listed.shape[2],
        GROUP=group,
        ROW=call.row,
        HAS_CAP=call.softcap is not None,
        BLOCK_D=width,
        BLOCK_Q=rows,
        num_warps=tile.warps,
        num_stages=stages,
        **shared,
    )
    most, merged = triton.next_power_of_2(runs), _MERGED if query_count <= _FEW else _MERGED_OF_MANY
    merged = min(merged, max(_MERGED, _MOST_MERGED // most))
    merge_runs[(triton.cdiv(head_dim, merged), query_heads, query_count)](
        states,
        lses,
        regions,
        out,
        query_count,
        BLOCK_D=merged,
        BLOCK_R=most,
        num_warps=max(1, min(4, most * merged // 2048)),
        **shared,
    )


@triton.jit
def ends_of(p_line, SELECTS: tl.constexpr):
    """How many reads the query of a line has, or those of lines have."""
    if SELECTS:
        _, _, end = reads_of(p_line, True)
        reads_slots = (tl.load(p_line + in_line("KIND")) == 0) & (tl.load(p_line + in_line("RING")) == 0)
        return tl.where(reads_slots, tl.minimum(end, tl.load(p_line + in_line("UPTO")).to(tl.int32) + 1), end)
    count = tl.where(tl.load(p_line + in_line("KIND")) == 0, tl.load(p_line + in_line("COUNT")), 0).to(tl.int32)
    # Where slots are positions, none after its own is seen.
    return tl.where(
        tl.load(p_line + in_line("RING")) > 0,
        count,
        tl.minimum(count, tl.load(p_line + in_line("UPTO")).to(tl.int32) + 1),
    )


@triton.jit
def runs_of(
    p_regions, query_count, FIELDS: tl.constexpr, RUNS: tl.constexpr, LEAST_RUN: tl.constexpr, SELECTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Of each query, how many runs there are, at least one; and the tiles of a run."""
    o_n = tl.arange(0, BLOCK_N)
    p_lines = p_regions + tl.minimum(o_n, query_count - 1) * FIELDS
    b_tiles = tl.where(o_n < query_count, tl.cdiv(ends_of(p_lines, SELECTS), BLOCK_S), 0)
    tiles = tl.maximum(tl.cdiv(tl.sum(b_tiles, axis=0), RUNS), LEAST_RUN)
    return tl.where(o_n < query_count, tl.maximum(tl.cdiv(b_tiles, tiles), 1), 0), tiles


@triton.jit
def query_of(b_runs, number):
    """Which query a program's run is of; as many as there are queries, or more: of none."""
    return tl.sum((tl.cumsum(b_runs, axis=0) <= number).to(tl.int32), axis=0)


@triton.jit
def runs_at(b_runs, query, BLOCK_N: tl.constexpr):
    """How many runs a query has, and how many there are before them."""
    o_n = tl.arange(0, BLOCK_N)
    return tl.sum(tl.where(o_n == query, b_runs, 0), axis=0), tl.sum(tl.where(o_n < query, b_runs, 0), axis=0)


@triton.jit
def seen(o_s, end, sink, ring, last, upto, floor, sink_floor):
    """Which slots a query sees."""
    in_sink = o_s < sink
    # A slot past `last` was opened and never written: its remainder is negative, its position past `upto`.
    position = tl.where(in_sink | (ring == 0), o_s, last - (last - o_s) % tl.maximum(ring, 1))
    return (o_s < end) & (position <= upto) & (position >= tl.where(in_sink, sink_floor, floor))


@triton.jit
def with_tile(b_top, b_sum, b_out, b_scores, b_v, to_power):
    """Attention so far, to which a tile is added."""
    b_new = tl.maximum(b_top, tl.max(b_scores, axis=1) * to_power)
    b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_weights = tl.exp2(tl.fma(b_scores, to_power, -b_safe[:, None]))
    b_keep = tl.exp2(b_top - b_safe)
    b_sum = tl.fma(b_sum, b_keep, tl.sum(b_weights, axis=1))
    b_out = tl.dot(b_weights.to(b_v.dtype), b_v, b_out * b_keep[:, None], input_precision="ieee")
    return b_new, b_sum, b_out


@triton.jit
def _scores_of(b_q, b_k, scaling, softcap, HAS_CAP: tl.constexpr):
    b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if HAS_CAP:
        b_scores *= scaling
        b_power = tl.exp(-2.0 * tl.abs(b_scores / softcap))
        b_tanh = (1.0 - b_power) / (1.0 + b_power)
        b_scores = softcap * tl.where(b_scores < 0, -b_tanh, b_tanh)
    return b_scores


@triton.jit(do_not_specialize=["query_count"])
def _attend_run(
    p_queries,
    p_keys,
    p_values,
    p_regions,
    p_listed,
    p_states,
    p_lses,
    p_out,
    query_count,
    scaling,
    softcap,
    FIELDS: tl.constexpr,
    RUNS: tl.constexpr,
    LEAST_RUN: tl.constexpr,
    SELECTS: tl.constexpr,
    LISTED: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """CHAINED: the kernel before wrote the queries, and some of the keys and values, or the list; lines were there."""
    head = tl.program_id(0)
    number = tl.program_id(1)
    heads = tl.num_programs(0)
    b_runs, tiles = runs_of(p_regions, query_count, FIELDS, RUNS, LEAST_RUN, SELECTS, BLOCK_N, BLOCK_S)
    query = query_of(b_runs, number)
    if query < query_count:
        runs, before = runs_at(b_runs, query, BLOCK_N)
        part = number - before
        p_line = p_regions + query * FIELDS
        sink = tl.load(p_line + in_line("SINK")).to(tl.int32)
        ring = tl.load(p_line + in_line("RING")).to(tl.int32)
        last = tl.load(p_line + in_line("LAST")).to(tl.int32)
        upto = tl.load(p_line + in_line("UPTO")).to(tl.int32)
        floor = tl.load(p_line + in_line("FLOOR")).to(tl.int32)
        sink_floor = tl.load(p_line + in_line("SINK_FLOOR")).to(tl.int32)
        prefix = tl.load(p_line + in_line("PREFIX_START")) + head * tl.load(p_line + in_line("PREFIX_HEAD_SLOTS"))
        begin = tl.load(p_line + in_line("BASE"))
        own = tl.load(p_line) + head * tl.load(p_line + in_line("HEAD_SLOTS")) - begin
        behind = (prefix - own) * ROW
        first = part * tiles * BLOCK_S
        end = tl.minimum(ends_of(p_line, SELECTS), first + tiles * BLOCK_S)
        floor = tl.where(ring > 0, tl.maximum(floor, sink), tl.maximum(floor, 0))
        # All slots between these two are seen.
        all_from = tl.where(ring > 0, end, tl.maximum(floor, sink_floor))
        all_until = tl.where(ring > 0, 0, tl.minimum(end, upto + 1))
        o_i = tl.arange(0, BLOCK_S)
        o_d = tl.arange(0, BLOCK_D)
        o_q = tl.arange(0, BLOCK_Q)
        m_q = o_q < GROUP
        m_d = o_d < D
        m_out = m_q[:, None] & m_d[None, :]
        o_tile = o_i[:, None] * ROW + o_d[None, :]
        o_h = (query * heads + head) * GROUP + o_q
        is_selecting = tl.load(p_line + in_line("KIND")) > 0
        local = tl.load(p_line + in_line("LOCAL")).to(tl.int32)
        size, _, _ = candidates(p_line)
        to_listed, to_local, _ = reads_of(p_line, True)
        p_list = p_listed + (query * heads + head) * LISTED
        if CHAINED:
            gdc_wait()
            gdc_launch_dependents()
        b_q = tl.load(p_queries + o_h[:, None] * D + o_d[None, :], mask=m_out, other=0.0)
        # Powers of two are what the device computes; scores are scaled to them as the largest is subtracted.
        to_power = 1.4426950408889634 if HAS_CAP else scaling * 1.4426950408889634
        b_top = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros((BLOCK_Q,), dtype=tl.float32)
        b_out = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
        upto_here = end
        if SELECTS:
            upto_here = tl.where(is_selecting, first, end)
        for s in range(first, upto_here, BLOCK_S):
            m_kv = (o_i < end - s)[:, None] & m_d[None, :]
            o_kv = (own + s) * ROW + tl.where(o_i < begin - s, behind, 0)[:, None] + o_tile
            b_k = tl.load(p_keys + o_kv, mask=m_kv, other=0.0)
            b_scores = _scores_of(b_q, b_k, scaling, softcap, HAS_CAP)
            if (s < all_from) | (s + BLOCK_S > all_until):
                m_seen = seen(s + o_i, end, sink, ring, last, upto, floor, sink_floor)
                b_scores = tl.where(m_seen[None, :], b_scores, float("-inf"))
            b_v = tl.load(p_values + o_kv, mask=m_kv, other=0.0)
            b_top, b_sum, b_out = with_tile(b_top, b_sum, b_out, b_scores, b_v, to_power)
        if SELECTS:
            # Where a tile is a run of slots, one number says where it is: that is most of the time.
            is_whole = (ring == 0) & (size % BLOCK_S == 0) & (to_listed % BLOCK_S == 0)
            own = tl.load(p_line) + head * tl.load(p_line + in_line("HEAD_SLOTS"))
            for r in range(tl.where(is_selecting & is_whole, first, end), end, BLOCK_S):
                in_list = (r >= to_listed) & (r < to_local)
                block = tl.load(p_list + (r - to_listed) // size, mask=in_list, other=0)
                slot = tl.where(in_list, block * size + (r - to_listed) % size, r)
                slot = tl.where(r >= to_local, r - to_local + local, slot)
                # A block that the sink or the window cuts is listed for the rest of it.
                least = tl.where(in_list, sink, 0) - slot
                until = tl.where(in_list, local, tl.where(r >= to_local, upto + 1, tl.minimum(end, upto + 1))) - slot
                m_s = (o_i >= least) & (o_i < tl.minimum(until, end - r))
                m_kv = m_s[:, None] & m_d[None, :]
                o_kv = (own + slot) * ROW + o_tile
                b_k = tl.load(p_keys + o_kv, mask=m_kv, other=0.0)
                b_scores = _scores_of(b_q, b_k, scaling, softcap, HAS_CAP)
                b_scores = tl.where(m_s[None, :], b_scores, float("-inf"))
                b_v = tl.load(p_values + o_kv, mask=m_kv, other=0.0)
                b_top, b_sum, b_out = with_tile(b_top, b_sum, b_out, b_scores, b_v, to_power)
            for r in range(tl.where(is_selecting & ~is_whole, first, end), end, BLOCK_S):
                o_r = r + o_i
                m_listed = (o_r >= to_listed) & (o_r < to_local)
                o_in = o_r - to_listed
                b_block = tl.load(p_list + o_in // size, mask=m_listed, other=0)
                position = tl.where(m_listed, b_block * size + o_in % size, o_r - to_local + local)
                position = tl.where(o_r < to_listed, o_r, position)
                in_sink = position < sink
                m_s = (o_r < end) & (position <= upto) & ~(m_listed & (in_sink | (position >= local)))
                is_wrapped = (ring > 0) & ~in_sink
                o_slot = tl.where(is_wrapped, sink + (position - sink) % tl.maximum(ring, 1), position)
                o_kv = (own + o_slot)[:, None] * ROW + o_d[None, :]
                m_kv = m_s[:, None] & m_d[None, :]
                b_k = tl.load(p_keys + o_kv, mask=m_kv, other=0.0)
                b_scores = _scores_of(b_q, b_k, scaling, softcap, HAS_CAP)
                b_scores = tl.where(m_s[None, :], b_scores, float("-inf"))
                b_v = tl.load(p_values + o_kv, mask=m_kv, other=0.0)
                b_top, b_sum, b_out = with_tile(b_top, b_sum, b_out, b_scores, b_v, to_power)
        b_some = tl.where(b_sum > 0, b_sum, 1.0)
        b_out = b_out / b_some[:, None]
        if runs == 1:
            tl.store(p_out + o_h[:, None] * D + o_d[None, :], b_out.to(p_out.dtype.element_ty), mask=m_out)
        else:
            o_state = (number * heads + head) * GROUP + o_q
            tl.store(p_states + o_state[:, None] * D + o_d[None, :], b_out, mask=m_out)
            tl.store(p_lses + o_state, tl.where(b_sum > 0, b_top + tl.log2(b_some), float("-inf")), mask=m_q)
    elif CHAINED:
        gdc_wait()  # what comes later relies on every program to wait
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["query_count"])
def merge_runs(
    p_states,
    p_lses,
    p_regions,
    p_out,
    query_count,
    FIELDS: tl.constexpr,
    RUNS: tl.constexpr,
    LEAST_RUN: tl.constexpr,
    SELECTS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Of a query of several runs, for one head and some channels."""
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    query = tl.program_id(2)
    b_runs, _ = runs_of(p_regions, query_count, FIELDS, RUNS, LEAST_RUN, SELECTS, BLOCK_N, BLOCK_S)
    runs, before = runs_at(b_runs, query, BLOCK_N)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if runs > 1:
        o_r = tl.arange(0, BLOCK_R)
        o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
        m_r = o_r < runs
        m_d = o_d < D
        o_state = (before + o_r) * heads + head
        b_lse = tl.load(p_lses + o_state, mask=m_r, other=float("-inf"))
        m_state = m_r[:, None] & m_d[None, :]
        b_states = tl.load(p_states + o_state[:, None] * D + o_d[None, :], mask=m_state, other=0.0)
        b_top = tl.max(b_lse, axis=0)
        b_weights = tl.exp2(b_lse - tl.where(b_top == float("-inf"), 0.0, b_top))
        b_all = tl.sum(b_weights, axis=0)
        b_out = tl.sum(b_states * b_weights[:, None], axis=0) / tl.where(b_all > 0, b_all, 1.0)
        tl.store(p_out + (query * heads + head) * D + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)
