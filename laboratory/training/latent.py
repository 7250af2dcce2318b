"""Calibration: a model and token ids in, a latent codec and what it loses out.

One forward over the text, one eigen-decomposition per group of layers. The text decides what the latent resolves: use
text like that of the sessions to come, several languages and formats of it, and measure on other text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kv_cache_proposer.f_theta.codec import LatentCodec
from kv_cache_proposer.f_theta.codec_errors import LatentError
from kv_cache_proposer.f_theta.fit import fit
from kv_cache_proposer.f_theta.group_layout import LayerShape, join
from kv_cache_proposer.f_theta.importance import Importances, from_projections, unweighted
from kv_cache_proposer.f_theta.statistics import Statistics
from laboratory.training.capture import LayerStates, capture, output_projections

Advance = Callable[[int], None]  # called with the tokens done since the last call


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Squared error of restored entries over the squared distance of the entries from their mean, both weighed by
    importance.

    0 is perfect, 1 is what the mean alone would give. by_layer: the same for each layer.
    """

    overall: float
    by_layer: Mapping[int, float]


def collect(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    layers: Sequence[int],
    group_layers: int,
    has_queries: bool = True,
    device: torch.device | str | None = None,
    advance: Advance | None = None,
) -> Statistics:
    """Statistics of the model's KV entries over token ids, each batch [sequences, T].

    layers: those the latent will cover; leave out layers with a window of their own. device: where sums are kept, by
    default the model's. A group of W numbers a token takes 8 W² bytes. has_queries: also those of queries, which
    importances `projections` are made of.
    """
    statistics: Statistics | None = None
    for states in capture(model, batches, layers=layers):
        if statistics is None:
            place = states[0].keys.device if device is None else device
            statistics = Statistics([shape_of(layer) for layer in states], group_layers=group_layers, device=place)
        queries = [one.queries for one in states] if has_queries else None
        statistics.add([one.keys for one in states], [one.values for one in states], queries)
        if advance is not None:
            advance(len(states[0].keys))
    if statistics is None:
        raise LatentError("there is no calibration text; give at least one batch of token ids")
    return statistics


def calibrate(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    layers: Sequence[int],
    bytes_per_token: int,
    group_layers: int = 15,
    importances: Importances | Literal["projections", "none"] = "projections",
    precision: str = "float16",
    kernels: str = "auto",
    shrinkage: float = 0.1,
    is_rough: bool = False,
    advance: Advance | None = None,
) -> LatentCodec:
    """A codec for the model, on the model's device. The arguments are those of `collect` and `fit`.

    importances: from `measure_sensitivity`, which loses a third less; `projections` takes them from the text's queries
    and the model's output projections, and needs no gradient; `none` counts all errors alike.
    """
    statistics = collect(
        model,
        batches,
        layers=layers,
        group_layers=group_layers,
        has_queries=importances == "projections",
        advance=advance,
    )
    if importances == "projections":
        importances = from_projections(statistics, output_projections(model, layers=layers))
    elif importances == "none":
        importances = unweighted(statistics.shapes)
    return fit(
        statistics,
        importances,
        bytes_per_token=bytes_per_token,
        precision=precision,
        kernels=kernels,
        shrinkage=shrinkage,
        is_rough=is_rough,
    )


def measure(model: nn.Module, batches: Iterable[Tensor], codec: LatentCodec) -> Loss:
    """What the codec loses on KV entries of a text; give it text that it was not calibrated on."""
    errors = dict.fromkeys(codec.layers, 0.0)
    energies = dict.fromkeys(codec.layers, 0.0)
    for states in capture(model, batches, layers=codec.layers):
        keys, values = [r.keys for r in states], [r.values for r in states]
        restored_keys, restored_values = codec.decode(codec.encode(keys, values))
        first = 0
        for part in codec.coders:
            own = slice(first, first + len(part.basis.group.shapes))
            first = own.stop
            exact = join(part.basis.group, keys[own], values[own])
            restored = join(part.basis.group, restored_keys[own], restored_values[own])
            lost = part.basis.weigh(exact - restored).double().square().sum(0)
            given = part.basis.weigh(exact - part.basis.mean).double().square().sum(0)
            for shape, start in zip(part.basis.group.shapes, part.basis.group.offsets, strict=True):
                errors[shape.layer] += float(lost[start : start + shape.width].sum())
                energies[shape.layer] += float(given[start : start + shape.width].sum())
    if not any(energies.values()):
        raise LatentError("there is no text to measure on; give at least one batch of token ids")
    return Loss(
        overall=sum(errors.values()) / sum(energies.values()),
        by_layer={layer: errors[layer] / energies[layer] for layer in codec.layers},
    )


def shape_of(states: LayerStates) -> LayerShape:
    return LayerShape(layer=states.layer, kv_heads=states.keys.shape[1], head_dim=states.keys.shape[2])
