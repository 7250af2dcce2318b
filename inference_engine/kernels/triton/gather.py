"""Attention over regions in steps in which queries read selected blocks: `kernels/ragged_attention.py` in Triton.

    bounds ─ score ─▶ scores [N, Hkv, blocks] ─ select ─▶ block ids [N, Hkv, blocks] ─ read ─▶ parts ─ merge ─▶ out

What a query reads is counted through, and cut into tiles. Nothing else is loaded:

    read number   0 … sink-1 | sink …                 | …                  a query of the block size 0 reads slots
    slot          its number | of the listed blocks   | local … upto       0 … count-1

Lengths, and how much is kept, are read on the device, so launches depend on the number of queries alone: the step can
be part of a CUDA graph. Tile t goes to part t modulo `_PARTS`, and parts are merged in their order: the sums of a query
follow from its own numbers, whatever queries are beside it. In a step of more than `_FEW` and at most 64 queries, none
of which reads offloaded blocks, `triton/few_queries.py` reads, of which that is not so. Sums are float32; float32
inputs are multiplied as float32.

The kernels are launched in a chain (`triton/dependent_launch.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.reads import FIELDS, AttentionCall, BlockRead, OffloadedBlockRead, StagedRead
from inference_engine.kernels.triton.block_places import find_blocks
from inference_engine.kernels.triton.block_selection import (
    LEAST,
    SelectionTile,
    candidates,
    reads_of,
    score_blocks,
    select_blocks,
    width_of,
)
from inference_engine.kernels.triton.dependent_launch import chained
from inference_engine.kernels.triton.few_queries import attend_few
from inference_engine.kernels.triton.line import in_line, in_record, number_of

_PARTS = 80  # of one query and KV head
_PARTS_OF_MANY = 8  # where queries beside them make up a chunk of some prefill
_MERGED, _MERGING_WARPS = 32, 2  # channels that a program merges
_AT_ONCE = 64  # queries, where the parts of each are the same however many there are
_FEW = 4  # queries that all these parts are for: of more, the programs would be too many and too short
_READ = SelectionTile(64, 2**14, 2, 1)


def attend_selecting(call: AttentionCall, out: Tensor, read: StagedRead, *, serves_all: bool) -> None:
    """Implements ReadKernel, for BlockRead and OffloadedBlockRead. Of many queries, few should read so."""
    assert isinstance(read.record, BlockRead)
    listed = select_blocks(score_blocks(call, read.record.blocks), call.lines)
    sources = find_blocks(listed, call.lines) if isinstance(read.record, OffloadedBlockRead) else None
    attend_listed(call, out, listed, serves_all=serves_all, sources=sources)


def attend_selecting_in_parts(call: AttentionCall, out: Tensor, read: StagedRead, *, serves_all: bool) -> None:
    """As `attend_selecting`, some queries at a time."""
    for first in range(0, len(call.queries), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        attend_selecting(call.of(part), out[part], read, serves_all=serves_all)


def attend_listed(
    call: AttentionCall, out: Tensor, listed: Tensor, *, serves_all: bool = True, sources: Tensor | None = None
) -> None:
    """Attention of each query to its sink, its listed blocks, and what is local; of others, to all that they see.

    listed: [N, Hkv, any] int32, as many valid ones as the line keeps, or as there are candidates if these are fewer.
    sources: as `find_blocks` has them; None: all entries are on the device.
    """
    queries, kv_heads, group = call.queries, call.kv_heads, call.group
    query_count, query_heads, head_dim = queries.shape
    if serves_all and sources is None and query_count > _FEW:
        attend_few(call, out, listed=listed)
        return
    width = width_of(head_dim)
    part_count = _PARTS if serves_all else _PARTS_OF_MANY
    parts = torch.empty((query_count, query_heads, part_count, head_dim), dtype=torch.float32, device=queries.device)
    sums = torch.empty((query_count, query_heads, part_count), dtype=torch.float32, device=queries.device)
    tile = _READ.rows_of(width, call.keys.element_size())
    _attend_part[(part_count, kv_heads, query_count)](
        queries,
        call.keys,
        call.values,
        call.lines,
        listed,
        parts,
        sums,
        call.scaling,
        call.cap,
        FIELDS=FIELDS,
        BLOCKS=listed.shape[2],
        PARTS=part_count,
        SERVES_ALL=serves_all,
        GROUP=group,
        D=head_dim,
        ROW=call.row,
        HAS_CAP=call.softcap is not None,
        BLOCK_G=max(LEAST, triton.next_power_of_2(group)),
        BLOCK_D=width,
        BLOCK_S=tile,
        p_sources=listed if sources is None else sources,
        OFFLOADED=sources is not None,
        num_warps=_READ.warps,
        num_stages=_READ.stages,
        **chained(queries.device),
    )
    _merge_parts[(triton.cdiv(head_dim, _MERGED), query_heads, query_count)](
        parts,
        sums,
        out,
        call.lines,
        FIELDS=FIELDS,
        PARTS=part_count,
        SERVES_ALL=serves_all,
        D=head_dim,
        BLOCK_P=triton.next_power_of_2(part_count),
        BLOCK_D=_MERGED,
        BLOCK_S=tile,
        num_warps=_MERGING_WARPS,
        **chained(queries.device),
    )


@triton.jit
def with_tile(b_top, b_sum, b_out, b_q, b_k, b_v, m_s, scaling, softcap, HAS_CAP: tl.constexpr):
    """Attention so far, to which a tile is added: its keys and values [slots, D], and which of them are seen."""
    b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scaling
    return with_scores(b_top, b_sum, b_out, b_scores, b_v, m_s, softcap, HAS_CAP)


@triton.jit
def with_scores(b_top, b_sum, b_out, b_scores, b_v, m_s, softcap, HAS_CAP: tl.constexpr):
    """As `with_tile`, by the scores of the tile's keys."""
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
    return b_new, b_sum, b_out


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
    SERVES_ALL: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHAINED: tl.constexpr,
    p_sources,
    OFFLOADED: tl.constexpr,
):
    attend_reads(
        p_queries,
        p_keys,
        p_values,
        p_regions,
        p_listed,
        p_parts,
        p_sums,
        scaling,
        softcap,
        tl.program_id(0),
        FIELDS,
        BLOCKS,
        PARTS,
        PARTS,
        SERVES_ALL,
        GROUP,
        D,
        ROW,
        HAS_CAP,
        BLOCK_G,
        BLOCK_D,
        BLOCK_S,
        CHAINED,
        p_sources,
        OFFLOADED,
    )


