"""A number of a latent from its code: `kernels/latents.py` in Triton, for all that reads codes on a GPU.

A code has `width` bits, its subset of levels follows from the last bits of the codes that stand one, two and three
steps before it in its chain, and a token's numbers share one scale (`kernels/trellis.py`). A token's bytes lie in two
halves.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _byte(p_low, p_high, half, index, live):
    """Byte `index` of a token's code."""
    b_low = tl.load(p_low + index, mask=live & (index < half), other=0)
    b_high = tl.load(p_high + index - half, mask=live & (index >= half) & (index < 2 * half), other=0)
    return (b_low | b_high).to(tl.int32)


@triton.jit
def places_of_codes(p_begins, p_widths, p_tables, first_byte, o_code, live, chains):
    """Of codes, the same for every token: first byte, bits behind the code in three bytes, mask, first level;
    and the bits that end those one, two and three before, with whether there is one.
    """
    b_begin = tl.load(p_begins + o_code, mask=live, other=0)
    b_width = tl.load(p_widths + o_code, mask=live, other=1)
    b_table = tl.load(p_tables + o_code, mask=live, other=0)
    has_one = live & (o_code >= chains)
    has_two = live & (o_code >= 2 * chains)
    has_three = live & (o_code >= 3 * chains)
    b_one = tl.load(p_begins + o_code - chains, mask=has_one, other=0)
    b_one += tl.load(p_widths + o_code - chains, mask=has_one, other=1) - 1
    b_two = tl.load(p_begins + o_code - 2 * chains, mask=has_two, other=0)
    b_two += tl.load(p_widths + o_code - 2 * chains, mask=has_two, other=1) - 1
    b_three = tl.load(p_begins + o_code - 3 * chains, mask=has_three, other=0)
    b_three += tl.load(p_widths + o_code - 3 * chains, mask=has_three, other=1) - 1
    b_octet = first_byte + 1 + b_begin // 8
    b_right = 24 - b_begin % 8 - b_width
    b_mask = (1 << b_width) - 1
    return b_octet, b_right, b_mask, b_table, b_one, b_two, b_three, has_one, has_two, has_three


@triton.jit
def numbers_of_codes(
    p_low,
    p_high,
    half,
    first_byte,
    p_levels,
    p_scales,
    live,
    inside,
    codes,
):
    """The numbers of one token, float32, where live; p_low, p_high: its halves. inside: there is such a token.

    codes: as `places_of_codes` has them.
    """
    b_octet, b_right, b_mask, b_table, b_one, b_two, b_three, has_one, has_two, has_three = codes
    here = live & inside
    behind = first_byte + 1
    b_word = _byte(p_low, p_high, half, b_octet, here) << 16
    b_word |= _byte(p_low, p_high, half, b_octet + 1, here) << 8
    b_word |= _byte(p_low, p_high, half, b_octet + 2, here)
    b_code = (b_word >> b_right) & b_mask
    u_one = _byte(p_low, p_high, half, behind + b_one // 8, has_one & here) >> (7 - b_one % 8)
    u_two = _byte(p_low, p_high, half, behind + b_two // 8, has_two & here) >> (7 - b_two % 8)
    u_three = _byte(p_low, p_high, half, behind + b_three // 8, has_three & here) >> (7 - b_three % 8)
    b_subset = (((b_code ^ u_one ^ u_three) & 1) << 1) | (u_two & 1)
    b_level = tl.load(p_levels + b_table + ((b_code >> 1) << 2) + b_subset, mask=here, other=0.0)
    scale_code = tl.load(p_low + first_byte, mask=inside & (first_byte < half), other=0)
    scale_code |= tl.load(p_high + first_byte - half, mask=inside & (first_byte >= half), other=0)
    return b_level * tl.load(p_scales + scale_code.to(tl.int32))
