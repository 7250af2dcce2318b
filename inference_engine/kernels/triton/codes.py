"""Numbers of a latent from their codes: `kernels/latents.py` in Triton, for all that reads codes on a GPU.

    code  ─ its `width` bits                                                        at most three bytes
    subset of levels  ─ the last bits of the codes one, two and three steps before it in its chain
    number = scale of the token · level                                             (`kernels/trellis.py`)

A thread reads four steps of a chain, one after another, and so loads the bits before them once for all four. A token's
bytes lie in two halves, and the halves of every token are as far apart: where a code lies is worked out once for many
tokens, from the beginning of its low half and over whatever lies between.

Of a code two neighbours in one half are read, for which one address does. What may follow them is of all codes of a
token the same, the beginning of the high half, unless a code has a third byte, which none of at most nine bits has.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _offset(index, half, between):
    """Of byte `index` of a token's code."""
    return index + tl.where(index >= half, between, 0)


@triton.jit
def _near(p_begins, p_widths, behind, half, o_code, count):
    """Of a code: the first of two bytes of one half that it begins in, and the bits behind it in these and two more."""
    # Codes behind the last are read as the last, and what is read for them does not count.
    o_code = tl.minimum(o_code, count - 1)
    b_begin = tl.load(p_begins + o_code)
    octet = behind + b_begin // 8
    first = tl.minimum(octet, tl.where(octet < half, half, 2 * half) - 2)
    return first, 32 - (octet - first) * 8 - b_begin % 8 - tl.load(p_widths + o_code)


@triton.jit
def _place(p_widths, p_tables, half, between, near, o_code, count, are_long):
    """Of a code: the offset of its first two bytes, the bits behind it in what is read, its mask, its first level."""
    o_code = tl.minimum(o_code, count - 1)
    right = tl.where(are_long, near[1], near[1] - 16)
    return _offset(near[0], half, between), right, (1 << tl.load(p_widths + o_code)) - 1, tl.load(p_tables + o_code)


