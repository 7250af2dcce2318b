"""Which blocks a query reads: their scores, and those that are selected. The first two kernels of `gather.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.gather import MOST_BLOCKS
from inference_engine.kernels.reads import FIELDS, AttentionCall
from inference_engine.kernels.triton.dependent_launch import chained
from inference_engine.kernels.triton.line import in_line, number_of
from inference_engine.kernels.triton.topk import in_order, lowest_of, of_order, places_of

LEAST = 16  # rows and columns that a matrix product of Triton has at least
_SCORING_PROGRAMS = 512
_SHORT = 128  # blocks of which each is compared with each
_NARROW = 1024  # blocks that a selection takes fewer registers for
_SELECT_WARPS = 8
_FEW = 32  # blocks that are selected of many by their tiles


class SelectionTile(NamedTuple):
    """What a program works on at once: so many slots or blocks, of at most so many bytes of K. stages: under way."""

    rows: int
    most_bytes: int
    warps: int
    stages: int

    def rows_of(self, width: int, itemsize: int) -> int:
        return max(LEAST, min(self.rows, self.most_bytes // (width * itemsize)))


class Scores(NamedTuple):
    """values [N, Hkv, blocks], by block. best [N, Hkv, tiles]: the best of each tile of blocks, of which the first
    begins with the first candidate. Both float32, and undefined where there is no candidate."""

    values: Tensor
    best: Tensor

    @property
    def tile(self) -> int:
        """Blocks of a tile; a power of two."""
        return int(triton.next_power_of_2(triton.cdiv(self.values.shape[2], self.best.shape[2])))


_SCORE = SelectionTile(64, 2**14, 4, 1)


def score_blocks(call: AttentionCall, blocks: int) -> Scores:
    """The bounds of `kernels/bounds.py` for each query's candidates."""
    queries, kv_heads, head_dim = call.queries, call.kv_heads, call.head_dim
    assert blocks <= MOST_BLOCKS, blocks
    query_count, width = len(queries), width_of(head_dim)
    tile = _SCORE.rows_of(width, call.keys.element_size())
    tiles = triton.cdiv(blocks, tile)
    made = Scores(
        torch.empty((query_count, kv_heads, blocks), dtype=torch.float32, device=queries.device),
        torch.empty((query_count, kv_heads, tiles), dtype=torch.float32, device=queries.device),
    )
    programs = max(1, min(tiles, _SCORING_PROGRAMS // (query_count * kv_heads)))
    _score_blocks[(programs, kv_heads, query_count)](
        queries,
        call.keys,
        call.values,
        call.lines,
        made.values,
        made.best,
        call.scaling,
        FIELDS=FIELDS,
        BLOCKS=blocks,
        GROUP=call.group,
        D=head_dim,
        ROW=call.row,
        BLOCK_G=max(LEAST, triton.next_power_of_2(call.group)),
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


def width_of(head_dim: int) -> int:
    return max(LEAST, int(triton.next_power_of_2(head_dim)))


@triton.jit
def candidates(p_line):
    """A line's block size, at least 1, its first candidate, and the block after its last; none if it selects none.

    A line that selects tokens (`triton/components.py`) selects no block; the size is one that its sink may be cut at.
    """
    sink = tl.load(p_line + in_line("SINK"))
    local = tl.load(p_line + in_line("LOCAL"))
    kind = tl.load(p_line + in_line("KIND"))
    by_blocks = (kind == number_of("BlockRead")) | (kind == number_of("OffloadedBlockRead"))
    by_tokens = kind == number_of("TokenRead")
    size = tl.where(by_blocks, tl.load(p_line + in_line("BLOCK")), tl.where(by_tokens, 1024, 1))
    first = sink // size
    end = tl.where(by_blocks & (sink < local), tl.cdiv(local, size), first)
    return size.to(tl.int32), first.to(tl.int32), end.to(tl.int32)


@triton.jit
def reads_of(p_line, SERVES_ALL: tl.constexpr):
    """How a line's reads are counted through: those of the sink, then of listed blocks, and all. See the module."""
    size, first, end = candidates(p_line)
    count = tl.load(p_line + in_line("COUNT"))
    sink = tl.load(p_line + in_line("SINK"))
    kind = tl.load(p_line + in_line("KIND"))
    selects = (kind >= number_of("BlockRead")) & (kind <= number_of("TokenRead"))
    local = tl.load(p_line + in_line("LOCAL"))
    seen = tl.load(p_line + in_line("UPTO")) + 1
    # Of a ring buffer, positions are counted; it has fewer slots.
    seen = tl.where(selects & (tl.load(p_line + in_line("RING")) > 0), seen, tl.minimum(count, seen))
    before = tl.where(kind == 0, count if SERVES_ALL else 0, 0)
    before = tl.where(selects, tl.minimum(tl.minimum(sink, local), seen), before).to(tl.int32)
    listed = tl.minimum(tl.load(p_line + in_line("KEPT")).to(tl.int32), end - first) * size
    behind = tl.where(selects, tl.maximum(seen - local, 0), 0).to(tl.int32)
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
    ROW: tl.constexpr,
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
    _, first, end = candidates(p_line)
    start = tl.load(p_line) + head * tl.load(p_line + in_line("HEAD_SLOTS")) + tl.load(p_line + in_line("BOUNDS"))
    # Where all candidates are read, scores do not matter.
    end = tl.where(tl.load(p_line + in_line("KEPT")) < end - first, end, first)

    o_g = tl.arange(0, BLOCK_G)
    o_d = tl.arange(0, BLOCK_D)
    m_g = o_g < GROUP
    m_d = o_d < D
    step = tl.num_programs(0) * BLOCK_B
    o_b = first + tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    o_kv = (start + o_b)[:, None] * ROW + o_d[None, :]
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
        o_kv = (start + o_b + step)[:, None] * ROW + o_d[None, :]
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
    _, first, end = candidates(p_line)
    kept = tl.load(p_line + in_line("KEPT")).to(tl.int32)
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
