"""What stands for a drafter's taps where there is only the latent of a token: the linear map that fits best.

    tokens → entries → analysis, coded as a session keeps it → coefficients [n, C] → least squares → taps

A drafter's first matrix is linear in its taps, so this is also the best a first matrix of its own could do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kv_cache_proposer.f_theta.codec import LatentCodec
from kv_cache_proposer.f_theta.codec_errors import LatentError
from kv_cache_proposer.f_theta.group_layout import join
from laboratory.training.capture import LayerStates, capture
from laboratory.training.drafter_taps import read_taps

# Of the mean square of the coefficients: what is added to each before it is divided by.
_RIDGE = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class LatentTaps:
    """weights [C + 1, taps · hidden], the last vector a constant. is_coded: through codes, or exact coefficients."""

    codec: LatentCodec
    is_coded: bool
    weights: Tensor

    def __call__(self, model: PreTrainedModel, tokens: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Implements ReadTaps. Of the taps' model only its width is asked, and its last states."""
        taps, last = read_taps(model, tokens, layers)
        found = _coefficients(model, tokens, self.codec, is_coded=self.is_coded) @ self.weights
        return found.view(taps.shape).to(taps.dtype), last


def fit_latent_taps(
    model: PreTrainedModel, batches: Iterable[Tensor], codec: LatentCodec, *, tap_layers: Sequence[int], is_coded: bool
) -> LatentTaps:
    """Over token ids [N, T], of the model's own words, which is what is drafted."""
    squares: Tensor | None = None
    products: Tensor | None = None
    for tokens in batches:
        given = _coefficients(model, tokens, codec, is_coded=is_coded).double()
        taps = read_taps(model, tokens, tap_layers)[0].flatten(2).flatten(0, 1).double()
        squares = given.T @ given + (0 if squares is None else squares)
        products = given.T @ taps + (0 if products is None else products)
    if squares is None or products is None:
        raise LatentError("there are no texts to fit taps on; give at least one batch of token ids")
    # Each coefficient alike, whatever its size.
    sizes = squares.diagonal().clamp_min(1e-12).rsqrt()
    level = squares * sizes * sizes[:, None]
    level.diagonal().add_(_RIDGE)
    solved = torch.linalg.solve(level, products * sizes[:, None]) * sizes[:, None]
    return LatentTaps(codec, is_coded, solved.float())


def _coefficients(model: PreTrainedModel, tokens: Tensor, codec: LatentCodec, *, is_coded: bool) -> Tensor:
    """float32 [N · T, C + 1], of all groups, the last of them 1."""
    (states,) = capture(model, [tokens], layers=codec.layers)
    found: list[Tensor] = []
    first = 0
    for part in codec.coders:
        own: Sequence[LayerStates] = states[first : first + len(part.basis.group.shapes)]
        first += len(own)
        vectors = join(part.basis.group, [one.keys for one in own], [one.values for one in own])
        units = part.basis.analyse(vectors) / part.basis.deviations
        found.append(part.rounded(units) if is_coded else units)
    return torch.cat([*found, torch.ones_like(found[0][:, :1])], dim=1)
