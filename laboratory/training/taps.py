"""KV entries restored from hidden states of a few layers, as a drafter reads them: measured beside the latent, not
served.

    taps [n, taps · hidden], each scaled to length 1 a number → ridge → K and V of all layers → coded as the latent is

Coding the entries that the taps predict, and not the taps themselves, favours them most: bits go where an error changes
attention, and no bits go to the rest of the taps. `predict_entries` alone is the limit of any code of these taps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kv_cache_proposer.f_theta.codec import LatentCodec
from kv_cache_proposer.f_theta.codec_errors import LatentError
from kv_cache_proposer.f_theta.fit import fit
from kv_cache_proposer.f_theta.group_layout import LayerShape
from kv_cache_proposer.f_theta.importance import Importances
from kv_cache_proposer.f_theta.statistics import Statistics
from laboratory.training.capture import LayerStates, capture
from laboratory.training.divergence import Restore
from laboratory.training.drafter_taps import read_taps

# Of the mean variance of the taps: what is added to each before it is divided by.
_RIDGE = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class TapMap:
    """Taps to KV entries.

    weights [taps · hidden + 1, W], the last vector a constant; widths of each layer's K and V in W.
    """

    tap_layers: tuple[int, ...]
    shapes: tuple[LayerShape, ...]
    weights: Tensor

    def predict_entries(self, model: PreTrainedModel, tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """K and V of every covered layer [n, Hkv, D] of token ids [sequences, T]."""
        predicted = _read(model, tokens, self.tap_layers) @ self.weights
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for shape, part in zip(self.shapes, torch.split(predicted, [s.width for s in self.shapes], dim=1), strict=True):
            own = part.view(-1, 2, shape.kv_heads, shape.head_dim)
            keys.append(own[:, 0])
            values.append(own[:, 1])
        return keys, values

    def uncoded(self, model: PreTrainedModel) -> Restore:
        return lambda tokens, _states: self.predict_entries(model, tokens[None])

    def through(self, model: PreTrainedModel, codec: LatentCodec) -> Restore:
        return lambda tokens, _states: codec.decode(codec.encode(*self.predict_entries(model, tokens[None])))


def fit_taps(
    model: PreTrainedModel, batches: Iterable[Tensor], *, tap_layers: Sequence[int], layers: Sequence[int]
) -> TapMap:
    """Ridge regression of the KV entries of `layers` on the outputs of `tap_layers`, over token ids [sequences, T]."""
    squares: Tensor | None = None
    products: Tensor | None = None
    shapes: tuple[LayerShape, ...] = ()
    for tokens, states in _with_states(model, batches, layers):
        taps = _read(model, tokens, tap_layers)
        vectors = torch.cat([part.float().flatten(1) for one in states for part in (one.keys, one.values)], dim=1)
        if squares is None or products is None:
            squares = taps.new_zeros((taps.shape[1], taps.shape[1]), dtype=torch.float64)
            products = taps.new_zeros((taps.shape[1], vectors.shape[1]), dtype=torch.float64)
            shapes = tuple(
                LayerShape(layer=r.layer, kv_heads=r.keys.shape[1], head_dim=r.keys.shape[2]) for r in states
            )
        squares += taps.T @ taps
        products += taps.T @ vectors
    if squares is None or products is None:
        raise LatentError("there is no calibration text; give at least one batch of token ids")
    ridge = _RIDGE * squares.diagonal().mean() * torch.eye(len(squares), dtype=torch.float64, device=squares.device)
    return TapMap(tuple(tap_layers), shapes, torch.linalg.solve(squares + ridge, products).float())


def fit_tap_codec(
    model: PreTrainedModel,
    batches: Iterable[Tensor],
    taps: TapMap,
    importances: Importances,
    *,
    bytes_per_token: int,
    group_layers: int = 15,
) -> LatentCodec:
    """The codec of the entries that the taps predict."""
    statistics = Statistics(taps.shapes, group_layers=group_layers, device=model.device)
    for tokens in batches:
        keys, values = taps.predict_entries(model, tokens)
        statistics.add(keys, values)
    return fit(statistics, importances, bytes_per_token=bytes_per_token)


def _with_states(
    model: PreTrainedModel, batches: Iterable[Tensor], layers: Sequence[int]
) -> Iterator[tuple[Tensor, list[LayerStates]]]:
    for tokens in batches:
        (states,) = capture(model, [tokens], layers=layers)
        yield tokens, states


def _read(model: PreTrainedModel, tokens: Tensor, layers: Sequence[int]) -> Tensor:
    """float32 [n, taps · hidden + 1], the last of them 1."""
    taps, _ = read_taps(model, tokens.to(model.device), layers)
    scaled = taps.float() * taps.float().square().mean(-1, keepdim=True).clamp_min(1e-12).rsqrt()
    flat = scaled.flatten(0, 1).flatten(1)
    return torch.cat((flat, torch.ones_like(flat[:, :1])), dim=1)
