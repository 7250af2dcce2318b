"""Levels and what is reported of them: the distortion that is found, and numbers far out that are still followed."""

import itertools

import pytest
import torch

from inference_engine.kernels.trellis import choose, levels_of, make_levels
from kv_cache_proposer.f_theta.levels import MAX_BITS, distortion, levels


def found_distortion(bits: int, numbers: torch.Tensor, *, has_tails: bool = False) -> float:
    coded = make_levels([levels(bits, has_tails)] * numbers.shape[1], torch.ones(numbers.shape[1]))
    return float((numbers - levels_of(choose(numbers, coded), coded)).square().mean())


def test_the_distortion_reported_is_the_distortion_found(subtests: pytest.Subtests) -> None:
    for bits in (1, 2, 3, 4, 5, 6, 7, 9):
        with subtests.test(str(bits)):
            numbers = torch.randn(128, 2048, generator=torch.Generator().manual_seed(bits))
            assert distortion(bits) == pytest.approx(found_distortion(bits, numbers), rel=0.04)


def test_each_further_bit_removes_less_error_than_the_one_before() -> None:
    falls = [distortion(bits) - distortion(bits + 1) for bits in range(MAX_BITS)]
    assert all(a > b > 0 for a, b in itertools.pairwise(falls))


def test_levels_are_symmetric_and_ascend(subtests: pytest.Subtests) -> None:
    for bits in range(1, MAX_BITS + 1):
        with subtests.test(str(bits)):
            table = levels(bits)
            assert len(table) == 2 ** (bits + 1)
            assert torch.equal(table, -table.flip(0))
            assert bool((table.diff() > 0).all())


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


@pytest.mark.parametrize("bits", [0, MAX_BITS + 1])
def test_a_width_without_levels_is_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"1…12, got {bits}"):
        levels(bits)
