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


def test_several_values_are_right_together_in_any_order_and_partly_right_apart() -> None:
    question = TASKS["values"].make(0, 0)
    codes = [fact.split()[-1].rstrip(".") for fact in question.facts]
    assert question.grade(f":\n1. {codes[1]}\n2. {codes[0]}") is Grade.EXACT
    assert question.grade(f" {codes[1]}, {codes[1]}") is question.grade(f" {codes[0]}") is Grade.PART
    assert question.grade(f" 12, 345678, 456789, {codes[0]}") is Grade.WRONG


def test_a_chain_of_names_leads_to_one_key_and_not_to_the_other() -> None:
    question = TASKS["variables"].make(0, 0)
    origin, asked = (question.facts[fact] for fact in question.needed)
    name = origin.split()[4]
    assert asked.endswith(f"is the same as the pass key of {name}.") and name not in question.question
    other = next(fact for fact in question.facts[:2] if fact != origin).split()[-1]
    assert question.grade(f" {other}") is Grade.OTHER_FACT


def test_the_number_called_most_often_is_asked_for() -> None:
    question = TASKS["aggregation"].make(0, 0)
    calls = [fact.split()[2] for fact in question.facts]
    assert question.answer.strip(" .") == max(calls, key=calls.count)
    assert {calls[fact] for fact in question.needed} == {question.answer.strip(" .")}
    assert question.grade(f" {min(calls, key=calls.count)}") is Grade.OTHER_FACT


def test_a_key_is_right_only_as_the_first_number() -> None:
    key = TASKS["single"].make(0, 0).facts[0].split()[4].rstrip(".")
    assert grade("single", f" {key}.") is grade("single", f": **{key}**, I think") is Grade.EXACT
    for wrong in ("", " unknown", f" 1, or {key}", f" {key}0", f" {key[:3]} {key[3:]}", f" {key[:4]}"):
        assert grade("single", wrong) is Grade.WRONG


def test_the_key_of_another_fact_is_reported_apart() -> None:
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


def test_what_the_model_knew_anyway_is_reported_apart_from_what_the_text_says() -> None:
    for trial in range(24):
        question = TASKS["counterfactual"].make(trial, 0)
        subject, _, planted = question.facts[0].rstrip(".").partition(" is ")
        assert question.grade(f" {planted}.") is question.grade(f" the {planted.upper()}, it says") is Grade.EXACT
        assert question.grade(f" {planted}ville") is Grade.WRONG
        known = next(prior[1] for prior in PRIORS if prior[0].lower() == subject.lower())
        assert question.grade(f" {known}") is Grade.PRIOR


def test_a_task_says_after_how_many_questions_it_asks_the_first_again() -> None:
    for task in TASKS.values():
        many = task.questions or 24
        asked = {(*task.make(trial, 0).facts, task.make(trial, 0).question) for trial in range(many + 1)}
        assert len(asked) == (many if task.questions else many + 1)


def test_a_call_is_right_when_it_is_the_same_json() -> None:
    call = TASKS["tool_call"].make(0, 0).facts[0].partition(" is ")[2]
    rest = call.removeprefix('{"name":')
    assert grade("tool_call", f"{rest} Then go on.") is Grade.EXACT
    assert grade("tool_call", rest.replace('{"door"', '{ "door"')) is Grade.EXACT
    assert grade("tool_call", rest.replace("unlock", "lock")) is Grade.VALID_CALL
    for wrong in (rest[:-2], "", ' "x"}', ' "x", "arguments": 3}', f" {rest[:20]}"):
        assert grade("tool_call", wrong) is Grade.WRONG
