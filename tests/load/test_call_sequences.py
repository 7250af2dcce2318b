"""Sequences of calls, whatever they are, leave histories that the model of them allows."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings

from tests.load.calls import STRATEGIES, Calls
from tests.load.known import LIMIT_TOKENS

# What a machine of threads does cannot be made smaller: no shrinking.
Calls.TestCase.settings = settings(
    max_examples=28, stateful_step_count=50, deadline=None, phases=[Phase.explicit, Phase.generate]
)
TestCallSequences = Calls.TestCase


@pytest.mark.parametrize("pick", range(len(STRATEGIES)), ids=[strategy.name for strategy in STRATEGIES])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_generate_ends_at_its_sessions_limit_whatever_the_strategy(pick: int, seed: int | None) -> None:
    calls = Calls()
    calls.create(pick, has_id=False)
    for first in range(0, LIMIT_TOKENS - 4, 6):
        calls.append(0, list(range(first, first + 6)), has_id=False)
    (known,) = calls._open
    assert len(known.history) == LIMIT_TOKENS - 4
    calls.generate(0, 6, seed, has_id=False)
    assert len(known.history) == LIMIT_TOKENS
    calls.generate(0, 6, seed, has_id=False)
    calls.leave_a_generate(0, 2, has_id=False)
    calls.run_out_of_time(0)
    calls.teardown()


@pytest.mark.parametrize("skipped", range(7))
def test_a_generate_is_replayed_and_continued_from_any_token_on(skipped: int) -> None:
    """What the sequences above do now and then, each time."""
    calls = Calls()
    calls.create(0, has_id=False)
    calls.append(0, [1, 2, 3], has_id=False)
    calls.generate(0, 6, None, has_id=True)
    calls.say_it_again(0)
    calls.take_up_a_generate_again(0, skipped)
    (known,) = calls._open
    assert len(known.history) == 9
    calls.teardown()
