"""Packed codes come back, whatever their widths."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_proposer.f_theta.packing import MAX_WIDTH, Packing

widths = st.lists(st.integers(0, MAX_WIDTH), min_size=1, max_size=40)


@given(widths=widths, count=st.integers(0, 5), seed=st.integers(0, 2**31))
def test_codes_are_packed_bit_by_bit_and_come_back(widths: list[int], count: int, seed: int) -> None:
    packing = Packing(tuple(widths))
    draw = torch.Generator().manual_seed(seed)
    codes = torch.stack([torch.randint(2**width, (count,), generator=draw) for width in widths], dim=1)
    packed = packing.pack(codes)
    assert packed.dtype == torch.uint8
    for numbers, octets in zip(codes.tolist(), packed.tolist(), strict=True):
        bits = "".join(f"{code:0{width}b}" for code, width in zip(numbers, widths, strict=True) if width)
        assert octets == [int(bits[first : first + 8].ljust(8, "0"), 2) for first in range(0, len(bits), 8)]
    assert torch.equal(packing.unpack(packed), codes.int())
