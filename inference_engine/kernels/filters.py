"""temperature, top_k, top_p and min_p over whole rows of logits, a draw from what they leave, and log-probabilities.

A token depends on its own row of logits alone, bit for bit, so each operation here treats a row the same, whatever rows
are beside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from inference_engine.kernels.gumbel_noise import NoiseOfAll, noise_of_all
from inference_engine.kernels.transfer import on_device
from inference_engine.types import Sampling

# Of one float64 array over the vocabulary, for as many rows of logits as fit, and at least one. Four of that size are
# there at once on a CPU, whatever the sampling; where a GPU sorts, more. A GPU needs few operations: 85 rows of 49,152
# ids, 16 of 262,144. On a CPU, larger arrays are slower: the system takes their memory back, and clears it, at every
# operation.
MAX_ARRAY_BYTES = 32 << 20
MAX_ARRAY_BYTES_ON_CPU = 1 << 20
FEW = 1024  # ids, of a top_k up to which those in front are all that is put in order


def draw(
    logits: Tensor, samplings: Sequence[Sampling], keys: Sequence[int], noise_of_all: NoiseOfAll = noise_of_all
) -> Tensor:
    """A token [n] from each row of `logits` [n, V], which have penalties and bias already. No synchronisation.

    keys: of the noise of each row, as `gumbel_noise.key` makes them. No sampling may be greedy. Neighbours are drawn
    together if `ranks` is the same of them, so put those side by side.
    """
    return draw_with(logits, samplings, on_device(np.array(keys, dtype=np.int64), logits.device), noise_of_all, {})


def draw_with(
    logits: Tensor,
    samplings: Sequence[Sampling],
    keys: Tensor,
    noise_of_all: NoiseOfAll,
    filters: dict[tuple[int, int], Filters],
) -> Tensor:
    """As `draw`. filters: those of neighbouring rows, by the first one and the one behind the last, once made."""
    vocab = logits.shape[-1]
    if not filters:
        first = 0
        for _, alike in itertools.groupby(samplings, lambda sampling: ranks(sampling, vocab)):
            count = len(list(alike))
            for part in _parts(first, first + count, logits):
                filters[part.start, part.stop] = Filters.of(samplings[part], vocab, logits.device)
            first += count
        assert first == len(logits) == len(keys), (first, len(logits), len(keys))
    tokens: list[Tensor] = []
    for (first, last), own in filters.items():
        scores = own.left(logits[first:last])
        scores += noise_of_all(keys[first:last], vocab)
        tokens.append(scores.argmax(dim=-1))
    return joined(tokens)


def logprobs(logits: Tensor, tokens: Tensor, most: int = 0) -> list[Tensor]:
    """Natural log-probabilities [n] of `tokens` [n] under raw float32 `logits` [n, V], and `most` times [n] the ids of
    the likeliest tokens, as float32, and `most` times their log-probabilities; of equals the lower ids, in any order.
    """
    # Not logits - logsumexp: how that adds up depends on the number of rows.
    vocab, found = logits.shape[-1], list[Tensor]()
    assert not most or vocab <= 2**24, "ids are exact as float32"
    for part in _parts(0, len(logits), logits):
        every = _aligned(logits[part]).log_softmax(dim=-1)[:, :vocab]
        of_part = [every.gather(1, tokens[part, None])]
        if most:
            counts = torch.full((len(every), 1), most, device=every.device)
            largest = _largest(every, counts, every.topk(most, dim=-1).values)
            values, ids = every.masked_fill(~largest, -torch.inf).topk(most, dim=-1)
            of_part += [ids.to(torch.float32), values]
        found.append(torch.cat(of_part, dim=-1))
    return list(joined(found).T)


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """The filters of some rows, on the device. A filter that is off cuts nothing.

    temperature, top_k, top_p, min_p: float64 [n, 1] each; of min_p, the logarithm. is_ranked, has_top_p, has_min_p: of
    any row. most_k: the largest top_k, which is the vocabulary where it is off.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    is_ranked: bool
    has_top_p: bool
    has_min_p: bool
    most_k: int

    @staticmethod
    def of(samplings: Sequence[Sampling], vocab: int, device: torch.device) -> Filters:
        options = [
            (
                sampling.temperature,
                sampling.top_k if 0 < sampling.top_k < vocab else vocab,
                sampling.top_p if sampling.top_p < 1.0 else math.inf,
                math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf,
            )
            for sampling in samplings
        ]
        temperature, top_k, top_p, min_p = on_device(np.array(options).T[:, :, None], device)
        return Filters(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            is_ranked=any(is_ranked(sampling, vocab) for sampling in samplings),
            has_top_p=any(sampling.top_p < 1.0 for sampling in samplings),
            has_min_p=any(sampling.min_p > 0.0 for sampling in samplings),
            most_k=int(max(each[1] for each in options)),
        )

    def left(self, logits: Tensor) -> Tensor:
        """`logits` [n, V] ÷ temperature, float64, and -inf where a filter cuts."""
        left = logits.to(torch.float64, copy=True).div_(self.temperature)
        if self.is_ranked:
            counts = self.top_k.long()
            if self.has_top_p:
                # Always as many: how they are added up depends on their number.
                few = min(FEW, logits.shape[-1])
                ranked = logits.topk(few, dim=-1).values if self.most_k <= few else _ranked(logits)
                counts = _nucleus(ranked, self.temperature, counts, self.top_p)
            else:
                ranked = logits.topk(self.most_k, dim=-1).values
            left.masked_fill_(~_largest(logits, counts, ranked), -torch.inf)
        if self.has_min_p:
            left.masked_fill_(left < left.amax(dim=-1, keepdim=True) + self.min_p, -torch.inf)
        return left


