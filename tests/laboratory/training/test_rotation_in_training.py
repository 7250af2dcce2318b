"""Calibration rotates keys as the model's layers do: not at all in some, in part in others; or it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from laboratory.training import distant
from laboratory.training.capture import capture, require_stored_keys
from laboratory.training.distant import Distant, Rotate, seeing
from tests.kv_cache_proposer.small_models import gemma3, gemma4, llama, phi, qwen3, smollm3, tokens

LAYERS = (0, 1, 2)
EACH_MODEL = pytest.mark.parametrize("make", [llama, qwen3, gemma3, gemma4, smollm3, phi])


@EACH_MODEL
def test_entries_put_back_where_they_were_change_nothing(make: Callable[[], PreTrainedModel]) -> None:
    model, ids = make(), tokens(2, 24)
    (entries,) = capture(model, [ids], layers=LAYERS)

    def far(layer: int, keys: Tensor, values: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor]:
        own = entries[layer].keys.view(*ids.shape, *entries[layer].keys.shape[1:]).transpose(1, 2)
        return rotate(own), values

    with torch.no_grad(), seeing(model, LAYERS) as forward:
        expected = model(input_ids=ids, use_cache=False, distant=Distant(2, 5, frozenset(), far)).logits
        again = forward(ids, Distant(2, 5, frozenset(LAYERS), far))
    torch.testing.assert_close(again, expected, atol=1e-4, rtol=1e-4)


@EACH_MODEL
def test_queries_that_attend_together_read_what_each_reads_alone(
    make: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = make(), tokens(2, 24)

    def far(_layer: int, keys: Tensor, values: Tensor, _rotate: Rotate) -> tuple[Tensor, Tensor]:
        return -keys, values + 1.0

    logits = {}
    with torch.no_grad(), seeing(model, LAYERS) as forward:
        for size in (1, 7, 24):
            monkeypatch.setattr(distant, "BLOCK_TOKENS", size)
            logits[size] = forward(ids, Distant(2, 5, frozenset(LAYERS), far))
        exactly = forward(ids, Distant(2, 24, frozenset(LAYERS), far))
    for size in (7, 24):
        torch.testing.assert_close(logits[size], logits[1], atol=1e-4, rtol=1e-4)
    # The sink and the window reach back to the first token for so many queries, and for no other.
    torch.testing.assert_close(logits[24][:, :7], exactly[:, :7], atol=1e-4, rtol=1e-4)
    assert not torch.isclose(logits[24][:, 7:], exactly[:, 7:], atol=1e-4, rtol=1e-4).all(-1).any()


@EACH_MODEL
def test_keys_that_calibration_sees_are_those_that_sessions_store(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    before = model.config._attn_implementation
    require_stored_keys(model, layers=LAYERS)
    assert model.config._attn_implementation == before
