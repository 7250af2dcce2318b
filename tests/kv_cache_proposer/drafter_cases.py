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
from kv_cache_proposer.eagle3.eagle3_network import Eagle3Config, Eagle3Network
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


def tiny_eagle3(*, seed: int = 0, **changes: Any) -> Eagle3Network:
    """Of TinyModel's sizes, with weights large enough that drafts are far apart; it drafts every second id."""
    shape: dict[str, Any] = {
        "hidden": 64,
        "target_hidden": 64,
        "query_heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "intermediate": 96,
        "vocabulary": 128,
        "draft_vocabulary": 48,
        "tap_layers": (0, 1, 2),
        "longest": 5,
        "context_window": 24,
        "rope_theta": 10_000.0,
        "norm_eps": 1e-6,
        **changes,
    }
    network = Eagle3Network(Eagle3Config(**shape)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for weight in network.parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        weight.copy_(drawn * 0.3 if weight.ndim == 2 else 1 + drawn * 0.2)
    network.draft_ids = torch.arange(network.config.draft_vocabulary) * 2 + 9
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
