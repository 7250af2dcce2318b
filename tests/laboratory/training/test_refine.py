"""Refinement lowers what restoration costs on text it was not trained on, or leaves the codec as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from kv_cache_proposer.f_theta.codec import LatentCodec
from laboratory.training.divergence import measure_divergence, nothing, through
from laboratory.training.latent import calibrate
from laboratory.training.refine import refine
from tests.further import further
from tests.kv_cache_proposer.small_models import gemma3, llama, qwen3, tokens

Make = Callable[[], PreTrainedModel]

SINK, WINDOW, BYTES = 2, 5, 24
MODELS = pytest.mark.parametrize("make", [llama, qwen3, gemma3])


def calibrated(model: PreTrainedModel) -> LatentCodec:
    texts = [tokens(8, 64, seed) for seed in range(2)]
    return calibrate(model, texts, layers=[1, 2], bytes_per_token=BYTES, group_layers=2)


def turned_blindly(codec: LatentCodec) -> LatentCodec:
    """Its components are others of the same space: those of most variance are mixed with those of least."""
    (part,) = codec.coders
    components = part.basis.components
    drawn = torch.randn(components.count, components.count, generator=torch.Generator().manual_seed(0))
    entries = (components.whole() @ torch.linalg.qr(drawn).Q).to(components.entries.dtype)
    basis = replace(part.basis, components=replace(components, entries=entries))
    return replace(codec, coders=(replace(part, basis=basis),))


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
    assert found["exact"].agreement == 1.0


@pytest.mark.parametrize("make", [further(llama), further(qwen3), gemma3])
def test_refining_mends_what_was_drawn_blindly_at_every_rate(make: Make) -> None:
    model = make()
    codec = turned_blindly(calibrated(model))
    held_out = tokens(4, 48, seed=7)
    rates = (BYTES // 2, BYTES // 3)
    refined, reported = refine(
        model, codec, tokens(32, 48, seed=5), held_out, rates=rates, steps=80, sink=SINK, window=WINDOW
    )
    assert reported.steps > 0
    assert reported.gain > 0.02
    for rate in rates:
        assert reported.best[rate] <= reported.start[rate]
        assert refined.at(rate).bytes_per_token == rate
        for which, expected in ((codec, reported.start), (refined, reported.best)):
            found = measure_divergence(
                model, held_out, {"it": through(which.at(rate))}, layers=[1, 2], sink=SINK, window=WINDOW
            )
            assert found["it"].mean == pytest.approx(expected[rate], rel=1e-6)
