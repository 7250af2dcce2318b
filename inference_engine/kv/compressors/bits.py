"""Integers of any width, packed into bytes without a gap.

A number of 28 bits is cut into three whole bytes and one half; of 6 bits, into a half and a quarter. Whole bytes are
stored one after the other, halves two to a byte, quarters four, eighths eight: so nothing but shifts by fixed counts is
needed, for all numbers of a column at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `count` numbers of `bits` bits take: exactly count · bits / 8 if count is a multiple of 8."""
    return sum(-(-count * width // 8) for _, width in _pieces(bits))


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Integers [count, N], their low `bits` bits -> uint8 [packed_bytes, N]."""
    packed = []
    for shift, width in _pieces(bits):
        pieces = ((numbers >> shift) & (2**width - 1)).to(torch.uint8)
        share = 8 // width  # pieces in a byte
        if share > 1:
            pieces = F.pad(pieces, (0, 0, 0, -len(pieces) % share)).view(-1, share, pieces.shape[1])
            whole = pieces[:, 0]
            for place in range(1, share):
                whole = whole | (pieces[:, place] << (place * width))
            pieces = whole
        packed.append(pieces)
    return torch.cat(packed)


def unpack(packed: Tensor, count: int, bits: int) -> Tensor:
    """The inverse of `pack`: uint8 [packed_bytes, N] -> [count, N], int64 if the numbers have more than 8 bits."""
    numbers: Tensor | None = None
    start = 0
    for shift, width in _pieces(bits):
        end = start + -(-count * width // 8)
        pieces = packed[start:end]
        start = end
        share = 8 // width
        if share > 1:
            places = [(pieces >> (place * width)) & (2**width - 1) for place in range(share)]
            pieces = torch.stack(places, dim=1).view(-1, packed.shape[1])[:count]
        if bits > 8:
            pieces = pieces.to(torch.int64)
        pieces = pieces << shift
        numbers = pieces if numbers is None else numbers | pieces
    assert numbers is not None and start == len(packed), (count, bits, packed.shape)
    return numbers


def _pieces(bits: int) -> list[tuple[int, int]]:
    """(shift, width) of the pieces a number of `bits` bits is cut into, from its low end."""
    pieces = [(shift, 8) for shift in range(0, bits - 7, 8)]
    shift = bits - bits % 8
    for width in (4, 2, 1):
        if bits % 8 & width:
            pieces.append((shift, width))
            shift += width
    return pieces
