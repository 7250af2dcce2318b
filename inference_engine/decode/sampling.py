"""Draws a token from each of many rows of logits.

Order: repetition penalty (whole history), bias, temperature, top_k, top_p, min_p; log-probabilities are of the raw
logits. The draw inverts the cumulative distribution, in order of token id, at a uniform number that is a function of
(seed, position) alone (Philox, Salmon et al., SC'11), so neither the way a history was built nor drafting can change
it.

Rows are drawn together, whatever their samplings: a few operations for all of them. What one gives depends on itself
alone, bit for bit, so each operation here treats a row the same, whatever rows are beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from inference_engine.types import Sampling

# Of one float64 array over the vocabulary, for as many rows as fit, and at least one. Where top_k or top_p need an
# order, half a dozen such arrays are there at once. A GPU wants few operations: 85 rows of 49,152 ids, 16 of 262,144.
# On a CPU larger arrays are slower: the system takes their memory back, and clears it, at every operation.
MAX_ARRAY_BYTES = 32 << 20
MAX_ARRAY_BYTES_ON_CPU = 3 << 20

# Philox4x64-10: the multipliers, and what is added to the key's two halves after each of the ten rounds.
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_WORD = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """In [0, 1), with 53 random bits: numpy's `Generator(Philox(key=seed, counter=position)).random()`, sooner made."""
    # A numpy generator counts up before it draws.
    a, b, c, d = position + 1, 0, 0, 0
    key, other_key = seed, 0
    for _ in range(_ROUNDS):
        low, high = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (high >> 64) ^ b ^ key, high & _WORD, (low >> 64) ^ d ^ other_key, low & _WORD
        key, other_key = key + _KEY_STEPS[0] & _WORD, other_key + _KEY_STEPS[1] & _WORD
    return (a >> 11) * 2.0**-53


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
    def is_plain(self) -> bool:
        """Raw logits are drawn from as they are."""
        return self.seen is None and self.bias is None

    def adjusted(self, logits: Tensor, guesses: Sequence[int]) -> Tensor:
        """Raw float32 `logits` [n, V] with penalty and bias. Row r comes after the first r of the `guesses` [n - 1].

        Guesses are tokens that have not been observed.
        """
        sampling = self.sampling
        if self.seen is not None:
            seen = self.seen
            if guesses:
                seen = seen.expand(len(logits), -1).clone()
                after = [(row, guess) for row in range(len(logits)) for guess in guesses[:row]]
                rows, ids = on_device(np.array(after, dtype=np.int64).T, logits.device)
                seen[rows, ids] = True
            penalised = torch.where(
                logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty
            )
            logits = torch.where(seen, penalised, logits)
        return logits if self.bias is None else logits + self.bias

    def observe(self, token_id: int) -> None:
        """Remember a committed token."""
        if self.seen is not None:
            self.seen[token_id] = True


