"""Packed codes come back, whatever their widths."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_proposer.f_theta.packing import Packing

widths = st.lists(st.integers(0, 12), min_size=1, max_size=40)


def random_codes(packing: Packing, rows: int, seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(2**run.width, (rows, run.count), generator=draw) for run in packing.runs()]


@given(widths=widths, rows=st.integers(0, 5), seed=st.integers(0, 2**31))
def test_unpacking_gives_back_what_was_packed(widths: list[int], rows: int, seed: int) -> None:
    packing = Packing(tuple(widths))
    codes = random_codes(packing, rows, seed)
    packed = packing.pack(codes, rows, torch.device("cpu"))
    assert packed.dtype == torch.uint8
    assert packed.shape == (rows, -(-sum(widths) // 8))
    assert all(torch.equal(a, b) for a, b in zip(codes, packing.unpack(packed), strict=True))


def test_the_most_significant_bit_comes_first() -> None:
    packing = Packing((3, 3, 2, 1))
    codes = [torch.tensor([[0b101, 0b010]]), torch.tensor([[0b11]]), torch.tensor([[1]])]
    assert packing.pack(codes, 1, torch.device("cpu")).tolist() == [[0b10101011, 0b10000000]]
