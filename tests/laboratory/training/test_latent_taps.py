"""Entries predicted from hidden states: exact where they follow from them, and never better than the entries."""

from __future__ import annotations

from laboratory.training.capture import capture
from laboratory.training.divergence import measure_divergence, nothing, through
from laboratory.training.latent import calibrate
from laboratory.training.sensitivity import measure_sensitivity
from laboratory.training.taps import fit_tap_codec, fit_taps
from tests.kv_cache_proposer.small_models import llama, tokens

SINK, WINDOW, BYTES = 2, 5, 24


def test_entries_that_are_linear_in_a_tap_are_foretold() -> None:
    """A layer's entries are a projection of the normed output of the layer before."""
    model = llama()
    taps = fit_taps(model, [tokens(16, 60, seed) for seed in range(3)], tap_layers=[0], layers=[1, 2])
    unseen = tokens(2, 33, seed=9)
    keys, values = taps.predict_entries(model, unseen)
    (entries,) = capture(model, [unseen], layers=[1, 2])
    for reported, exact in ((keys[0], entries[0].keys), (values[0], entries[0].values)):
        # Ridge takes a little off, so that noise is not followed.
        assert float((reported - exact).square().sum() / exact.square().sum()) < 1e-4
    assert float((keys[1] - entries[1].keys).square().sum() / entries[1].keys.square().sum()) > 1e-2


def test_coded_taps_lose_more_than_uncoded_and_uncoded_less_than_nothing() -> None:
    model = llama()
    texts = [tokens(8, 64, seed) for seed in range(4)]
    importances = measure_sensitivity(model, texts[:1], layers=[1, 2], sink=SINK, window=WINDOW)
    taps = fit_taps(model, texts, tap_layers=[0], layers=[1, 2])
    coded = fit_tap_codec(model, texts, taps, importances, bytes_per_token=BYTES, group_layers=2)
    entries = calibrate(model, texts, layers=[1, 2], bytes_per_token=BYTES, group_layers=2, importances=importances)
    variants = {
        "uncoded": taps.uncoded(model),
        "coded": taps.through(model, coded.at(8)),
        "nothing": nothing,
        "entries": through(entries),
    }
    found = measure_divergence(model, tokens(4, 40, seed=9), variants, layers=[1, 2], sink=SINK, window=WINDOW)
    assert found["uncoded"].mean < found["coded"].mean < found["nothing"].mean
    assert found["entries"].mean < found["coded"].mean
