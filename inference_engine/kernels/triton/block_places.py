"""Where selected blocks are, if some are in the host's memory: `kernels/offloaded.py` in Triton.

Between the selection of `block_selection.py` and the reading of `gather.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.reads import FIELDS
from inference_engine.kernels.triton.block_selection import candidates
from inference_engine.kernels.triton.dependent_launch import chained
from inference_engine.kernels.triton.line import in_line, in_record, number_of

_FOUND = 64  # listed blocks, and places, that are compared at once


def find_blocks(listed: Tensor, regions: Tensor) -> Tensor:
    """Where the listed blocks are, of lines whose blocks may be off the device: [N, Hkv, any] int32; else undefined.

    A slot of the regions; or -1, only in the host's memory; or -2 - slot: there, and to be put into that slot. Blocks
    are given places here: see `kernels/offloaded.py`.
    """
    query_count, kv_heads, width = listed.shape
    sources = torch.empty_like(listed)
    _find_blocks[(kv_heads, query_count)](
        listed,
        sources,
        regions,
        FIELDS=FIELDS,
        WIDTH=width,
        AT_ONCE=_FOUND,
        num_warps=4,
        **chained(regions.device),
    )
    return sources


@triton.jit
def _find_blocks(
    p_listed,
    p_sources,
    p_regions,
    FIELDS: tl.constexpr,
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program for each KV head and query; the only one of a step that changes places of its session and head."""
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    query = tl.program_id(1).to(tl.int64)
    p_line = p_regions + query * FIELDS
    size, first, end = candidates(p_line)
    sink = tl.load(p_line + in_line("SINK")).to(tl.int32)
    ring = tl.maximum(tl.load(p_line + in_line("RING")).to(tl.int32), 1)
    record = tl.load(p_line + in_line("PLACES"))
    offloaded_end = tl.load(p_line + in_line("OFFLOADED_END")).to(tl.int32)
    kept = tl.minimum(tl.load(p_line + in_line("KEPT")).to(tl.int32), end - first)
    is_offloaded = tl.load(p_line + in_line("KIND")) == number_of("OffloadedBlockRead")
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if is_offloaded & (kept > 0):
        p_record = record.to(tl.pointer_type(tl.int64))
        count = tl.load(p_record + in_record("PLACE_COUNT")).to(tl.int32)
        p_places = tl.load(p_record + in_record("PLACES")).to(tl.pointer_type(tl.int32)) + head * count
        fetched_from = tl.load(p_record + in_record("FETCHED_FROM")).to(tl.int32)
        p_counts = tl.load(p_record + in_record("COUNTS")).to(tl.pointer_type(tl.int64)) + head * 2
        p_list = p_listed + (query * heads + head) * WIDTH
        p_source = p_sources + (query * heads + head) * WIDTH
        away = tl.abs(offloaded_end)
        o_k = tl.arange(0, AT_ONCE)
        o_p = tl.arange(0, AT_ONCE)
        found = 0
        missed = 0
        for k in range(0, kept, AT_ONCE):
            m_k = k + o_k < kept
            b_block = tl.load(p_list + k + o_k, mask=m_k, other=-2)
            b_first = b_block * size
            b_source = tl.where(b_first < sink, b_first, sink + (b_first - sink) % ring)
            m_away = m_k & (b_first >= sink) & (b_first < away)
            b_source = tl.where(m_away, -1, b_source)
            for p in range(0, count, AT_ONCE):
                b_held = tl.load(p_places + p + o_p, mask=p + o_p < count, other=-3)
                m_same = m_away[:, None] & (b_block[:, None] == b_held[None, :])
                b_place = tl.sum(tl.where(m_same, p + o_p[None, :] + 1, 0), axis=1)
                b_source = tl.where(b_place > 0, fetched_from + (b_place - 1) * size, b_source)
            tl.store(p_source + k + o_k, b_source, mask=m_k)
            missed += tl.sum((m_k & (b_source < 0)).to(tl.int32), axis=0)
            found += tl.sum((m_away & (b_source >= 0)).to(tl.int32), axis=0)
        tl.store(p_counts, tl.load(p_counts) + found)
        tl.store(p_counts + 1, tl.load(p_counts + 1) + missed)
        if (offloaded_end > 0) & (missed > 0):
            tl.debug_barrier()  # what was stored is read again by other threads
            free = 0
            for p in range(0, count, AT_ONCE):
                m_p = p + o_p < count
                b_held = tl.load(p_places + p + o_p, mask=m_p, other=-3)
                b_wanted = tl.zeros((AT_ONCE,), dtype=tl.int32)
                for k in range(0, kept, AT_ONCE):
                    b_block = tl.load(p_list + k + o_k, mask=k + o_k < kept, other=-2)
                    m_same = b_block[:, None] == b_held[None, :]
                    b_wanted += tl.sum(m_same.to(tl.int32), axis=0)
                m_free = m_p & (b_wanted == 0)
                b_free = m_free.to(tl.int32)
                b_turn = free + tl.cumsum(b_free, axis=0) - b_free  # the free place of this number
                missing = 0
                b_new = b_held
                for k in range(0, kept, AT_ONCE):
                    m_k = k + o_k < kept
                    b_block = tl.load(p_list + k + o_k, mask=m_k, other=-2)
                    b_source = tl.load(p_source + k + o_k, mask=m_k, other=0)
                    b_miss = (b_source < 0).to(tl.int32)
                    b_number = missing + tl.cumsum(b_miss, axis=0) - b_miss
                    m_pair = (b_miss == 1)[:, None] & m_free[None, :] & (b_number[:, None] == b_turn[None, :])
                    b_given = tl.sum(tl.where(m_pair, p + o_p[None, :] + 1, 0), axis=1)
                    b_slot = fetched_from + (b_given - 1) * size
                    tl.store(p_source + k + o_k, -2 - b_slot, mask=m_k & (b_given > 0))
                    b_taken = tl.sum(tl.where(m_pair, b_block[:, None] + 1, 0), axis=0)
                    b_new = tl.where(b_taken > 0, b_taken - 1, b_new)
                    missing += tl.sum(b_miss, axis=0)
                tl.store(p_places + p + o_p, b_new, mask=m_p)
                free += tl.sum(b_free, axis=0)
