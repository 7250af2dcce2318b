"""Many are asked at once, a run records them all side by side, and a bad control voids it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference_engine.config import ModelConfig
from inference_engine.engine import Engine
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from laboratory.evaluation import needle
from laboratory.evaluation.asking import Asked, answer_all
from laboratory.evaluation.haystack import Texts
from laboratory.evaluation.models import Target
from laboratory.evaluation.needle import Cell, check_control
from laboratory.evaluation.prompts import Prompt, Prompts
from laboratory.evaluation.record import write_record
from laboratory.evaluation.tasks import TASKS, Grade
from laboratory.evaluation.trials import EvaluationVoid
from tests.laboratory.typed import typed_for
from tests.tiny import tiny_engine, tiny_forward
from tests.tiny_folder import END, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
STOP = (TOKENIZER.convert_tokens_to_ids(END),)
CONTROL = SinkWindow(sink=4, window=16)


def prompt(task: str = "single", trial: int = 0, *, kind: str = "looped", length: int = 500) -> Prompt:
    spec = TASKS[task]
    build = Prompts(Texts(TOKENIZER))
    return build.build(kind, length, spec.make(trial, 0), spec.depths(trial, 10), spec.haystack(trial))


# -- asking -----------------------------------------------------------------------------------------------------------


def asked(count: int) -> list[Asked]:
    strategies = (Full(), SinkWindow(sink=2, window=16))
    return [
        Asked(
            strategy=strategies[number % 2], token_ids=tuple((7 * number + place) % 90 for place in range(40 + number))
        )
        for number in range(count)
    ]


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_queued": 1}, {"max_sessions": 2}, {"kv_bytes": 120_000}, {"max_append_tokens": 13}],
    ids=lambda settings: next(iter(settings), "roomy"),
)
def test_answers_do_not_depend_on_how_many_sessions_fit(settings: dict[str, Any]) -> None:
    prompts = asked(9)
    with tiny_engine() as engine:
        alone = [answer_all(engine, [one], answer_tokens=6, stop_ids=STOP)[0] for one in prompts]
    with tiny_engine(**settings) as engine:
        assert answer_all(engine, prompts, answer_tokens=6, stop_ids=STOP) == alone
        assert engine.info().kv_reserved_bytes == 0
    assert all(alone)


# -- a whole run ------------------------------------------------------------------------------------------------------


@pytest.fixture
def target() -> Iterator[Target]:
    with tiny_engine() as engine:
        yield make_target(engine)


def make_target(engine: Engine) -> Target:
    return Target(
        engine=engine,
        forward=tiny_forward(),
        tokenizer=TOKENIZER,
        stop_ids=STOP,
        model=ModelConfig(),
        weights_sha256="0" * 64,
    )


def arguments(*typed: str) -> argparse.Namespace:
    return typed_for(needle.add_arguments, "--control=sink_window:sink=4,window=16", *typed)


def test_a_run_records_every_strategy_in_every_cell_with_its_interval_and_its_pairs(
    target: Target, tmp_path: Path
) -> None:
    typed = ("--strategies", "sink_window:sink=1,window=64", "full", "--lengths", "337", "401", "--kinds", "looped")
    payload = needle.main(arguments(*typed, "--trials=3", "--task", "single", "tool_call"), target)
    path = write_record("needle", {"command": "kakeya evaluate needle", **payload}, results_dir=tmp_path)
    needle.draw(payload, path.parent)
    names = ["full", "sink_window:sink=4,window=16", "sink_window:sink=1,window=64"]
    assert payload["config"]["strategies"] == names
    assert len(payload["tables"]["recall"]) == 2 * 2 * 3
    assert len(payload["values"]) == 2 * 2 * (3 + 1)
    assert len(payload["tables"]["against full"]) == 2 * 2 * 2
    for row in payload["tables"]["recall"]:
        assert row["low"] <= row["hits"] / row["trials"] <= row["high"]
        assert payload["values"][f"{row['strategy']}: {row['task']}, looped at {row['length']}"]["unit"] == "of 3"
    for row in payload["tables"]["against full"]:
        assert row["both"] + row["only full"] + row["only it"] + row["neither"] == 3
    assert all(row["out of its reach"] >= 1 and row["of those found"] == 0 for row in payload["tables"]["control"])
    base = payload["tables"]["base rate"]
    assert [row["full finds"] for row in base] == [
        row["hits"] for row in payload["tables"]["recall"] if row["strategy"] == "full"
    ]
    assert all(row["says something"] == (row["at least (95 %)"] > 0.0) for row in base)
    assert {image.name for image in path.parent.glob("*.svg")} == {
        "recall_single_looped.svg",
        "recall_tool_call_looped.svg",
    }


def test_a_control_that_sees_every_fact_voids_the_run_before_it_starts(target: Target) -> None:
    typed = arguments("--lengths=337", "--kinds=looped", "--trials=2", "--control=sink_window:sink=4,window=330")
    with pytest.raises(EvaluationVoid, match=r"all 2 facts are within reach of sink_window:sink=4,window=330"):
        needle.main(typed, target)


def cell(control: list[Grade], eligible: tuple[int, ...]) -> Cell:
    prompts = tuple(prompt(trial=trial) for trial in range(len(control)))
    blank = Cell(task="single", kind="looped", length=500, prompts=prompts, eligible=eligible, grades={})
    return replace(blank, grades={"full": (Grade.EXACT,) * len(control), str(CONTROL): tuple(control)})


def test_a_control_that_finds_what_it_cannot_see_voids_the_run_with_the_count() -> None:
    with pytest.raises(EvaluationVoid, match=r"found 2 of 3 facts that it cannot see; the run is void"):
        check_control(cell([Grade.EXACT, Grade.WRONG, Grade.PART, Grade.WRONG], (0, 1, 2)), str(CONTROL))
