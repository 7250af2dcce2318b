"""Sequences of calls, whatever they are, leave histories that the model of them allows."""

from __future__ import annotations

from hypothesis import Phase, settings

from tests.load.calls import Calls

# What a machine of threads does cannot be made smaller: no shrinking.
Calls.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, phases=[Phase.explicit, Phase.generate]
)
TestCallSequences = Calls.TestCase
