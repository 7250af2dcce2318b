"""Divergence from full is nothing for full, something for a window, and perplexity is the engine's own."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.engine import Engine
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import GenerateParams, Sampling, TokenCommitted
from laboratory.evaluation.divergence import FULL, compare
from laboratory.evaluation.fidelity import (
    Cell,
    add_arguments,
    draw,
    main,
    measure,
    rows,
    values,
)
from laboratory.evaluation.models import Target
from laboratory.evaluation.passages import Passage, cut, force
from laboratory.evaluation.record import VALUE_KEYS, write_record
from tests.laboratory.typed import typed_for
from tests.tiny import VOCABULARY, tiny_engine

WINDOW = SinkWindow(sink=2, window=16)
TEXT = [int(one) for one in np.random.default_rng(3).integers(VOCABULARY, size=400)]
PASSAGE = cut("noise", TEXT, 83, 37)
FORCE = 1000.0  # the largest logit_bias


def passages() -> list[Passage]:
    return [cut("noise", TEXT[start:], 83, 37) for start in (0, 11, 50)]


def arguments(*typed: str) -> argparse.Namespace:
    return typed_for(add_arguments, *typed)


def losses_by_generating(engine: Engine, passage: Passage) -> list[float]:
    """The same losses, one Generate a token, each forced through its bias."""
    session = engine.create_session(limit_tokens=len(passage.prefix) + len(passage.forced)).session_id
    engine.append(session, passage.prefix)
    losses = []
    for token_id in passage.forced:
        params = GenerateParams(max_tokens=1, sampling=Sampling(logit_bias={token_id: FORCE}), logprobs=True)
        (event,) = (one for one in engine.generate(session, params) if isinstance(one, TokenCommitted))
        assert event.token_id == token_id
        assert event.logprob is not None
        losses.append(-event.logprob)
    engine.close_session(session)
    return losses


def forced_logits(engine: Engine, strategy: KVStrategy) -> Tensor:
    """Of PASSAGE's forced tokens: [n, V], float64."""
    seen: list[Tensor] = []
    force(engine, strategy, PASSAGE, lambda _, logits: seen.append(logits.double()))
    return torch.cat(seen)


def test_full_does_not_differ_from_itself() -> None:
    with tiny_engine() as engine:
        found, refused = compare(engine, [Full()], PASSAGE)
    again = found["full, repeated"]
    assert not refused
    assert (again.divergence == 0).all()
    assert again.agrees.all()
    assert (again.loss == found[FULL].loss).all()


def test_losses_are_those_of_tokens_generated_one_by_one() -> None:
    with tiny_engine() as engine:
        found, _ = compare(engine, [], PASSAGE)
        expected = losses_by_generating(engine, PASSAGE)
    assert found[FULL].loss == pytest.approx(expected, abs=1e-4)
    reported = values({Cell(strategy=FULL, kind="noise", length=83): [found[FULL]]})
    assert reported["perplexity, full, noise at 83"]["median"] == pytest.approx(math.exp(np.mean(expected)), rel=1e-4)


def test_divergence_is_that_of_the_two_distributions() -> None:
    with tiny_engine() as engine:
        raw = forced_logits(engine, Full())
        full, window = (logits.log_softmax(-1) for logits in (raw, forced_logits(engine, WINDOW)))
        found, _ = compare(engine, [WINDOW], PASSAGE)
    scores = found[str(WINDOW)]
    expected = (full.exp() * (full - window)).sum(-1)
    assert scores.divergence == pytest.approx(expected.numpy(), abs=1e-5)
    assert (scores.agrees == (full.argmax(-1) == window.argmax(-1)).numpy()).all()
    best = raw.topk(2).values
    assert scores.margin == pytest.approx((best[:, 0] - best[:, 1]).numpy(), abs=1e-5)
    assert scores.loss == pytest.approx(-window[range(37), list(PASSAGE.forced)].numpy(), abs=1e-5)


def test_side_by_side_says_what_one_after_another_says_however_many_fit() -> None:
    strategies = [WINDOW, SinkWindow(sink=4, window=32), Full()]
    with tiny_engine() as engine:
        together, _ = compare(engine, strategies, PASSAGE)
        opened = engine.create_session(strategy=Full(), limit_tokens=len(PASSAGE.prefix) + len(PASSAGE.forced))
    with tiny_engine(kv_bytes=opened.bound.peak_bytes) as engine:
        one_by_one, refused = compare(engine, strategies, PASSAGE)
    assert not refused
    assert together.keys() == one_by_one.keys()
    for name, scores in together.items():
        assert scores.loss == pytest.approx(one_by_one[name].loss, abs=1e-5)
        assert scores.divergence == pytest.approx(one_by_one[name].divergence, abs=1e-5)


def test_a_record_pools_the_tokens_and_resamples_the_texts() -> None:
    with tiny_engine() as engine:
        found, _ = measure(engine, [WINDOW], passages())
    reported, name = values(found), f"{WINDOW}, noise at 83"
    assert all(set(VALUE_KEYS) <= value.keys() for value in reported.values())
    assert all(value["low"] <= value["median"] <= value["high"] for value in reported.values())
    assert reported[f"KL to full, mean, {name}"]["count"] == 3 * 37
    assert reported[f"KL to full, mean, {name}"]["low"] < reported[f"KL to full, mean, {name}"]["high"]
    line = next(line for line in rows(found) if line["strategy"] == str(WINDOW))
    assert line["perplexity ÷ full"] == pytest.approx(reported[f"perplexity ÷ full, {name}"]["median"])
    assert line["kl"] == pytest.approx(reported[f"KL to full, mean, {name}"]["median"])
    buckets = [text.split(" of ") for key, text in line.items() if key.startswith("agreed, margin")]
    assert sum(int(tokens) for _, tokens in buckets) == line["tokens"] == 3 * 37
    assert sum(int(agreed) for agreed, _ in buckets) == pytest.approx(line["top-1 agreement"] * 111)


def test_a_run_leaves_a_record_and_a_plot_for_each_kind(tiny_target: Target, tmp_path: Path) -> None:
    payload = main(
        arguments("--strategies", str(WINDOW), "full", "--lengths", "70", "--kinds", "looped", "--count=9"),
        tiny_target,
    )
    path = write_record("fidelity", {"command": "kakeya evaluate fidelity", **payload}, results_dir=tmp_path)
    draw(payload, path.parent)
    assert (path.parent / "kl_looped.svg").exists()
    assert [line["strategy"] for line in payload["tables"]["fidelity"]] == [FULL, str(WINDOW), "full, repeated"]
    assert payload["tables"]["fidelity"][0]["texts"] == 4
    assert payload["tables"]["left out"] == []