@triton.jit
def _last_bit(p_begins, p_widths, behind, half, between, o_code, count):
    """Where a code's last bit is: its byte, and how far from that byte's end; beyond its beginning if there is none."""
    o_there = tl.minimum(tl.maximum(o_code, 0), count - 1)
    b_bit = tl.load(p_begins + o_there) + tl.load(p_widths + o_there) - 1
    return _offset(behind + b_bit // 8, half, between), tl.where(o_code >= 0, 7 - b_bit % 8, 31)


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
    """Where four codes each lie in every token, and whether two bytes are too few for any of them. A half has at least
    two bytes. between: from the end of a low half to its high half, int64.
    """
    behind = first_byte + 1
    near_0 = _near(p_begins, p_widths, behind, half, o_code, count)
    near_1 = _near(p_begins, p_widths, behind, half, o_code + chains, count)
    near_2 = _near(p_begins, p_widths, behind, half, o_code + 2 * chains, count)
    near_3 = _near(p_begins, p_widths, behind, half, o_code + 3 * chains, count)
    b_least = tl.minimum(tl.minimum(near_0[1], near_1[1]), tl.minimum(near_2[1], near_3[1]))
    are_long = tl.min(b_least, axis=0) < 16
    own_0 = _place(p_widths, p_tables, half, between, near_0, o_code, count, are_long)
    own_1 = _place(p_widths, p_tables, half, between, near_1, o_code + chains, count, are_long)
    own_2 = _place(p_widths, p_tables, half, between, near_2, o_code + 2 * chains, count, are_long)
    own_3 = _place(p_widths, p_tables, half, between, near_3, o_code + 3 * chains, count, are_long)
    one = _last_bit(p_begins, p_widths, behind, half, between, o_code - chains, count)
    two = _last_bit(p_begins, p_widths, behind, half, between, o_code - 2 * chains, count)
    three = _last_bit(p_begins, p_widths, behind, half, between, o_code - 3 * chains, count)
    scale_at = _offset(first_byte, half, between)
    return own_0, own_1, own_2, own_3, one, two, three, scale_at, half + between, are_long


@triton.jit
def bytes_of_codes(p_token, places):
    """What is loaded of one token for `numbers_of_codes`: nothing waits for another load. p_token: its low half."""
    own_0, own_1, own_2, own_3, one, two, three, scale_at, high, are_long = places
    b_before = tl.load(p_token + one[0]), tl.load(p_token + two[0]), tl.load(p_token + three[0])
    b_0, b_1, b_2, b_3 = (
        _two(p_token + own_0[0], True),
        _two(p_token + own_1[0], True),
        _two(p_token + own_2[0], True),
        _two(p_token + own_3[0], True),
    )
    return p_token, tl.load(p_token + scale_at), b_0, b_1, b_2, b_3, _two(p_token + high, are_long), b_before


@triton.jit
def _two(p_first, is_read):
    return tl.load(p_first, mask=is_read, other=0), tl.load(p_first + 1, mask=is_read, other=0)


@triton.jit
def _joined(b_bytes):
    return (b_bytes[0].to(tl.int32) << 8) | b_bytes[1].to(tl.int32)


@triton.jit
def _longer(p_token, b_word, others, place, half):
    """Two bytes of a code, and two that follow: the beginning of the high half, or one more of the same half."""
    # The third byte of those that end with the low half may be behind the last of all tokens.
    m_third = (place[1] < 16) & (place[0] != half - 2)
    b_third = tl.load(p_token + place[0] + 2, mask=m_third, other=0).to(tl.int32)
    return (b_word << 16) | tl.where(m_third, b_third << 8, others)


@triton.jit
def _level(p_levels, place, b_code, b_one, b_two, b_three):
    """Level `code / 2 · 4 + subset`. b_one, b_two, b_three: the last bits of the codes before."""
    return tl.load(p_levels + place[3] + (((b_code ^ b_one ^ b_three) << 1) + b_two))


@triton.jit
def numbers_of_codes(p_levels, p_scales, places, found, half):
    """The numbers of four codes each of one token, float32. found: by `bytes_of_codes`."""
    own_0, own_1, own_2, own_3, one, two, three, _, _, are_long = places
    p_token, octet, b_0, b_1, b_2, b_3, others, b_before = found
    scale = tl.load(p_scales + octet.to(tl.int32))
    b_word_0, b_word_1, b_word_2, b_word_3 = _joined(b_0), _joined(b_1), _joined(b_2), _joined(b_3)
    if are_long:
        b_high = _joined(others)
        b_word_0 = _longer(p_token, b_word_0, b_high, own_0, half)
        b_word_1 = _longer(p_token, b_word_1, b_high, own_1, half)
        b_word_2 = _longer(p_token, b_word_2, b_high, own_2, half)
        b_word_3 = _longer(p_token, b_word_3, b_high, own_3, half)
    b_code_0, b_code_1 = (b_word_0 >> own_0[1]) & own_0[2], (b_word_1 >> own_1[1]) & own_1[2]
    b_code_2, b_code_3 = (b_word_2 >> own_2[1]) & own_2[2], (b_word_3 >> own_3[1]) & own_3[2]
    b_one = (b_before[0].to(tl.int32) >> one[1]) & 1
    b_two = (b_before[1].to(tl.int32) >> two[1]) & 1
    b_three = (b_before[2].to(tl.int32) >> three[1]) & 1
    b_last_0, b_last_1, b_last_2 = b_code_0 & 1, b_code_1 & 1, b_code_2 & 1
    return (
        _level(p_levels, own_0, b_code_0, b_one, b_two, b_three) * scale,
        _level(p_levels, own_1, b_code_1, b_last_0, b_one, b_two) * scale,
        _level(p_levels, own_2, b_code_2, b_last_1, b_last_0, b_one) * scale,
        _level(p_levels, own_3, b_code_3, b_last_2, b_last_1, b_last_0) * scale,
    )


@triton.jit
def put_numbers(p_numbers, numbers, o_code, chains, count, padded):
    """Write what `numbers_of_codes` gave of a token, and zeros behind its last code."""
    b_0, b_1, b_2, b_3 = numbers
    _put(p_numbers, b_0, o_code, count)
    _put(p_numbers, b_1, o_code + chains, count)
    _put(p_numbers, b_2, o_code + 2 * chains, count)
    _put(p_numbers, b_3, o_code + 3 * chains, count)
    if padded > count:  # by itself, as most have none
        _put_zeros(p_numbers, o_code, count, padded)
        _put_zeros(p_numbers, o_code + chains, count, padded)
        _put_zeros(p_numbers, o_code + 2 * chains, count, padded)
        _put_zeros(p_numbers, o_code + 3 * chains, count, padded)


@triton.jit
def _put(p_numbers, b_number, o_code, count):
    tl.store(p_numbers + o_code, b_number.to(p_numbers.dtype.element_ty), mask=o_code < count)


@triton.jit
def _put_zeros(p_numbers, o_code, count, padded):
    b_zero = tl.zeros(o_code.shape, p_numbers.dtype.element_ty)
    tl.store(p_numbers + o_code, b_zero, mask=(o_code >= count) & (o_code < padded))
