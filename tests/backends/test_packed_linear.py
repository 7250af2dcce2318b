"""Packed linear layers: equal logits, an off-switch, and tokens that do not depend on their neighbours."""

from __future__ import annotations

import copy

import pytest
import torch

from inference_engine.backends.packed_linear import PackedLinear, can_pack, kernel_vectors, pack_linears, takes
from inference_engine.backends.quanta import probe_quanta
from inference_engine.models.seam import ATTENTION, Seam
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_can_be_packed_is_known_before_anything_is(dtype: torch.dtype) -> None:
    """Some CPUs have no instructions for bfloat16: a model is served with its plain layers there."""
    model = copy.deepcopy(tiny_model()).to(dtype)
    if can_pack(model):
        assert pack_linears(model) > 10
    else:
        with pytest.raises(RuntimeError):
            PackedLinear(torch.nn.Linear(16, 16, dtype=dtype))


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


def test_a_server_meets_few_shapes_however_many_lengths_its_prompts_have() -> None:
    padded = {kernel_vectors(vectors) for vectors in range(1, 4097)}
    assert len(padded) < 90
    assert len({vectors for vectors in padded if vectors <= 512}) <= 22
    for vectors in range(1, 4097):
        assert vectors <= kernel_vectors(vectors) < vectors + max(1, min(64, vectors))


def test_packed_layers_have_a_token_quantum() -> None:
    """Fixed-shape mode is to be had with packed layers too."""
    model = tiny_model(attention=ATTENTION)
    pack_linears(model)
    vectors, keys = probe_quanta(Seam(model))
    assert vectors <= 8
    assert keys == 512
