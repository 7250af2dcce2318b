"""Entries captured from real model classes are the ones the model attends with, and a codec can be made from them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from inference_engine.errors import NonFiniteEntries
from laboratory.training.capture import capture
from laboratory.training.latent import calibrate, measure
from tests.kv_cache_proposer.small_models import HEADS, gemma3, llama, qwen3, tokens

Make = Callable[[], PreTrainedModel]

# Of a rotation in float32.
ROUNDING = 1e-5


# HEADS tokens: then shapes alone do not say which axis is which.
@pytest.mark.parametrize("make", [llama, qwen3, gemma3])
@pytest.mark.parametrize("length", [HEADS, 4, 11])
def test_entries_before_rotation_have_the_lengths_of_the_models_own_cache(
    make: Callable[[], PreTrainedModel], length: int
) -> None:
    model = make()
    ids = tokens(3, length)
    (entries,) = capture(model, [ids], layers=range(3))
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    for entry in entries:
        keys, values = cache.layers[entry.layer].keys, cache.layers[entry.layer].values
        # A rotation keeps each pair's length; position 0 is not rotated at all.
        own = entry.keys.view(3, length, HEADS, 8).transpose(1, 2)
        torch.testing.assert_close(own[:, :, 0], keys[:, :, 0], atol=ROUNDING, rtol=ROUNDING)
        pairs = [x.unflatten(-1, (2, 4)).square().sum(-2) for x in (own, keys)]
        torch.testing.assert_close(*pairs, atol=ROUNDING, rtol=ROUNDING)
        torch.testing.assert_close(
            entry.values.view(3, length, HEADS, 8).transpose(1, 2), values, atol=ROUNDING, rtol=ROUNDING
        )
        assert entry.queries.shape == (3 * length, 4, 8)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["k", "v"])
def test_a_model_that_overflows_is_refused_by_layer(kind: str, bad: float) -> None:
    model = llama()
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, f"{kind}_proj").weight[3, 2] = bad
    part = {"k": "keys", "v": "values"}[kind]
    with pytest.raises(NonFiniteEntries, match=f"layer 1: {part}") as caught:
        next(capture(model, [tokens(2, 5)], layers=[0, 1]))
    assert (caught.value.layer, caught.value.part) == (1, part)


@pytest.mark.parametrize("make", [llama, qwen3, gemma3])
def test_a_calibrated_codec_restores_text_it_has_not_seen(make: Make) -> None:
    model = make()
    texts = [tokens(8, 64, seed) for seed in range(4)]
    done: list[int] = []
    codec = calibrate(model, texts, layers=[1, 2], bytes_per_token=48, group_layers=2, advance=done.append)
    unseen = [tokens(4, 33, seed=9)]
    coarse, fine = measure(model, unseen, codec.at(8)), measure(model, unseen, codec)
    assert sum(done) == 4 * 8 * 64
    assert codec.layers == (1, 2)
    assert fine.overall < coarse.overall < 1.0
    assert all(fine.by_layer[layer] < coarse.by_layer[layer] for layer in codec.layers)
