"""The few variants that stand for all: nothing is left out that two values together could show."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_engine.kv.strategies import strategy_names
from inference_engine.kv.strategy import KVStrategy
from tests.further import covering
from tests.laws.variants import all_strategies, by_turns, mechanism, meet_first

sizes = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@given(sizes)
def test_every_value_and_every_pair_of_values_occurs(counts: list[int]) -> None:
    parameters = [[f"{place}-{number}" for number in range(count)] for place, count in enumerate(counts)]
    cases = covering(*parameters)

    for place, values in enumerate(parameters):
        assert {case[place] for case in cases} == set(values)
    for one, other in combinations(range(len(parameters)), 2):
        assert {(case[one], case[other]) for case in cases} == set(product(parameters[one], parameters[other]))


@pytest.mark.parametrize("number", [2, 3, 4])
def test_each_mechanism_of_each_strategy_meets_each_value(number: int) -> None:
    strategies, values = all_strategies(), list(range(number))
    cases = covering(strategies, values, of=lambda one: one if isinstance(one, int) else mechanism(one))

    mechanisms = {mechanism(strategy) for strategy in strategies}
    assert {(mechanism(strategy), value) for strategy, value in cases} == set(product(mechanisms, values))
    assert {str(strategy) for strategy, _ in cases} == {str(strategy) for strategy in strategies}
    assert len(cases) < len(strategies) * number


def test_strategies_that_keep_entries_differently_are_different_mechanisms() -> None:
    mechanisms = {mechanism(strategy) for strategy in all_strategies()}
    assert {name.split()[0] for name in mechanisms} == set(strategy_names())
    assert {"full", "full coded", "restored latent hold", "restored latent stream"} <= mechanisms


@pytest.mark.parametrize("number", [2, 3])
def test_cases_in_which_values_meet_first_hold_every_pair_of_them(number: int) -> None:
    strategies, values = all_strategies(), list(range(number))

    def common(one: KVStrategy | int) -> str | int:
        return one if isinstance(one, int) else mechanism(one)

    cases = covering(strategies, values, of=common)
    first = [case for case, is_new in zip(cases, meet_first(cases, of=common), strict=True) if is_new]

    mechanisms = {mechanism(strategy) for strategy in strategies}
    assert {(mechanism(strategy), value) for strategy, value in first} == set(product(mechanisms, values))
    assert len(first) == len(mechanisms) * number <= len(cases)


def test_in_laws_that_take_turns_nothing_is_left_out_of_all_of_them() -> None:
    laws, modes = [(f"law {number}",) for number in range(20)], ["batched", "fixed-shape"]
    sizes = ["long", "short"]
    cases = list(product(laws, all_strategies(), product(modes, sizes)))
    kept = [case for case, stays in zip(cases, by_turns(cases, few=5), strict=True) if stays]

    mechanisms = {mechanism(strategy) for strategy in all_strategies()}
    assert len({(law, mechanism(strategy)) for law, strategy, _ in kept}) == len(kept) == 5 * len(laws)
    for place, values in enumerate((modes, sizes)):
        assert {(law, given[place]) for law, _, given in kept} == set(product(laws, values))
        assert {(mechanism(strategy), given[place]) for _, strategy, given in kept} == set(product(mechanisms, values))
    assert {str(strategy) for _, strategy, _ in kept} == {str(strategy) for strategy in all_strategies()}
