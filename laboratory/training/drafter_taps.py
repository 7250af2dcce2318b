"""The frozen target, run over texts for what a drafter is given and what it should have said."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference_engine.models.seam import parents_of, tapped
from kv_cache_proposer.drafter_errors import DrafterError
from laboratory.training.capture import attention_modules


def read_taps(model: PreTrainedModel, tokens: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """tokens [N, T] → outputs of `layers` [N, T, taps, hidden], and the last hidden states, as the head takes them.

    No mask: what stands behind a text's end is seen by nothing before it.
    """
    attentions = attention_modules(model)
    if missing := [layer for layer in layers if layer not in attentions]:
        raise DrafterError(f"{type(model).__name__} has {len(attentions)} layers; layers {missing} cannot be tapped")
    in_order = sorted(set(layers))
    blocks = parents_of(model, [attentions[layer] for layer in in_order])
    with torch.no_grad(), tapped(blocks) as states:
        last: Tensor = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    taps = dict(zip(in_order, states, strict=True))
    return torch.stack([taps[layer] for layer in layers], dim=2), last
