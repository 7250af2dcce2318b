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

from inference_engine.kernels.gather import MOST_BLOCKS
from inference_engine.kernels.ragged_attention import FIELDS
from inference_engine.kernels.triton.chained import chained
from inference_engine.kernels.triton.topk import in_order, lowest_of, of_order, places_of

_PARTS = 80  # of one query and KV head
_PARTS_OF_MANY = 8  # where queries beside them make up a chunk of some prefill
_SCORING_PROGRAMS = 512
_LEAST = 16  # rows and columns that a matrix product of Triton has at least
_SHORT = 128  # blocks of which each is compared with each
_NARROW = 1024  # blocks that a selection takes fewer registers for


class Tile(NamedTuple):
    """What a program works on at once: so many slots or blocks, of at most so many bytes of K. stages: under way."""

    rows: int
    most_bytes: int
    warps: int
    stages: int

    def rows_of(self, width: int, itemsize: int) -> int:
        return max(_LEAST, min(self.rows, self.most_bytes // (width * itemsize)))


class Scores(NamedTuple):
    """values [N, Hkv, blocks], by block. best [N, Hkv, tiles]: the best of each tile of blocks, of which the first
    begins with the first candidate. Both float32, and undefined where there is no candidate."""

    values: Tensor
    best: Tensor

    @property
    def tile(self) -> int:
        """Blocks of a tile; a power of two."""
        return int(triton.next_power_of_2(triton.cdiv(self.values.shape[2], self.best.shape[2])))


_SCORE = Tile(64, 2**14, 4, 1)
_SELECT_WARPS = 8
_FEW = 32  # blocks that are selected of many by their tiles
_FOUND = 64  # listed blocks, and places, that are compared at once
_MERGED = 32  # channels that a program merges
_READ = Tile(64, 2**14, 2, 1)


def attend_selecting(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    regions: Tensor,
    out: Tensor,
    *,
    kv_heads: int,
    scaling: float,
    softcap: float | None = None,
    blocks: int,
    serves_all: bool = True,
    reads_offloaded: bool = False,
) -> None:
    """See `RaggedAttention`; blocks > 0, queries and regions contiguous.

    serves_all: fill `out` for queries that read all they see, too. Otherwise theirs stays, and there may be many.
    """
    scores = score_blocks(queries, keys, values, regions, scaling=scaling, kv_heads=kv_heads, blocks=blocks)
    listed = select_blocks(scores, regions)
    attend_listed(
        queries,
        keys,
        values,
        regions,
        listed,
        out,
        scaling=scaling,
        softcap=softcap,
        serves_all=serves_all,
        sources=find_blocks(listed, regions) if reads_offloaded else None,
    )


def score_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, regions: Tensor, *, scaling: float, kv_heads: int, blocks: int
) -> Scores:
    """The bounds of `kernels/bounds.py` for each query's candidates."""
    query_count, query_heads, head_dim = queries.shape
    assert blocks <= MOST_BLOCKS, blocks
    group, width = query_heads // kv_heads, _width(head_dim)
    tile = _SCORE.rows_of(width, keys.element_size())
    tiles = triton.cdiv(blocks, tile)
    made = Scores(
        torch.empty((query_count, kv_heads, blocks), dtype=torch.float32, device=queries.device),
        torch.empty((query_count, kv_heads, tiles), dtype=torch.float32, device=queries.device),
    )
    programs = max(1, min(tiles, _SCORING_PROGRAMS // (query_count * kv_heads)))
    _score_blocks[(programs, kv_heads, query_count)](
        queries,
        keys,
        values,
        regions,
        made.values,
        made.best,
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
    return made


def select_blocks(scores: Scores, regions: Tensor) -> Tensor:
    """The blocks that each query reads, ascending, [N, Hkv, blocks] int32; undefined behind the last of them.

    Those of the highest scores, NaN above all, of equal ones the first: as `kernels/gather.py` selects.
    """
    query_count, kv_heads, blocks = scores.values.shape
    listed = torch.empty((query_count, kv_heads, blocks), dtype=torch.int32, device=regions.device)
    _select_blocks[(kv_heads, query_count)](
        *scores,
        listed,
        regions,
        FIELDS=FIELDS,
        BLOCKS=blocks,
        TILE=scores.tile,
        TILES=triton.next_power_of_2(scores.best.shape[2]),
        FEW=_FEW,
        SHORT=min(_SHORT, triton.next_power_of_2(blocks)),
        NARROW=min(_NARROW, triton.next_power_of_2(blocks)),
        WIDE=triton.next_power_of_2(blocks),
        num_warps=_SELECT_WARPS,
        **chained(regions.device),
    )
    return listed


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


def attend_listed(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    regions: Tensor,
    listed: Tensor,
    out: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    serves_all: bool = True,
    sources: Tensor | None = None,
) -> None:
    """Attention of each query to its sink, its listed blocks, and what is local; of others, to all that they see.

    listed: [N, Hkv, any] int32, as many valid ones as the line keeps, or as there are candidates if these are fewer.
    sources: as `find_blocks` has them; None: all entries are on the device.
    """
    query_count, query_heads, head_dim = queries.shape
    kv_heads = listed.shape[1]
    group, width = query_heads // kv_heads, _width(head_dim)
    part_count = _PARTS if serves_all else _PARTS_OF_MANY
    parts = torch.empty((query_count, query_heads, part_count, head_dim), dtype=torch.float32, device=queries.device)
    sums = torch.empty((query_count, query_heads, part_count), dtype=torch.float32, device=queries.device)
    tile = _READ.rows_of(width, keys.element_size())
    _attend_part[(part_count, kv_heads, query_count)](
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
        PARTS=part_count,
        SERVES_ALL=serves_all,
        GROUP=group,
        D=head_dim,
        HAS_CAP=softcap is not None,
        BLOCK_G=max(_LEAST, triton.next_power_of_2(group)),
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
        regions,
        FIELDS=FIELDS,
        PARTS=part_count,
        SERVES_ALL=serves_all,
        D=head_dim,
        BLOCK_P=triton.next_power_of_2(part_count),
        BLOCK_D=_MERGED,
        BLOCK_S=tile,
        num_warps=4,
        **chained(queries.device),
    )


def _width(head_dim: int) -> int:
    return max(_LEAST, int(triton.next_power_of_2(head_dim)))


@triton.jit
def _candidates(p_line):
    """A line's block size, at least 1, its first candidate, and the block after its last; none if it selects none.

    A line that selects tokens (`triton/components.py`) selects no block; the size is one that its sink may be cut at.
    """
    sink = tl.load(p_line + 3)
    block = tl.load(p_line + 9)
    local = tl.load(p_line + 11)
    by_tokens = (block > 0) & (tl.load(p_line + 13) != 0)
    size = tl.where(by_tokens, 1024, tl.maximum(block, 1))
    first = sink // size
    end = tl.where((block > 0) & (sink < local) & ~by_tokens, tl.cdiv(local, size), first)
    return size.to(tl.int32), first.to(tl.int32), end.to(tl.int32)


@triton.jit
def reads_of(p_line, SERVES_ALL: tl.constexpr):
    """How a line's reads are counted through: those of the sink, then of listed blocks, and all. See the module."""
    size, first, end = _candidates(p_line)
    count = tl.load(p_line + 2)
    sink = tl.load(p_line + 3)
    block = tl.load(p_line + 9)
    local = tl.load(p_line + 11)
    seen = tl.load(p_line + 6) + 1
    # Of a ring buffer, positions are counted; it has fewer slots.
    seen = tl.where((block > 0) & (tl.load(p_line + 4) > 0), seen, tl.minimum(count, seen))
    before = tl.where(block > 0, tl.minimum(tl.minimum(sink, local), seen), count if SERVES_ALL else 0).to(tl.int32)
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
    p_best,
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
    """CHAINED: the kernel before wrote the queries, and nothing else that is read here."""
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
    step = tl.num_programs(0) * BLOCK_B
    o_b = first + tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    o_kv = (start + o_b)[:, None] * D + o_d[None, :]
    m_kv = (o_b < end + 0)[:, None] & m_d[None, :]
    # Bounds were written before the step began, so the first ones are on their way while the kernel before ends.
    b_high = tl.load(p_values + o_kv, mask=m_kv, other=0.0)
    b_low = tl.load(p_keys + o_kv, mask=m_kv, other=0.0)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    o_q = ((query * heads + head) * GROUP + o_g)[:, None] * D + o_d[None, :]
    b_q = tl.load(p_queries + o_q, mask=m_g[:, None] & m_d[None, :], other=0.0)
    b_up = tl.maximum(b_q, 0.0).to(b_q.dtype)
    b_down = tl.minimum(b_q, 0.0).to(b_q.dtype)
    for b in range(first + tl.program_id(0) * BLOCK_B, end, step):
        o_b = b + tl.arange(0, BLOCK_B)
        m_b = o_b < end
        b_scores = tl.dot(b_up, tl.trans(b_high), input_precision="ieee")
        b_scores = tl.dot(b_down, tl.trans(b_low), b_scores, input_precision="ieee")
        b_best = tl.max(tl.where(m_g[:, None], b_scores, float("-inf")), axis=0) * scaling
        # The largest of some numbers is a number even if one of them is NaN.
        is_nan = tl.max((b_scores != b_scores).to(tl.int32), axis=0)  # noqa: PLR0124
        b_best = tl.where(is_nan == 1, float("nan"), b_best)
        tl.store(p_scores + (query * heads + head) * BLOCKS + o_b, b_best, mask=m_b)
        best = of_order(tl.max(tl.where(m_b, in_order(b_best), -2147483648), axis=0))
        tl.store(p_best + (query * heads + head) * tl.cdiv(BLOCKS, BLOCK_B) + (b - first) // BLOCK_B, best)
        o_kv = (start + o_b + step)[:, None] * D + o_d[None, :]
        m_kv = (o_b + step < end)[:, None] & m_d[None, :]
        b_high = tl.load(p_values + o_kv, mask=m_kv, other=0.0)
        b_low = tl.load(p_keys + o_kv, mask=m_kv, other=0.0)


@triton.jit
def _select_blocks(
    p_scores,
    p_best,
    p_listed,
    p_regions,
    FIELDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    FEW: tl.constexpr,
    SHORT: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    head = tl.program_id(0)
    query = tl.program_id(1).to(tl.int64)
    p_line = p_regions + query * FIELDS
    _, first, end = _candidates(p_line)
    kept = tl.load(p_line + 10).to(tl.int32)
    row = query * tl.num_programs(0) + head
    o_row = row * BLOCKS
    count = end - first
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if kept >= count:
        for b in range(0, count, NARROW):
            o_b = b + tl.arange(0, NARROW)
            tl.store(p_listed + o_row + o_b, first + o_b, mask=o_b < count)
    elif kept > 0:
        if count <= SHORT:
            _select_by_ranks(p_scores + o_row + first, p_listed + o_row, first, count, kept, SHORT)
        elif count <= NARROW:
            _select_of(p_scores + o_row + first, p_listed + o_row, first, count, kept, NARROW)
        elif kept <= FEW:
            p_best += row * tl.cdiv(BLOCKS, TILE)
            _select_of_tiles(p_scores + o_row + first, p_best, p_listed + o_row, first, count, kept, TILE, TILES, FEW)
        else:
            _select_of(p_scores + o_row + first, p_listed + o_row, first, count, kept, WIDE)


@triton.jit
def _select_by_ranks(p_scores, p_listed, first, count, kept, WIDTH: tl.constexpr):
    """As `_select_of`, for so few that each can be compared with each: nothing is searched."""
    o_b = tl.arange(0, WIDTH)
    m_b = o_b < count
    b_order = tl.where(m_b, in_order(tl.load(p_scores + o_b, mask=m_b, other=0.0)), -2147483648)
    b_chosen = (_ranks(b_order, WIDTH) < kept).to(tl.int32)
    o_place = tl.cumsum(b_chosen, axis=0) - b_chosen
    tl.store(p_listed + o_place, first + o_b, mask=b_chosen == 1)


@triton.jit
def _select_of(p_scores, p_listed, first, count, kept, WIDTH: tl.constexpr):
    """List the `kept` of the first `count` scores, fewer than these: whose lowest is searched."""
    GROUPS: tl.constexpr = 128 if WIDTH > 128 else WIDTH  # noqa: FURB136 - no such function there
    o_b = tl.arange(0, WIDTH)
    m_b = o_b < count
    b_order = tl.where(m_b, in_order(tl.load(p_scores + o_b, mask=m_b, other=0.0)), -2147483648)
    # At least `kept` scores reach the one that is so high among the largest of each group.
    b_best = tl.max(tl.reshape(b_order, (GROUPS, WIDTH // GROUPS)), axis=1)
    b_rank = _ranks(b_best, GROUPS)
    low = tl.max(tl.where(b_rank == kept - 1, b_best, -2139095041), axis=0)  # what no score is below: minus infinity
    _list_of(b_order, o_b, p_listed, first, kept, low, tl.max(b_best, axis=0) + 1)


@triton.jit
def _select_of_tiles(
    p_scores, p_best, p_listed, first, count, kept, TILE: tl.constexpr, TILES: tl.constexpr, FEW: tl.constexpr
):
    """As `_select_of`, for at most FEW: they are in the FEW tiles whose best are highest, of equal ones the first.

    Each of these holds a score that is at least as high, and before it, as any score of the other tiles.
    """
    o_t = tl.arange(0, TILES)
    m_t = o_t * TILE < count
    b_best = tl.where(m_t, in_order(tl.load(p_best + o_t, mask=m_t, other=0.0)), -2147483648)
    b_rank = _ranks(b_best, TILES)
    low = tl.max(tl.where(b_rank == kept - 1, b_best, -2139095041), axis=0)
    b_taken = (m_t & (b_rank < FEW)).to(tl.int32)
    b_place = tl.cumsum(b_taken, axis=0) - b_taken
    o_few = tl.arange(0, FEW)
    m_place = (b_place[None, :] == o_few[:, None]) & (b_taken[None, :] == 1)
    b_tile = tl.sum(tl.where(m_place, o_t[None, :], 0), axis=1)
    o_b = tl.reshape(b_tile[:, None] * TILE + tl.arange(0, TILE)[None, :], (FEW * TILE,))
    m_b = (tl.arange(0, FEW * TILE) < tl.sum(b_taken, axis=0) * TILE) & (o_b < count)
    b_order = tl.where(m_b, in_order(tl.load(p_scores + o_b, mask=m_b, other=0.0)), -2147483648)
    _list_of(b_order, o_b, p_listed, first, kept, low, tl.max(b_best, axis=0) + 1)


@triton.jit
def _ranks(b_order, COUNT: tl.constexpr):
    """How many numbers are before each: larger ones, and of equal ones the earlier."""
    o_i = tl.arange(0, COUNT)
    is_equal = b_order[None, :] == b_order[:, None]
    is_before = (b_order[None, :] > b_order[:, None]) | (is_equal & (o_i[None, :] < o_i[:, None]))
    return tl.sum(is_before.to(tl.int32), axis=1)


@triton.jit
def _list_of(b_order, o_b, p_listed, first, kept, low, high):
    """List the `kept` largest numbers by their blocks; low: at most the lowest of them, high: above all."""
    reached = tl.sum((b_order >= low).to(tl.int32), axis=0)
    low, _ = lowest_of(b_order, kept, low, high, reached, tl.full((), 0, tl.int32))
    room = kept - tl.sum((b_order > low).to(tl.int32), axis=0)
    o_place, m_chosen = places_of(b_order, low, room)
    tl.store(p_listed + o_place, first + o_b, mask=m_chosen)


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
    size, first, end = _candidates(p_line)
    sink = tl.load(p_line + 3).to(tl.int32)
    ring = tl.maximum(tl.load(p_line + 4).to(tl.int32), 1)
    by_tokens = tl.load(p_line + 13) != 0
    record = tl.load(p_line + 14)
    offloaded_end = tl.load(p_line + 15).to(tl.int32)
    kept = tl.minimum(tl.load(p_line + 10).to(tl.int32), end - first)
    has_record = (tl.load(p_line + 9) > 0) & (record != 0)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if has_record & (by_tokens == 0) & (kept > 0):
        p_record = record.to(tl.pointer_type(tl.int64))
        count = tl.load(p_record + 4).to(tl.int32)
        p_places = tl.load(p_record + 3).to(tl.pointer_type(tl.int32)) + head * count
        fetched_from = tl.load(p_record + 5).to(tl.int32)
        p_counts = tl.load(p_record + 6).to(tl.pointer_type(tl.int64)) + head * 2
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


@triton.jit
def with_tile(b_top, b_sum, b_out, b_q, b_k, b_v, m_s, scaling, softcap, HAS_CAP: tl.constexpr):
    """Attention so far, to which a tile is added: its keys and values [slots, D], and which of them are seen."""
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
    block = tl.load(p_line + 9)
    is_away = False
    if OFFLOADED:
        is_away = (block > 0) & (tl.load(p_line + 13) == 0) & (tl.load(p_line + 14) != 0)
        begin = tl.where(is_away, 0, begin)
    size, _, _ = _candidates(p_line)
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
    is_whole = (block == 0) | ((size % BLOCK_S == 0) & (to_listed % BLOCK_S == 0))
    is_plain = (ring == 0) & (begin == 0) & (sink_floor == floor)
    o_i = tl.arange(0, BLOCK_S)
    o_tile = o_i[:, None] * D + o_d[None, :]
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if is_away:
        p_record = tl.load(p_line + 14).to(tl.pointer_type(tl.int64))
        p_table = tl.load(p_record).to(tl.pointer_type(tl.int64))
        chunk = tl.load(p_record + 1).to(tl.int32)
        layer_bytes = tl.load(p_record + 2)
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
            o_here = (own + tl.where(m_listed, o_place, o_slot)) * D
            m_host = m_listed & m_s & (b_source < 0)
            o_chunk = (position - sink) // chunk
            at = tl.load(p_table + o_chunk, mask=m_host, other=0) + layer_bytes
            # Counted in numbers from the buffers, of which the device sees the host's memory as a part.
            o_in_chunk = (position - sink) % chunk
            o_keys = (at - p_keys.to(tl.int64)) // ITEM + (head * chunk + o_in_chunk) * D
            o_values = (at - p_values.to(tl.int64)) // ITEM + ((heads + head) * chunk + o_in_chunk) * D
            o_keys = tl.where(m_host, o_keys, o_here)
            o_values = tl.where(m_host, o_values, o_here)
            if D % 8 == 0:
                o_keys = tl.multiple_of(o_keys, 8)
                o_values = tl.multiple_of(o_values, 8)
            m_kv = m_s[:, None] & m_d[None, :]
            b_k = tl.load(p_keys + o_keys[:, None] + o_d[None, :], mask=m_kv, other=0.0)
            b_v = tl.load(p_values + o_values[:, None] + o_d[None, :], mask=m_kv, other=0.0)
            b_top, b_sum, b_out = with_tile(b_top, b_sum, b_out, b_q, b_k, b_v, m_s, scaling, softcap, HAS_CAP)
            if D % 8 == 0:
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
            o_first = (own + first) * D
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
            is_wrapped = (block > 0) & (ring > 0) & (o_behind >= sink)
            o_behind = tl.where(is_wrapped, sink + (o_behind - sink) % step, o_behind)
            o_s = tl.where(o_r < to_listed, o_r, o_behind)
            in_sink = o_s < sink
            # A slot past `last` was opened and never written: its remainder is negative, its position past `upto`.
            position = tl.where(in_sink | (ring == 0), o_s, last - (last - o_s) % step)
            m_s = (o_r < end) & (position <= upto) & (position >= tl.where(in_sink, sink_floor, own_floor))
            m_s = m_s & ~(m_listed & (in_sink | (o_s >= local)))
            o_slot = o_s.to(tl.int64)
            o_kv = (tl.where(o_slot < begin, prefix, own) + o_slot)[:, None] * D + o_d[None, :]
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
        m_d = m_d & (tl.load(p_line + 9) > 0)
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
