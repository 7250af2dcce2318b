"""Which layers are kept follows from measured damage."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from laboratory.evaluation.layer_ranking import (
    Damage,
    Windows,
    _other_question,
    damage_to_answers,
    rank,
)
from laboratory.evaluation.passages import Passage
from laboratory.evaluation.tasks import TASKS
from tests.tiny import VOCABULARY, tiny_engine

WINDOWS = Windows(sink=2, window=16)
PASSAGE = Passage(
    kind="answer",
    prefix=tuple((7 * place) % VOCABULARY for place in range(90)),
    forced=tuple((5 * place) % VOCABULARY for place in range(9)),
)


def needing(*groups: Sequence[int]) -> Damage:
    """Damage of 1 for each group of which no layer is kept."""
    return lambda kept: [float(sum(not set(group) & set(layers) for group in groups)) for layers in kept]


def test_ablation_ranks_the_layer_first_whose_loss_hurts_most() -> None:
    ranking = rank((0, 1, 2, 3), needing([2], [2], [1]))
    assert ranking.order == (2, 1, 0, 3)
    assert ranking.harm == {0: 0.0, 1: 1.0, 2: 2.0, 3: 0.0}


def test_only_greedy_search_sees_that_two_layers_stand_in_for_each_other() -> None:
    damage = needing([1, 3], [2])
    assert rank((0, 1, 2, 3), damage).order == (2, 0, 1, 3)
    greedy = rank((0, 1, 2, 3), damage, is_greedy=True)
    assert set(greedy.order[:2]) == {2, 3}
    assert sorted(rank((4, 5, 9), damage, is_greedy=True).order) == [4, 5, 9]


def test_windowing_layers_moves_answers_and_keeping_all_does_not() -> None:
    with tiny_engine(windowed=False) as engine:
        none, one, every = damage_to_answers(engine, WINDOWS, [PASSAGE])([(), (1,), (0, 1, 2)])
    assert every == 0.0 < one
    assert none > 0


def test_layers_are_ranked_by_facts_that_the_sweep_does_not_ask(subtests: pytest.Subtests) -> None:
    for name in TASKS:
        with subtests.test(name):
            task = TASKS[name]
            swept = {task.make(trial, 5).facts for trial in range(18)}
            ranked = [_other_question(task, trial, 18, 5) for trial in range(6)]
            assert not swept & {question.facts for question in ranked}
            assert len({(question.facts, question.asked) for question in ranked}) == 6
