"""Samples of a load: latencies, tokens, refusals, and the numbers that say it in short."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

PERCENTILES = (50, 90, 99)


@dataclass(kw_only=True)
class Samples:
    """Seconds, all of them; a turn's from when it was due."""

    first_token: list[float] = field(default_factory=list)
    first_token_asked: list[float] = field(default_factory=list)  # from the call, which the turn before may delay
    behind: list[float] = field(default_factory=list)  # how long a turn that was due waited for the one before it
    gap: list[float] = field(default_factory=list)
    turn: list[float] = field(default_factory=list)
    refusal: list[float] = field(default_factory=list)  # from the call that was refused
    fork: list[float] = field(default_factory=list)  # until there was one
    late: list[float] = field(default_factory=list)  # how much after its time our own call went out, if it could
    refused: collections.Counter[str] = field(default_factory=collections.Counter)  # by reason
    failed: collections.Counter[str] = field(default_factory=collections.Counter)  # by reason, or status code
    due: int = 0
    finished: int = 0
    # Of finished turns, by the second after the warm-up in which a token came; negative within it.
    tokens_by_second: collections.Counter[int] = field(default_factory=collections.Counter)

    @staticmethod
    def together(several: Sequence[Samples]) -> Samples:
        """Those of clients that played side by side."""
        found = Samples()
        for each in several:
            for spec in fields(Samples):
                setattr(found, spec.name, getattr(found, spec.name) + getattr(each, spec.name))
        return found

    def goodput(self, seconds: float) -> list[float]:
        """Tokens that came in each whole second of the phase after its warm-up, if their turn was finished, ever."""
        return [float(self.tokens_by_second[second]) for second in range(max(1, int(seconds)))]

    def percentiles(self) -> dict[str, dict[str, float]]:
        """In seconds: by what, then by percentile; only of what there was."""
        kinds = {
            "first_token": self.first_token,
            "first_token_asked": self.first_token_asked,
            "behind": self.behind,
            "gap": self.gap,
            "turn": self.turn,
            "refusal": self.refusal,
            "fork": self.fork,
            "late": self.late,
        }
        return {
            name: {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
            for name, values in kinds.items()
            if values
        }

    def facts(self) -> dict[str, Any]:
        return {
            "turns_due": self.due,
            "turns_finished": self.finished,
            "turns_refused": dict(sorted(self.refused.items())),
            "turns_failed": dict(sorted(self.failed.items())),
            "percentiles_seconds": self.percentiles(),
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed. `values` must hold one."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
