"""The leading eigenvectors are nearly those of the whole, or there are none."""

import torch
from torch import Tensor

from kv_cache_proposer.f_theta.leading import leading

BLOCKS = [40, 60, 50, 50]
WIDTH, SOUGHT = sum(BLOCKS), 120
# Of the variance that the best directions leave out, for a half and for five sixths of those that are sought.
HALF, MOST = 0.01, 0.1
# Of the variance that is kept: what a part of it left out would add.
UNSEEN = 1e-3
ROUNDING = 1e-5


def made(least: float) -> Tensor:
    """A covariance with eigenvalues from 1 down to `least`, equally far apart in their logarithms."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)).Q
    values = torch.logspace(0, torch.tensor(least).log10().item(), WIDTH, dtype=torch.float64)
    covariance: Tensor = (turn * values) @ turn.T
    return covariance


def test_they_keep_nearly_as_much_as_the_best() -> None:
    covariance = made(1e-6)
    values = torch.linalg.eigvalsh(covariance).flip(0)
    found = leading(covariance.clone(), BLOCKS, SOUGHT)
    assert found is not None
    own, vectors = found
    assert vectors.shape == (WIDTH, SOUGHT)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(SOUGHT), atol=ROUNDING, rtol=0)
    assert bool((own.diff() <= 0).all())
    for count, most in ((SOUGHT // 2, HALF), (SOUGHT * 5 // 6, MOST)):
        kept = vectors[:, :count].double()
        left = covariance.trace() - ((covariance @ kept) * kept).sum()
        assert float(left / values[count:].sum()) < 1 + most
        torch.testing.assert_close(own[:count].double().sum(), values[:count].sum(), atol=0, rtol=UNSEEN)
