"""Small corpora and drafters of TinyModel, for tests."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kv_cache_proposer.dflash.drafter_config import DFlashConfig
from kv_cache_proposer.dflash.network import DFlashNetwork
from laboratory.training.corpus_store import Text
from laboratory.training.drafter_init import config_for, new_network
from tests.tiny import tiny_model

MASK = 127


def tiny_config(*, windows: tuple[int, ...] = (), causal: tuple[bool, ...] = (), **changes: int) -> DFlashConfig:
    shape = {"layers": 2, "taps": 2, "block_size": 4, "mask_token_id": MASK, "context_window": 24, **changes}
    return replace(config_for(_target(), **shape), windows=windows, causal=causal)


@cache
def _target() -> PreTrainedModel:
    """Of which the configuration alone is read: the module makes networks while it is collected."""
    return tiny_model()


def tiny_network(*, seed: int = 0, **changes: Any) -> DFlashNetwork:
    return new_network(tiny_config(**changes), seed=seed).eval().requires_grad_(False)


def chained_network(**changes: int) -> DFlashNetwork:
    """As if it had learnt what follows what: its chain says as much as its layers."""
    network = tiny_network(**{"chain": 8, **changes})
    assert network.chain is not None
    generator = torch.Generator().manual_seed(5)
    weight = network.chain.out_proj.weight
    weight.copy_(torch.randn(weight.shape, generator=generator))
    return network


@lru_cache(maxsize=2)
def greedy_texts(count: int = 6, length: int = 45) -> tuple[Text, ...]:
    """What TinyModel says greedily after eight ids; the last one is held out."""
    ids = torch.randint(0, MASK, (count, 8), generator=torch.Generator().manual_seed(2))
    model = tiny_model()
    with torch.no_grad():
        while ids.shape[1] < length:
            ids = torch.cat([ids, model(ids).logits[:, -1:, :MASK].argmax(-1)], dim=1)
    answers = np.arange(length) >= 8
    return tuple(
        Text(one.numpy().astype(np.uint32), answers, "code" if place % 2 else "chat", place >= count - 2)
        for place, one in enumerate(ids)
    )