def draw(logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> Tensor:
    """A token [n] from each row of `logits` [n, V], which have penalties and bias already. No synchronisation.

    No sampling may be greedy. Rows are drawn together as long as those beside them need an order of the vocabulary as
    they do, or do not, so let those that do stand side by side.
    """
    rows, vocab = logits.shape
    tokens: list[Tensor] = []
    first = 0
    for _, alike in itertools.groupby(samplings, lambda sampling: is_ranked(sampling, vocab)):
        count = len(list(alike))
        parts = _parts(first, first + count, logits)
        tokens.extend(_drawn(logits[part], samplings[part], uniforms[part]) for part in parts)
        first += count
    assert first == rows == len(uniforms), (first, rows, len(uniforms))
    return _joined(tokens)


def is_ranked(sampling: Sampling, vocab: int) -> bool:
    """Does it need the vocabulary in order of probability?"""
    return 0 < sampling.top_k < vocab or sampling.top_p < 1.0


def filtered_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution [V] tokens are drawn from, in float64; zero where top_k, top_p or min_p cut. Not renormalised.

    Ties go to the lower id. Temperature must not be 0.
    """
    return _filtered(logits[None], [sampling])[0]


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Natural log-probabilities [n] of `tokens` [n] under raw float32 `logits` [n, V]."""
    # Not logits - logsumexp: how that adds up depends on the number of rows.
    parts = [
        _aligned(logits[part]).log_softmax(dim=-1).gather(1, tokens[part, None])[:, 0]
        for part in _parts(0, len(logits), logits)
    ]
    return _joined(parts)


def on_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """The numbers as a tensor there. The host goes on at once; a copy from ordinary memory to a GPU is waited for."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _drawn(logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> Tensor:
    vocab = logits.shape[-1]
    cumulative = _running_sums_(_filtered(_aligned(logits), samplings))
    targets = cumulative[:, -1:] * on_device(np.array(uniforms)[:, None], logits.device)
    # The first id whose cumulative probability exceeds the target; ids that were filtered out add nothing.
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp_max(vocab - 1)


def _filtered(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """`filtered_probabilities` of rows [n, V]. A filter that a row has not is one that cuts nothing from it."""
    vocab = logits.shape[-1]
    has_top_p = any(sampling.top_p < 1.0 for sampling in samplings)
    options = [
        (
            sampling.temperature,
            sampling.top_k if 0 < sampling.top_k < vocab else vocab,
            sampling.top_p if sampling.top_p < 1.0 else np.inf,
            sampling.min_p,
        )
        for sampling in samplings
    ]
    temperature, top_k, top_p, min_p = on_device(np.array(options, dtype=np.float64).T[:, :, None], logits.device)
    probabilities: Tensor = logits.to(torch.float64, copy=True).div_(temperature).softmax(dim=-1)
    if any(is_ranked(sampling, vocab) for sampling in samplings):
        ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
        ranked.masked_fill_(torch.arange(vocab, dtype=torch.float64, device=logits.device) >= top_k, 0.0)
        if has_top_p:
            # A token stays if those before it fall short of top_p of the mass that top_k left.
            sums = _running_sums_(ranked.clone())
            totals = _totals(ranked, sums)
            ranked.masked_fill_(sums.sub_(ranked) >= top_p * totals, 0.0)
        probabilities.scatter_(-1, order, ranked)
    if any(sampling.min_p > 0.0 for sampling in samplings):
        probabilities.masked_fill_(probabilities < min_p * probabilities.amax(dim=-1, keepdim=True), 0.0)
    return probabilities


def _parts(first: int, last: int, logits: Tensor) -> Iterator[slice]:
    """Rows first … last - 1, as many at a time as the limit of an array allows."""
    vocab = logits.shape[-1]
    if logits.is_cuda:
        # Up to V / 512 rows torch gives each of them 512 threads to add it up with, and so one order to add in.
        count = max(min(MAX_ARRAY_BYTES // (8 * vocab), vocab // 512), 2)
    else:
        count = max(MAX_ARRAY_BYTES_ON_CPU // (8 * vocab), 1)
    for start in range(first, last, count):
        yield slice(start, min(start + count, last))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _aligned(logits: Tensor) -> Tensor:
    """The rows [n, V]; on a GPU with impossible ids added until each row begins at a multiple of 16 bytes.

    There softmax adds in an order that depends on where in such a multiple a row begins.
    """
    missing = -logits.shape[-1] % 4 if logits.is_cuda else 0
    return functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def _running_sums_(rows: Tensor) -> Tensor:
    """Of each row; `rows` may be written over."""
    if rows.is_cuda and len(rows) == 1:
        # On a GPU torch gives a lone row to cub, which adds in another order, and not always in the same.
        return rows.repeat(2, 1).cumsum_(dim=-1)[:1]
    return rows.cumsum_(dim=-1)


def _totals(rows: Tensor, running_sums: Tensor) -> Tensor:
    """The sum of each row, [n, 1]."""
    if rows.is_cuda:
        # There the order of a sum, unlike that of running sums, changes with the number of rows.
        return running_sums[:, -1:].clone()
    # On a CPU a lone row would be added up by all threads, each a part of it; of several rows each is added by one.
    several = rows if len(rows) > 1 else rows.expand(2, -1)
    return several.sum(dim=-1, keepdim=True)[: len(rows)]
