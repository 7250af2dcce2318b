"""The leading eigenvectors of a large covariance, for less than half of the work that all of them take.

    C[:, chosen] = F Lᵀ,  L Lᵀ = C[chosen, chosen]      F Fᵀ ≈ C, and exactly C where it is no more than these columns

The chosen ones are principal components of single blocks, those of most variance. What they do not foretell of the
others is left out; it is least for the leading eigenvectors and most for the last ones. Eigenvectors of F Fᵀ are those
of Fᵀ F through F, and Fᵀ F has a side for each that was chosen.
Source: Williams and Seeger, Using the Nyström Method to Speed Up Kernel Machines, NIPS 2000.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Of the largest eigenvalue: what is smaller is lost in float32's rounding.
_LEAST = 1e-7


def leading(covariance: Tensor, blocks: Sequence[int], count: int) -> tuple[Tensor, Tensor] | None:
    """Eigenvalues [C] in descending order and orthonormal eigenvectors [W, C], float32, with C at most `count`.

    covariance: float64 [W, W], which is overwritten. blocks: widths of parts that belong together, W in all. None where
    not half of them are large enough for float32, or the covariance has not `count` independent directions.
    """
    turns = []
    start = 0
    for width in blocks:
        own = slice(start, start + width)
        turn = torch.linalg.eigh(covariance[own, own]).eigenvectors
        covariance[:, own] = covariance[:, own] @ turn
        covariance[own] = turn.T @ covariance[own]
        turns.append(turn.float())
        start += width
    order = covariance.diagonal().argsort(descending=True, stable=True)
    columns = covariance[order[:, None], order[:count]]
    lower, failed = torch.linalg.cholesky_ex(columns[:count])
    if failed:
        return None
    rest = torch.linalg.solve_triangular(lower.T, columns[count:], upper=True, left=False)
    factor = torch.cat((lower, rest)).float()
    values, vectors = torch.linalg.eigh(factor.T @ factor)
    if (kept := int((values > _LEAST * values[-1]).sum())) < count / 2:
        return None
    values, vectors = values.flip(0)[:kept], vectors.flip(1)[:, :kept]
    vectors = factor @ (vectors / values.sqrt())
    # Of small ones rounding leaves a part along large ones.
    lower, failed = torch.linalg.cholesky_ex(vectors.T @ vectors)
    if failed:
        return None
    found = torch.empty_like(vectors)
    found[order] = torch.linalg.solve_triangular(lower.T, vectors, upper=True, left=False)
    parts = torch.split(found, list(blocks))
    return values, torch.cat([turn @ part for turn, part in zip(turns, parts, strict=True)])
