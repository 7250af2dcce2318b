"""Entries that are not finite are reported when finiteness is required and not before, until they are dropped."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from inference_engine.errors import NonFiniteEntries, RestorationFailed
from inference_engine.kv.archives.finite import FiniteCheck
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies import make_strategy
from tests.further import each_pair
from tests.laws.test_session_kv_laws import SEGMENT, Entries, active, context, feed
from tests.tiny import LATENT_BYTES

BAD = [math.nan, math.inf, -math.inf]
LAYERS = (2, 5, 7)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("part", ["keys", "values"])
def test_they_are_named_again_and_again(bad: float, part: str, subtests: pytest.Subtests) -> None:
    for come_back, before in product((False, True), repeat=2):
        with subtests.test(come_back=come_back, before=before):
            finite = FiniteCheck()
            entries = {"keys": torch.randn(3, 4, 2, 8), "values": torch.randn(3, 4, 2, 8)}
            finite.ask(LAYERS, *entries.values(), come_back=come_back)
            entries[part][1, 2, 0, 3] = bad
            finite.ask(LAYERS, *entries.values(), come_back=come_back)
            entries[part][1, 2, 0, 3] = 0.0
            finite.require()
            if before:
                finite.send()
            finite.ask(LAYERS, *entries.values(), come_back=come_back)
            finite.send()
            for _ in range(2):
                with pytest.raises(NonFiniteEntries, match=f"layer 5: {part} {'decoded' if come_back else 'to be'}"):
                    finite.require()
            finite.forget()
            finite.send()
            finite.require()


def test_finite_entries_of_any_size_pass() -> None:
    finite = FiniteCheck()
    finite.ask(
        LAYERS, torch.full((3, 1, 1, 1), torch.finfo(torch.float32).max), torch.zeros(3, 1, 1, 1), come_back=True
    )
    finite.ask(LAYERS, torch.zeros(3, 0, 1, 1), torch.zeros(3, 0, 1, 1), come_back=True)
    finite.send()
    finite.require()


@each_pair(mode=["hold", "stream"], bad=BAD, part=["k", "v"])
def test_a_session_whose_evicted_entries_are_not_finite_fails_before_it_is_idle(
    mode: str, bad: float, part: str
) -> None:
    strategy = make_strategy("restored", sink=3, window=13, source="latent", bytes_per_token=LATENT_BYTES, mode=mode)
    entries = Entries(90)
    getattr(entries, part)[0][0, 20, 1] = bad
    for reported in (SessionKV.require_finite, SessionKV.idle):
        kv = active(strategy, context())
        feed(kv, entries, 2 * SEGMENT)
        kv.require_finite()
        feed(kv, entries, 3 * SEGMENT)
        for _ in range(2):
            with pytest.raises(RestorationFailed, match=r"layer 0: .* hold NaN or infinity"):
                reported(kv)
        with pytest.raises(RestorationFailed, match=r"layer 0: .* hold NaN or infinity"):
            feed(kv, entries, 4 * SEGMENT)
        kv.forget()
        assert kv.wake(90)
        feed(kv, Entries(90), 90)
        kv.idle()
