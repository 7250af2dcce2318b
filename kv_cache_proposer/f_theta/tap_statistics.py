"""Statistics of a drafter's taps and the model's entries over a text: sums, never the tokens.

Covariances of normed taps, and of these with the entries of each group of layers. Products are formed in float32 around
the first batch's mean, so that they do not cancel, and summed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kv_cache_proposer.f_theta.codec_errors import LatentError
from kv_cache_proposer.f_theta.group_layout import Group, LayerShape, join, make_groups


class TapStatistics:
    """Running sums, for the layers `shapes` in groups of `group_layers`."""

    def __init__(self, shapes: Sequence[LayerShape], *, group_layers: int, device: torch.device | str = "cpu") -> None:
        self.groups: tuple[Group, ...] = make_groups(shapes, group_layers)
        self.tokens = 0
        self._device = torch.device(device)
        self._shifts: list[Tensor] = []  # of taps, then of each group: float32, near the mean
        self._sums: list[Tensor] = []
        self._products: list[Tensor] = []  # of taps with taps, then with each group: [X, X], [X, W] …

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        return tuple(shape for group in self.groups for shape in group.shapes)

    def add(self, normed_taps: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """normed_taps [n, X] float32 (`tap_codec.normed`); per covered layer, unrotated, keys and values [n, Hkv, D].

        All finite.
        """
        vectors, first = [normed_taps.to(self._device)], 0
        for group in self.groups:
            own = slice(first, first + len(group.shapes))
            first = own.stop
            vectors.append(join(group, keys[own], values[own]).to(self._device))
        if not self._shifts:
            self._shifts = [one.mean(0) for one in vectors]
            self._sums = [torch.zeros_like(shift, dtype=torch.float64) for shift in self._shifts]
            size = vectors[0].shape[1]
            self._products = [
                torch.zeros((size, one.shape[1]), dtype=torch.float64, device=self._device) for one in vectors
            ]
        vectors = [one - shift for one, shift in zip(vectors, self._shifts, strict=True)]
        for index, one in enumerate(vectors):
            self._sums[index] += one.sum(0)
            self._products[index] += vectors[0].T @ one
        self.tokens += len(normed_taps)

    def tap_mean(self) -> Tensor:
        """[X] float64."""
        return self._mean(0)

    def tap_covariance(self) -> Tensor:
        """[X, X] float64."""
        return self._covariance(0)

    def mean(self, group: int) -> Tensor:
        """[W] float64."""
        return self._mean(group + 1)

    def crossed(self, group: int) -> Tensor:
        """Covariance of normed taps with the group's vectors, [X, W] float64."""
        return self._covariance(group + 1)

    def _mean(self, index: int) -> Tensor:
        if not self.tokens:
            raise LatentError("no token was counted yet; add taps and entries of a calibration text first")
        return self._shifts[index].double() + self._sums[index] / self.tokens

    def _covariance(self, index: int) -> Tensor:
        if not self.tokens:
            raise LatentError("no token was counted yet; add taps and entries of a calibration text first")
        return self._products[index] / self.tokens - torch.outer(
            self._sums[0] / self.tokens, self._sums[index] / self.tokens
        )
