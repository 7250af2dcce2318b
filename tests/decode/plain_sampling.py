"""What a draw means, spelled out for one row, to hold the drawing of many against; and a draw of one row by itself."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inference_engine.decode.sampling import Sampler, draw, uniform
from inference_engine.types import Sampling


def next_token(sampler: Sampler, logits: Tensor, position: int) -> int:
    """The token for `position` from raw `logits` [V]."""
    adjusted = sampler.adjusted(logits[None], [])
    if sampler.sampling.is_greedy:
        return int(adjusted[0].argmax())
    return int(draw(adjusted, [sampler.sampling], [uniform(sampler.seed, position)])[0])


def plainly(logits: Tensor, sampling: Sampling, number: float) -> int:
    """The token from `logits` [V] at the uniform `number`: each step of the documented order in its own words."""
    probabilities = (logits.double() / sampling.temperature).softmax(0)
    ranked, order = probabilities.sort(descending=True, stable=True)
    if sampling.top_k:
        ranked[sampling.top_k :] = 0.0
    if sampling.top_p < 1.0:
        before = ranked.cumsum(0) - ranked
        ranked[before >= sampling.top_p * ranked.sum()] = 0.0
    kept = np.zeros(len(logits))
    kept[order.numpy()] = ranked.numpy()
    kept[kept < sampling.min_p * kept.max()] = 0.0
    ends = np.cumsum(kept)
    return int(min(np.searchsorted(ends, ends[-1] * number, side="right"), len(logits) - 1))


def penalised(logits: Tensor, sampling: Sampling, history: list[int]) -> Tensor:
    """Raw `logits` [V] after the repetition penalty, of all ids of `history`, and the bias."""
    changed = logits.clone()
    for token in set(history):
        factor = torch.tensor(sampling.repetition_penalty, dtype=torch.float32)
        changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
    for token, bias in sampling.logit_bias.items():
        changed[token] += bias
    return changed
