"""Appended tokens that choose what is restored for them: each as a generated token does, however they are grouped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from inference_engine.kv.strategies import make_strategy
from tests.further import further
from tests.kv.test_streaming import LATENT, LIMIT, WatchedTokens
from tests.laws.test_session_kv_laws import HKV, SEGMENT, Entries, active, context, feed, step

LENGTH, CHOSEN = 126, 12
INDEX: dict[str, Any] = {**LATENT, "window": 40, "mode": "select", "rank": 4, "bits": 4, "run": 1}
ALL, SELECT = (
    make_strategy("restored", **INDEX, budget=3 + 40 + 32 + CHOSEN, appended=name) for name in ("all", "select")
)
STREAM = make_strategy("restored", **{**LATENT, "window": 40 + 32}, mode="stream")


@pytest.mark.parametrize("quanta", [further((1, 1)), (4, 32)], ids=["batched", "fixed-shape"])
def test_an_appended_token_reads_what_a_generated_one_reads_however_they_are_grouped(quanta: tuple[int, int]) -> None:
    """To the bit where shapes do not depend on the group."""
    entries, (token_quantum, key_quantum) = Entries(LIMIT), quanta
    one_by_one, *others = (
        feed(
            active(SELECT, context(token_quantum=token_quantum, key_quantum=key_quantum)),
            entries,
            LENGTH,
            chunk,
            generated=generated,
        )
        for chunk, generated in ((1, True), (1, False), (5, False), (SEGMENT, False))
    )
    for outs in others:
        for ours, theirs in zip(outs, one_by_one, strict=True):
            if token_quantum > 1:
                assert torch.equal(ours, theirs)
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_choice_of_everything_reads_what_chunks_give_and_a_smaller_one_does_not() -> None:
    entries = Entries(LIMIT)
    everything = make_strategy("restored", **INDEX, budget=3 + 40 + 32 + LIMIT, appended="select")
    streamed, whole, few = (feed(active(each, context()), entries, LENGTH) for each in (STREAM, everything, SELECT))
    for one, other in zip(streamed, whole, strict=True):
        # Equal entries, whose sums are taken in another order.
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)
    assert not torch.allclose(few[0], streamed[0], atol=1e-2)


def test_generated_tokens_read_the_same_whatever_appended_ones_read() -> None:
    """Given the same entries: the option is about the queries of appended tokens alone."""
    entries = Entries(LIMIT)
    outs = []
    for strategy in (ALL, SELECT):
        kv = active(strategy, context())
        feed(kv, entries, 110)
        outs.append(feed(kv, entries, LENGTH, 1, generated=True))
    for one, other in zip(*outs, strict=True):
        assert torch.equal(one, other)


def test_a_step_of_many_has_no_more_restored_at_once_than_one_token_chooses() -> None:
    """And nothing is restored that no query chose."""
    codec = WatchedTokens()
    kv = active(SELECT, replace(context(), latent=codec))
    feed(kv, Entries(LIMIT), 160)
    codec.decoded.clear()
    step(kv, Entries(LIMIT), SEGMENT)
    assert codec.decoded
    assert all(entries <= HKV * CHOSEN and len(layers) == 1 for entries, layers in codec.decoded)
