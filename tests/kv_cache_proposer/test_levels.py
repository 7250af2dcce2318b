"""The quantiser: optimal for a Laplace variable, by conditions that do not know how it was built."""

import itertools
import math

import pytest
import torch

from kv_cache_proposer.f_theta.levels import MAX_BITS, laplace_distortion, laplace_levels


def cells(bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mass, mean and mean square of a unit Laplace variable in each cell, by numeric integration in float64."""
    levels = laplace_levels(bits).double()
    x = torch.linspace(-40, 40, 4_000_001, dtype=torch.float64)
    mass = torch.exp(-math.sqrt(2) * x.abs())
    mass /= mass.sum()
    cell = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
    sums = [torch.zeros(len(levels), dtype=torch.float64).index_add(0, cell, mass * x**power) for power in (0, 1, 2)]
    return sums[0], sums[1], sums[2]


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8])
def test_each_level_is_the_mean_of_what_is_coded_as_it(bits: int) -> None:
    mass, first, _ = cells(bits)
    torch.testing.assert_close(first / mass, laplace_levels(bits).double(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8])
def test_the_distortion_told_is_the_distortion_found(bits: int) -> None:
    mass, first, second = cells(bits)
    levels = laplace_levels(bits).double()
    found = (second - 2 * levels * first + levels**2 * mass).sum()
    assert laplace_distortion(bits) == pytest.approx(float(found), rel=1e-3)


def test_each_further_bit_removes_less_error_than_the_one_before() -> None:
    falls = [laplace_distortion(bits) - laplace_distortion(bits + 1) for bits in range(MAX_BITS)]
    assert all(a > b > 0 for a, b in itertools.pairwise(falls))


def test_levels_are_symmetric_and_ascend() -> None:
    for bits in range(MAX_BITS + 1):
        levels = laplace_levels(bits)
        assert len(levels) == 2**bits
        assert torch.equal(levels, -levels.flip(0))
        assert bool((levels.diff() > 0).all())
