"""Top-k of tokens that queries read, of all that they have scores for: exactly k, without sorting.

    weigh    the group's softmax of each token, and the largest weight of each group of neighbours. These are counted
             by how far they are below the largest weight that there may be
    gather   if k groups have a weight of a bucket or above, so have k tokens, and all that are chosen: of each part of
             the history, those tokens are copied to a list
    choose   the k largest of the lists, the first among equals, ascending

Weights are kept as whole numbers in their order (`in_order`), and NaN is above all of them. All sums run in an order
that follows from the history alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.triton.block_selection import reads_of
from inference_engine.kernels.triton.component_scores import choices_of, parts_of
from inference_engine.kernels.triton.topk import in_order, lowest_of, of_order, places_of

_NOTHING: tl.constexpr = tl.constexpr(-2147483648)  # in the order of weights: no candidate
# Buckets are 64 for each power of two of the distance below the largest, itself in powers of two, from 2 ** −6 on.
_CUT: tl.constexpr = tl.constexpr(17)
_NEAREST: tl.constexpr = tl.constexpr(121 * 64)


@triton.jit
def _bucket(b_order, most, BUCKETS: tl.constexpr):
    """The bucket of weights, given in order; the last one has the largest. most: log2 of what none is above."""
    b_below = most - tl.log2(of_order(tl.where(b_order > 0, b_order, 0x3F800000)))
    b_below = tl.where(b_order > 0, tl.maximum(b_below, 0.0), float("inf"))
    b_number = (b_below.to(tl.int32, bitcast=True) >> _CUT) - _NEAREST
    b_number = tl.minimum(tl.maximum(b_number, 0), BUCKETS - 1)
    return BUCKETS - 1 - tl.where(b_below == b_below, b_number, BUCKETS - 1)  # noqa: PLR0124 - NaN


@triton.jit
def _least_of(bucket, most, BUCKETS: tl.constexpr):
    """A weight, in order, that no weight of this bucket or a higher one is below, by however little it is rounded."""
    below = ((BUCKETS - bucket + _NEAREST) << _CUT).to(tl.float32, bitcast=True)
    least = in_order(tl.exp2(most - below) * 0.998)
    return tl.where(bucket <= 0, 0, tl.where(least > 0x7F800000, 0, least))


@triton.jit
def _is_tied(kept, count, TIED: tl.constexpr):
    """Neighbours of whose largest weights there are enough: of so many each."""
    return tl.where(kept * 64 <= count, TIED, tl.where(kept * 16 <= count, 4, 1))


@triton.jit
def _count(p_counts, b_order, most, BUCKETS: tl.constexpr):
    b_one = tl.full(b_order.shape, 1, tl.int32)
    m_there = b_order != _NOTHING
    tl.atomic_add(p_counts + _bucket(b_order, most, BUCKETS), b_one, mask=m_there, sem="relaxed", scope="gpu")


@triton.jit
def _of_span(
    p_tops, p_scores, row, span, first, end, TIED: tl.constexpr, ROOM: tl.constexpr, G: tl.constexpr, SPAN: tl.constexpr
):
    """What the scores of a span's groups are less than [SPAN / TIED, G], and the scores [SPAN, G]; 0: no candidate.

    Scores come by tokens, which lie side by side: by groups of neighbours a warp would load a piece of each.
    """
    o_g = tl.arange(0, G)
    o_i = span * (SPAN // TIED) + tl.arange(0, SPAN // TIED)
    o_s = span * SPAN + tl.arange(0, SPAN)
    # Chunks without a candidate have no scores.
    m_i = (o_i * TIED < end) & ((o_i + 1) * TIED > first)
    m_s = (o_s >= first) & (o_s < end)
    p_less = p_tops + (row * (ROOM // TIED) + o_i)[:, None] * G + o_g[None, :]
    b_less = tl.load(p_less, mask=m_i[:, None], other=0.0)
    b_scores = tl.load(p_scores + (row * ROOM + o_s)[:, None] * G + o_g[None, :], mask=m_s[:, None], other=0.0)
    return b_less, b_scores


@triton.jit
def weigh(
    p_regions,
    p_scores,
    p_tops,
    p_states,
    p_sums,
    p_orders,
    p_largest,
    p_counts,
    p_most,
    FIELDS: tl.constexpr,
    CHUNK: tl.constexpr,
    TIED: tl.constexpr,
    SHAPE: tl.constexpr,
    ROOM: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    NEAR: tl.constexpr,
    HELD: tl.constexpr,
    BUCKETS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    G: tl.constexpr,
    SPAN: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    p_line = p_regions + tl.program_id(2).to(tl.int64) * FIELDS
    first, end, kept = choices_of(p_line, SHAPE)
    first_chunk, end_chunk, each = parts_of(first, end, CHUNK, PARTS)
    _, _, near = reads_of(p_line, False)
    span = first // SPAN + tl.program_id(0)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if (span * SPAN < end) & (end > first):
        o_g = tl.arange(0, G)
        # The scores are on their way while what they are shares of is added up.
        b_less, b_scores = _of_span(p_tops, p_scores, row, span, first, end, TIED, ROOM, G, SPAN)
        o_p = tl.arange(0, PARTS)
        o_n = tl.arange(0, NEAR)
        p_state = p_states + (row * PARTS + o_p)[:, None] * (2 * G) + o_g[None, :]
        m_p = (o_p * each < end_chunk - first_chunk)[:, None]
        b_tops = tl.load(p_state, mask=m_p, other=float("-inf"))
        b_sums = tl.load(p_state + G, mask=m_p, other=0.0)
        m_n = (o_n * BLOCK_S < near)[:, None] & (o_g < GROUP)[None, :]
        p_near = p_sums + (row * GROUP + o_g)[None, :] * HELD + o_n[:, None]
        b_near = tl.load(p_near, mask=m_n, other=float("-inf")) * 1.4426950408889634
        b_best = tl.max(b_tops, axis=0)
        b_top = tl.maximum(b_best, tl.max(b_near, axis=0))
        b_safe = tl.where(b_top == float("-inf"), 0.0, b_top)[None, :]
        b_all = tl.sum(b_sums * tl.exp2(b_tops - b_safe), axis=0) + tl.sum(tl.exp2(b_near - b_safe), axis=0)
        b_all = tl.reshape(b_safe, (G,)) + tl.log2(b_all)
        most = tl.log2(tl.sum(tl.where(o_g < GROUP, tl.exp2(b_best - b_all), 0.0), axis=0))
        if tl.program_id(0) == 0:
            tl.store(p_most + row, most)

        p_own = p_counts + row * BUCKETS
        tied = _is_tied(kept, end - first, TIED)
        while span * SPAN < end:
            o_i = span * (SPAN // TIED) + tl.arange(0, SPAN // TIED)
            o_s = span * SPAN + tl.arange(0, SPAN)
            m_s = (o_s >= first) & (o_s < end)
            b_less = b_less - b_all[None, :]
            b_scores = tl.reshape(b_scores, (SPAN // TIED, TIED, G)).to(tl.float32)
            b_shares = tl.exp2(b_scores + b_less[:, None, :])
            b_weights = tl.sum(tl.where((o_g < GROUP)[None, None, :], b_shares, 0.0), axis=2)
            span += tl.num_programs(0)
            b_less, b_scores = _of_span(p_tops, p_scores, row, span, first, end, TIED, ROOM, G, SPAN)
            b_orders = tl.where(m_s, in_order(tl.reshape(b_weights, (SPAN,))), _NOTHING)
            tl.store(p_orders + row * ROOM + o_s, b_orders, mask=o_s < ROOM)
            b_fours = tl.max(tl.reshape(b_orders, (SPAN // 4, 4)), axis=1)
            b_largest = tl.max(tl.reshape(b_fours, (SPAN // TIED, TIED // 4)), axis=1)
            tl.store(p_largest + row * (ROOM // TIED) + o_i, b_largest, mask=o_i < ROOM // TIED)
            if tied == TIED:
                _count(p_own, b_largest, most, BUCKETS)
            elif tied == 4:
                _count(p_own, b_fours, most, BUCKETS)
            else:
                _count(p_own, b_orders, most, BUCKETS)


@triton.jit
def gather(
    p_regions,
    p_orders,
    p_largest,
    p_counts,
    p_most,
    p_groups,
    p_tokens,
    p_found,
    p_numbers,
    FIELDS: tl.constexpr,
    TIED: tl.constexpr,
    SHAPE: tl.constexpr,
    ROOM: tl.constexpr,
    BUCKETS: tl.constexpr,
    SPAN: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    span = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    first, end, kept = choices_of(p_regions + tl.program_id(2).to(tl.int64) * FIELDS, SHAPE)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if (span * SPAN < end) & ((span + 1) * SPAN > first) & (end > first):
        o_b = tl.arange(0, BUCKETS)
        o_i = span * (SPAN // TIED) + tl.arange(0, SPAN // TIED)
        m_i = (o_i * TIED < end) & ((o_i + 1) * TIED > first)
        b_largest = tl.load(p_largest + row * (ROOM // TIED) + o_i, mask=m_i, other=_NOTHING)
        b_reached = tl.cumsum(tl.load(p_counts + row * BUCKETS + o_b), axis=0, reverse=True)
        bucket = tl.sum((b_reached >= kept).to(tl.int32), axis=0) - 1
        least = _least_of(bucket, tl.load(p_most + row), BUCKETS)
        m_taken = b_largest >= least
        b_taken = m_taken.to(tl.int32)
        p_own = p_groups + row * (ROOM // TIED) + span * (SPAN // TIED)
        tl.store(p_own + tl.cumsum(b_taken, axis=0) - b_taken, o_i, mask=m_taken)
        taken = tl.sum(b_taken, axis=0)
        tl.debug_barrier()
        p_list = row * ROOM + span * SPAN
        count = tl.full((), 0, tl.int32)
        for r in range(0, taken, AT_ONCE):
            o_r = r + tl.arange(0, AT_ONCE)
            b_group = tl.load(p_own + o_r, mask=o_r < taken, other=0)
            o_s = b_group[:, None] * TIED + tl.arange(0, TIED)[None, :]
            b_order = tl.load(p_orders + row * ROOM + o_s, mask=(o_r < taken)[:, None], other=_NOTHING)
            b_order = tl.reshape(b_order, (AT_ONCE * TIED,))
            o_s = tl.reshape(o_s, (AT_ONCE * TIED,))
            b_in = (b_order >= least).to(tl.int32)
            o_place = p_list + count + tl.cumsum(b_in, axis=0) - b_in
            tl.store(p_tokens + o_place, o_s, mask=b_in == 1)
            tl.store(p_found + o_place, b_order, mask=b_in == 1)
            count += tl.sum(b_in, axis=0)
        tl.store(p_numbers + row * tl.num_programs(0) + span, count)


@triton.jit
def _in_lists(p_before, o_e, first_span, SPANS: tl.constexpr, STEPS: tl.constexpr, SPAN: tl.constexpr):
    """Where the lists' numbers o_e are, by counting through one list after the other: SPANS of them, and p_before says
    how many numbers are in each and those before it.
    """
    b_list = tl.zeros_like(o_e)
    for step in tl.static_range(STEPS):
        b_list += tl.where(tl.load(p_before + b_list + (SPANS >> (step + 1)) - 1) <= o_e, SPANS >> (step + 1), 0)
    before = tl.load(p_before + b_list - 1, mask=b_list > 0, other=0)
    return (first_span + b_list) * SPAN + o_e - before


@triton.jit
def _choose_of(
    p_tokens,
    p_found,
    p_before,
    p_chosen,
    first_span,
    count,
    kept,
    SPANS: tl.constexpr,
    STEPS: tl.constexpr,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """List the `kept` largest of `count` numbers, which are more, at most WIDTH."""
    o_e = tl.arange(0, WIDTH)
    m_e = o_e < count
    o_list = _in_lists(p_before, tl.minimum(o_e, count - 1), first_span, SPANS, STEPS, SPAN)
    b_order = tl.load(p_found + o_list, mask=m_e, other=_NOTHING)
    b_token = tl.load(p_tokens + o_list, mask=m_e, other=0)
    low = tl.min(tl.where(m_e, b_order, 2147483647), axis=0)
    high = tl.max(b_order, axis=0) + 1
    low, _ = lowest_of(b_order, kept, low, high, count, tl.full((), 0, tl.int32))
    room = kept - tl.sum((b_order > low).to(tl.int32), axis=0)
    o_place, m_chosen = places_of(b_order, low, room)
    tl.store(p_chosen + o_place, b_token, mask=m_chosen & m_e)


@triton.jit
def _choose_of_many(
    p_tokens,
    p_found,
    p_before,
    p_chosen,
    p_copy,
    first_span,
    count,
    kept,
    SPANS: tl.constexpr,
    STEPS: tl.constexpr,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """As `_choose_of`, for more than WIDTH, which are read again in each round of the search."""
    low = tl.full((), 2147483647, tl.int32)
    high = tl.full((), 0, tl.int32)
    for o in range(0, count, WIDTH):
        o_e = o + tl.arange(0, WIDTH)
        m_e = o_e < count
        o_list = _in_lists(p_before, tl.minimum(o_e, count - 1), first_span, SPANS, STEPS, SPAN)
        b_order = tl.load(p_found + o_list, mask=m_e, other=_NOTHING)
        tl.store(p_copy + o_e, b_order, mask=m_e)
        low = tl.minimum(low, tl.min(tl.where(m_e, b_order, 2147483647), axis=0))
        high = tl.maximum(high, tl.max(b_order, axis=0) + 1)
    tl.debug_barrier()
    above = tl.full((), 0, tl.int32)
    while low + 1 < high:
        middle = low + (high - low) // 2
        reached = tl.full((), 0, tl.int32)
        for o in range(0, count, WIDTH):
            o_e = o + tl.arange(0, WIDTH)
            b_order = tl.load(p_copy + o_e, mask=o_e < count, other=_NOTHING)
            reached += tl.sum((b_order >= middle).to(tl.int32), axis=0)
        is_enough = reached >= kept
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
        above = tl.where(is_enough, above, reached)
    room = kept - above
    before = tl.full((), 0, tl.int32)
    for o in range(0, count, WIDTH):
        o_e = o + tl.arange(0, WIDTH)
        m_e = o_e < count
        b_order = tl.load(p_copy + o_e, mask=m_e, other=_NOTHING)
        o_list = _in_lists(p_before, tl.minimum(o_e, count - 1), first_span, SPANS, STEPS, SPAN)
        b_token = tl.load(p_tokens + o_list, mask=m_e, other=0)
        o_place, m_chosen = places_of(b_order, low, room)
        tl.store(p_chosen + before + o_place, b_token, mask=m_chosen & m_e)
        before += tl.sum((m_chosen & m_e).to(tl.int32), axis=0)
        room = tl.maximum(room - tl.sum(((b_order == low) & m_e).to(tl.int32), axis=0), 0)


@triton.jit
def choose(
    p_regions,
    p_tokens,
    p_found,
    p_numbers,
    p_before,
    p_copy,
    p_chosen,
    FIELDS: tl.constexpr,
    SHAPE: tl.constexpr,
    ROOM: tl.constexpr,
    LISTS: tl.constexpr,
    SPANS: tl.constexpr,
    STEPS: tl.constexpr,
    SPAN: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    first, end, kept = choices_of(p_regions + tl.program_id(1).to(tl.int64) * FIELDS, SHAPE)
    first_span = first // SPAN
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if kept > 0:
        p_tokens += row * ROOM
        p_found += row * ROOM
        p_chosen += row * ROOM
        p_before += row * SPANS
        o_l = tl.arange(0, SPANS)
        m_l = (first_span + o_l) * SPAN < end
        b_before = tl.cumsum(tl.load(p_numbers + row * LISTS + first_span + o_l, mask=m_l, other=0), axis=0)
        tl.store(p_before + o_l, b_before)
        count = tl.max(b_before, axis=0)
        tl.debug_barrier()
        if count == kept:
            for o in range(0, count, FEW):
                o_e = o + tl.arange(0, FEW)
                o_list = _in_lists(p_before, tl.minimum(o_e, count - 1), first_span, SPANS, STEPS, SPAN)
                tl.store(p_chosen + o_e, tl.load(p_tokens + o_list), mask=o_e < count)
        elif count <= FEW:
            _choose_of(p_tokens, p_found, p_before, p_chosen, first_span, count, kept, SPANS, STEPS, SPAN, FEW)
        elif count <= MANY:
            _choose_of(p_tokens, p_found, p_before, p_chosen, first_span, count, kept, SPANS, STEPS, SPAN, MANY)
        else:
            _choose_of_many(
                p_tokens,
                p_found,
                p_before,
                p_chosen,
                p_copy + row * ROOM,
                first_span,
                count,
                kept,
                SPANS,
                STEPS,
                SPAN,
                MANY,
            )
