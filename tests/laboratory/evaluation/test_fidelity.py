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
from inference_engine.errors import InvalidArgument
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import GenerateParams, Sampling, TokenCommitted
from laboratory.evaluation.divergence import FULL, Scores, compare
from laboratory.evaluation.fidelity import (
    Cell,
    add_arguments,
    cut_all,
    draw,
    main,
    measure,
    rows,
    values,
    worst_kinds,
    worst_values,
)
from laboratory.evaluation.haystack import Texts
from laboratory.evaluation.models import Target
from laboratory.evaluation.passages import Passage, cut, force, text_passage
from laboratory.evaluation.record import VALUE_KEYS, write_record
from tests.tiny import TRAINED_POSITIONS, VOCABULARY, tiny_engine

WINDOW = SinkWindow(sink=2, window=16)
TEXT = [int(one) for one in np.random.default_rng(3).integers(VOCABULARY, size=400)]
PASSAGE = cut("noise", TEXT, 83, 37)
FORCE = 1000.0  # the largest logit_bias


def passages() -> list[Passage]:
    return [cut("noise", TEXT[start:], 83, 37) for start in (0, 11, 50)]


def arguments(*typed: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args(typed)


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


def test_a_window_shorter_than_the_text_differs_and_one_that_is_longer_does_not() -> None:
    longer = SinkWindow(sink=2, window=160)
    with tiny_engine() as engine:
        found, _ = compare(engine, [WINDOW, longer], PASSAGE)
    assert found[str(WINDOW)].divergence.mean() > 0.01
    assert not found[str(WINDOW)].agrees.all()
    assert found[str(longer)].divergence.max() < 1e-5
    assert found[str(longer)].agrees.all()


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


def test_a_length_the_strategy_cannot_hold_is_reported_with_its_reason() -> None:
    too_wide = SinkWindow(sink=2, window=TRAINED_POSITIONS)
    with tiny_engine() as engine:
        found, left_out = measure(engine, [WINDOW, too_wide], passages()[:1])
        assert engine.info().kv_reserved_bytes == 0
    assert {cell.strategy for cell in found} == {FULL, str(WINDOW)}
    (reason,) = left_out.values()
    assert "window" in reason


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


def test_agreement_is_reported_by_the_margin_of_full() -> None:
    margin = np.array([0.0, 0.05, 0.1, 0.9, 1.0, 7.0])
    scores = Scores(
        loss=np.ones(6), divergence=np.ones(6), agrees=np.array([False, True, True, True, True, False]), margin=margin
    )
    cells = {Cell(strategy=name, kind="x", length=9): [scores] for name in (FULL, "other")}
    line = rows(cells)[1]
    agreed = [line[f"agreed, margin {words}"] for words in ("below 0.1", "0.1 to 1", "1 and more")]
    assert agreed == ["1 of 2", "2 of 2", "1 of 2"]


def test_the_worst_kind_of_text_is_named_for_the_mean_and_for_p99() -> None:
    def cell(strategy: str, kind: str) -> Cell:
        return Cell(strategy=strategy, kind=kind, length=9)

    def scores(divergence: list[float]) -> list[Scores]:
        none = np.zeros(len(divergence))
        return [Scores(loss=none, divergence=np.array(divergence), agrees=none == 0, margin=none)]

    found = {cell(FULL, kind): scores([0.0] * 10) for kind in ("even", "spiky")}
    found |= {cell("other", "even"): scores([0.2] * 10), cell("other", "spiky"): scores([0.0] * 9 + [1.0])}
    (line,) = worst_kinds(rows(found))
    assert (line["worst kind"], line["worst kind of p99"], line["kinds"]) == ("even", "spiky", 2)
    reported = worst_values([line], values(found))
    assert reported["KL to full, mean, worst kind, other at 9"]["median"] == pytest.approx(0.2)
    assert reported["KL to full, p99, worst kind, other at 9"]["median"] > 0.5


def test_lengths_that_a_kind_has_too_little_text_for_are_left_out_by_name(tiny_target: Target) -> None:
    there = len(tiny_target.texts.filler("polish", 9000, 0))
    passages, too_long = cut_all(tiny_target.texts, ["looped", "polish"], [70, 3 * there], count=9, texts=2, seed=0)
    assert [(one.kind, len(one.prefix)) for one in passages] == [
        *[("looped", 70)] * 2, *[("polish", 70)] * 2, *[("looped", 3 * there)] * 2
    ]  # fmt: skip
    assert list(too_long) == [f"polish at {3 * there}"]
    with pytest.raises(InvalidArgument, match="ids of kind polish"):
        cut_all(tiny_target.texts, ["polish"], [3 * there], count=9, texts=2, seed=0)


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="400"):
        cut("noise", TEXT, 390, 11)
    with pytest.raises(ValueError, match="append and to force"):
        cut("noise", TEXT, 390, 0)


def test_a_passage_begins_as_the_tokenizer_begins_a_text() -> None:
    class Beginning:
        """A tokenizer that puts a mark of its own before every text."""

        @staticmethod
        def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [*([1] if add_special_tokens else []), *(10 + ord(character) for character in text)]

    passage = text_passage(Texts(Beginning), "looped", 40, 9, "0/0")
    assert (len(passage.prefix), len(passage.forced)) == (40, 9)
    assert passage.prefix[0] == 1
    assert 1 not in (*passage.prefix[1:], *passage.forced)


def test_a_run_leaves_a_record_and_a_plot_for_each_kind(tiny_target: Target, tmp_path: Path) -> None:
    payload = main(
        arguments("--strategies", str(WINDOW), "full", "--lengths", "70", "--kinds", "looped", "--count=9"),
        tiny_target,
    )
    path = write_record("fidelity", {"command": "kakeya evaluate fidelity", **payload}, results_dir=tmp_path)
    draw(payload, path.parent)
    assert (path.parent / "kl_looped.png").exists()
    assert [line["strategy"] for line in payload["tables"]["fidelity"]] == [FULL, str(WINDOW), "full, repeated"]
    assert payload["tables"]["fidelity"][0]["texts"] == 4
    assert payload["tables"]["left out"] == []


def test_a_length_that_full_cannot_hold_is_refused_before_anything_runs(tiny_target: Target) -> None:
    with pytest.raises(InvalidArgument, match="at most 512 with full"):
        main(arguments("--strategies", str(WINDOW), "--lengths", "70", "500", "--count=13"), tiny_target)


def test_numbers_below_one_are_refused(tiny_target: Target) -> None:
    for typed in ("--count=0", "--texts=0", "--lengths=0"):
        with pytest.raises(InvalidArgument, match="at least 1"):
            main(arguments("--strategies", "full", typed), tiny_target)
