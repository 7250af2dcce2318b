"""Latent attention of a step, in Triton: entries are one vector for all heads, of which values are the first numbers.

    entry     value, and most of the key [rank] | the rest of the key [rotated]
    program   some neighbouring queries and their heads, over a run of the entries: each is read once, for both products

As `few_queries.py`, from which runs and their merging are: a query of a single run has no state. All heads share what
is read, so tensor cores have as much to do as the memory has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.reads import FIELDS, AttentionCall
from inference_engine.kernels.triton.dependent_launch import chained
from inference_engine.kernels.triton.few_queries import (
    ends_of,
    merge_runs,
    query_of,
    runs_at,
    runs_of,
    seen,
    with_tile,
)
from inference_engine.kernels.triton.line import in_line
from inference_engine.kernels.triton.tiles import shared_bytes

_PROGRAMS = 264  # two for each processor of a large GPU: one multiplies while the other one reads
_LEAST_RUN = 2  # tiles of a run
_MOST_QUERIES = 1024  # of a launch, whose programs count through so many
_LEAST, _MOST_ROWS = 16, 64  # queries and heads of a program
_SLOTS, _STAGES = 32, 3
_MERGED, _MOST_MERGED = 32, 2**13  # channels that a program merges; numbers of states that it holds


def attend_latent(call: AttentionCall, out: Tensor) -> None:
    """Implements RegionKernel, where values are the first numbers of keys, and all heads read one."""
    assert call.kv_heads == 1 and call.keys.data_ptr() == call.values.data_ptr(), "another kernel's"
    for first in range(0, len(out), _MOST_QUERIES):
        some = slice(first, first + _MOST_QUERIES)
        _attend_some(call.of(some), out[some])


def _attend_some(call: AttentionCall, out: Tensor) -> None:
    queries, (count, heads, rank) = call.queries, out.shape
    rotated = call.head_dim - rank
    widths = [max(_LEAST, triton.next_power_of_2(each)) for each in (rank, rotated)]
    rows = max(_LEAST, min(_MOST_ROWS, triton.next_power_of_2(heads)))
    row = sum(widths) * queries.element_size()
    slots = _SLOTS if queries.element_size() == 2 else _SLOTS // 2
    stages = max(1, min(_STAGES, (shared_bytes(queries.device) - rows * row) // (slots * row)))
    blocks = triton.cdiv(heads, rows)
    runs = max(1, _PROGRAMS // blocks)
    programs = runs + count  # each query's last run may be a short one
    states = torch.empty((programs, heads, rank), dtype=torch.float32, device=queries.device)
    lses = torch.empty((programs, heads), dtype=torch.float32, device=queries.device)
    shared = {
        "FIELDS": FIELDS,
        "RUNS": runs,
        "LEAST_RUN": _LEAST_RUN,
        "SELECTS": False,
        "D": rank,
        "BLOCK_N": triton.next_power_of_2(count),
        "BLOCK_S": slots,
        **chained(queries.device),
    }
    _attend_run[(blocks, programs)](
        queries,
        call.keys,
        call.lines,
        states,
        lses,
        out,
        count,
        call.scaling,
        HEADS=heads,
        ROTATED=rotated,
        ROW=call.row,
        BLOCK_D=widths[0],
        BLOCK_R=widths[1],
        BLOCK_Q=rows,
        num_warps=4 if rows == _LEAST else 8,
        num_stages=stages,
        **shared,
    )
    most = triton.next_power_of_2(runs)
    merged = max(_LEAST, min(_MERGED, _MOST_MERGED // most))
    merge_runs[(triton.cdiv(rank, merged), heads, count)](
        states,
        lses,
        call.lines,
        out,
        count,
        BLOCK_D=merged,
        BLOCK_R=most,
        num_warps=max(1, min(4, most * merged // 2048)),
        **shared,
    )


@triton.jit(do_not_specialize=["query_count"])
def _attend_run(
    p_queries,
    p_entries,
    p_regions,
    p_states,
    p_lses,
    p_out,
    query_count,
    scaling,
    FIELDS: tl.constexpr,
    RUNS: tl.constexpr,
    LEAST_RUN: tl.constexpr,
    SELECTS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """CHAINED: the kernel before wrote the queries, and some entries; lines were there."""
    number = tl.program_id(1)
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
        begin = tl.load(p_line + in_line("BASE"))
        own = tl.load(p_line) - begin
        behind = (tl.load(p_line + in_line("PREFIX_START")) - own) * ROW
        first = part * tiles * BLOCK_S
        end = tl.minimum(ends_of(p_line, SELECTS), first + tiles * BLOCK_S)
        floor = tl.maximum(floor, tl.where(ring > 0, sink, 0))
        # All slots between these two are seen.
        all_from = tl.where(ring > 0, end, tl.maximum(floor, sink_floor))
        all_until = tl.where(ring > 0, 0, tl.minimum(end, upto + 1))
        o_i = tl.arange(0, BLOCK_S)
        o_d = tl.arange(0, BLOCK_D)
        o_r = tl.arange(0, BLOCK_R)
        o_head = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        m_q = o_head < HEADS
        m_d = o_d < D
        m_r = o_r < ROTATED
        m_out = m_q[:, None] & m_d[None, :]
        if CHAINED:
            gdc_wait()
            gdc_launch_dependents()
        p_query = p_queries + (query * HEADS + o_head)[:, None] * (D + ROTATED)
        b_q = tl.load(p_query + o_d[None, :], mask=m_out, other=0.0)
        b_turned = tl.load(p_query + D + o_r[None, :], mask=m_q[:, None] & m_r[None, :], other=0.0)
        # Powers of two are what the device computes; scores are scaled to them as the largest is subtracted.
        to_power = scaling * 1.4426950408889634
        b_top = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros((BLOCK_Q,), dtype=tl.float32)
        b_out = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
        for s in range(first, end, BLOCK_S):
            m_s = o_i < end - s
            p_rows = p_entries + ((own + s + o_i) * ROW + tl.where(o_i < begin - s, behind, 0))[:, None]
            b_v = tl.load(p_rows + o_d[None, :], mask=m_s[:, None] & m_d[None, :], other=0.0)
            b_k = tl.load(p_rows + D + o_r[None, :], mask=m_s[:, None] & m_r[None, :], other=0.0)
            b_scores = tl.dot(b_q, tl.trans(b_v), input_precision="ieee")
            b_scores = tl.dot(b_turned, tl.trans(b_k), b_scores, input_precision="ieee")
            if (s < all_from) | (s + BLOCK_S > all_until):
                m_seen = seen(s + o_i, end, sink, ring, last, upto, floor, sink_floor)
                b_scores = tl.where(m_seen[None, :], b_scores, float("-inf"))
            b_top, b_sum, b_out = with_tile(b_top, b_sum, b_out, b_scores, b_v, to_power)
        b_some = tl.where(b_sum > 0, b_sum, 1.0)
        b_out = b_out / b_some[:, None]
        if runs == 1:
            p_to = p_out + (query * HEADS + o_head)[:, None] * D + o_d[None, :]
            tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=m_out)
        else:
            o_state = number * HEADS + o_head
            tl.store(p_states + o_state[:, None] * D + o_d[None, :], b_out, mask=m_out)
            tl.store(p_lses + o_state, tl.where(b_sum > 0, b_top + tl.log2(b_some), float("-inf")), mask=m_q)
    elif CHAINED:
        gdc_wait()  # what comes later relies on every program to wait
        gdc_launch_dependents()
