"""A group's basis: rows → weighted deviations from the mean → coefficients, and back.

    vector [W]  −  mean  →  · weights (per layer, K or V, and head)  →  · components [W, C]  →  coefficients [C]

Weights are square roots of importances (`importance.py`), so that plain squared error in the weighted space is the
error the model feels. The components are the leading eigenvectors of the weighted covariance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kv_cache_proposer.f_theta.components import Components
from kv_cache_proposer.f_theta.rows import Group

# Components whose variance is below this share of the largest count as constant.
_RANK_FLOOR = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Basis:
    """mean [W]; weights and inverses per layer [2 (K, V), Hkv, D, D]; components [W, C]; deviations [C]. float32.

    deviations: standard deviation of each coefficient over the calibration text, never rising.
    """

    group: Group
    mean: Tensor
    weights: tuple[Tensor, ...]
    inverses: tuple[Tensor, ...]
    components: Components
    deviations: Tensor

    @property
    def nbytes(self) -> int:
        plain = (self.mean, *self.weights, *self.inverses, self.deviations)
        return self.components.nbytes + sum(tensor.nbytes for tensor in plain)

    def analyse(self, vectors: Tensor) -> Tensor:
        """Joined rows [n, W], float32, to coefficients [n, C]."""
        return self.weigh(vectors - self.mean) @ self.components.whole()

    def weigh(self, differences: Tensor) -> Tensor:
        """Differences of joined rows [n, W] in the space where squared length is what attention feels, [n, W]."""
        return _through_rows(differences, self.group, self.weights)

    def synthesise(self, coefficients: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """K and V [n, Hkv, D] of the group's layer number `index`. The other layers' components are not touched."""
        shape, start = self.group.shapes[index], self.group.offsets[index]
        first = sum(2 * before.kv_heads for before in self.group.shapes[:index])
        weighted = coefficients @ self.components.heads(first, first + 2 * shape.kv_heads).T
        rows = _through(weighted, self.inverses[index]) + self.mean[start : start + shape.width]
        rows = rows.view(-1, 2, shape.kv_heads, shape.head_dim)
        return rows[:, 0], rows[:, 1]

    def truncated(self, count: int) -> Basis:
        """The first `count` components."""
        return replace(self, components=self.components.truncated(count), deviations=self.deviations[:count])

    def at_precision(self, precision: str) -> Basis:
        return replace(self, components=self.components.at_precision(precision))

    def to(self, device: torch.device | str) -> Basis:
        return replace(
            self,
            mean=self.mean.to(device),
            weights=tuple(block.to(device) for block in self.weights),
            inverses=tuple(block.to(device) for block in self.inverses),
            components=self.components.to(device),
            deviations=self.deviations.to(device),
        )


def fit_basis(group: Group, mean: Tensor, covariance: Tensor, importances: Sequence[Tensor]) -> Basis:
    """All W components of a group. mean [W], covariance [W, W], importances per layer [2, Hkv, D, D]; all float64.

    Importances must be positive definite, and in one unit for all groups whose components will share bits.
    """
    roots = [_roots(importance) for importance in importances]
    weights = [root for root, _ in roots]
    inverses = [inverse for _, inverse in roots]
    half = _through_rows(covariance, group, weights)
    weighted = _through_rows(half.T.contiguous(), group, weights)
    eigenvalues, eigenvectors = torch.linalg.eigh((weighted + weighted.T) / 2)
    variances = eigenvalues.flip(0)
    # What is left of exact zeros after rounding is not worth a bit.
    variances = torch.where(variances > variances[0] * _RANK_FLOOR, variances, 0.0)
    return Basis(
        group=group,
        mean=mean.float(),
        weights=tuple(block.float() for block in weights),
        inverses=tuple(block.float() for block in inverses),
        components=Components(entries=eigenvectors.flip(1).float().contiguous(), head_sizes=group.head_sizes),
        deviations=variances.sqrt().float(),
    )


def _roots(importance: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric square roots of matrices [..., D, D], and their inverses."""
    eigenvalues, vectors = torch.linalg.eigh(importance)
    roots = eigenvalues.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
    transposed = vectors.transpose(-2, -1)
    return (vectors * roots[..., None, :]) @ transposed, (vectors / roots[..., None, :]) @ transposed


def _through_rows(matrix: Tensor, group: Group, blocks: Sequence[Tensor]) -> Tensor:
    parts = torch.split(matrix, [shape.width for shape in group.shapes], dim=1)
    return torch.cat([_through(part, block) for part, block in zip(parts, blocks, strict=True)], dim=1)


def _through(part: Tensor, block: Tensor) -> Tensor:
    """Each head's vectors through its own matrix: part [n, width of a layer], block [2, Hkv, D, D]."""
    matrices = block.flatten(0, 1)
    heads = part.reshape(len(part), len(matrices), block.shape[-1])
    return torch.einsum("nhd,hde->nhe", heads, matrices).flatten(1)
