"""The values that code a coefficient of variance 1, and their distortion: see `inference_engine/kernels/trellis.py`.

Levels lie as densely as is best for a quantiser of many levels: in proportion to the cube root of the variable's
density (Panter and Dite, Proc. IRE 39(1), 1951), drawn together where levels are few. Coefficients of a token, divided
by the token's scale, are nearly Gaussian but for the leading ones, whose tails are heavier. So these, and what has many
bits, have levels for a Student variable of 14 degrees of freedom, which on a Gaussian one loses a sixth more and
reaches more than twice as far; the cube root of its density is that of one with 4.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

MAX_BITS = 12
GAUSSIAN_BITS = 6  # at most: what has more bits has the longer tails
LEADING = 16  # components of a group that have them anyway
_FREEDOM = 14.0

# Mean squared error of a Gaussian variable with 0, 1, … bits, found by coding 2²⁰ numbers of it (a test finds them
# again, to 4 %). Beyond, each bit leaves a quarter.
_DISTORTIONS = (1.0, 0.3077, 0.08728, 0.02401, 0.006374, 0.001652, 0.0004231, 0.0001238)


@lru_cache(maxsize=2 * MAX_BITS)
def levels(bits: int, has_tails: bool = False) -> Tensor:
    """The 2**(bits + 1) levels of a trellis, ascending, float32 on the CPU."""
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits must be 1…{MAX_BITS}, got {bits}")
    # With 0.4 a Gaussian variable loses up to 1 % less; coefficients of text unlike calibration's reach further.
    together = 1.0 - 0.35 * 2.0 ** (-(bits - 1) / 2)
    return spread(2 ** (bits + 1), has_tails or bits > GAUSSIAN_BITS).mul(together).float()


def spread(count: int, has_tails: bool) -> Tensor:
    """`count` levels, as dense as is best for a coefficient, ascending, float64."""
    quantiles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return _student(quantiles) if has_tails else _gaussian(quantiles)


def distortion(bits: int) -> float:
    """Mean squared error of coding a Gaussian variable of variance 1 with `bits` bits."""
    known = min(bits, len(_DISTORTIONS) - 1)
    return _DISTORTIONS[known] * 4.0 ** (known - bits)


def _gaussian(quantiles: Tensor) -> Tensor:
    """Of the density that is a standard normal one's cube root: again normal, √3 as wide."""
    normal: Tensor = torch.special.ndtri(quantiles)
    return math.sqrt(3.0) * normal


def _student(quantiles: Tensor) -> Tensor:
    """Of the density that is the cube root of a Student one's with 14 degrees of freedom and variance 1.

    That is Student's with 4, rescaled, whose quantiles are in closed form (Shaw, Journal of Computational Finance 9(4),
    2006).
    """
    root = (4.0 * quantiles * (1.0 - quantiles)).sqrt()
    four = 2.0 * ((torch.arccos(root) / 3.0).cos() / root - 1.0).clamp_min(0.0).sqrt()
    found: Tensor = torch.sign(quantiles - 0.5) * four * math.sqrt((_FREEDOM - 2.0) / 4.0)
    return found
