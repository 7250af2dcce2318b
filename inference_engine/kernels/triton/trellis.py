"""The operations of `kernels/trellis.py` in Triton: five launches for what takes plain torch a thousand.

    numbers ── scale ── near ──▶ nearest level of each subset, its cost  ── path ──▶ codes ── pack ──▶ bytes
                                                                            codes ── levels ──▶ numbers

Searching tables is done for all numbers at once; what is left for the path, a step after another, is sums and minima of
the 8 states of a chain, which stay in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference_engine.kernels.trellis import (
    FOLLOWED,
    SCALE_ONE,
    SCALE_STEPS,
    STEPS,
    SUBSETS,
    BitPlaces,
    Levels,
    Trellis,
)

_BLOCK, _CHAINS = 256, 32  # numbers, and chains, of a program
_SCALED = 1024  # numbers of a vector that are added at once
_VECTORS, _BYTES = 8, 64  # of a program that packs
_STEPS = 4  # of a chain at once, whose bits a word holds


def choose(numbers: Tensor, levels: Levels) -> Tensor:
    """See `kernels.trellis.choose`."""
    numbers = numbers.contiguous()
    vector_count, count = numbers.shape
    codes = torch.empty((vector_count, count), dtype=torch.int32, device=numbers.device)
    if not numbers.numel():
        return codes
    costs = numbers.new_empty((SUBSETS, vector_count, count))
    nearest = torch.empty((SUBSETS, vector_count, count), dtype=torch.int16, device=numbers.device)
    _near[(vector_count, triton.cdiv(count, _BLOCK))](
        numbers,
        levels.values,
        levels.first,
        levels.size,
        levels.weights,
        costs,
        nearest,
        count,
        numbers.numel(),
        HALVINGS=levels.longest.bit_length() - 1,
        BLOCK=_BLOCK,
    )
    path_count = vector_count * levels.chains
    from_above = torch.empty((STEPS // _STEPS, path_count), dtype=torch.int32, device=numbers.device)
    _path[(triton.cdiv(path_count, _CHAINS),)](
        costs,
        nearest,
        from_above,
        codes,
        count,
        numbers.numel(),
        levels.chains,
        path_count,
        STEPS=STEPS,
        BLOCK=_CHAINS,
        num_warps=1,
    )
    return codes


def scale(numbers: Tensor, scale_codes: Tensor) -> Tensor:
    """See `kernels.trellis.Scale`."""
    vector_count, count = numbers.shape
    found = torch.empty((vector_count, count), dtype=torch.float32, device=numbers.device)
    if found.numel():
        assert numbers.stride(1) == 1
        _scale[(vector_count,)](
            numbers,
            scale_codes,
            found,
            numbers.stride(0),
            scale_codes.stride(0),
            count,
            POWER=SCALE_STEPS * FOLLOWED / 2,
            ONE=SCALE_ONE,
            OF_TWO=SCALE_STEPS,
            BLOCK=_SCALED,
        )
    return found


def pack(codes: Tensor, places: BitPlaces, packed: Tensor) -> None:
    """See `kernels.trellis.Pack`."""
    codes = codes.contiguous()
    vector_count, byte_count = packed.shape
    if packed.numel():
        assert packed.stride(1) == 1
        _pack[(triton.cdiv(vector_count, _VECTORS), triton.cdiv(byte_count, _BYTES))](
            codes,
            places.code,
            places.left,
            packed,
            vector_count,
            codes.shape[1],
            byte_count,
            packed.stride(0),
            VECTORS=_VECTORS,
            BYTES=_BYTES,
        )


def levels_of(codes: Tensor, levels: Levels) -> Tensor:
    """See `kernels.trellis.levels_of`."""
    codes = codes.contiguous()
    found = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    if codes.numel():
        vector_count, count = codes.shape
        _levels[(vector_count, triton.cdiv(count, _BLOCK))](
            codes, levels.values, levels.first, found, count, levels.chains, BLOCK=_BLOCK
        )
    return found


@triton.jit
def _scale(
    p_numbers,
    p_scale_codes,
    p_found,
    stride,
    stride_of_codes,
    count,
    POWER: tl.constexpr,
    ONE: tl.constexpr,
    OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    vector = tl.program_id(0).to(tl.int64)
    p_numbers += vector * stride
    p_found += vector * count
    b_energy = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, count, BLOCK):
        o_number = first + tl.arange(0, BLOCK)
        b_number = tl.load(p_numbers + o_number, mask=o_number < count, other=0.0)
        b_energy += b_number * b_number
    energy = tl.sum(b_energy, axis=0) / count
    steps = tl.log2(tl.maximum(energy, 1.1754943508222875e-38)) * POWER
    code = tl.minimum(tl.maximum(tl.floor(steps + 0.5) + ONE, 0.0), 255.0)
    tl.store(p_scale_codes + vector * stride_of_codes, code.to(tl.int32).to(tl.uint8))
    factor = tl.exp2((code - ONE) / OF_TWO)
    for first in range(0, count, BLOCK):
        o_number = first + tl.arange(0, BLOCK)
        b_number = tl.load(p_numbers + o_number, mask=o_number < count, other=0.0)
        tl.store(p_found + o_number, b_number / factor, mask=o_number < count)


@triton.jit
def _pack(
    p_codes,
    p_code_of_bit,
    p_left,
    p_packed,
    vector_count,
    count,
    byte_count,
    stride,
    VECTORS: tl.constexpr,
    BYTES: tl.constexpr,
):
    o_vector = (tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)).to(tl.int64)
    o_byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    live = (o_vector < vector_count)[:, None] & (o_byte < byte_count)[None, :]
    b_packed = tl.zeros([VECTORS, BYTES], dtype=tl.int32)
    for bit in tl.static_range(8):
        o_code = tl.load(p_code_of_bit + o_byte * 8 + bit, mask=o_byte < byte_count, other=0)
        b_left = tl.load(p_left + o_byte * 8 + bit, mask=o_byte < byte_count, other=0)
        b_code = tl.load(p_codes + o_vector[:, None] * count + o_code[None, :], mask=live, other=0)
        b_packed = (b_packed << 1) | ((b_code >> b_left[None, :]) & 1)
    tl.store(p_packed + o_vector[:, None] * stride + o_byte[None, :], b_packed.to(tl.uint8), mask=live)


@triton.jit
def _near(
    p_numbers,
    p_values,
    p_first,
    p_size,
    p_weights,
    p_costs,
    p_nearest,
    count,
    plane,
    HALVINGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o_number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = o_number < count
    place = tl.program_id(0).to(tl.int64) * count + o_number
    b_number = tl.load(p_numbers + place, mask=live, other=0.0)
    b_weight = tl.load(p_weights + o_number, mask=live, other=0.0)
    b_size = tl.load(p_size + o_number, mask=live, other=0)
    p_table = p_values + tl.load(p_first + o_number, mask=live, other=0)
    # How many levels lie below: sizes are powers of two, so every half is either a whole one or more than there is.
    b_below = tl.zeros([BLOCK], dtype=tl.int32)
    for halving in tl.static_range(HALVINGS):
        half = 1 << (HALVINGS - 1 - halving)
        fits = live & (half < b_size)
        b_level = tl.load(p_table + b_below + half - 1, mask=fits, other=0.0)
        b_below += tl.where(fits & (b_level < b_number), half, 0)
    b_level = tl.load(p_table + b_below, mask=live, other=0.0)
    b_below += tl.where(live & (b_level < b_number), 1, 0)
    for subset in tl.static_range(4):
        b_lower = b_below - 1 - ((b_below - 1 - subset) & 3)
        b_upper = tl.minimum(b_lower + 4, b_size - 4 + subset)
        b_lower = tl.maximum(b_lower, subset)
        b_down = b_number - tl.load(p_table + b_lower, mask=live, other=0.0)
        b_up = b_number - tl.load(p_table + b_upper, mask=live, other=0.0)
        is_up = b_up * b_up < b_down * b_down
        b_missed = tl.where(is_up, b_up, b_down)
        out = subset * tl.cast(plane, tl.int64) + place
        tl.store(p_costs + out, b_missed * b_missed * b_weight, mask=live)
        tl.store(p_nearest + out, (tl.where(is_up, b_upper, b_lower) >> 2).to(tl.int16), mask=live)


@triton.jit
def _path(
    p_costs,
    p_nearest,
    p_from_above,
    p_codes,
    count,
    plane,
    chains,
    path_count,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Four steps at once: their costs are under way while those of the four before are added up."""
    o_path = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = o_path < path_count
    o_chain = o_path % chains
    place = (o_path // chains).to(tl.int64) * count + o_chain
    stride = tl.cast(plane, tl.int64)
    none = tl.zeros([BLOCK], dtype=tl.float32) + float("inf")
    sums = (tl.zeros([BLOCK], dtype=tl.float32), none, none, none, none, none, none, none)
    o_word = o_path.to(tl.int64)
    # A chain that has ended goes on at no cost.
    last = tl.where(live, count - o_chain, 0)
    one = _costs(p_costs + place, stride, last > 0)
    two = _costs(p_costs + place + chains, stride, last > chains)
    three = _costs(p_costs + place + 2 * chains, stride, last > 2 * chains)
    four = _costs(p_costs + place + 3 * chains, stride, last > 3 * chains)
    for step in range(0, STEPS, 4):
        ahead = (step + 4) * chains
        at = p_costs + place + ahead
        next_one = _costs(at, stride, last > ahead)
        next_two = _costs(at + chains, stride, last > ahead + chains)
        next_three = _costs(at + 2 * chains, stride, last > ahead + 2 * chains)
        next_four = _costs(at + 3 * chains, stride, last > ahead + 3 * chains)
        sums, b_first = _advance(sums, one)
        sums, b_second = _advance(sums, two)
        sums, b_third = _advance(sums, three)
        sums, b_fourth = _advance(sums, four)
        b_word = b_first | (b_second << 8) | (b_third << 16) | (b_fourth << 24)
        tl.store(p_from_above + o_word, b_word, mask=live)
        o_word += path_count
        one = next_one
        two = next_two
        three = next_three
        four = next_four
    b_state = tl.zeros([BLOCK], dtype=tl.int32)
    b_least = sums[0]
    for state in tl.static_range(1, 8):
        b_state = tl.where(sums[state] < b_least, state, b_state)
        b_least = tl.minimum(b_least, sums[state])
    # Each chain reads what it wrote itself.
    tl.debug_barrier()
    o_word -= path_count
    b_next = tl.load(p_from_above + o_word, mask=live, other=0)
    for back in range(0, STEPS, 4):
        b_word = b_next
        step = STEPS - 4 - back
        o_word -= path_count
        b_next = tl.load(p_from_above + o_word, mask=live & (step > 0), other=0)
        b_state, b_fourth_subset, b_fourth = _retreat(b_state, b_word >> 24)
        b_state, b_third_subset, b_third = _retreat(b_state, b_word >> 16)
        b_state, b_second_subset, b_second = _retreat(b_state, b_word >> 8)
        b_state, b_first_subset, b_first = _retreat(b_state, b_word)
        first = step * chains
        at = place + first
        in_first, in_second = last > first, last > first + chains
        in_third, in_fourth = last > first + 2 * chains, last > first + 3 * chains
        p_own = p_nearest + at
        n_first = tl.load(p_own + b_first_subset * stride, mask=in_first, other=0)
        n_second = tl.load(p_own + chains + b_second_subset * stride, mask=in_second, other=0)
        n_third = tl.load(p_own + 2 * chains + b_third_subset * stride, mask=in_third, other=0)
        n_fourth = tl.load(p_own + 3 * chains + b_fourth_subset * stride, mask=in_fourth, other=0)
        p_own = p_codes + at
        tl.store(p_own, (n_first.to(tl.int32) << 1) | b_first, mask=in_first)
        tl.store(p_own + chains, (n_second.to(tl.int32) << 1) | b_second, mask=in_second)
        tl.store(p_own + 2 * chains, (n_third.to(tl.int32) << 1) | b_third, mask=in_third)
        tl.store(p_own + 3 * chains, (n_fourth.to(tl.int32) << 1) | b_fourth, mask=in_fourth)


@triton.jit
def _costs(at, stride, here):
    """Of a step, by subset."""
    return (
        tl.load(at, mask=here, other=0.0),
        tl.load(at + stride, mask=here, other=0.0),
        tl.load(at + 2 * stride, mask=here, other=0.0),
        tl.load(at + 3 * stride, mask=here, other=0.0),
    )


@triton.jit
def _advance(sums, costs):
    """The sums of the states a step later, less the least of them, and a bit for each state: does it come from above?

    State 2 j + u comes from j, with the subset that u, u₋₁, u₋₂ and u₋₃ give, or from j + 4.
    """
    s0, s1, s2, s3, s4, s5, s6, s7 = sums
    c0, c1, c2, c3 = costs
    b_above = ((s4 + c2) < (s0 + c0)).to(tl.int32)
    b_above += ((s4 + c0) < (s0 + c2)).to(tl.int32) << 1
    b_above += ((s5 + c0) < (s1 + c2)).to(tl.int32) << 2
    b_above += ((s5 + c2) < (s1 + c0)).to(tl.int32) << 3
    b_above += ((s6 + c3) < (s2 + c1)).to(tl.int32) << 4
    b_above += ((s6 + c1) < (s2 + c3)).to(tl.int32) << 5
    b_above += ((s7 + c1) < (s3 + c3)).to(tl.int32) << 6
    b_above += ((s7 + c3) < (s3 + c1)).to(tl.int32) << 7
    n0 = tl.minimum(s0 + c0, s4 + c2)
    n1 = tl.minimum(s0 + c2, s4 + c0)
    n2 = tl.minimum(s1 + c2, s5 + c0)
    n3 = tl.minimum(s1 + c0, s5 + c2)
    n4 = tl.minimum(s2 + c1, s6 + c3)
    n5 = tl.minimum(s2 + c3, s6 + c1)
    n6 = tl.minimum(s3 + c3, s7 + c1)
    n7 = tl.minimum(s3 + c1, s7 + c3)
    b_least = tl.minimum(
        tl.minimum(tl.minimum(n0, n1), tl.minimum(n2, n3)), tl.minimum(tl.minimum(n4, n5), tl.minimum(n6, n7))
    )
    later = (
        n0 - b_least, n1 - b_least, n2 - b_least, n3 - b_least, n4 - b_least, n5 - b_least, n6 - b_least, n7 - b_least
    )  # fmt: skip
    return later, b_above


@triton.jit
def _retreat(b_state, b_above):
    """The state a step before, and the subset and the last bit of the step. b_above: the bits of `_advance`, lowest."""
    b_branch = b_state | (((b_above >> b_state) & 1) << 3)
    b_before = b_branch >> 1
    u = b_branch & 1
    b_subset = ((u ^ (b_before & 1) ^ ((b_before >> 2) & 1)) << 1) | ((b_before >> 1) & 1)
    return b_before, b_subset, u


@triton.jit
def _levels(p_codes, p_values, p_first, p_found, count, chains, BLOCK: tl.constexpr):
    o_number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = o_number < count
    base = tl.program_id(0).to(tl.int64) * count
    b_code = tl.load(p_codes + base + o_number, mask=live, other=0)
    b_one = tl.load(p_codes + base + o_number - chains, mask=live & (o_number >= chains), other=0)
    b_two = tl.load(p_codes + base + o_number - 2 * chains, mask=live & (o_number >= 2 * chains), other=0)
    b_three = tl.load(p_codes + base + o_number - 3 * chains, mask=live & (o_number >= 3 * chains), other=0)
    b_subset = (((b_code ^ b_one ^ b_three) & 1) << 1) | (b_two & 1)
    b_first = tl.load(p_first + o_number, mask=live, other=0)
    b_level = tl.load(p_values + b_first + ((b_code >> 1) << 2) + b_subset, mask=live, other=0.0)
    tl.store(p_found + base + o_number, b_level, mask=live)


trellis = Trellis(choose, levels_of, scale, pack)
