"""The frozen target, run over texts for what a drafter is given and what it should have said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kv_cache_proposer.errors import DrafterError
from laboratory.training.capture import attention_modules


def read_taps(model: PreTrainedModel, tokens: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """tokens [N, T] → outputs of `layers` [N, T, taps, hidden], and the last hidden states, as the head takes them.

    No mask: what stands behind a text's end is seen by nothing before it.
    """
    with torch.no_grad(), _tapped(model, layers) as taps:
        last: Tensor = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return torch.stack([taps[layer] for layer in layers], dim=2), last


@contextmanager
def _tapped(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    attentions = attention_modules(model)
    if missing := [layer for layer in layers if layer not in attentions]:
        raise DrafterError(f"{type(model).__name__} has {len(attentions)} layers; layers {missing} cannot be tapped")
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    taps: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
            taps[layer] = output if isinstance(output, Tensor) else output[0]

        return hook

    handles = [parents[attentions[layer]].register_forward_hook(keep(layer)) for layer in layers]
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()
