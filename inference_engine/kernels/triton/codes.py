"""Numbers of a latent from their codes: `kernels/latents.py` in Triton, for all that reads codes on a GPU.

    code  ─ its `width` bits                                                        at most three bytes
    subset of levels  ─ the last bits of the codes one, two and three steps before it in its chain
    number = scale of the token · level                                             (`kernels/trellis.py`)

A thread reads four steps of a chain, one after another, and so loads the bits before them once for all four. A token's
bytes lie in two halves, and the halves of every token are as far apart: where a code lies is worked out once for many
tokens, from the beginning of its low half and over whatever lies between.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _offset(index, half, between):
    """Of byte `index` of a token's code."""
    return index + tl.where(index >= half, between, 0)


@triton.jit
def _place(p_begins, p_widths, p_tables, behind, half, between, o_code, count):
    """Of a code: the offsets of its bytes, the bits behind it in them, its mask, and its first level."""
    # Codes behind the last are read as the last, and what is read for them does not count.
    o_code = tl.minimum(o_code, count - 1)
    b_begin = tl.load(p_begins + o_code)
    b_width = tl.load(p_widths + o_code)
    octet = behind + b_begin // 8
    # Nor does what is read for bytes behind a token's last, where a code ends before its third.
    last = 2 * half - 1
    first = _offset(octet, half, between)
    second = _offset(tl.minimum(octet + 1, last), half, between)
    third = _offset(tl.minimum(octet + 2, last), half, between)
    return first, second, third, 24 - b_begin % 8 - b_width, (1 << b_width) - 1, tl.load(p_tables + o_code)


@triton.jit
def _last_bit(p_begins, p_widths, behind, half, between, o_code, count):
    """Where a code's last bit is: its byte, how far it is from that byte's end, and 1; 0 if there is no such code."""
    is_there = (o_code >= 0).to(tl.int32)
    o_code = tl.minimum(tl.maximum(o_code, 0), count - 1)
    b_bit = tl.load(p_begins + o_code) + tl.load(p_widths + o_code) - 1
    return _offset(behind + b_bit // 8, half, between), 7 - b_bit % 8, is_there


@triton.jit
def codes_of(block, chains, BLOCK: tl.constexpr):
    """Of the block's threads the first of their four codes. The others are `chains` behind one another."""
    o_thread = block * BLOCK + tl.arange(0, BLOCK)
    return o_thread // chains * (4 * chains) + o_thread % chains


@triton.jit
def blocks_of(padded, chains, BLOCK: tl.constexpr):
    """How many blocks have all codes of a token, and what it is padded with."""
    return tl.cdiv(tl.cdiv(padded, 4 * chains) * chains, BLOCK)


@triton.jit
def places_of_codes(p_begins, p_widths, p_tables, first_byte, half, between, o_code, count, chains):
    """Where four codes each lie in every token. between: from the end of a low half to its high half, int64."""
    behind = first_byte + 1
    own_0 = _place(p_begins, p_widths, p_tables, behind, half, between, o_code, count)
    own_1 = _place(p_begins, p_widths, p_tables, behind, half, between, o_code + chains, count)
    own_2 = _place(p_begins, p_widths, p_tables, behind, half, between, o_code + 2 * chains, count)
    own_3 = _place(p_begins, p_widths, p_tables, behind, half, between, o_code + 3 * chains, count)
    one = _last_bit(p_begins, p_widths, behind, half, between, o_code - chains, count)
    two = _last_bit(p_begins, p_widths, behind, half, between, o_code - 2 * chains, count)
    three = _last_bit(p_begins, p_widths, behind, half, between, o_code - 3 * chains, count)
    return own_0, own_1, own_2, own_3, one, two, three, _offset(first_byte, half, between)


@triton.jit
def _code(p_token, place):
    first, second, third, right, b_mask, _ = place
    b_word = tl.load(p_token + first).to(tl.int32) << 16
    b_word |= tl.load(p_token + second).to(tl.int32) << 8
    b_word |= tl.load(p_token + third).to(tl.int32)
    return (b_word >> right) & b_mask


@triton.jit
def _bit(p_token, place):
    offset, right, is_there = place
    return (tl.load(p_token + offset).to(tl.int32) >> right) & is_there


@triton.jit
def _level(p_levels, place, b_code, b_one, b_two, b_three):
    b_subset = (((b_code ^ b_one ^ b_three) & 1) << 1) | (b_two & 1)
    return tl.load(p_levels + place[5] + ((b_code >> 1) << 2) + b_subset)


@triton.jit
def numbers_of_codes(p_token, p_levels, p_scales, places):
    """The numbers of four codes each of one token, float32. p_token: its low half."""
    own_0, own_1, own_2, own_3, one, two, three, scale_at = places
    b_one, b_two, b_three = _bit(p_token, one), _bit(p_token, two), _bit(p_token, three)
    b_code_0 = _code(p_token, own_0)
    b_code_1 = _code(p_token, own_1)
    b_code_2 = _code(p_token, own_2)
    b_code_3 = _code(p_token, own_3)
    scale = tl.load(p_scales + tl.load(p_token + scale_at).to(tl.int32))
    return (
        _level(p_levels, own_0, b_code_0, b_one, b_two, b_three) * scale,
        _level(p_levels, own_1, b_code_1, b_code_0, b_one, b_two) * scale,
        _level(p_levels, own_2, b_code_2, b_code_1, b_code_0, b_one) * scale,
        _level(p_levels, own_3, b_code_3, b_code_2, b_code_1, b_code_0) * scale,
    )


@triton.jit
def put_numbers(p_numbers, numbers, o_code, chains, count, padded, is_token):
    """Write what `numbers_of_codes` gave of a token, and zeros behind its last code; nothing if it is no token."""
    b_0, b_1, b_2, b_3 = numbers
    _put(p_numbers, b_0, o_code, count, padded, is_token)
    _put(p_numbers, b_1, o_code + chains, count, padded, is_token)
    _put(p_numbers, b_2, o_code + 2 * chains, count, padded, is_token)
    _put(p_numbers, b_3, o_code + 3 * chains, count, padded, is_token)


@triton.jit
def _put(p_numbers, b_number, o_code, count, padded, is_token):
    b_number = tl.where(o_code < count, b_number, 0.0).to(p_numbers.dtype.element_ty)
    tl.store(p_numbers + o_code, b_number, mask=is_token & (o_code < padded))
