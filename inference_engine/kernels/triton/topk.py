"""`topk_by_sorting` of `kernels/topk.py` in Triton, for float32: exact, without sorting, and nothing comes to the host.

A row of up to 8,192 scores is held in the registers of one program, which searches the lowest score to be chosen.
A longer one is cut into chunks, a program each:

    estimate  two estimates from a sample of the row enclose that score; one program for each row
    count     each chunk counts what reaches them
    collect   what lies between them is copied to a short list, in the order of the row; the program that ends last
              searches the list
    emit      each program writes the indices that its chunk has

What is sampled changes how long the list is, never what is chosen: where the estimates are wrong, what is above or
below them is collected instead. A list too long for registers is read again in each round of the search.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.topk import topk_by_sorting
from inference_engine.kernels.triton.dependent_launch import chained

_ONE = 8192  # scores that one program holds
_CHUNK = (1024, 8192)  # of a longer row, at least and at most
_PROGRAMS = 128  # for a row, up to the largest chunks
_SAMPLE, _SAMPLE_WARPS = 4096, 8
_LISTED, _SEARCH_WARPS = 8192, 8  # of the short list, held in registers
# Numbers of a row: the two estimates, how many programs have collected, the lowest chosen score, and how many scores
# equal to it are chosen.
_STATE = 8


def largest(scores: Tensor, k: int, *, candidates: Tensor | None = None) -> Tensor:
    """See `topk_by_sorting`. Other types than float32, and rows without scores, are sorted."""
    count = scores.shape[-1]
    if scores.dtype != torch.float32 or not scores.numel() or k == 0:
        return topk_by_sorting(scores, k, candidates=candidates)
    kept, rows = min(k, count), scores.reshape(-1, count).contiguous()
    mask = rows  # unused without candidates
    if candidates is not None:
        mask = candidates.expand(scores.shape).reshape(-1, count).contiguous()
    indices = torch.empty((len(rows), kept), dtype=torch.int64, device=scores.device)
    constants = {"HAS_MASK": candidates is not None, **chained(scores.device)}
    if count <= _ONE:
        width = max(16, triton.next_power_of_2(count))
        _choose_in_one[(len(rows),)](rows, mask, indices, count, kept, WIDTH=width, num_warps=8, **constants)
        return indices.view(*scores.shape[:-1], kept)
    chunk = min(_CHUNK[1], max(_CHUNK[0], triton.next_power_of_2(triton.cdiv(count, _PROGRAMS))))
    chunks = triton.cdiv(count, chunk)
    # Of so many in the sample, as many as a share of the row expects, and a few deviations more or less.
    expected = kept * _SAMPLE / count
    most = min(_SAMPLE, math.ceil(expected + 4 * math.sqrt(expected) + 4))
    least = max(0, math.floor(expected - 4 * math.sqrt(expected) - 1))
    counts = torch.empty((len(rows), chunks, 4), dtype=torch.int32, device=scores.device)
    state = torch.empty((len(rows), _STATE), dtype=torch.int32, device=scores.device)
    short_list = torch.empty((len(rows), count), dtype=torch.int32, device=scores.device)
    grid, warps = (chunks, len(rows)), 4 if chunk <= 2048 else 8 if chunk <= 4096 else 16
    given = (rows, mask, state, count)
    chunked = {**constants, "CHUNK": chunk, "CHUNKS": triton.next_power_of_2(chunks), "LISTED": _LISTED}
    _estimate[(len(rows),)](*given, most, least, SAMPLE=_SAMPLE, num_warps=_SAMPLE_WARPS, **constants)
    _count[grid](*given, counts, CHUNK=chunk, num_warps=warps, **constants)
    _collect[grid](*given, counts, short_list, kept, num_warps=max(_SEARCH_WARPS, warps // 2), **chunked)
    _emit[grid](*given, counts, short_list, indices, kept, num_warps=warps, **chunked)
    return indices.view(*scores.shape[:-1], kept)


_NOTHING: tl.constexpr = tl.constexpr(-2147483648)  # in the order of scores: no candidate
_LOWEST: tl.constexpr = tl.constexpr(-2147483647)
_BEHIND: tl.constexpr = tl.constexpr(0x7F800002)  # above NaN


@triton.jit
def in_order(b_scores):
    """Whole numbers in the order of float32 scores: 0 and -0 are one score, NaN is above infinity."""
    b_bits = b_scores.to(tl.int32, bitcast=True)
    b_size = b_bits & 0x7FFFFFFF
    b_order = tl.where(b_bits < 0, -b_size, b_bits)  # -0 becomes 0
    return tl.where(b_size > 0x7F800000, 0x7F800001, b_order)


@triton.jit
def of_order(b_order):
    """The scores that `in_order` gives these numbers for."""
    return tl.where(b_order < 0, -b_order | -2147483648, b_order).to(tl.float32, bitcast=True)


@triton.jit
def _curve(number, total, IN_TAIL: tl.constexpr):
    """It grows about evenly with the score that `number` of `total` reach: in a tail, or in a normal distribution."""
    share = tl.minimum(tl.maximum(number.to(tl.float32), 0.5), total.to(tl.float32) - 0.5) / total.to(tl.float32)
    if IN_TAIL:
        return -tl.log(share)
    root = tl.sqrt(-2.0 * tl.log(tl.minimum(share, 1.0 - share)))  # after Abramowitz and Stegun, 26.2.22
    far = root - (2.30753 + 0.27061 * root) / (1.0 + (0.99229 + 0.04481 * root) * root)
    return tl.where(share < 0.5, far, -far)


@triton.jit
def between(low, high, reached, above, kept, total, turn, IN_TAIL: tl.constexpr):
    """Where to look next for what `kept` of `total` scores reach: along a curve through both ends, or in their middle.

    low < high - 1: what `reached` and `above` scores reach, as `in_order` has them.
    """
    last = high - 1
    value_low = of_order(low)
    value_last = of_order(last)
    at_low = _curve(reached, total, IN_TAIL)
    share = (_curve(kept, total, IN_TAIL) - at_low) / (_curve(above, total, IN_TAIL) - at_low)
    value = value_low + (value_last - value_low) * share
    on_curve = tl.minimum(tl.maximum(in_order(value), low + 1), last)
    middle = (low & high) + ((low ^ high) >> 1)  # without overflow
    # What is not finite has no curve, and a wrong one must not hold up the search.
    is_finite = (value - value == 0) & (turn % 4 != 3)
    return tl.where(is_finite, on_curve, middle)


@triton.jit
def lowest_of(b_order, kept, low, high, reached, above, IN_TAIL: tl.constexpr = True):
    """What the lowest of the `kept` largest is, and by how many it is reached; as much or more than `kept`.

    low, high: around it; `reached` ≥ kept of b_order reach low, `above` < kept reach high. IN_TAIL: do scores become
    fewer from `low` on? Otherwise they are taken to be all of a normal distribution. It changes the time alone.
    """
    turn = 0
    total = reached
    while (reached > kept) & (low + 1 < high):
        middle = between(low, high, reached, above, kept, total, turn, IN_TAIL)
        number = tl.sum((b_order >= middle).to(tl.int32), axis=0)
        is_enough = number >= kept
        low = tl.where(is_enough, middle, low)
        reached = tl.where(is_enough, number, reached)
        high = tl.where(is_enough, high, middle)
        above = tl.where(is_enough, above, number)
        turn += 1
        if turn % 4 == 0:  # equal numbers must not hold it up
            low = tl.min(tl.where(b_order >= low, b_order, 2147483647), axis=0)
            high = tl.max(tl.where(b_order < high, b_order, -2147483648), axis=0) + 1
    return low, reached


@triton.jit
def places_of(b_order, low, room):
    """Of each number its place among those above `low` and the first `room` equal to it; and whether it has one.

    Fewer than 2 ** 15 numbers: both are counted at once.
    """
    b_above = (b_order > low).to(tl.int32)
    b_equal = (b_order == low).to(tl.int32)
    b_both = (b_above << 16) | b_equal
    b_before = tl.cumsum(b_both, axis=0) - b_both
    b_equals = b_before & 0xFFFF
    return (b_before >> 16) + tl.minimum(b_equals, room), (b_above == 1) | ((b_equal == 1) & (b_equals < room))


@triton.jit
def _loaded(p_row, p_mask, o_row, o_s, m_s, HAS_MASK: tl.constexpr):
    """Scores at o_s of a row, in order; the smallest number of all where there is no candidate."""
    b_order = in_order(tl.load(p_row + o_row + o_s, mask=m_s, other=0.0))
    if HAS_MASK:
        m_s = m_s & (tl.load(p_mask + o_row + o_s, mask=m_s, other=0) != 0)
    return tl.where(m_s, b_order, _NOTHING)


@triton.jit(do_not_specialize=["k"])
def _choose_in_one(
    p_rows,
    p_mask,
    p_indices,
    count,
    k,
    HAS_MASK: tl.constexpr,
    WIDTH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, WIDTH)
    b_order = _loaded(p_rows, p_mask, row * count, o_s, o_s < count, HAS_MASK)
    m_there = b_order != _NOTHING
    there = tl.sum(m_there.to(tl.int32), axis=0)
    kept = tl.minimum(k, there)
    low = tl.min(tl.where(m_there, b_order, 2147483647), axis=0)
    high = tl.max(b_order, axis=0) + 1
    low, _ = lowest_of(b_order, kept, low, high, there, tl.full((), 0, tl.int32), IN_TAIL=False)
    room = kept - tl.sum((b_order > low).to(tl.int32), axis=0)
    o_place, m_chosen = places_of(b_order, low, room)
    tl.store(p_indices + row * k + o_place, o_s.to(tl.int64), mask=m_chosen & m_there)
    tl.store(p_indices + row * k + o_s, tl.full((WIDTH,), -1, tl.int64), mask=(o_s >= kept) & (o_s < k))


@triton.jit(do_not_specialize=["most", "least"])
def _estimate(
    p_rows,
    p_mask,
    p_state,
    count,
    most,
    least,
    HAS_MASK: tl.constexpr,
    SAMPLE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Scores that about `most` and about `least` of the sample reach: runs of 32, evenly over the row."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    o_i = tl.arange(0, SAMPLE)
    o_s = o_i // 32 * (count // (SAMPLE // 32)) + o_i % 32
    b_sample = _loaded(p_rows, p_mask, row * count, o_s, o_i >= 0, HAS_MASK)
    low = tl.min(tl.where(b_sample == _NOTHING, 2147483646, b_sample), axis=0)
    low_end = tl.maximum(tl.max(b_sample, axis=0), low) + 1
    low_reached = tl.sum((b_sample != _NOTHING).to(tl.int32), axis=0)
    low_above = tl.full((), 0, tl.int32)
    high = low
    high_end = low_end
    high_reached = low_reached
    high_above = low_above
    total = low_reached
    is_many = low_reached > most
    turn = 0
    is_open = is_many
    # `low` is reached by `most` or more, `high_end` by `least` or fewer.
    while is_open & (turn < 48):
        low_at = tl.maximum(low_end, low + 2)
        low_middle = between(low, low_at, low_reached, tl.minimum(low_above, low_reached - 1), most, total, turn, True)
        high_at = tl.maximum(high_end, high + 2)
        high_middle = between(
            high, high_at, high_reached, tl.minimum(high_above, high_reached - 1), least, total, turn, True
        )
        b_both = (b_sample >= low_middle).to(tl.int32) + ((b_sample >= high_middle).to(tl.int32) << 16)
        both = tl.sum(b_both, axis=0)
        low_number = both & 0xFFFF
        high_number = both >> 16
        is_low = low_number >= most
        low = tl.where(is_low, low_middle, low)
        low_reached = tl.where(is_low, low_number, low_reached)
        low_end = tl.where(is_low, low_end, tl.minimum(low_end, low_middle))
        low_above = tl.where(is_low, low_above, low_number)
        is_high = high_number > least
        high = tl.where(is_high, high_middle, high)
        high_reached = tl.where(is_high, high_number, high_reached)
        high_end = tl.where(is_high, high_end, tl.minimum(high_end, high_middle))
        high_above = tl.where(is_high, high_above, high_number)
        is_low_open = (low_reached > most + most // 4) & (low + 1 < low_end)
        is_open = is_low_open | ((high_above < least - least // 4) & (high + 1 < high_end))
        turn += 1
        if turn % 4 == 0:  # equal scores must not hold it up
            low = tl.min(tl.where(b_sample >= low, b_sample, 2147483646), axis=0)
            low_end = tl.max(tl.where(b_sample < low_end, b_sample, _LOWEST), axis=0) + 1
            high = tl.min(tl.where(b_sample >= high, b_sample, 2147483646), axis=0)
            high_end = tl.max(tl.where(b_sample < high_end, b_sample, _LOWEST), axis=0) + 1
    p_own = p_state + row * 8
    tl.store(p_own, tl.where(is_many, low, _LOWEST))
    tl.store(p_own + 1, tl.maximum(high_end, low + 1))
    tl.store(p_own + 2, 0)


@triton.jit
def _count(
    p_rows,
    p_mask,
    p_state,
    count,
    p_counts,
    HAS_MASK: tl.constexpr,
    CHUNK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """For each chunk, how many candidates there are, reach the lower estimate, and the higher one."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    o_s = chunk * CHUNK + tl.arange(0, CHUNK)
    b_order = _loaded(p_rows, p_mask, row * count, o_s, o_s < count, HAS_MASK)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    low = tl.load(p_state + row * 8)
    high = tl.load(p_state + row * 8 + 1)
    both = tl.sum((b_order >= low).to(tl.int32) + ((b_order >= high).to(tl.int32) << 16), axis=0)
    p_own = p_counts + (row * tl.num_programs(0) + chunk) * 4
    tl.store(p_own, tl.sum((b_order != _NOTHING).to(tl.int32), axis=0))
    tl.store(p_own + 1, both & 0xFFFF)
    tl.store(p_own + 2, both >> 16)


