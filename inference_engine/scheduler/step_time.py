"""Measured durations: of a step's parts, of a step by its tokens, of one with prefill, of the wait for a place."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from inference_engine.metrics import STEP_PARTS, EngineMetrics

_MEMORY = 0.98  # decay: the weight of a step when the next one was measured
_FEW_STEPS = 4.0
_LEAST_SECONDS, _MOST_SECONDS = 0.05, 60.0
_UNKNOWN_SECONDS = 1.0
# A stop takes effect between steps that others need: within half a second, also where the machine has become twice as
# busy since the last step.
CHUNK_SECONDS = 0.25
# But where a step of single tokens takes long, so many times that, or weights are read for little.
_TIMES_DECODING = 2.0
_FIRST_CHUNK_TOKENS = 64
FORGETTING = 1.05  # by how much the shortest step that decodes counts as longer at each later one


class StepTimer:
    """Splits the time of a step into disjoint parts. Engine's thread.

    On a CUDA device the host continues while the model runs: `forward` is then the time of the launches, and `sample`
    includes the rest.
    """

    def __init__(self, metrics: EngineMetrics, clock: Callable[[], float]) -> None:
        self._seconds = metrics.step_seconds
        self._seconds_of = metrics.seconds_of_part
        self._clock = clock
        self._at = 0.0
        self._parts = dict.fromkeys(STEP_PARTS, 0.0)

    def begin(self) -> float:
        """Begin a step; one that did not end is discarded. Returns the time."""
        self._parts = dict.fromkeys(STEP_PARTS, 0.0)
        self._at = self._clock()
        return self._at

    def lap(self, part: str) -> None:
        """Count the time since the last call as `part`, one of STEP_PARTS."""
        now = self._clock()
        self._parts[part] += now - self._at
        self._at = now

    def end(self, part: str) -> None:
        """As `lap`, at the end of the step, which is noted in the metrics."""
        parts = self._parts
        parts[part] += self._clock() - self._at
        self._seconds.note(sum(parts.values()))
        for name, seconds in parts.items():
            self._seconds_of[name].note(seconds)


@dataclass(slots=True)
class StepPace:
    """A linear fit of step durations, seconds = fixed + tokens · each; older steps count less."""

    _count: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _tokens_squared: float = 0.0
    _tokens_seconds: float = 0.0

    def saw(self, tokens: int, seconds: float) -> None:
        """Record that a step of `tokens` took `seconds`."""
        self._count = _MEMORY * self._count + 1
        self._tokens = _MEMORY * self._tokens + tokens
        self._seconds = _MEMORY * self._seconds + seconds
        self._tokens_squared = _MEMORY * self._tokens_squared + tokens * tokens
        self._tokens_seconds = _MEMORY * self._tokens_seconds + tokens * seconds

    def seconds(self, tokens: int) -> float | None:
        """Expected duration of a step of `tokens`; None before a few steps of different sizes were measured."""
        line = self._line()
        return None if line is None else line[0] + tokens * line[1]

    @property
    def mean_seconds(self) -> float | None:
        """Mean duration of a step; None before a few were measured."""
        return None if self._count < _FEW_STEPS - 0.5 else self._seconds / self._count

    @property
    def token_seconds(self) -> float:
        """What another token adds to a step; 0 while that is not known."""
        line = self._line()
        return 0.0 if line is None else line[1]

    def tokens_within(self, seconds: float) -> int | None:
        """Most tokens of a step of `seconds`, 0 if even an empty one takes longer; None as in `seconds`."""
        line = self._line()
        return None if line is None else max(0, math.floor((seconds - line[0]) / line[1]))

    def _line(self) -> tuple[float, float] | None:
        spread = self._count * self._tokens_squared - self._tokens * self._tokens
        if self._count < _FEW_STEPS or spread <= 1e-9 * self._count * self._tokens_squared:
            return None
        each = (self._count * self._tokens_seconds - self._tokens * self._seconds) / spread
        # More tokens never take less time: a negative slope is noise.
        each = max(each, 1e-9)
        return max(0.0, (self._seconds - each * self._tokens) / self._count), each


@dataclass(slots=True)
class ChunkPace:
    """How many tokens a step with a chunk of prefill may have to take `CHUNK_SECONDS`, by the last such step.

    A step that took too long says at once how many the next may have. After shorter ones the number doubles, so that a
    first step that loads weights, or a pause, costs a few short chunks.
    """

    least_tokens: int
    tokens: int = _FIRST_CHUNK_TOKENS  # none decodes yet that would wait for them
    # Of the shortest step that decodes; 0: none was seen. No estimate from steps with prefill: it would grow with what
    # is allowed here, and allow more.
    decoding_seconds: float = 0.0

    def saw(self, tokens: int, seconds: float) -> None:
        """Record a step with prefill."""
        most = max(CHUNK_SECONDS, _TIMES_DECODING * self.decoding_seconds)
        # At least, if the step was short: the part that does not depend on its tokens counts as theirs.
        fitting = math.floor(tokens * most / max(seconds, 1e-9))
        wanted = fitting if seconds > most else max(self.tokens, min(fitting, 2 * self.tokens))
        self.tokens = max(self.least_tokens, wanted)


@dataclass(slots=True)
class EndPace:
    """How often a Generate ends and frees its place."""

    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def ended(self, now: float) -> None:
        self._ends.append(now)

    def seconds_for(self, places: int, now: float) -> float:
        """Expected time until `places` places are free; a fixed estimate before two Generates have ended."""
        if len(self._ends) < 2:
            return _UNKNOWN_SECONDS
        # Up to now, not to the last end: the estimate grows while no Generate ends.
        between = (now - self._ends[0]) / len(self._ends)
        return min(max(places * between, _LEAST_SECONDS), _MOST_SECONDS)
