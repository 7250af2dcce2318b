"""The values a coefficient may be coded as: Lloyd–Max quantisers of a Laplace variable with mean 0 and variance 1.

The best quantiser of an exponential tail can be built from outside in. Let d be the distance from a cell's left edge to
its level; the outermost cell is a whole exponential, so d is its mean. An edge lies midway between its two levels, so
the next cell's level is d to the left of the edge they share, which fixes that cell's width, which fixes its own d:

    … | ←d₂→ x ←d₁→ | ←d₁→ x          x levels, | edges
         cell 2       cell 1, to ∞

With an even number of levels the middle edge is 0 and the negative half mirrors the positive one.
Source: the optimality conditions are Lloyd's and Max's (IEEE Trans. Inf. Theory 28(2), 1982; IRE Trans. 6(1), 1960);
the recursion follows from the exponential having no memory (Sullivan, IEEE Trans. Inf. Theory 42(5), 1996).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

MAX_BITS = 12

# Decay of a Laplace density of variance 1.
_RATE = math.sqrt(2.0)


@lru_cache(maxsize=MAX_BITS + 1)
def laplace_levels(bits: int) -> Tensor:
    """The 2**bits levels, ascending, float32 on the CPU. Zero bits have one level: 0."""
    if not 0 <= bits <= MAX_BITS:
        raise ValueError(f"bits must be 0…{MAX_BITS}, got {bits}")
    if bits == 0:
        return torch.zeros(1)
    _, levels = _half(bits)
    upper = torch.tensor(levels, dtype=torch.float64)
    return torch.cat((-upper.flip(0), upper)).float()


@lru_cache(maxsize=MAX_BITS + 1)
def laplace_distortion(bits: int) -> float:
    """Mean squared error of coding a Laplace variable of variance 1 with `bits` bits."""
    if bits == 0:
        return 1.0
    edges, levels = _half(bits)
    # Where each level is its cell's mean, the error is the variance less the variance of the levels.
    mass = [math.exp(-_RATE * a) - math.exp(-_RATE * b) for a, b in zip(edges, [*edges[1:], math.inf], strict=True)]
    return 1.0 - sum(m * level * level for m, level in zip(mass, levels, strict=True))


def _half(bits: int) -> tuple[list[float], list[float]]:
    """Left edges and levels of the cells on the positive side."""
    distance = 1.0 / _RATE
    widths: list[float] = []
    distances = [distance]
    for _ in range(2 ** (bits - 1) - 1):
        widths.append(_width_ending(distance))
        distance = widths[-1] - distance
        distances.append(distance)
    edges = [0.0]
    for width in reversed(widths):
        edges.append(edges[-1] + width)
    return edges, [edge + d for edge, d in zip(edges, reversed(distances), strict=True)]


def _width_ending(distance: float) -> float:
    """The width of the cell whose mean lies `distance` before its right edge."""
    low, high = distance, 2.0 * distance
    for _ in range(100):
        middle = (low + high) / 2
        if _mean_to_right_edge(middle) < distance:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _mean_to_right_edge(width: float) -> float:
    """In a cell of that width, how far the mean of the exponential lies before the right edge."""
    x = _RATE * width
    if x < 1e-3:
        # The quotient below cancels for narrow cells; this is its series.
        return width * (0.5 + x / 12)
    return width / -math.expm1(-x) - 1 / _RATE