@triton.jit
def _enclosed(p_counts, p_state, row, chunk, chunks, k, CHUNKS: tl.constexpr):
    """Of a row: what encloses the lowest score to be chosen, how many to choose, and how many reach the upper end.

    Then of the chunks before this one: how many reach the upper end, and how many are enclosed; and of all, enclosed.
    """
    o_c = tl.arange(0, CHUNKS)
    m_c = o_c < chunks
    p_c = p_counts + (row * chunks + o_c) * 4
    b_there = tl.load(p_c, mask=m_c, other=0)
    b_low = tl.load(p_c + 1, mask=m_c, other=0)
    b_high = tl.load(p_c + 2, mask=m_c, other=0)
    low = tl.load(p_state + row * 8)
    high = tl.load(p_state + row * 8 + 1)
    kept = tl.minimum(k, tl.sum(b_there, axis=0))
    is_above = tl.sum(b_high, axis=0) >= kept  # the upper estimate is too low
    is_below = tl.sum(b_low, axis=0) < kept  # the lower estimate is too high
    b_from = tl.where(is_above, b_high, tl.where(is_below, b_there, b_low))
    b_upto = tl.where(is_above, 0, tl.where(is_below, b_low, b_high))
    first = tl.where(is_above, high, tl.where(is_below, _LOWEST, low))
    end = tl.where(is_above, _BEHIND, tl.where(is_below, low, high))
    m_before = o_c < chunk
    reached = tl.sum(b_upto, axis=0)
    reached_before = tl.sum(tl.where(m_before, b_upto, 0), axis=0)
    enclosed_before = tl.sum(tl.where(m_before, b_from - b_upto, 0), axis=0)
    enclosed = tl.sum(b_from - b_upto, axis=0)
    return first, end, kept, reached, reached_before, enclosed_before, enclosed


