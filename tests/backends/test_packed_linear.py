"""Packed linear layers: equal logits, an off-switch, and tokens that do not depend on their neighbours."""

from __future__ import annotations

import copy

import pytest
import torch

from inference_engine.backends.packed_linear import PackedLinear, can_pack, pack_linears, takes
from tests.tiny import tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vectors", [1, 2, 5, 64, 300])
def test_packed_gives_the_same_product(dtype: torch.dtype, vectors: int) -> None:
    if not takes(dtype):
        pytest.skip(f"this CPU has no instructions for packed {dtype}")
    generator = torch.Generator().manual_seed(vectors)
    linear = torch.nn.Linear(200, 120).to(dtype)
    states = torch.randn(1, vectors, 200, generator=generator).to(dtype)
    with torch.inference_mode():
        expected, packed = linear(states).float(), PackedLinear(linear)(states).float()
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2  # sums of 200 terms of order 0.05, rounded once
    torch.testing.assert_close(packed, expected, atol=tolerance, rtol=0)


def test_every_linear_layer_is_replaced_and_logits_stay() -> None:
    plain = tiny_model()
    packed = copy.deepcopy(plain)
    assert can_pack(packed)
    count = sum(type(module) is torch.nn.Linear for module in plain.modules())
    assert pack_linears(packed) == count > 10
    assert not any(type(module) is torch.nn.Linear for module in packed.modules())
    ids = torch.randint(0, 128, (1, 50), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(packed(ids).logits, plain(ids).logits, atol=2e-4, rtol=0)
