"""A budget for a model's thinking: tokens until it ends by itself, or until the budget is used up and it is ended.

    history … <think>  [thinking, at most `budget` ids]  [the marker's ids that are missing]  [the answer]

Everything is in the history as it was generated or appended, so the next turn goes on from exactly that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kakeya._checks import invalid, token_ids
from kakeya._values import GenerateResult, StopReason

Stream = TypeVar("Stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class Thought(Generic[Stream]):
    """How a thinking went, and the answer after it."""

    thinking: GenerateResult  # with the marker's ids at its end, as far as the model gave them
    appended_ids: tuple[int, ...]  # of the marker, put in because the budget was used up; empty: it ended by itself
    answer: Stream | None  # a stream, as `generate` gives it; None: the turn ended before there was one


class Budget:
    """The two Generates of a thinking, by the options that are for both."""

    def __init__(self, end_token_ids: Iterable[int], options: dict[str, Any]) -> None:
        self._end = token_ids(end_token_ids, "end_token_ids")
        if not self._end:
            raise invalid("end_token_ids", "must hold the ids that end the thinking, got none")
        # What the answer has to be is no rule for the thinking.
        ours = {name: value for name, value in options.items() if name not in ("constraint", "min_tokens")}
        self.thinking = {**ours, "stop_sequences": [self._end, *options.get("stop_sequences", ())]}
        self._answer = {name: value for name, value in options.items() if name != "expected_history_length"}

    def missing(self, thinking: GenerateResult) -> list[int] | None:
        """The marker's ids to append; None: the turn is over."""
        if thinking.stop_sequence == 0:
            return []
        if thinking.stop_reason is not StopReason.MAX_TOKENS:
            return None
        said, end = list(thinking.token_ids), self._end
        present = next((count for count in range(len(end) - 1, 0, -1) if said[-count:] == end[:count]), 0)
        return end[present:]

    def answer(self, thinking: GenerateResult) -> dict[str, Any]:
        """Its options: with one seed, all of it is generated again the same."""
        return {**self._answer, "seed": thinking.seed}
