"""Draws one token from one row of logits.

Order: repetition penalty (whole history), bias, temperature, top_k, top_p, min_p; log-probabilities are of the raw
logits. The draw inverts the cumulative distribution, in order of token id, at a uniform number that is a function of
(seed, position) alone (Philox, Salmon et al., SC'11), so neither the way a history was built nor drafting can change
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference_engine.types import Sampling


def uniform(seed: int, position: int) -> float:
    """In [0, 1), with 53 random bits."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=[position, 0, 0, 0])).random())


@dataclass(slots=True)
class Sampler:
    """One Generate's sampling, with what it must remember of the history on the device."""

    sampling: Sampling
    seed: int
    seen: Tensor | None = None  # [V] bool: ids in the history, kept only under a repetition penalty
    bias: Tensor | None = None  # [V]

    @staticmethod
    def start(sampling: Sampling, seed: int, history: np.ndarray, vocab_size: int, device: torch.device) -> Sampler:
        """history: all token ids so far, appended and generated."""
        sampler = Sampler(sampling, seed)
        if sampling.repetition_penalty != 1.0:
            sampler.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            sampler.seen[torch.from_numpy(history.astype(np.int64)).to(device)] = True
        if sampling.logit_bias:
            sampler.bias = torch.zeros(vocab_size, device=device)
            ids = torch.tensor(list(sampling.logit_bias), device=device)
            sampler.bias[ids] = torch.tensor(list(sampling.logit_bias.values()), device=device)
        return sampler

    @property
    def is_plain_greedy(self) -> bool:
        """The token is the largest raw logit: rows of many such requests can be taken at once."""
        return self.sampling.is_greedy and self.seen is None and self.bias is None

    def draw(self, logits: Tensor, position: int, drafted: Sequence[int] = ()) -> Tensor:
        """The token for `position` from raw float32 `logits` [V], as a scalar tensor: no synchronisation.

        drafted: tokens before `position` that have not been observed.
        """
        sampling = self.sampling
        if self.seen is not None:
            seen = self.seen
            if drafted:
                seen = seen.clone()
                seen[torch.tensor(drafted, device=seen.device)] = True
            penalised = torch.where(
                logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty
            )
            logits = torch.where(seen, penalised, logits)
        if self.bias is not None:
            logits = logits + self.bias
        if sampling.is_greedy:
            return logits.argmax()
        probabilities = filtered_probabilities(logits, sampling)
        cumulative = probabilities.cumsum(0)
        target = cumulative[-1] * uniform(self.seed, position)
        # The first id whose cumulative probability exceeds the target; ids that were filtered out add nothing.
        return torch.searchsorted(cumulative, target, right=True).clamp_max(len(cumulative) - 1)

    def observe(self, token_id: int) -> None:
        """Remember a committed token."""
        if self.seen is not None:
            self.seen[token_id] = True


def filtered_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution [V] tokens are drawn from, in float64; zero where top_k, top_p or min_p cut. Not renormalised.

    Ties go to the lower id. Temperature must not be 0.
    """
    scaled = logits.double() / sampling.temperature
    probabilities = scaled.softmax(0)
    if 0 < sampling.top_k < len(logits) or sampling.top_p < 1.0:
        ranked, order = probabilities.sort(descending=True, stable=True)
        if 0 < sampling.top_k < len(logits):
            ranked[sampling.top_k :] = 0.0
        if sampling.top_p < 1.0:
            # A token stays if those before it fall short of top_p of the mass that top_k left.
            before = ranked.cumsum(0) - ranked
            ranked[before >= sampling.top_p * ranked.sum()] = 0.0
        probabilities = torch.zeros_like(probabilities).scatter(0, order, ranked)
    if sampling.min_p > 0.0:
        probabilities[probabilities < sampling.min_p * probabilities.max()] = 0.0
    return probabilities


def logprob(logits: Tensor, token: Tensor) -> Tensor:
    """Natural log-probability of `token` under raw `logits` [V], a scalar tensor."""
    return logits.index_select(0, token.reshape(1))[0] - logits.logsumexp(0)