def is_ranked(sampling: Sampling, vocab: int) -> bool:
    """Does it need the vocabulary in order of probability?"""
    return 0 < sampling.top_k < vocab or sampling.top_p < 1.0


def ranks(sampling: Sampling, vocab: int) -> int:
    """Of how many ids in order of probability it needs to know: none, `FEW`, or all. Rows are drawn beside others of
    the same need: sums of more have other bits."""
    if not is_ranked(sampling, vocab):
        return 0
    return FEW if 0 < sampling.top_k <= min(FEW, vocab) else vocab


def _ranked(logits: Tensor) -> Tensor:
    """Each row of `logits` [n, V], sorted from its largest number down."""
    if logits.is_cuda:
        return logits.sort(dim=-1, descending=True).values
    # torch sorts the ids along, which are not needed here: that takes three times as long.
    return torch.from_numpy(-np.sort(-logits.numpy(), axis=-1))


def _nucleus(ranked: Tensor, temperature: Tensor, counts: Tensor, top_p: Tensor) -> Tensor:
    """How many [n, 1] of the first `counts` of each row top_p leaves: the fewest whose sum reaches it."""
    weights = ranked.double().sub_(ranked[:, :1]).div_(temperature).exp_()
    weights.masked_fill_(torch.arange(ranked.shape[-1], device=ranked.device) >= counts, 0.0)
    sums = _running_sums_(weights)
    short = (sums < top_p * sums[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(short + 1, counts)


def _largest(logits: Tensor, counts: Tensor, ranked: Tensor) -> Tensor:
    """Whether each number [n, V] is one of the `counts` [n, 1] largest of its row; of equals the lower ids are.

    ranked: the largest numbers of each row, sorted, as many as needed.
    """
    last = ranked.gather(1, counts - 1)
    above, equal = logits > last, logits == last
    room = counts - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= room))


def _parts(first: int, last: int, logits: Tensor) -> Iterator[slice]:
    """Slices of the rows first … last - 1, each as long as the limit of an array allows."""
    vocab = logits.shape[-1]
    if logits.is_cuda:
        # Up to V / 512 rows, torch adds up each row with 512 threads, and so in one order.
        count = max(min(MAX_ARRAY_BYTES // (8 * vocab), vocab // 512), 2)
    else:
        count = max(MAX_ARRAY_BYTES_ON_CPU // (8 * vocab), 1)
    for start in range(first, last, count):
        yield slice(start, min(start + count, last))


def joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _aligned(logits: Tensor) -> Tensor:
    """`logits` [n, V]; on a GPU, padded with -inf until each row begins at a multiple of 16 bytes.

    On a GPU the order in which softmax adds depends on where in such a multiple a row begins.
    """
    missing = -logits.shape[-1] % 4 if logits.is_cuda else 0
    return functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def _running_sums_(numbers: Tensor) -> Tensor:
    """Running sums of each row of `numbers`, which may be written over."""
    if numbers.is_cuda and len(numbers) == 1:
        # On a GPU, torch gives a single row to cub, which adds in another order, and not always in the same.
        return numbers.repeat(2, 1).cumsum_(dim=-1)[:1]
    return numbers.cumsum_(dim=-1)
