"""A group's basis: token vectors → weighted deviations from the mean → coefficients, and back.

    vector [W]  −  mean  →  · weights (per layer, K or V, and head)  →  · components [W, C]  →  coefficients [C]

Weights are square roots of importances (`importance.py`), so that plain squared error in the weighted space is the
error the model feels. The components are the leading eigenvectors of the weighted covariance: orthonormal, so that they
analyse as well as synthesise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kv_cache_proposer.f_theta.components import Components
from kv_cache_proposer.f_theta.group_layout import Group
from kv_cache_proposer.f_theta.leading import leading

# Components whose variance is below this share of the largest count as constant.
_RANK_FLOOR = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Basis:
    """mean [W]; weights and inverses per layer [2 (K, V), Hkv, D, D]; components [W, C]; deviations [C]. float32.

    deviations: standard deviation of each coefficient over the calibration text, in descending order.
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
        """Token vectors [n, W], float32, to coefficients [n, C]."""
        return self.weigh(vectors - self.mean) @ self.components.whole()

    def weigh(self, differences: Tensor) -> Tensor:
        """Differences of token vectors [n, W] in the space where squared length is the error in attention, [n, W]."""
        return _through_vectors(differences, self.group, self.weights)

    def synthesise(self, coefficients: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """K and V [n, Hkv, D] of the group's layer number `index`. The other layers' components are not read."""
        shape = self.group.shapes[index]
        first = sum(2 * before.kv_heads for before in self.group.shapes[:index])
        return self.unweigh(coefficients @ self.components.heads(first, first + 2 * shape.kv_heads).T, index)

    def synthesise_all(self, coefficients: Tensor) -> list[tuple[Tensor, Tensor]]:
        """As `synthesise`, for each of the group's layers, in a few operations whatever their number."""
        weighted = coefficients @ self.components.whole().T
        vectors = _through_vectors(weighted, self.group, self.inverses) + self.mean
        parts = torch.split(vectors, [shape.width for shape in self.group.shapes], dim=1)
        heads = [
            part.view(-1, 2, shape.kv_heads, shape.head_dim)
            for part, shape in zip(parts, self.group.shapes, strict=True)
        ]
        return [(part[:, 0], part[:, 1]) for part in heads]

    def unweigh(self, weighted: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """K and V [n, Hkv, D] of the group's layer number `index` from its weighted deviations [n, its width]."""
        shape, start = self.group.shapes[index], self.group.offsets[index]
        vectors = _through(weighted, self.inverses[index]) + self.mean[start : start + shape.width]
        vectors = vectors.view(-1, 2, shape.kv_heads, shape.head_dim)
        return vectors[:, 0], vectors[:, 1]

    def means_of(self, index: int) -> Tensor:
        """[Hkv, 2 · D] of the group's layer number `index`: K and V of each head."""
        shape, start = self.group.shapes[index], self.group.offsets[index]
        means = self.mean[start : start + shape.width].view(2, shape.kv_heads, shape.head_dim)
        return means.transpose(0, 1).reshape(shape.kv_heads, -1)

    def matrix_of(self, index: int) -> Tensor:
        """[Hkv, 2 · D, C]: `synthesise` as one product a head, of coefficients ÷ deviations, with the means to add."""
        shape = self.group.shapes[index]
        first = sum(2 * before.kv_heads for before in self.group.shapes[:index])
        heads = self.components.heads(first, first + 2 * shape.kv_heads) * self.deviations
        heads = heads.view(2, shape.kv_heads, shape.head_dim, -1)
        return (self.inverses[index].mT @ heads).transpose(0, 1).flatten(1, 2).contiguous()

    def analysis_of(self, index: int) -> Tensor:
        """[Hkv, 2 · D, C]: this layer's part of `analyse` as one product, of differences from the mean.

        It makes coefficients ÷ deviations.
        """
        shape = self.group.shapes[index]
        first = sum(2 * before.kv_heads for before in self.group.shapes[:index])
        heads = self.components.heads(first, first + 2 * shape.kv_heads) / self.deviations
        heads = heads.view(2, shape.kv_heads, shape.head_dim, -1)
        return (self.weights[index] @ heads).transpose(0, 1).flatten(1, 2).contiguous()

    def truncated(self, count: int) -> Basis:
        """The first `count` components."""
        return replace(
            self,
            components=self.components.truncated(count),
            deviations=self.deviations[:count],
        )

    def at_precision(self, precision: str) -> Basis:
        return replace(
            self,
            components=self.components.at_precision(precision),
        )

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
    space = WeightedSpace(group, importances)
    eigenvalues, eigenvectors = torch.linalg.eigh(space.covariance(covariance))
    return space.basis(mean, eigenvectors.flip(1), eigenvalues.flip(0))


def fit_leading(
    group: Group, mean: Tensor, covariance: Tensor, importances: Sequence[Tensor], count: int
) -> Basis | None:
    """As `fit_basis`, at most the leading `count` components, and nearly those. None where there are not so many."""
    space = WeightedSpace(group, importances)
    found = leading(space.covariance(covariance), [shape.width for shape in group.shapes], count)
    return None if found is None else space.basis(mean, found[1], found[0])


class WeightedSpace:
    """A group's vectors, weighted so that squared error is the error of the model's output."""

    def __init__(self, group: Group, importances: Sequence[Tensor]) -> None:
        self.group = group
        roots = [_roots(importance) for importance in importances]
        self._weights = [root for root, _ in roots]
        self._inverses = [inverse for _, inverse in roots]

    def weigh(self, vectors: Tensor) -> Tensor:
        """[n, W] of vectors, or of what is linear in them, to the same of weighted ones."""
        return _through_vectors(vectors, self.group, self._weights)

    def covariance(self, covariance: Tensor) -> Tensor:
        """Covariance [W, W] of weighted vectors, from that of the vectors."""
        half = _through_vectors(covariance, self.group, self._weights).T.contiguous()
        weighted = _through_vectors(half, self.group, self._weights)
        weighted = torch.add(weighted, weighted.T, out=half)
        weighted /= 2
        return weighted

    def basis(self, mean: Tensor, components: Tensor, variances: Tensor) -> Basis:
        """From components [W, C] in this space and the variances [C] of their coefficients, in descending order."""
        # What is left of exact zeros after rounding is not worth a bit.
        kept = torch.where(variances > variances[0] * _RANK_FLOOR, variances, 0.0)
        return Basis(
            group=self.group,
            mean=mean.float(),
            weights=tuple(block.float() for block in self._weights),
            inverses=tuple(block.float() for block in self._inverses),
            components=Components(entries=components.float().contiguous(), head_sizes=self.group.head_sizes),
            deviations=kept.sqrt().float(),
        )


def _roots(importance: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric square roots of matrices [..., D, D], and their inverses."""
    eigenvalues, vectors = torch.linalg.eigh(importance)
    roots = eigenvalues.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
    transposed = vectors.transpose(-2, -1)
    return (vectors * roots[..., None, :]) @ transposed, (vectors / roots[..., None, :]) @ transposed


def _through_vectors(matrix: Tensor, group: Group, blocks: Sequence[Tensor]) -> Tensor:
    if len({shape.head_dim for shape in group.shapes}) == 1:
        return _through(matrix, torch.cat([block.flatten(0, 1) for block in blocks]))
    parts = torch.split(matrix, [shape.width for shape in group.shapes], dim=1)
    return torch.cat([_through(part, block) for part, block in zip(parts, blocks, strict=True)], dim=1)


def _through(part: Tensor, block: Tensor) -> Tensor:
    """Each head's vectors through its own matrix: part [n, heads · D], block [..., D, D], as many in all as heads."""
    matrices = block.reshape(-1, *block.shape[-2:])
    heads = part.reshape(len(part), len(matrices), block.shape[-1])
    return torch.einsum("nhd,hde->nhe", heads, matrices).flatten(1)
