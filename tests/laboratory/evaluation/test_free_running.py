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
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.types import GenerateParams, Sampling, TokenCommitted
from laboratory.evaluation import free_running
from laboratory.evaluation.asking import GREEDY
from laboratory.evaluation.divergence import FULL
from laboratory.evaluation.free_running import (
    REPEATED,
    Cell,
    Text,
    measure,
    read,
    rows,
    values,
)
from laboratory.evaluation.models import Target
from laboratory.evaluation.record import VALUE_KEYS, write_record
from tests.laboratory.typed import typed_for
from tests.tiny import VOCABULARY, tiny_engine

NARROW = SinkWindow(sink=2, window=16)
PROMPT = tuple(int(one) for one in np.random.default_rng(4).integers(VOCABULARY, size=83))
SAMPLED = Sampling(temperature=0.7, seed=3)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with tiny_engine() as running:
        yield running


def arguments(*typed: str) -> argparse.Namespace:
    return typed_for(free_running.add_arguments, "--strategies", str(NARROW), *typed)


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


# -- counting ---------------------------------------------------------------------------------------------------------


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
