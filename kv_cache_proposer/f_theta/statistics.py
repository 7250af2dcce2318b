"""Statistics that calibration keeps of a text: sums over its tokens, never the tokens or their KV entries.

Per group of layers the mean and covariance of the token vectors; per layer and KV head E[q qᵀ] of the queries that read
it. Products are formed in float32 around the first batch's mean, so that they do not cancel, and summed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kv_cache_proposer.f_theta.codec_errors import LatentError
from kv_cache_proposer.f_theta.group_layout import Group, LayerShape, join, make_groups

# Of the rows of a product with itself, summed one by one: what lies left of them is not, for it is the same again.
_BLOCKS = 12


class Statistics:
    """Running sums for the layers `shapes`, with a basis to come for each `group_layers` of them."""

    def __init__(self, shapes: Sequence[LayerShape], *, group_layers: int, device: torch.device | str = "cpu") -> None:
        self.groups: tuple[Group, ...] = make_groups(shapes, group_layers)
        self.tokens = 0
        self._query_tokens = 0
        self._device = torch.device(device)
        self._shifts: list[Tensor] = []  # [W] per group: float32, near the mean
        self._sums = [self._zeros(group.width) for group in self.groups]
        self._products = [self._zeros(group.width, group.width) for group in self.groups]
        self._queries = {
            shape.layer: self._zeros(shape.kv_heads, shape.head_dim, shape.head_dim) for shape in self.shapes
        }

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        return tuple(shape for group in self.groups for shape in group.shapes)

    def add(self, keys: Sequence[Tensor], values: Sequence[Tensor], queries: Sequence[Tensor] | None = None) -> None:
        """Per covered layer, unrotated: keys and values [n, Hkv, D], queries [n, Hq, D]. All finite.

        queries: with each call, or with none, where `query_moment` is not asked for.
        """
        first = 0
        joined: list[Tensor] = []
        for group in self.groups:
            last = first + len(group.shapes)
            joined.append(join(group, keys[first:last], values[first:last]).to(self._device))
            first = last
        if not self._shifts:
            self._shifts = [vectors.mean(0) for vectors in joined]
        for index, vectors in enumerate(joined):
            vectors.sub_(self._shifts[index])
            self._sums[index] += vectors.sum(0)
            _add_products(self._products[index], vectors)
        self.tokens += len(joined[0])
        if queries is not None:
            self._add_queries(queries)
            self._query_tokens += len(joined[0])

    def _add_queries(self, queries: Sequence[Tensor]) -> None:
        for shape, vectors in zip(self.shapes, queries, strict=True):
            # Query heads of one group are neighbours: [n, Hq, D] → [Hkv, n · group, D].
            grouped = vectors.to(self._device).float().reshape(len(vectors), shape.kv_heads, -1, shape.head_dim)
            per_head = grouped.transpose(0, 1).flatten(1, 2)
            self._queries[shape.layer] += per_head.transpose(1, 2) @ per_head

    def mean(self, group: int) -> Tensor:
        """[W] float64."""
        self._check()
        return self._shifts[group].double() + self._sums[group] / self.tokens

    def covariance(self, group: int) -> Tensor:
        """[W, W] float64."""
        self._check()
        offset = self._sums[group] / self.tokens
        found = self._products[group].triu()  # changed in place: a group may be wide
        found += found.triu(1).T
        found /= self.tokens
        found -= torch.outer(offset, offset)
        return found

    def query_moment(self, layer: int) -> Tensor:
        """Σ over the group's query heads of E[q qᵀ], [Hkv, D, D] float64."""
        self._check()
        if self._query_tokens != self.tokens:
            raise LatentError(f"queries were given for {self._query_tokens} of {self.tokens} tokens; give all of them")
        return self._queries[layer] / self.tokens

    def _check(self) -> None:
        if not self.tokens:
            raise LatentError("no token was counted yet; add entries of a calibration text first")

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._device)


def _add_products(sums: Tensor, vectors: Tensor) -> None:
    """Adds vectorsᵀ vectors to sums [W, W], on and above the diagonal, with little more than half of the
    multiplications. What is below means nothing."""
    size = max(1, -(-len(sums) // _BLOCKS))
    for start in range(0, len(sums), size):
        own = slice(start, start + size)
        sums[own, start:] += vectors[:, own].T @ vectors[:, start:]
