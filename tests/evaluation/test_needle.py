"""Prompts hold what they say where they say it, grading is exact, many are asked at once, and a bad control voids."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference_engine.config import ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument, NoCapacity
from inference_engine.evaluation import needle
from inference_engine.evaluation.answers import Asked, answer_all
from inference_engine.evaluation.haystack import KINDS
from inference_engine.evaluation.models import Target
from inference_engine.evaluation.needle import Cell, check_control
from inference_engine.evaluation.prompts import Prompt, Prompts
from inference_engine.evaluation.record import write_record
from inference_engine.evaluation.tasks import PRIORS, TASKS, Grade
from inference_engine.evaluation.trials import EvaluationVoid
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from tests.tiny import tiny_engine, tiny_forward
from tests.tiny_folder import END, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
STOP = (TOKENIZER.convert_tokens_to_ids(END),)
CONTROL = SinkWindow(sink=4, window=16)


def prompt(task: str = "single", trial: int = 0, *, kind: str = "looped", length: int = 500) -> Prompt:
    spec = TASKS[task]
    return Prompts(TOKENIZER).build(kind, length, spec.make(trial, 0), spec.depths(trial, 10), spec.haystack(trial))


def base_tokenizer() -> Any:
    bare = tiny_tokenizer()
    bare.chat_template = None
    return bare


# -- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [431, 509])
def test_a_prompt_is_exactly_as_long_as_asked_and_its_fact_is_where_it_says(kind: str, task: str, length: int) -> None:
    for trial in range(10):
        made = prompt(task, trial, kind=kind, length=length)
        assert len(made.token_ids) == length
        planted = TOKENIZER.decode(made.token_ids[made.fact_at : made.fact_end])
        assert planted.strip() == made.question.facts[made.question.asked]
        text = TOKENIZER.decode(made.token_ids)
        assert all(fact in text for fact in made.question.facts)
        tail = TOKENIZER.decode(made.token_ids[made.tail_at :])
        assert tail.startswith(f"\n\n{made.question.question}")
        assert tail.endswith(made.question.opening)


def test_the_same_trial_gives_the_same_prompt_and_others_other_codes() -> None:
    assert prompt(trial=3).token_ids == prompt(trial=3).token_ids
    assert len({prompt(trial=trial).question.facts for trial in range(20)}) == 20


def test_a_chat_model_gets_its_own_frame() -> None:
    text = TOKENIZER.decode(prompt().token_ids)
    assert text.startswith("<|im_start|>user\n")
    assert text.endswith("mentioned in the text above?<|im_end|>\n<|im_start|>assistant\nThe pass key is")


def test_a_base_model_gets_text_to_go_on_with() -> None:
    task = TASKS["single"]
    made = Prompts(base_tokenizer()).build("looped", 300, task.make(0, 0), (0.5,), 0)
    text = TOKENIZER.decode(made.token_ids)
    assert "<|" not in text
    assert text.endswith("\n\nWhat is the pass key mentioned in the text above? The pass key is")


@pytest.mark.parametrize("task", TASKS)
def test_facts_sweep_the_depths_from_5_to_95_percent(task: str) -> None:
    depths = sorted({depth for trial in range(40) for depth in TASKS[task].depths(trial, 40)})
    assert [depths[0], depths[-1]] == pytest.approx([0.05, 0.95])
    assert max(after - before for before, after in itertools.pairwise(depths)) < 0.05


def test_facts_are_planted_where_a_sentence_ends_nearest_to_the_depth() -> None:
    task = TASKS["single"]
    builder = Prompts(TOKENIZER)
    for depth in (0.05, 0.3, 0.62, 0.95):
        made = builder.build("looped", 509, task.make(0, 0), (depth,), 0)
        before = TOKENIZER.decode(made.token_ids[: made.fact_at])
        assert before.endswith(".")
        filler_tokens = made.tail_at - (made.fact_end - made.fact_at)
        assert made.fact_at / filler_tokens == pytest.approx(depth, abs=0.1)


def test_a_prompt_too_short_for_its_facts_is_refused_with_the_length_it_needs() -> None:
    with pytest.raises(InvalidArgument, match=r"lengths: .* needs at least \d+ ids, got 90"):
        prompt(length=90)


@pytest.mark.parametrize("segment_tokens", [16, 48])
@pytest.mark.parametrize("window", [1, 16, 77, 300])
def test_out_of_reach_means_that_no_query_of_the_question_sees_the_fact(window: int, segment_tokens: int) -> None:
    sink = 4
    for trial in range(10):
        made = prompt(trial=trial, length=477)
        seen: set[int] = set(range(sink))
        for query in range(made.tail_at, len(made.token_ids) + 12):
            seen.update(range(max(0, query - query % segment_tokens - window), query + 1))
        expected = seen.isdisjoint(range(made.fact_at, made.fact_end))
        assert made.is_out_of_reach(sink=sink, window=window, segment_tokens=segment_tokens) is expected


# -- grading ----------------------------------------------------------------------------------------------------------


def grade(task: str, answer: str, trial: int = 0) -> Grade:
    return TASKS[task].make(trial, 0).grade(answer)


def test_a_key_is_right_only_as_the_first_number() -> None:
    key = TASKS["single"].make(0, 0).facts[0].split()[4].rstrip(".")
    assert grade("single", f" {key}.") is grade("single", f": **{key}**, I think") is Grade.EXACT
    for wrong in ("", " unknown", f" 1, or {key}", f" {key}0", f" {key[:3]} {key[3:]}", f" {key[:4]}"):
        assert grade("single", wrong) is Grade.WRONG


def test_the_key_of_somebody_else_is_told_apart() -> None:
    question = TASKS["multi"].make(2, 0)
    keys = [fact.split()[-1].rstrip(".") for fact in question.facts]
    assert question.asked == 2
    assert [question.grade(f" {key}.") for key in keys].count(Grade.OTHER_FACT) == 4
    assert question.grade(f" {keys[2]}") is Grade.EXACT


def test_trials_of_one_haystack_ask_for_each_of_its_facts() -> None:
    questions = [TASKS["multi"].make(trial, 0) for trial in range(5)]
    assert [question.asked for question in questions] == [0, 1, 2, 3, 4]
    assert len({question.facts for question in questions}) == 1
    assert len({question.question for question in questions}) == 5


def test_what_the_model_knew_anyway_is_told_apart_from_what_the_text_says() -> None:
    for trial in range(24):
        question = TASKS["counterfactual"].make(trial, 0)
        subject, _, planted = question.facts[0].rstrip(".").partition(" is ")
        assert question.grade(f" {planted}.") is question.grade(f" the {planted.upper()}, it says") is Grade.EXACT
        assert question.grade(f" {planted}ville") is Grade.WRONG
        known = next(prior[1] for prior in PRIORS if prior[0].lower() == subject.lower())
        assert question.grade(f" {known}") is Grade.PRIOR


def test_a_call_is_right_when_it_is_the_same_json() -> None:
    call = TASKS["tool_call"].make(0, 0).facts[0].partition(" is ")[2]
    rest = call.removeprefix('{"name":')
    assert grade("tool_call", f"{rest} Then go on.") is Grade.EXACT
    assert grade("tool_call", rest.replace('{"door"', '{ "door"')) is Grade.EXACT
    assert grade("tool_call", rest.replace("unlock", "lock")) is Grade.VALID_CALL
    for wrong in (rest[:-2], "", ' "x"}', ' "x", "arguments": 3}', f" {rest[:20]}"):
        assert grade("tool_call", wrong) is Grade.WRONG


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


def test_an_answer_ends_before_the_id_it_stops_at() -> None:
    prompts = asked(1)
    with tiny_engine() as engine:
        whole = answer_all(engine, prompts, answer_tokens=6, stop_ids=STOP)[0]
        stop = whole[2]
        assert answer_all(engine, prompts, answer_tokens=6, stop_ids=(stop,))[0] == whole[: whole.index(stop)]


def test_a_prompt_that_fits_nowhere_is_refused_and_nothing_stays_open() -> None:
    small, large = asked(1)[0], Asked(strategy=Full(), token_ids=(5,) * 400)
    with tiny_engine(kv_bytes=120_000) as engine:
        with pytest.raises(NoCapacity):
            answer_all(engine, [small, large], answer_tokens=6, stop_ids=STOP)
        assert engine.info().kv_reserved_bytes == 0


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
        weights_sha256=None,
    )


def arguments(*typed: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    needle.add_arguments(parser)
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args(["--control=sink_window:sink=4,window=16", *typed])


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
    assert {image.name for image in path.parent.glob("*.png")} == {
        "recall_single_looped.png",
        "recall_tool_call_looped.png",
    }


def test_a_run_can_be_repeated(target: Target) -> None:
    typed = arguments("--lengths", "337", "--kinds", "prose", "--trials=2")
    assert needle.main(typed, target) == needle.main(typed, target)


def test_quick_means_few_trials(target: Target) -> None:
    payload = needle.main(arguments("--quick", "--trials=40", "--lengths=337", "--kinds=looped"), target)
    assert payload["config"]["trials"] == needle.QUICK_TRIALS


def test_a_control_that_sees_every_fact_voids_the_run_before_it_starts(target: Target) -> None:
    typed = arguments("--lengths=337", "--kinds=looped", "--trials=2", "--control=sink_window:sink=4,window=330")
    with pytest.raises(EvaluationVoid, match=r"all 2 facts are within reach of sink_window:sink=4,window=330"):
        needle.main(typed, target)


@pytest.mark.parametrize(
    ("typed", "field"),
    [
        ("--control=full", "control"),
        ("--trials=0", "trials"),
        ("--lengths=60", "lengths"),
        ("--lengths=510", "limit_tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(target: Target, typed: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        needle.main(arguments("--kinds=looped", typed), target)
    assert caught.value.field == field
    assert target.engine.info().kv_reserved_bytes == 0


def cell(control: list[Grade], eligible: tuple[int, ...]) -> Cell:
    prompts = tuple(prompt(trial=trial) for trial in range(len(control)))
    blank = Cell(task="single", kind="looped", length=500, prompts=prompts, eligible=eligible, grades={})
    return replace(blank, grades={"full": (Grade.EXACT,) * len(control), str(CONTROL): tuple(control)})


def test_a_control_that_finds_what_it_cannot_see_voids_the_run_with_the_count() -> None:
    with pytest.raises(EvaluationVoid, match=r"found 2 of 3 facts that it cannot see; the run is void"):
        check_control(cell([Grade.EXACT, Grade.WRONG, Grade.EXACT, Grade.WRONG], (0, 1, 2)), str(CONTROL))


def test_a_control_may_find_what_it_can_see() -> None:
    check_control(cell([Grade.WRONG, Grade.OTHER_FACT, Grade.EXACT], (0, 1)), str(CONTROL))
