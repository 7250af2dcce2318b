"""How long things take here, as measured: a step by its rows, and a place in the queue."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

_MEMORY = 0.98  # what a step counts when the next one has come
_FEW_STEPS = 4.0
_LEAST_SECONDS, _MOST_SECONDS = 0.05, 60.0
_UNKNOWN_SECONDS = 1.0


@dataclass(slots=True)
class StepPace:
    """A line through what steps took by their rows, seconds = fixed + rows · each; older steps count less."""

    _count: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _tokens_squared: float = 0.0
    _tokens_seconds: float = 0.0

    def saw(self, tokens: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        for name, value in (
            ("_count", 1.0),
            ("_tokens", float(tokens)),
            ("_seconds", seconds),
            ("_tokens_squared", float(tokens * tokens)),
            ("_tokens_seconds", tokens * seconds),
        ):
            setattr(self, name, _MEMORY * getattr(self, name) + value)

    def seconds(self, tokens: int) -> float | None:
        """What a step of so many rows takes; None before there were a few of different sizes."""
        line = self._line()
        return None if line is None else line[0] + tokens * line[1]

    @property
    def mean_seconds(self) -> float | None:
        """What steps took on average; None before there were a few."""
        return None if self._count < _FEW_STEPS - 0.5 else self._seconds / self._count

    @property
    def token_seconds(self) -> float:
        """What another row adds to a step; 0 where that is not known yet."""
        line = self._line()
        return 0.0 if line is None else line[1]

    def tokens_within(self, seconds: float) -> int | None:
        """The most rows of a step that takes `seconds`, 0 if even an empty one takes longer; None as in `seconds`."""
        line = self._line()
        return None if line is None else max(0, math.floor((seconds - line[0]) / line[1]))

    def _line(self) -> tuple[float, float] | None:
        spread = self._count * self._tokens_squared - self._tokens * self._tokens
        if self._count < _FEW_STEPS or spread <= 1e-9 * self._count * self._tokens_squared:
            return None
        each = (self._count * self._tokens_seconds - self._tokens * self._seconds) / spread
        # More rows never take less: what says so is noise.
        each = max(each, 1e-9)
        return max(0.0, (self._seconds - each * self._tokens) / self._count), each


@dataclass(slots=True)
class EndPace:
    """How often a Generate ends, and so gives its place to another one."""

    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def ended(self, now: float) -> None:
        self._ends.append(now)

    def seconds_for(self, places: int, now: float) -> float:
        """When so many places will probably have come free; a draft token of ours before there were any."""
        if len(self._ends) < 2:
            return _UNKNOWN_SECONDS
        # Up to now, not to the last end: a queue that stands still becomes slower as one looks at it.
        between = (now - self._ends[0]) / len(self._ends)
        return min(max(places * between, _LEAST_SECONDS), _MOST_SECONDS)
