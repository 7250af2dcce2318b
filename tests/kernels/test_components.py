"""The index of keys by components: what it keeps of a key, how a query is scored, and which tokens are read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inference_engine.kernels.components import (
    IndexShape,
    KeyComponents,
    component_scores,
    encode,
    of_vector,
    pack,
    unpack,
)

HKV, GROUP, D = 2, 3, 16
SHAPES = [IndexShape(rank=16, bits=8, run=1), IndexShape(rank=5, bits=3, run=2), IndexShape(rank=7, bits=1, run=4)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotate(vectors: Tensor, shifts: Tensor) -> Tensor:
    angles = shifts[:, None] * 10.0 ** -torch.arange(D // 2)
    left, right = vectors.chunk(2, dim=-1)
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)


def components() -> KeyComponents:
    basis = torch.linalg.qr(random(HKV, D, D, seed=1)).Q
    return KeyComponents(mean=random(HKV, D, seed=2) / 2, basis=basis, deviations=torch.ones(HKV, D))


@each_shape
def test_every_token_of_a_tile_has_its_codes_in_it(shape: IndexShape) -> None:
    codes = torch.randint(0, 2**shape.bits, (3, HKV, shape.tile, shape.rank))

    words = pack(codes, shape)

    assert sorted(of_vector(shape.run).flatten().tolist()) == list(range(shape.tile))
    assert words.shape[2:] == (shape.words, 16) and words[0, 0].nbytes == shape.tile_bytes
    assert torch.equal(unpack(words, shape), codes)


def test_with_all_components_in_many_bits_scores_are_those_of_the_keys() -> None:
    shape, found = SHAPES[0], components()
    keys, queries = random(HKV, 2 * shape.tile, D) / 2, random(2, HKV * GROUP, D, seed=3)
    positions = torch.arange(keys.shape[1])

    scores = component_scores(queries, encode(keys, found, shape), found.rows(shape), shape, rotate, 0.25)

    rotated = rotate(keys, positions).repeat_interleave(GROUP, dim=0)
    exact = torch.einsum("thd,hnd->thn", queries, rotated) * 0.25
    assert (scores - exact).abs().max() < 0.05 < exact.std()
