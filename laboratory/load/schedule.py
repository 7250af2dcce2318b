"""What agents do and when: fixed before the first call, so that a slow server is not asked less.

    agent   ├ first turn: a long prompt ┤ …think… ├ turn: a tool's result, a short answer ┤ … for dozens of turns

Every turn has its time. A turn whose predecessor is not over by then starts late, and its latency counts from when it
was due: waiting is the server's, too (no coordinated omission; Tene, "How NOT to Measure Latency").
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from inference_engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How agents are. Token counts are medians of what is drawn; they spread by about a factor of two."""

    turns: int = 24
    prompt_tokens: int = 400  # of the first turn
    append_tokens: int = 120  # of the others
    generate_tokens: int = 32
    interval_seconds: float = 8.0  # between the turns of an agent, on average
    fork_share: float = 0.0  # of turns that are tried on a fork first

    def __post_init__(self) -> None:
        for name in ("turns", "prompt_tokens", "append_tokens", "generate_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.interval_seconds < math.inf:
            raise ConfigError(f"interval_seconds must be above 0, got {self.interval_seconds:g}")
        if not 0 <= self.fork_share <= 1:
            raise ConfigError(f"fork_share must be from 0 to 1, got {self.fork_share:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """due_seconds: after the beginning of the phase."""

    due_seconds: float
    append_tokens: int
    generate_tokens: int
    is_forked: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Agent:
    """One session's worth of turns."""

    number: int
    turns: tuple[Turn, ...]


def schedule(shape: Shape, *, agents: int, seconds: float, seed: int) -> Iterator[Agent]:
    """`agents` at any time for `seconds`: one that is done is followed by the next. By slot, each in order of time."""
    for slot in range(agents):
        rng = random.Random(f"{seed} {slot}")
        # Somewhere in its life when the phase begins, so that not all prompts come together.
        due = rng.uniform(0, shape.interval_seconds)
        turns_left = rng.randint(1, shape.turns)
        number = 0
        while due < seconds:
            turns = []
            for index in range(turns_left):
                if due >= seconds:
                    break
                median = shape.append_tokens if index else shape.prompt_tokens
                turns.append(
                    Turn(
                        due_seconds=due,
                        append_tokens=_spread(rng, median),
                        generate_tokens=_spread(rng, shape.generate_tokens),
                        is_forked=rng.random() < shape.fork_share,
                    )
                )
                # At least half the mean, the rest exponential: people and tools take a while, some a long one.
                due += shape.interval_seconds * (0.5 + rng.expovariate(2.0))
            yield Agent(number=slot + number * agents, turns=tuple(turns))
            turns_left = shape.turns
            number += 1


def _spread(rng: random.Random, median: int) -> int:
    return max(1, min(8 * median, round(median * math.exp(rng.gauss(0.0, 0.6)))))
