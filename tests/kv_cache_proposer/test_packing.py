"""Packed codes come back, whatever their widths."""

import pytest
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


def test_the_most_significant_bit_comes_first() -> None:
    packing = Packing((3, 3, 2, 1))
    assert packing.pack(torch.tensor([[0b101, 0b010, 0b11, 1]])).tolist() == [[0b10101011, 0b10000000]]


def test_a_code_too_wide_for_three_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="0 to 16 bits, got 3 to 17"):
        Packing((3, MAX_WIDTH + 1)).pack(torch.zeros(1, 2, dtype=torch.int64))
