"""Rows that are not finite are named, when somebody has to know and not before, until they are forgotten."""

from __future__ import annotations

import math
from unittest.mock import Mock

import pytest
import torch

from inference_engine.errors import NonFiniteEntries, RestorationFailed
from inference_engine.kv.archives.finite import FiniteCheck
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies import make_strategy
from tests.laws.test_session_kv_laws import SEGMENT, Rows, awake, context, feed
from tests.tiny import LATENT_BYTES

BAD = [math.nan, math.inf, -math.inf]
LAYERS = (2, 5, 7)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("come_back", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_they_are_named_again_and_again(bad: float, part: str, come_back: bool, before: bool) -> None:
    finite = FiniteCheck()
    rows = {"keys": torch.randn(3, 4, 2, 8), "values": torch.randn(3, 4, 2, 8)}
    finite.ask(LAYERS, *rows.values(), come_back=come_back)
    rows[part][1, 2, 0, 3] = bad
    finite.ask(LAYERS, *rows.values(), come_back=come_back)
    rows[part][1, 2, 0, 3] = 0.0
    finite.require()
    if before:
        finite.send()
    finite.ask(LAYERS, *rows.values(), come_back=come_back)
    finite.send()
    for _ in range(2):
        with pytest.raises(NonFiniteEntries, match=f"layer 5: {part} {'decoded' if come_back else 'to be'}"):
            finite.require()
    finite.forget()
    finite.send()
    finite.require()


def test_questions_that_could_not_be_sent_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    finite = FiniteCheck()
    finite.ask(LAYERS, torch.full((3, 1, 1, 1), math.nan), torch.zeros(3, 1, 1, 1), come_back=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", Mock(side_effect=RuntimeError("the device failed")))
        with pytest.raises(RuntimeError, match="the device failed"):
            finite.send()
    finite.send()
    with pytest.raises(NonFiniteEntries):
        finite.require()


def test_finite_rows_of_any_size_and_none_are_no_matter() -> None:
    finite = FiniteCheck()
    finite.ask(
        LAYERS, torch.full((3, 1, 1, 1), torch.finfo(torch.float32).max), torch.zeros(3, 1, 1, 1), come_back=True
    )
    finite.ask(LAYERS, torch.zeros(3, 0, 1, 1), torch.zeros(3, 0, 1, 1), come_back=True)
    finite.send()
    finite.require()


@pytest.mark.parametrize("mode", ["hold", "stream"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("part", ["k", "v"])
def test_a_session_whose_leaving_rows_are_not_finite_says_so_before_it_sleeps(mode: str, bad: float, part: str) -> None:
    strategy = make_strategy("restored", sink=3, window=13, source="latent", bytes_per_token=LATENT_BYTES, mode=mode)
    rows = Rows(90)
    getattr(rows, part)[0][0, 20, 1] = bad
    for reported in (SessionKV.require_finite, SessionKV.idle):
        kv = awake(strategy, context())
        feed(kv, rows, 2 * SEGMENT)
        kv.require_finite()
        feed(kv, rows, 3 * SEGMENT)
        for _ in range(2):
            with pytest.raises(RestorationFailed, match=r"layer 0: .* hold NaN or infinity"):
                reported(kv)
        with pytest.raises(RestorationFailed, match=r"layer 0: .* hold NaN or infinity"):
            feed(kv, rows, 4 * SEGMENT)
        kv.forget()
        assert kv.wake(90)
        feed(kv, Rows(90), 90)
        kv.idle()
