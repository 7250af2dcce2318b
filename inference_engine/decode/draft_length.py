"""How long a draft should be, from what drafts gave and what steps took: a draft has to pay for its rows.

    tokens a second with n guesses = (others + 1 + r₁ + r₁r₂ + … + r₁…rₙ) ÷ (seconds(rows + n) + drafting)

rᵢ is how often the guess in place i was right when those before it were. Steps are measured as they come, in groups of
as many sessions; older ones count less. The longest draft is tried while nothing is known of its cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_PRIOR_RATE, _PRIOR_WEIGHT = 0.6, 2.0
_DRAFT_MEMORY = 0.95  # what a draft counts when the next one has come
_STEP_MEMORY = 0.98
_OUTLIER = 3.0  # a step that took this many times what was expected counts no more than that
_LEAST_GAIN = 1.02  # a draft that promises less is not worth its risk


@dataclass(slots=True)
class Acceptance:
    """How often a session's guesses are right, by their place in the draft."""

    _right: list[float] = field(default_factory=list)
    _tried: list[float] = field(default_factory=list)

    def saw(self, proposed: int, accepted: int) -> None:
        """A draft of `proposed` guesses had its first `accepted` right."""
        tried = min(proposed, accepted + 1)
        while len(self._tried) < tried:
            self._right.append(_PRIOR_WEIGHT * self.rate(len(self._tried)))
            self._tried.append(_PRIOR_WEIGHT)
        for place in range(tried):
            self._right[place] = _DRAFT_MEMORY * self._right[place] + (place < accepted)
            self._tried[place] = _DRAFT_MEMORY * self._tried[place] + 1.0

    def rate(self, place: int) -> float:
        """How often the guess in `place` (from 0) is right if those before it are; unseen places resemble the last."""
        if not self._tried:
            return _PRIOR_RATE
        place = min(place, len(self._tried) - 1)
        return self._right[place] / self._tried[place]


@dataclass(slots=True)
class StepSeconds:
    """A line through the seconds of steps over their rows."""

    _known_rows: set[int] = field(default_factory=set)
    _weight: float = 0.0
    _rows: float = 0.0
    _seconds: float = 0.0
    _rows_rows: float = 0.0
    _rows_seconds: float = 0.0

    def saw(self, rows: int, seconds: float) -> None:
        if rows not in self._known_rows:
            # The first step of its shape prepares kernels.
            self._known_rows.add(rows)
            return
        expected = self.expected(rows)
        if expected is not None:
            seconds = min(seconds, _OUTLIER * expected)
        for name, value in (
            ("_weight", 1.0),
            ("_rows", rows),
            ("_seconds", seconds),
            ("_rows_rows", rows * rows),
            ("_rows_seconds", rows * seconds),
        ):
            setattr(self, name, _STEP_MEMORY * getattr(self, name) + value)

    def expected(self, rows: int) -> float | None:
        """Seconds of a step of `rows`; None before any was seen. More rows never count as faster."""
        if not self._weight:
            return None
        mean_rows, mean_seconds = self._rows / self._weight, self._seconds / self._weight
        spread = self._rows_rows / self._weight - mean_rows**2
        together = self._rows_seconds / self._weight - mean_rows * mean_seconds
        slope = max(0.0, together / spread) if spread > 1e-6 else 0.0
        return max(mean_seconds / 10, mean_seconds + slope * (rows - mean_rows))


def best_length(acceptance: Acceptance, step: StepSeconds, *, sessions: int, longest: int, draft_seconds: float) -> int:
    """How many guesses give the most tokens a second, at most `longest`; 0: a plain step does.

    sessions: how many decode in the step, one row each beside the guesses. draft_seconds: what a draft costs.
    """
    plain = step.expected(sessions)
    if plain is None:
        return longest
    best, best_rate = 0, _LEAST_GAIN * sessions / plain
    tokens, chance = float(sessions), 1.0
    for length in range(1, longest + 1):
        chance *= acceptance.rate(length - 1)
        tokens += chance
        seconds = step.expected(sessions + length)
        assert seconds is not None
        if (rate := tokens / (seconds + draft_seconds)) > best_rate:
            best, best_rate = length, rate
    return best


def steps_between(cost_seconds: float, step_seconds: float, share: float) -> int:
    """So many steps apart, something that costs `cost_seconds` takes at most `share` of the time."""
    return max(1, math.ceil(cost_seconds / (share * step_seconds))) if step_seconds > 0 else 1
