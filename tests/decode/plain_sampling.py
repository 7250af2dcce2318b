"""A draw spelled out for the logits of one token, the reference for draws of many; and a draw for one token alone."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.filters import Filters, draw
from inference_engine.kernels.gumbel_noise import key
from inference_engine.kernels.sampler import Sampler
from inference_engine.types import Sampling
from tests.kernels.plain_noise import plain_noise


def seen(history: list[int], vocab_size: int) -> NDArray[np.bool_]:
    """Which ids are in the history."""
    table = np.zeros(vocab_size, dtype=np.bool_)
    table[history] = True
    return table


def next_token(sampler: Sampler, logits: Tensor, position: int) -> int:
    """The token for `position` from raw `logits` [V]."""
    adjusted = sampler.adjusted(logits[None], [])
    if sampler.sampling.is_greedy:
        return int(adjusted[0].argmax())
    return int(draw(adjusted, [sampler.sampling], [key(sampler.seed, position)])[0])


def left(logits: Tensor, samplings: list[Sampling]) -> Tensor:
    """What the filters of each row leave of `logits` [n, V], ÷ temperature."""
    return Filters.of(samplings, logits.shape[-1], logits.device).left(logits)


def plainly(logits: Tensor, sampling: Sampling, noise_key: int) -> int:
    """The token from `logits` [V] with the noise of `noise_key`: each step of the documented order in its own words."""
    scaled = logits.double().numpy() / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-scaled, kind="stable")
    ranked = weights[order]
    left = np.ones(len(ranked), dtype=bool)
    if sampling.top_k:
        left[sampling.top_k :] = False
    if sampling.top_p < 1.0:
        mass = np.where(left, ranked, 0.0)
        left &= np.concatenate([[0.0], mass.cumsum()[:-1]]) < sampling.top_p * mass.sum()
    left &= ranked >= sampling.min_p * ranked[0]
    ids = np.sort(order[left])
    scores = scaled[ids] + plain_noise(noise_key, len(scaled))[ids]
    return int(ids[scores.argmax()])


def penalised(logits: Tensor, sampling: Sampling, history: list[int]) -> Tensor:
    """Raw `logits` [V] after the repetition penalty, of all ids of `history`, and the bias."""
    changed = logits.clone()
    for token in set(history):
        factor = torch.tensor(sampling.repetition_penalty, dtype=torch.float32)
        changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
    for token, bias in sampling.logit_bias.items():
        changed[token] += bias
    return changed


def filtered_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution [V] tokens are drawn from, in float64; zero where top_k, top_p or min_p cut.

    Ties go to the lower id. Temperature must not be 0.
    """
    return left(logits[None], [sampling])[0].softmax(dim=0)
