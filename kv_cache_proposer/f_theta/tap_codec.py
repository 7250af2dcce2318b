"""A code of a drafter's taps, and linear f_theta: what a token's taps say of K and V of all layers, in few bytes.

    taps [taps, hidden] ── each divided by its root mean square ── x − mean ── · analysis [X, C] ── coded ── packed bits
                                                                                     ┊ what a latent has from here on
    K and V of a layer  ──  means + inverse weights · components [W, C] · coefficients

Reduced-rank ridge regression: of all maps through C numbers the one whose K and V are nearest, errors weighed by
importance. The C numbers are principal components of what taps foretell of the entries (`fit_to_taps`), so a code is
packed, stored and decoded as the latent codec's is. Each layer's input is a hidden state divided by its root mean
square: of layers behind a tap layer, K and V are a linear function of it.
Source: Izenman, Reduced-rank regression for the multivariate linear model, Journal of Multivariate Analysis 5, 1975.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_engine.kernels.trellis import Trellis
from inference_engine.kv.context import LayerDecoder
from kv_cache_proposer.f_theta.basis import WeightedSpace
from kv_cache_proposer.f_theta.codec import LatentCodec, code, coded
from kv_cache_proposer.f_theta.codec_errors import LatentError
from kv_cache_proposer.f_theta.importance import Importances, regularised
from kv_cache_proposer.f_theta.tap_statistics import TapStatistics

# Of the variance of each number that taps give: how much is added to it before they are inverted. On 14,336 tokens and
# SmolLM2 0.134 · 0.129 · 0.126 · 0.130 of text held out is lost at 1e-3 · 1e-2 · 3e-2 · 1e-1; on 32,768 0.116 · 0.115 ·
# 0.115 · 0.122.
RIDGE = 1e-2
# Directions whose share of the largest variance is smaller are rounding.
_LEAST = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TapAnalysis:
    """How taps become a code's numbers. tap_layers: those of the drafter.

    mean [X] float32, X = taps · hidden; matrices, by group: [X, C] float32, for coefficients ÷ deviations.
    """

    tap_layers: tuple[int, ...]
    mean: Tensor
    matrices: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return self.mean.nbytes + sum(matrix.nbytes for matrix in self.matrices)

    def numbers(self, taps: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Of each group the first `counts`: [n, taps, hidden] → [n, C]."""
        vectors = normed(taps) - self.mean
        return [vectors @ matrix[:, :count] for matrix, count in zip(self.matrices, counts, strict=True)]

    def to(self, device: torch.device | str) -> TapAnalysis:
        return replace(self, mean=self.mean.to(device), matrices=tuple(matrix.to(device) for matrix in self.matrices))


def normed(taps: Tensor) -> Tensor:
    """[n, taps, hidden] → [n, X] float32, each tap divided by its root mean square."""
    return F.rms_norm(taps.float(), taps.shape[-1:]).flatten(1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrafterLatent:
    """Implements TapCodec. latent: what codes become. digest: of its file; "" before it has one."""

    analysis: TapAnalysis
    latent: LatentCodec
    digest: str = ""
    _lower: dict[int, DrafterLatent] = field(init=False, repr=False, default_factory=dict)  # by bytes per token

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.analysis.tap_layers

    @property
    def layers(self) -> tuple[int, ...]:
        return self.latent.layers

    @property
    def bytes_per_token(self) -> int:
        return self.latent.bytes_per_token

    @property
    def least_bytes_per_token(self) -> int:
        return self.latent.least_bytes_per_token

    @property
    def shared_bytes(self) -> int:
        """Bytes that are held once, however many sessions there are."""
        return self.latent.shared_bytes + self.analysis.nbytes

    def to(self, device: torch.device | str, kernels: str | None = None) -> DrafterLatent:
        """As `LatentCodec.to`."""
        return replace(self, analysis=self.analysis.to(device), latent=self.latent.to(device, kernels))

    def using(self, trellis: Trellis) -> DrafterLatent:
        return replace(self, latent=self.latent.using(trellis))

    def has(self, bytes_per_token: int) -> bool:
        return bytes_per_token in self._lower

    def at(self, bytes_per_token: int) -> DrafterLatent:
        """Raises LatentError as `LatentCodec.at` does."""
        if bytes_per_token not in self._lower:
            self._lower[bytes_per_token] = replace(self, latent=self.latent.at(bytes_per_token))
        return self._lower[bytes_per_token]

    def encode_taps(self, taps: Tensor) -> Tensor:
        """The code of a token whose taps are not finite is undefined."""
        counts = [part.basis.components.count for part in self.latent.coders]
        return self.latent.encode_numbers(self.analysis.numbers(taps, counts))

    def decode(self, codes: Tensor, layers: Sequence[int] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        return self.latent.decode(codes, layers)

    def decoder(self, layer: int) -> LayerDecoder:
        return self.latent.decoder(layer)


def fit_to_taps(
    statistics: TapStatistics,
    importances: Importances,
    *,
    tap_layers: Sequence[int],
    bytes_per_token: int,
    shrinkage: float = 0.1,
    ridge: float = RIDGE,
    precision: str = "float16",
    kernels: str = "auto",
) -> DrafterLatent:
    """On the statistics' device, for `bytes_per_token` and, through `at`, for any fewer.

    The arguments are those of `fit`. ridge: of each variance of normed taps. Raises LatentError for importances
    that are missing.
    """
    if missing := [shape.layer for shape in statistics.shapes if shape.layer not in importances]:
        raise LatentError(f"layers {missing} are in the statistics but have no importances")
    taps = statistics.tap_covariance()
    device = taps.device
    weighed = regularised(
        {shape.layer: importances[shape.layer].double().to(device) for shape in statistics.shapes}, shrinkage
    )
    taps.diagonal().mul_(1 + ridge)
    root = torch.linalg.cholesky(taps)
    bases, matrices = [], []
    for index, group in enumerate(statistics.groups):
        space = WeightedSpace(group, [weighed[shape.layer] for shape in group.shapes])
        crossed = space.weigh(statistics.crossed(index))  # [X, W]
        foretold = torch.linalg.solve_triangular(root, crossed, upper=False)
        variances, turn = torch.linalg.eigh(foretold @ foretold.T)
        variances, turn = variances.flip(0), turn.flip(1)
        count = int((variances > _LEAST * variances[0]).sum())
        variances, turn = variances[:count], turn[:, :count]
        components = foretold.T @ (turn / variances.sqrt())
        bases.append(space.basis(statistics.mean(index), components, variances))
        matrices.append(torch.linalg.solve_triangular(root.T, turn, upper=True).float())  # ÷ deviations
    codec = code(bases, bytes_per_token, kernels=kernels)
    widths = [part.packing.widths for part in codec.coders]
    latent = coded([part.basis.at_precision(precision) for part in codec.coders], widths, kernels)
    own = [matrix[:, : len(width)].contiguous() for matrix, width in zip(matrices, widths, strict=True)]
    analysis = TapAnalysis(tap_layers=tuple(tap_layers), mean=statistics.tap_mean().float(), matrices=tuple(own))
    return DrafterLatent(analysis=analysis, latent=latent)
