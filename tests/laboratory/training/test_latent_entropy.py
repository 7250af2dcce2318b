"""How short codes could be: much shorter for a text that repeats itself, hardly for one like the calibration text."""

from __future__ import annotations

import torch

from laboratory.training.entropy import code_length
from laboratory.training.latent import calibrate
from tests.kv_cache_proposer.small_models import llama, tokens

TEXTS = [tokens(8, 64, seed) for seed in range(4)]


def test_codes_of_like_text_can_hardly_be_shorter_and_a_constant_text_much() -> None:
    model = llama()
    codec = calibrate(model, TEXTS, layers=[1, 2], bytes_per_token=24, group_layers=2)
    like = code_length(model, codec, TEXTS, [tokens(8, 64, seed=9)])
    constant = torch.full((8, 64), 7)
    repeated = code_length(model, codec, [constant], [constant])
    assert like.packed == repeated.packed == 8 * 24
    assert 0.0 < like.saving < 0.2
    assert repeated.saving > 0.5
