"""What one Generate's sampling does to its logits before filters and noise, and what it must remember for that.

Order: repetition penalty (whole history), presence and frequency penalty (this Generate), bias, ids that may not be
drawn, mask of a constraint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.cpu_sampling import MOST
from inference_engine.kernels.transfer import ids_of_bits, on_device
from inference_engine.types import Sampling, TokenSet

Mask = NDArray[np.uint8]  # [ceil(V / 8)]: a bit for each id, the lowest first, set if it may be drawn


class Masks(Protocol):
    """What a constraint allows for the next tokens of one Generate."""

    def along(self, drafted: Sequence[int]) -> Sequence[Mask | None]:
        """For the token after the first r of `drafted`, for each r. None: whatever is drawn there is not used."""

    def allow(self, drafted: Sequence[int], token_ids: Sequence[int]) -> bool:
        """May `token_ids` [r] be drawn after the first r of `drafted`, each? Instead of `along`: if so, they are."""


@dataclass(slots=True)
class Sampler:
    """One Generate's sampling, with what it must remember of the history on the device.

    looks_back: a draw depends on the tokens before it, not on their logits alone.
    """

    sampling: Sampling
    seed: int
    seen: Tensor | None = None  # [V] bool: ids in the history, kept only under a repetition penalty
    # Only under a presence or frequency penalty: how often the Generate has given each id, and [V], what that costs it.
    counts: Counter[int] | None = None
    penalties: Tensor | None = None
    bias: Tensor | None = None  # [V]; -inf of what may not be drawn
    few: NDArray[np.int64] | None = None  # what may be drawn, ascending, where that is not many
    ends: Tensor | None = None  # ids that may not be drawn before the position `ends_from`
    ends_from: int = 0
    masks: Masks | None = None
    looks_back: bool = field(init=False)

    def __post_init__(self) -> None:
        self.looks_back = self.sampling.reads_history or self.sampling.counts_tokens

    @staticmethod
    def start(
        sampling: Sampling,
        seed: int,
        seen: NDArray[np.bool_] | None,
        vocab_size: int,
        device: torch.device,
        *,
        generated: Sequence[int] = (),
        ends: Sequence[int] = (),
        ends_from: int = 0,
    ) -> Sampler:
        """seen: bool [vocab_size], which ids are in the history, if the sampling reads it. It is not kept.
        generated: the tokens that the Generate has already. ends: ids not to be drawn before the position `ends_from`.
        """
        sampler = Sampler(sampling, seed)
        if sampling.reads_history:
            assert seen is not None
            sampler.seen = torch.tensor(seen, device=device)
        if sampling.counts_tokens:
            sampler.counts = Counter(generated)
            costs = np.zeros(vocab_size, dtype=np.float32)
            for token_id, count in sampler.counts.items():
                costs[token_id] = sampler.cost_of(count)
            sampler.penalties = on_device(costs, device).clone()
        if sampling.logit_bias:
            sampler.bias = torch.zeros(vocab_size, device=device)
            ids = torch.tensor(list(sampling.logit_bias), device=device)
            sampler.bias[ids] = torch.tensor(list(sampling.logit_bias.values()), device=device)
        if (permitted := permitted_by(sampling, vocab_size)) is not None:
            refused = on_device(np.where(permitted, np.float32(0.0), np.float32(-np.inf)), device)
            sampler.bias = refused.clone() if sampler.bias is None else sampler.bias + refused
            sampler.few = permitted.nonzero()[0] if np.count_nonzero(permitted) <= MOST else None
        if ends:
            sampler.ends, sampler.ends_from = on_device(np.array(sorted(ends)), device), ends_from
        return sampler

    @property
    def is_plain(self) -> bool:
        """Raw logits are drawn from as they are."""
        return self.is_unweighted and self.masks is None

    @property
    def is_unweighted(self) -> bool:
        """Neither a penalty, a bias nor an id that may not be drawn changes the logits."""
        return not self.looks_back and self.bias is None and self.ends is None

    def takes(self, drafted: Sequence[int], token_ids: Sequence[int]) -> bool:
        """Are these, the ids of the largest raw logits, what is drawn?"""
        is_raw = self.sampling.is_greedy and self.is_unweighted
        return is_raw and (self.masks is None or self.masks.allow(drafted, token_ids))

    def adjusted(self, logits: Tensor, draft_tokens: Sequence[int], position: int = 0) -> Tensor:
        """Raw float32 `logits` [n, V] with penalties, bias and mask.

        Row r follows the first r of `draft_tokens` [n - 1], which have not been observed. position: of the first row's
        token.
        """
        logits = self.weighted(logits, draft_tokens, position)
        return logits if self.masks is None else masked(logits, self.masks.along(draft_tokens))

    def weighted(self, logits: Tensor, draft_tokens: Sequence[int], position: int = 0) -> Tensor:
        """As `adjusted`, without the mask."""
        sampling = self.sampling
        if self.seen is not None:
            seen = self.seen
            if draft_tokens:
                seen = seen.expand(len(logits), -1).clone()
                after = [(index, draft_token) for index in range(len(logits)) for draft_token in draft_tokens[:index]]
                places, ids = on_device(np.array(after, dtype=np.int64).T, logits.device)
                seen[places, ids] = True
            penalised = torch.where(
                logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty
            )
            logits = torch.where(seen, penalised, logits)
        if self.penalties is not None:
            logits = logits - self._penalties_along(draft_tokens)
        if self.bias is not None:
            logits = logits + self.bias
        if self.ends is not None and (early := min(self.ends_from - position, len(logits))) > 0:
            logits = logits.clone()
            logits[:early].index_fill_(1, self.ends, -torch.inf)
        return logits

    def cost_of(self, count: int) -> float:
        """What the logit of an id loses that was given so often."""
        sampling = self.sampling
        return sampling.frequency_penalty * count + sampling.presence_penalty if count else 0.0

    def _penalties_along(self, draft_tokens: Sequence[int]) -> Tensor:
        """[V], or [n, V]: in row r after the first r of `draft_tokens` [n - 1]."""
        assert self.penalties is not None and self.counts is not None
        if not draft_tokens:
            return self.penalties
        rows = len(draft_tokens) + 1
        counts, costs = Counter[int](), dict[tuple[int, int], float]()  # by row and id
        for place, token_id in enumerate(draft_tokens, start=1):
            counts[token_id] += 1
            cost = self.cost_of(self.counts[token_id] + counts[token_id])
            costs |= {(row, token_id): cost for row in range(place, rows)}
        penalties = self.penalties.expand(rows, -1).clone()
        places, ids = on_device(np.array(list(costs), dtype=np.int64).T, penalties.device)
        penalties[places, ids] = on_device(np.array(list(costs.values()), dtype=np.float32), penalties.device)
        return penalties

    def observe(self, token_id: int) -> None:
        """Remember a committed token."""
        if self.seen is not None:
            self.seen[token_id] = True
        if self.counts is not None and self.penalties is not None:
            self.counts[token_id] += 1
            self.penalties[token_id] = self.cost_of(self.counts[token_id])


def permitted_by(sampling: Sampling, vocab: int) -> NDArray[np.bool_] | None:
    """Which ids [V] may be drawn by the sampling's own sets; None: all."""
    if sampling.allowed_token_ids is None and sampling.banned_token_ids is None:
        return None
    allowed, banned = sampling.allowed_token_ids, sampling.banned_token_ids
    permitted = np.ones(vocab, dtype=np.bool_) if allowed is None else _members(allowed, vocab)
    return permitted if banned is None else permitted & ~_members(banned, vocab)


def _members(token_ids: TokenSet, vocab: int) -> NDArray[np.bool_]:
    """[V]; ids beyond the vocabulary are left out."""
    firsts, behind = token_ids.ranges.clip(max=vocab).T
    edges = np.zeros(vocab + 1, dtype=np.bool_)
    edges[firsts] = True  # ranges are apart, so no edge is another's
    edges[behind] = True
    return np.logical_xor.accumulate(edges[:vocab])


def bits_of(mask: Mask, vocab: int) -> NDArray[np.bool_]:
    """Which ids [V] a mask allows."""
    return np.unpackbits(mask, count=vocab, bitorder="little").view(np.bool_)


def masked(logits: Tensor, masks: Sequence[Mask | None]) -> Tensor:
    """`logits` [n, V] of what each row's mask allows, and -inf of all others. Masks travel to the device together."""
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return logits
    packed = on_device(np.stack([mask for mask in masks if mask is not None]), logits.device)
    bits = ids_of_bits(packed, logits.shape[-1])
    if len(rows) == len(logits):
        return torch.where(bits, logits, -torch.inf)
    at = on_device(np.array(rows, dtype=np.int64), logits.device)
    return logits.index_copy(0, at, torch.where(bits, logits.index_select(0, at), -torch.inf))