@triton.jit(do_not_specialize=["k"])
def _collect(
    p_rows,
    p_mask,
    p_state,
    count,
    p_counts,
    p_list,
    k,
    HAS_MASK: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LISTED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    o_s = chunk * CHUNK + tl.arange(0, CHUNK)
    b_order = _loaded(p_rows, p_mask, row * count, o_s, o_s < count, HAS_MASK)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    low, high, kept, reached, _, enclosed_before, enclosed = _enclosed(
        p_counts, p_state, row, chunk, tl.num_programs(0), k, CHUNKS
    )
    p_list += row * count
    if low + 1 < high:  # they are not all equal
        b_in = ((b_order >= low) & (b_order < high)).to(tl.int32)
        o_place = enclosed_before + tl.cumsum(b_in, axis=0) - b_in
        tl.store(p_list + o_place, b_order, mask=b_in == 1)
    tl.debug_barrier()  # the whole program has stored what it collected before it says so
    ended = tl.atomic_add(p_state + row * 8 + 2, 1, sem="acq_rel")
    if ended == tl.num_programs(0) - 1:
        wanted = kept - reached
        above = tl.full((), 0, tl.int32)
        if low + 1 < high:
            if enclosed <= LISTED:
                o_l = tl.arange(0, LISTED)
                b_listed = tl.load(p_list + o_l, mask=o_l < enclosed, other=_NOTHING, cache_modifier=".cg")
                low = tl.min(tl.where(b_listed == _NOTHING, 2147483647, b_listed), axis=0)
                high = tl.max(b_listed, axis=0) + 1
                low, _ = lowest_of(b_listed, wanted, low, high, enclosed, tl.full((), 0, tl.int32))
                above = tl.sum((b_listed > low).to(tl.int32), axis=0)
            else:
                low, above = _lowest_of_many(p_list, wanted, low, high, enclosed, LISTED)
        tl.store(p_state + row * 8 + 3, low)
        tl.store(p_state + row * 8 + 4, wanted - above)


@triton.jit
def _lowest_of_many(p_list, wanted, low, high, enclosed, LISTED: tl.constexpr):
    """As `lowest_of`, of a list that is read again in each round; and how many are above it."""
    turn = 0
    reached = enclosed
    above = tl.full((), 0, tl.int32)
    while (reached > wanted) & (low + 1 < high):
        middle = between(low, high, reached, above, wanted, enclosed, turn, True)
        found = tl.full((), 0, tl.int32)
        next_above = high - 1
        next_below = low
        for o in range(0, enclosed, LISTED):
            o_l = o + tl.arange(0, LISTED)
            b_listed = tl.load(p_list + o_l, mask=o_l < enclosed, other=_NOTHING, cache_modifier=".cg")
            m_reached = b_listed >= middle
            found += tl.sum(m_reached.to(tl.int32), axis=0)
            next_above = tl.minimum(next_above, tl.min(tl.where(m_reached, b_listed, 2147483647), axis=0))
            next_below = tl.maximum(next_below, tl.max(tl.where(m_reached, _NOTHING, b_listed), axis=0))
        is_enough = found >= wanted
        low = tl.where(is_enough, next_above, low)
        reached = tl.where(is_enough, found, reached)
        high = tl.where(is_enough, high, next_below + 1)
        above = tl.where(is_enough, above, found)
        turn += 1
    above = tl.full((), 0, tl.int32)
    for o in range(0, enclosed, LISTED):
        o_l = o + tl.arange(0, LISTED)
        b_listed = tl.load(p_list + o_l, mask=o_l < enclosed, other=_NOTHING, cache_modifier=".cg")
        above += tl.sum((b_listed > low).to(tl.int32), axis=0)
    return low, above


@triton.jit(do_not_specialize=["k"])
def _emit(
    p_rows,
    p_mask,
    p_state,
    count,
    p_counts,
    p_list,
    p_indices,
    k,
    HAS_MASK: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LISTED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    o_s = chunk * CHUNK + tl.arange(0, CHUNK)
    b_order = _loaded(p_rows, p_mask, row * count, o_s, o_s < count, HAS_MASK)
    low, high, kept, _, before, enclosed_before, _ = _enclosed(
        p_counts, p_state, row, chunk, tl.num_programs(0), k, CHUNKS
    )
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    above_before = tl.full((), 0, tl.int32)
    equal_before = enclosed_before
    if low + 1 < high:  # otherwise they are all equal
        equal_before = above_before
        chosen = tl.load(p_state + row * 8 + 3)
        for o in range(0, enclosed_before, LISTED):
            o_l = o + tl.arange(0, LISTED)
            b_listed = tl.load(p_list + row * count + o_l, mask=o_l < enclosed_before, other=_NOTHING)
            both = tl.sum((b_listed > chosen).to(tl.int32) + ((b_listed == chosen).to(tl.int32) << 16), axis=0)
            above_before += both & 0xFFFF
            equal_before += both >> 16
    low = tl.load(p_state + row * 8 + 3)
    room = tl.load(p_state + row * 8 + 4)
    taken = tl.minimum(equal_before, room)
    o_place, m_chosen = places_of(b_order, low, room - taken)
    o_place += before + above_before + taken
    tl.store(p_indices + row * k + o_place, o_s.to(tl.int64), mask=m_chosen & (b_order != _NOTHING))
    if chunk == 0:
        for o in range(kept, k, CHUNK):
            o_k = o + tl.arange(0, CHUNK)
            tl.store(p_indices + row * k + o_k, tl.full((CHUNK,), -1, tl.int64), mask=o_k < k)