@triton.jit
def attend_reads(
    p_queries,
    p_keys,
    p_values,
    p_regions,
    p_listed,
    p_parts,
    p_sums,
    scaling,
    softcap,
    part,
    FIELDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    HELD: tl.constexpr,
    SERVES_ALL: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHAINED: tl.constexpr,
    p_sources=None,
    OFFLOADED: tl.constexpr = False,
):
    """One of PARTS parts of what a line reads (see the module); its state is the one of that number, of HELD.

    CHAINED: the kernel before wrote the list, or the sources, and nothing else that is read here.
    """
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    query = tl.program_id(2).to(tl.int64)
    p_line = p_regions + query * FIELDS
    start = tl.load(p_line)
    region = tl.load(p_line + in_line("HEAD_SLOTS"))
    sink = tl.load(p_line + in_line("SINK")).to(tl.int32)
    ring = tl.load(p_line + in_line("RING")).to(tl.int32)
    last = tl.load(p_line + in_line("LAST")).to(tl.int32)
    upto = tl.load(p_line + in_line("UPTO")).to(tl.int32)
    floor = tl.load(p_line + in_line("FLOOR")).to(tl.int32)
    sink_floor = tl.load(p_line + in_line("SINK_FLOOR")).to(tl.int32)
    local = tl.load(p_line + in_line("LOCAL")).to(tl.int32)
    prefix = tl.load(p_line + in_line("PREFIX_START")) + head * tl.load(p_line + in_line("PREFIX_HEAD_SLOTS"))
    begin = tl.load(p_line + in_line("BASE"))
    kind = tl.load(p_line + in_line("KIND"))
    is_away = False
    if OFFLOADED:
        is_away = kind == number_of("OffloadedBlockRead")
    size, _, _ = candidates(p_line)
    to_listed, to_local, end = reads_of(p_line, SERVES_ALL)

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
    # Where a tile is a run of slots that are their positions, one number says where it is: that is most of the time.
    is_whole = (kind == 0) | ((size % BLOCK_S == 0) & (to_listed % BLOCK_S == 0))
    is_plain = (ring == 0) & (begin == 0) & (sink_floor == floor)
    o_i = tl.arange(0, BLOCK_S)
    o_tile = o_i[:, None] * ROW + o_d[None, :]
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if is_away:
        p_record = tl.load(p_line + in_line("PLACES")).to(tl.pointer_type(tl.int64))
        p_table = tl.load(p_record).to(tl.pointer_type(tl.int64))
        chunk = tl.load(p_record + in_record("CHUNK_TOKENS")).to(tl.int32)
        layer_bytes = tl.load(p_record + in_record("LAYER_BYTES"))
        p_source = p_sources + (query * heads + head) * BLOCKS
        ITEM: tl.constexpr = p_keys.dtype.element_ty.primitive_bitwidth // 8
        for r in range(part * BLOCK_S, end, PARTS * BLOCK_S):
            o_r = r + o_i
            m_listed = (o_r >= to_listed) & (o_r < to_local)
            o_in = o_r - to_listed
            b_block = tl.load(p_list + o_in // size, mask=m_listed, other=0)
            b_source = tl.load(p_source + o_in // size, mask=m_listed, other=0)
            o_behind = tl.where(m_listed, b_block * size + o_in % size, o_r - to_local + local)
            position = tl.where(o_r < to_listed, o_r, o_behind)
            in_sink = position < sink
            m_s = (o_r < end) & (position <= upto) & ~(m_listed & (in_sink | (position >= local)))
            o_slot = tl.where(in_sink, position, sink + (position - sink) % step)
            o_place = tl.where(b_source >= 0, b_source, -2 - b_source) + o_in % size
            o_here = (own + tl.where(m_listed, o_place, o_slot)) * ROW
            m_host = m_listed & m_s & (b_source < 0)
            o_chunk = (position - sink) // chunk
            at = tl.load(p_table + o_chunk, mask=m_host, other=0) + layer_bytes
            # Counted in numbers from the buffers, of which the device sees the host's memory as a part.
            o_in_chunk = (position - sink) % chunk
            o_keys = (at - p_keys.to(tl.int64)) // ITEM + (head * chunk + o_in_chunk) * D
            o_values = (at - p_values.to(tl.int64)) // ITEM + ((heads + head) * chunk + o_in_chunk) * D
            o_keys = tl.where(m_host, o_keys, o_here)
            o_values = tl.where(m_host, o_values, o_here)
            if D % 8 == 0 and ROW % 8 == 0:
                o_keys = tl.multiple_of(o_keys, 8)
                o_values = tl.multiple_of(o_values, 8)
            m_kv = m_s[:, None] & m_d[None, :]
            b_k = tl.load(p_keys + o_keys[:, None] + o_d[None, :], mask=m_kv, other=0.0)
            b_v = tl.load(p_values + o_values[:, None] + o_d[None, :], mask=m_kv, other=0.0)
            b_top, b_sum, b_out = with_tile(b_top, b_sum, b_out, b_q, b_k, b_v, m_s, scaling, softcap, HAS_CAP)
            if D % 8 == 0 and ROW % 8 == 0:
                o_here = tl.multiple_of(o_here, 8)
            m_put = (m_host & (b_source < -1))[:, None] & m_d[None, :]
            tl.store(p_keys + o_here[:, None] + o_d[None, :], b_k, mask=m_put)
            tl.store(p_values + o_here[:, None] + o_d[None, :], b_v, mask=m_put)
    elif is_whole & is_plain:
        for r in range(part * BLOCK_S, end, PARTS * BLOCK_S):
            first = r
            floor_here = own_floor
            until = tl.minimum(end, upto + 1)
            if (r >= to_listed) & (r < to_local):
                first = tl.load(p_list + (r - to_listed) // size) * size + (r - to_listed) % size
                # A block that the sink or the window cuts is listed for the rest of it.
                floor_here = tl.maximum(own_floor, sink)
                until = local
            elif r >= to_local:
                first = r - to_local + local
                until = upto + 1
            m_s = (o_i >= floor_here - first) & (o_i < tl.minimum(until - first, end - r))
            o_first = (own + first) * ROW
            m_kv = m_s[:, None] & m_d[None, :]
            b_k = tl.load(p_keys + o_first + o_tile, mask=m_kv, other=0.0)
            b_v = tl.load(p_values + o_first + o_tile, mask=m_kv, other=0.0)
            b_top, b_sum, b_out = with_tile(b_top, b_sum, b_out, b_q, b_k, b_v, m_s, scaling, softcap, HAS_CAP)
    else:
        for r in range(part * BLOCK_S, end, PARTS * BLOCK_S):
            o_r = r + o_i
            m_listed = (o_r >= to_listed) & (o_r < to_local)
            o_in = o_r - to_listed
            b_block = tl.load(p_list + o_in // size, mask=m_listed, other=0)
            o_behind = tl.where(m_listed, b_block * size + o_in % size, o_r - to_local + local)
            is_wrapped = (kind > 0) & (ring > 0) & (o_behind >= sink)
            o_behind = tl.where(is_wrapped, sink + (o_behind - sink) % step, o_behind)
            o_s = tl.where(o_r < to_listed, o_r, o_behind)
            in_sink = o_s < sink
            # A slot past `last` was opened and never written: its remainder is negative, its position past `upto`.
            position = tl.where(in_sink | (ring == 0), o_s, last - (last - o_s) % step)
            m_s = (o_r < end) & (position <= upto) & (position >= tl.where(in_sink, sink_floor, own_floor))
            m_s = m_s & ~(m_listed & (in_sink | (o_s >= local)))
            o_slot = o_s.to(tl.int64)
            o_kv = (tl.where(o_slot < begin, prefix, own) + o_slot)[:, None] * ROW + o_d[None, :]
            m_kv = m_s[:, None] & m_d[None, :]
            b_k = tl.load(p_keys + o_kv, mask=m_kv, other=0.0)
            b_v = tl.load(p_values + o_kv, mask=m_kv, other=0.0)
            b_top, b_sum, b_out = with_tile(b_top, b_sum, b_out, b_q, b_k, b_v, m_s, scaling, softcap, HAS_CAP)

    if part * BLOCK_S < end:
        b_some = tl.where(b_sum > 0, b_sum, 1.0)
        o_part = ((query * heads + head) * GROUP + o_g) * HELD + part
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
    SERVES_ALL: tl.constexpr,
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHAINED: tl.constexpr,
):
    query = tl.program_id(2).to(tl.int64)
    o_head = query * tl.num_programs(1) + tl.program_id(1)
    p_line = p_regions + query * FIELDS
    _, _, end = reads_of(p_line, SERVES_ALL)
    o_p = tl.arange(0, BLOCK_P)
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_p = (o_p < PARTS) & (o_p * BLOCK_S < end)
    m_d = o_d < D
    if not SERVES_ALL:
        kind = tl.load(p_line + in_line("KIND"))
        m_d = m_d & ((kind == number_of("BlockRead")) | (kind == number_of("OffloadedBlockRead")))
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
