"""What restoration costs: more with fewer bytes, most where nothing is kept, nothing with exact entries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from kv_cache_proposer.f_theta.codec import LatentCodec
from laboratory.training.divergence import measure_divergence, nothing, through
from laboratory.training.latent import calibrate
from tests.kv_cache_proposer.small_models import gemma3, llama, qwen3, tokens

Make = Callable[[], PreTrainedModel]

SINK, WINDOW, BYTES = 2, 5, 24
MODELS = pytest.mark.parametrize("make", [llama, qwen3, gemma3])


def calibrated(model: PreTrainedModel) -> LatentCodec:
    texts = [tokens(8, 64, seed) for seed in range(2)]
    return calibrate(model, texts, layers=[1, 2], bytes_per_token=BYTES, group_layers=2)


@MODELS
def test_more_bytes_move_predictions_less_and_nothing_kept_moves_them_most(make: Make) -> None:
    model = make()
    codec = calibrated(model)
    variants = {"all": through(codec), "half": through(codec.at(BYTES // 2)), "nothing": nothing}
    found = measure_divergence(model, tokens(3, 41, seed=9), variants, layers=[1, 2], sink=SINK, window=WINDOW)
    assert found["all"].mean < found["half"].mean < found["nothing"].mean
    assert found["all"].mean < found["all"].p99
    assert found["all"].tokens == 3 * (41 - SINK - WINDOW)


@MODELS
def test_exact_entries_move_nothing(make: Make) -> None:
    model = make()
    found = measure_divergence(
        model,
        tokens(2, 33),
        {"exact": lambda _, entries: ([one.keys for one in entries], [one.values for one in entries])},
        layers=[1, 2],
        sink=SINK,
        window=WINDOW,
    )
    assert abs(found["exact"].mean) < 1e-6
