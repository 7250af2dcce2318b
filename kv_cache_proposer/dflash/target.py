"""What a drafter shares with its target: the embedding and the output head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from kv_cache_proposer.drafter_errors import DrafterError


@dataclass(frozen=True, slots=True)
class TargetWords:
    """embeddings: [V, hidden], as the weights are, without the model's own scale. head: [..., hidden] → [..., V].

    head_weight: the head as a matrix [V, hidden]; None where its layout allows products only.
    shortlist: [..., hidden] → ascending ids [..., C], that include the likeliest; None: all ids are scored.
    """

    embeddings: Tensor
    head: Callable[[Tensor], Tensor]
    head_weight: Tensor | None
    shortlist: Callable[[Tensor], Tensor] | None = None

    def embed(self, token_ids: Tensor, scale: float) -> Tensor:
        """[...] → [..., hidden]."""
        found = F.embedding(token_ids, self.embeddings)
        return found if scale == 1.0 else found * scale

    def scores(self, states: Tensor, token_ids: Tensor) -> Tensor:
        """The head's scores of some tokens: states [..., S, hidden], token_ids [..., K] → [..., S, K]."""
        if self.head_weight is None:
            return self.head(states).gather(-1, token_ids[..., None, :].expand(*states.shape[:-1], -1))
        return states @ F.embedding(token_ids, self.head_weight).transpose(-1, -2)

    def choices(self, states: Tensor) -> Choices:
        """The candidate ids of each place, states [..., hidden], and their scores."""
        if self.shortlist is None:
            return Choices(self.head(states), None)
        ids = self.shortlist(states)
        return Choices(self.scores(states[..., None, :], ids)[..., 0, :], ids)


@dataclass(frozen=True, slots=True)
class Choices:
    """scores: [..., C], the head's own, of token_ids [..., C], or of all ids where that is None."""

    scores: Tensor
    token_ids: Tensor | None

    def named(self, places: Tensor) -> Tensor:
        """The ids at `places` [..., K] among the choices."""
        return places if self.token_ids is None else self.token_ids.gather(-1, places)

    def best(self) -> Tensor:
        """The likeliest id [...] of each place; ties go to the first."""
        return self.named(self.scores.argmax(-1, keepdim=True))[..., 0]


def words_of(model: PreTrainedModel) -> TargetWords:
    """Raises DrafterError for a model that has no output layer of its own."""
    head = model.get_output_embeddings()
    if head is None:
        raise DrafterError(f"{type(model).__name__} has no output head to draft with")
    embeddings = model.get_input_embeddings().weight.detach()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) and getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        weight = embeddings
    is_plain = isinstance(weight, Tensor) and getattr(head, "bias", None) is None
    return TargetWords(embeddings, head, weight.detach() if is_plain and isinstance(weight, Tensor) else None)


def words_in(embeddings: Tensor, head: Tensor | None) -> TargetWords:
    """Of a target that does not run on torch: its matrices, [V, hidden]. Raises DrafterError for one without a head."""
    if head is None:
        raise DrafterError("the target's output head is no matrix alone, which a drafter could share")
    return TargetWords(embeddings, partial(F.linear, weight=head), head)


def embedding_scale_of(model: PreTrainedModel) -> float:
    """What the model's embedding module multiplies its weights by: √hidden for Gemma, 1 for most."""
    return float(getattr(model.get_input_embeddings(), "embed_scale", 1.0))
