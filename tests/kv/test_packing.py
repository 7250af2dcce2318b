"""Numbers in bits and scales in sixteen: nothing is lost, nothing more is stored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference_engine.kv.compressors.bits import pack, packed_bytes, unpack
from inference_engine.kv.compressors.scales import load_scales, store_scales


@given(bits=st.integers(1, 62), count=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_packed_numbers_come_back(bits: int, count: int, seed: int) -> None:
    numbers = torch.randint(0, 2**bits, (count, 3), generator=torch.Generator().manual_seed(seed))
    packed = pack(numbers, bits)
    assert packed.shape == (packed_bytes(count, bits), 3)
    assert torch.equal(unpack(packed, count, bits).to(torch.int64), numbers)


def test_eight_numbers_take_exactly_their_bits(subtests: pytest.Subtests) -> None:
    for bits in range(1, 40):
        with subtests.test(str(bits)):
            assert packed_bytes(8, bits) == bits
            numbers = torch.stack((torch.zeros(8, dtype=torch.int64), torch.full((8,), 2**bits - 1)), dim=1)
            packed = pack(numbers, bits)
            assert packed[:, 0].eq(0).all()
            assert packed[:, 1].eq(255).all(), "a bit is never used"


def test_a_scale_that_is_not_a_number_stays_none() -> None:
    scales = torch.tensor([[torch.nan], [0.0]])
    loaded = load_scales(store_scales(scales), 2)
    assert loaded[0].isnan().all()
    assert loaded[1] == 0
