"""Fits f_theta: a model, token ids and the layers that a drafter reads in, a code of its taps out.

As the latent's calibration (`latent.py`), of the same text and importances; the numbers are those that taps foretell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference_engine.models.seam import parents_of, tapped
from kv_cache_proposer.drafter_errors import DrafterError
from kv_cache_proposer.f_theta.codec_errors import LatentError
from kv_cache_proposer.f_theta.importance import Importances, unweighted
from kv_cache_proposer.f_theta.tap_codec import RIDGE, DrafterLatent, TapAnalysis, fit_to_taps, normed
from kv_cache_proposer.f_theta.tap_statistics import TapStatistics
from laboratory.training.capture import LayerStates, attention_modules, recording
from laboratory.training.divergence import Restore
from laboratory.training.drafter_taps import read_taps
from laboratory.training.latent import Advance, shape_of


def capture_taps(
    model: PreTrainedModel, batches: Iterable[Tensor], *, tap_layers: Sequence[int], layers: Sequence[int]
) -> Iterator[tuple[Tensor, list[LayerStates]]]:
    """As `capture`, beside the states of each batch its taps [N, taps, hidden]. tap_layers: ascending."""
    attentions = attention_modules(model)
    if missing := [layer for layer in tap_layers if layer not in attentions]:
        raise DrafterError(f"{type(model).__name__} has {len(attentions)} layers; layers {missing} cannot be tapped")
    blocks = parents_of(model, [attentions[layer] for layer in tap_layers])
    with recording(model, layers=layers) as take:
        for tokens in batches:
            with torch.no_grad(), tapped(blocks) as states:
                model.base_model(input_ids=tokens.to(model.device), use_cache=False)
            yield torch.stack(list(states), dim=2).flatten(0, 1), take()


def calibrate_taps(
    model: PreTrainedModel,
    batches: Iterable[Tensor],
    *,
    tap_layers: Sequence[int],
    layers: Sequence[int],
    bytes_per_token: int,
    group_layers: int = 15,
    importances: Importances | None = None,
    precision: str = "float16",
    kernels: str = "auto",
    shrinkage: float = 0.1,
    ridge: float = RIDGE,
    advance: Advance | None = None,
) -> DrafterLatent:
    """f_theta of a drafter that reads `tap_layers`, on the model's device. The other arguments are those of
    `fit_to_taps` and of `calibrate`; importances: None counts all errors alike.
    """
    statistics: TapStatistics | None = None
    for taps, states in capture_taps(model, batches, tap_layers=tap_layers, layers=layers):
        if statistics is None:
            shapes = [shape_of(one) for one in states]
            statistics = TapStatistics(shapes, group_layers=group_layers, device=taps.device)
        statistics.add(normed(taps), [one.keys for one in states], [one.values for one in states])
        if advance is not None:
            advance(len(taps))
    if statistics is None:
        raise LatentError("there is no calibration text; give at least one batch of token ids")
    if importances is None:
        importances = unweighted(statistics.shapes)
    return fit_to_taps(
        statistics,
        importances,
        tap_layers=tap_layers,
        bytes_per_token=bytes_per_token,
        shrinkage=shrinkage,
        ridge=ridge,
        precision=precision,
        kernels=kernels,
    )


def from_taps(model: PreTrainedModel, codec: DrafterLatent, *, of: Tensor | None = None) -> Restore:
    """Entries as f_theta restores them from the text's own taps, or from those of another text: a control.

    of: token ids [T] of that text, at least as many as are restored.
    """

    def restore(tokens: Tensor, _states: Sequence[LayerStates]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        read = tokens if of is None else of[: len(tokens)].to(tokens)
        taps, _ = read_taps(model, read[None], codec.tap_layers)
        return codec.decode(codec.encode_taps(taps[0]))

    return restore


def with_random_map(codec: DrafterLatent, seed: int = 0) -> DrafterLatent:
    """A control: f_theta's analysis replaced by random numbers of the same size, column by column."""
    generator = torch.Generator().manual_seed(seed)
    matrices = []
    for matrix in codec.analysis.matrices:
        drawn = torch.randn(matrix.shape, generator=generator).to(matrix)
        matrices.append(drawn * (matrix.norm(dim=0) / drawn.norm(dim=0)))
    analysis = TapAnalysis(tap_layers=codec.tap_layers, mean=codec.analysis.mean, matrices=tuple(matrices))
    return DrafterLatent(analysis=analysis, latent=codec.latent)
