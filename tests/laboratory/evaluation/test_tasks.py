"""Answers are graded exactly, and what is wrong is classified by what it is."""

from __future__ import annotations

import pytest

from laboratory.evaluation.tasks import PRIORS, TASKS, Grade


def grade(task: str, answer: str, trial: int = 0) -> Grade:
    return TASKS[task].make(trial, 0).grade(answer)


def test_what_answers_rightly_is_exact_and_what_says_nothing_is_not(subtests: pytest.Subtests) -> None:
    for name in TASKS:
        with subtests.test(name):
            for trial in range(8):
                question = TASKS[name].make(trial, 1)
                assert question.grade(question.answer) is Grade.EXACT
                assert question.grade("") is question.grade(" I do not know.") is Grade.WRONG
                assert question.asked in question.needed and question.needed[-1] < len(question.facts)


def test_what_the_model_knew_anyway_is_reported_apart_from_what_the_text_says() -> None:
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
