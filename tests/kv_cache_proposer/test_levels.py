"""Levels and what is reported of them: the distortion that is found, and numbers far out that are still followed."""

import pytest
import torch

from inference_engine.kernels.trellis import choose, levels_of, make_levels
from kv_cache_proposer.f_theta.levels import distortion, levels


def found_distortion(bits: int, numbers: torch.Tensor, *, has_tails: bool = False) -> float:
    coded = make_levels([levels(bits, has_tails)] * numbers.shape[1], torch.ones(numbers.shape[1]))
    return float((numbers - levels_of(choose(numbers, coded), coded)).square().mean())


def test_the_distortion_reported_is_the_distortion_found(subtests: pytest.Subtests) -> None:
    for bits in (1, 2, 3, 4, 5, 6, 7, 9):
        with subtests.test(str(bits)):
            numbers = torch.randn(128, 2048, generator=torch.Generator().manual_seed(bits))
            assert distortion(bits) == pytest.approx(found_distortion(bits, numbers), rel=0.04)


@pytest.mark.parametrize("bits", [7, 8, 10, 12])
def test_a_coefficient_of_many_bits_is_followed_where_its_tails_are_heavy(bits: int) -> None:
    """One in five hundred seven deviations out, where levels for a Gaussian variable would end at four and a half."""
    numbers = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    numbers[:, ::500] *= 7.0 / numbers[:, ::500].abs()
    assert found_distortion(bits, numbers) < 10 * distortion(bits)


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_a_leading_coefficient_is_followed_with_few_bits_too(bits: int) -> None:
    """One in five hundred six deviations out: levels for a Gaussian variable lose more, and less where none is."""
    plain = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    far = plain.clone()
    far[:, ::500] *= 6.0 / far[:, ::500].abs()
    assert found_distortion(bits, far, has_tails=True) < 0.8 * found_distortion(bits, far)
    assert found_distortion(bits, plain, has_tails=True) > found_distortion(bits, plain)
