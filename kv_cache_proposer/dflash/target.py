"""What a drafter shares with its target: how tokens become vectors, and vectors scores of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from kv_cache_proposer.errors import DrafterError


@dataclass(frozen=True, slots=True)
class TargetWords:
    """embeddings: [V, hidden], as the weights are, without the model's own scale. head: [..., hidden] → [..., V]."""

    embeddings: Tensor
    head: Callable[[Tensor], Tensor]

    def embed(self, token_ids: Tensor, scale: float) -> Tensor:
        """[...] → [..., hidden]."""
        found = F.embedding(token_ids, self.embeddings)
        return found if scale == 1.0 else found * scale


def words_of(model: PreTrainedModel) -> TargetWords:
    """Raises DrafterError for a model that has no output layer of its own."""
    head = model.get_output_embeddings()
    if head is None:
        raise DrafterError(f"{type(model).__name__} has no output head to draft with")
    return TargetWords(model.get_input_embeddings().weight.detach(), head)


def embedding_scale_of(model: PreTrainedModel) -> float:
    """What the model's embedding module multiplies its weights by: √hidden for Gemma, 1 for most."""
    return float(getattr(model.get_input_embeddings(), "embed_scale", 1.0))
