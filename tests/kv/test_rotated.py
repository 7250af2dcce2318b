"""Rotation and levels."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from inference_engine.kv.compressors.rotated import _GAUSSIAN_LEVELS, rotate


def test_the_rotation_is_sylvesters_and_its_own_inverse(subtests: pytest.Subtests) -> None:
    for head_dim in (1, 2, 8, 256):
        with subtests.test(str(head_dim)):
            matrix = rotate(torch.eye(head_dim))
            places = torch.arange(head_dim)
            shared = torch.tensor([[(int(row) & int(column)).bit_count() for column in places] for row in places])
            assert torch.equal(matrix, 1.0 - 2.0 * (shared % 2))
            assert torch.equal(rotate(matrix), head_dim * torch.eye(head_dim))


@pytest.mark.parametrize("bits", sorted(_GAUSSIAN_LEVELS))
def test_every_level_is_the_mean_of_the_gaussian_numbers_nearest_to_it(bits: int) -> None:
    levels = _GAUSSIAN_LEVELS[bits]
    assert len(levels) == 2 ** (bits - 1)
    borders = [0.0, *((one + other) / 2 for one, other in pairwise(levels)), math.inf]
    for level, (low, high) in zip(levels, pairwise(borders), strict=True):
        density = (math.exp(-low * low / 2) - math.exp(-high * high / 2)) / math.sqrt(2 * math.pi)
        share = (math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2))) / 2
        assert level == pytest.approx(density / share, abs=2e-5)
