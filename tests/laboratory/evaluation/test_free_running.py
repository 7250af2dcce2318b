"""Texts written alone are as long as asked, full reads them, and what sets them apart from full's is counted right."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument, NonFiniteLogits
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.types import GenerateParams, Sampling, TokenCommitted
from laboratory.evaluation import free_running
from laboratory.evaluation.asking import GREEDY, Asked, answer_all
from laboratory.evaluation.divergence import FULL
from laboratory.evaluation.free_running import (
    REPEATED,
    Cell,
    Text,
    agreed,
    distinct,
    loops,
    measure,
    perplexity,
    read,
    rows,
    unusable,
    values,
)
from laboratory.evaluation.models import Target
from laboratory.evaluation.record import VALUE_KEYS, write_record
from tests.tiny import TRAINED_POSITIONS, VOCABULARY, tiny_engine, tiny_forward

NARROW = SinkWindow(sink=2, window=16)
PROMPT = tuple(int(one) for one in np.random.default_rng(4).integers(VOCABULARY, size=83))
SAMPLED = Sampling(temperature=0.7, seed=3)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with tiny_engine() as running:
        yield running


def arguments(*typed: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    free_running.add_arguments(parser)
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args(["--strategies", str(NARROW), *typed])


def text(token_ids: list[int], losses: list[float], *, same: int = 0) -> Text:
    return Text(token_ids=tuple(token_ids), losses=np.array(losses), same=same, is_blank=False)


# -- writing ----------------------------------------------------------------------------------------------------------


def test_losses_are_those_full_had_when_it_wrote_the_text(engine: Engine) -> None:
    session = engine.create_session().session_id
    engine.append(session, PROMPT)
    events = engine.generate(session, GenerateParams(max_tokens=61, sampling=Sampling(), logprobs=True))
    written = [event for event in events if isinstance(event, TokenCommitted)]
    engine.close_session(session)
    losses = read(engine, PROMPT, [event.token_id for event in written])
    assert losses == pytest.approx([-(event.logprob or 0.0) for event in written], abs=1e-4)
    assert read(engine, PROMPT, []).shape == (0,)


def test_full_writes_the_same_again_and_a_narrow_window_soon_something_else(tiny_target: Target) -> None:
    methods = {"greedy": [GREEDY], "at 0.7": [SAMPLED]}
    found = measure(tiny_target, [NARROW, Full()], {"noise": [PROMPT]}, methods, 61)
    assert [cell.strategy for cell in found] == [FULL, REPEATED, str(NARROW)] * 2
    for cell, (written,) in found.items():
        assert len(written.token_ids) == len(written.losses) == 61
        assert (written.same == 61) == (cell.strategy != str(NARROW))
    greedy, sampled = (found[Cell(strategy=FULL, kind="noise", method=method)][0].token_ids for method in methods)
    assert greedy != sampled
    assert tiny_target.engine.info().kv_reserved_bytes == 0


def test_logits_that_are_not_finite_end_a_text_where_they_come() -> None:
    asked = [Asked(strategy=Full(), token_ids=PROMPT)]
    weight = tiny_forward(seed=5, windowed=True).seam.model.lm_head.weight
    kept = weight[3].clone()
    with tiny_engine(seed=5) as engine:
        weight.data[3] = math.nan
        try:
            assert answer_all(engine, asked, answer_tokens=9, stop_ids=(), may_fail_with=(NonFiniteLogits,)) == [[]]
            with pytest.raises(NonFiniteLogits):
                answer_all(engine, asked, answer_tokens=9, stop_ids=())
        finally:
            weight.data[3] = kept
        assert engine.info().kv_reserved_bytes == 0


# -- counting ---------------------------------------------------------------------------------------------------------


AGREEMENTS: list[tuple[list[int], list[int], int]] = [
    ([1, 2, 3], [1, 2, 4], 2),
    ([1], [2], 0),
    ([1, 2], [1, 2], 2),
    ([1, 2], [1], 1),
]


def test_agreement_ends_at_the_first_other_token(subtests: pytest.Subtests) -> None:
    for first, second, expected in AGREEMENTS:
        with subtests.test(first=first, second=second, expected=expected):
            assert agreed(first, second) == agreed(second, first) == expected


def test_a_text_that_goes_round_has_few_distinct_runs() -> None:
    assert distinct(list(range(50))) == 1.0
    assert distinct([7] * 50) == pytest.approx(1 / 47)
    assert distinct([1, 2, 3] * 20) == pytest.approx(3 / 57)
    assert distinct([1, 2, 3]) == 1.0


def test_only_the_end_of_a_text_makes_it_a_loop() -> None:
    winding, straight = [5, 6] * 40, list(range(100, 180))
    assert loops(text(straight + winding, [0.0] * 160), tokens=160)
    assert not loops(text(winding + straight, [0.0] * 160), tokens=160)


def test_what_is_missing_or_not_finite_is_unusable_and_not_in_the_perplexity() -> None:
    cut_short = text([1, 2, 3], [math.log(2.0), math.log(8.0), math.inf])
    assert perplexity(cut_short.losses) == pytest.approx(4.0)
    assert perplexity(np.array([math.nan, math.inf])) is None
    assert unusable([cut_short, text([1] * 10, [0.0] * 10)], tokens=10) == pytest.approx(8 / 20)


def test_a_ratio_is_taken_text_by_text_and_tables_say_what_values_say() -> None:
    here: dict[str, Any] = {"kind": "prose", "method": "greedy"}
    full, other = Cell(strategy=FULL, **here), Cell(strategy="other", **here)
    found = {
        full: [text([1, 2, 3, 4], [0.0] * 4, same=4), text([1, 2, 3, 4], [math.log(9.0)] * 4, same=4)],
        other: [text([1, 2, 3, 5], [math.log(2.0)] * 4, same=3), text([9, 2, 3, 5], [math.log(18.0)] * 4)],
    }
    line = rows(found, 4)[1]
    assert line["÷ full"] == pytest.approx(2.0)
    assert (line["earliest"], line["first difference"], line["unusable tokens"]) == (0, 1.5, 0.0)
    reported = values(found, 4)
    assert all(set(VALUE_KEYS) <= value.keys() for value in reported.values())
    assert reported[f"perplexity ÷ full's own, {other}"]["median"] == pytest.approx(2.0)
    assert reported[f"first difference, {other}"]["median"] == 1.5


# -- a whole run ------------------------------------------------------------------------------------------------------


def test_a_run_leaves_a_record_that_explains_itself_and_a_plot_for_each_kind_and_method(
    tiny_target: Target, tmp_path: Path
) -> None:
    typed = arguments("--kinds", "polish", "--length=70", "--tokens=64", "--texts=2")
    payload = free_running.main(typed, tiny_target)
    path = write_record("free_running", {"command": "kakeya evaluate free-running", **payload}, results_dir=tmp_path)
    free_running.draw(payload, path.parent)
    assert {image.name for image in path.parent.glob("*.png")} == {
        "free_running_polish_greedy.png",
        "free_running_polish_at_0.7.png",
    }
    tables = payload["tables"]
    assert [line["strategy"] for line in tables["free running"]] == [FULL, REPEATED, str(NARROW)] * 2
    assert len(tables["course"]) == 2 * 3 * free_running.PARTS
    explained = {line["number"] for line in tables["how to read it"]}
    assert explained <= tables["free running"][0].keys()
    assert tables["free running"][0]["÷ full"] == pytest.approx(1.0)


def test_conversations_are_gone_on_with(tiny_target: Target) -> None:
    typed = arguments("--kinds", "chat", "--length=70", "--tokens=40", "--texts=1")
    payload = free_running.main(typed, tiny_target)
    assert [line["texts"] for line in payload["tables"]["free running"]] == [1] * 6
    assert len(payload["config"]["texts_sha256"]["chat"]) == 64


@pytest.mark.parametrize(
    ("typed", "field"),
    [
        ("--texts=0", "texts"),
        ("--length=0", "length"),
        ("--tokens=31", "tokens"),
        ("--tokens=40000", "tokens"),
        (f"--tokens={TRAINED_POSITIONS}", "limit_tokens"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(tiny_target: Target, typed: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        free_running.main(arguments("--kinds=looped", "--length=70", typed), tiny_target)
    assert caught.value.field == field
    assert tiny_target.engine.info().kv_reserved_bytes == 0
