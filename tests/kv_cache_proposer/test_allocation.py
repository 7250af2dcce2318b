"""Bits go where they help most."""

import itertools

import pytest
import torch

from kv_cache_proposer.f_theta.bit_allocation import allocate, allocate_bytes
from kv_cache_proposer.f_theta.levels import MAX_BITS, distortion

DISTORTIONS = [distortion(bits) for bits in range(MAX_BITS + 1)]


def error(variances: torch.Tensor, bits: tuple[int, ...]) -> float:
    return sum(float(v) * DISTORTIONS[b] for v, b in zip(variances, bits, strict=True))


@pytest.mark.parametrize("budget", [0, 1, 4, 7, 11])
def test_no_other_sharing_of_the_same_bits_has_less_error(budget: int) -> None:
    variances = torch.tensor([9.0, 2.5, 2.4, 0.01])
    chosen = tuple(allocate(variances, budget, DISTORTIONS).tolist())
    others = [bits for bits in itertools.product(range(budget + 1), repeat=4) if sum(bits) == budget]
    assert sum(chosen) == budget
    assert error(variances, chosen) == pytest.approx(min(error(variances, bits) for bits in others))


def test_groups_get_whole_bytes_that_sum_to_the_total(subtests: pytest.Subtests) -> None:
    for total in (3, 4, 17, 40):
        with subtests.test(str(total)):
            groups = [torch.logspace(2, -2, 31), torch.logspace(1, -2, 19), torch.full((13,), 1e-6)]
            shares = allocate_bytes(groups, total, DISTORTIONS)
            assert all(int(share.sum()) % 8 == 0 and int(share.sum()) > 0 for share in shares)
            assert sum(int(share.sum()) for share in shares) == 8 * total
