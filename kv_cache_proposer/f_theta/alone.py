"""Each number coded by itself, as the nearest of as many levels as it has codes: the control for the trellis.

Up to 6 bits the levels are the best there are for a Gaussian variable (Max, IRE Trans. Inf. Theory 6(1), 1960), found
by Lloyd's iteration; beyond, they are those of the trellis at half the density.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from inference_engine.kernels.trellis import Levels, Trellis, pack, scale
from kv_cache_proposer.f_theta.levels import GAUSSIAN_BITS, MAX_BITS, spread

_ROUNDS = 300  # from levels that are good already
_FURTHEST, _POINTS = 12.0, 1 << 18  # of the integral of the error


@lru_cache(maxsize=2 * MAX_BITS)
def levels(bits: int, has_tails: bool = False) -> Tensor:
    """2**bits levels, ascending, float32 on the CPU."""
    has_tails |= bits > GAUSSIAN_BITS
    found = spread(2**bits, has_tails)
    for _ in range(0 if has_tails else _ROUNDS):
        found = _means(found)
    return found.float()


@lru_cache(maxsize=MAX_BITS + 1)
def distortion(bits: int) -> float:
    """Mean squared error of a Gaussian variable of variance 1."""
    if not bits:
        return 1.0
    points = torch.linspace(-_FURTHEST, _FURTHEST, _POINTS, dtype=torch.float64)
    weights = torch.exp(-points.square() / 2)
    table = levels(bits).double()
    missed = points - table[torch.bucketize(points, _edges(table))]
    return float((weights * missed.square()).sum() / weights.sum())


def choose(numbers: Tensor, levels: Levels) -> Tensor:
    """See `kernels.trellis.Choose`."""
    parts = []
    for first, behind, start, stop in levels.runs:
        edges = _edges(levels.values[start:stop])
        parts.append(torch.bucketize(numbers[:, first:behind].contiguous(), edges, out_int32=True))
    return torch.cat(parts, dim=1)


def levels_of(codes: Tensor, levels: Levels) -> Tensor:
    """See `kernels.trellis.LevelsOf`."""
    return levels.values[levels.first + codes]


ALONE = Trellis(choose, levels_of, scale, pack)


def _edges(table: Tensor) -> Tensor:
    return (table[1:] + table[:-1]) / 2


def _means(table: Tensor) -> Tensor:
    """The mean of a Gaussian variable in each cell between levels."""
    infinite = table.new_tensor([math.inf])
    edges = torch.cat((-infinite, _edges(table), infinite))
    density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
    mass = torch.special.ndtr(edges).diff()
    means: Tensor = -density.diff() / mass
    return means
