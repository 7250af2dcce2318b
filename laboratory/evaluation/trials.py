"""Counted trials: how sure a share of hits is, and how two strategies differ on the same prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from inference_engine.errors import KakeyaError

_Z95 = 1.959963984540054  # two-sided 95 % of the normal distribution


class EvaluationVoid(KakeyaError):
    """A control did not behave as it must: whatever the run counted says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """Trials by which of two were right: a baseline and another, asked the same."""

    both: int
    only_baseline: int
    only_other: int
    neither: int

    @property
    def discordant(self) -> int:
        """Trials that one of them got right and the other wrong."""
        return self.only_baseline + self.only_other

    @property
    def p_value(self) -> float:
        """McNemar's exact test: how likely so lopsided a split of the discordant is if neither is better."""
        count, fewer = self.discordant, min(self.only_baseline, self.only_other)
        tail = sum(math.comb(count, index) for index in range(fewer + 1))
        return min(1.0, 2.0 * tail * 0.5**count)


def pair(baseline: Sequence[bool], other: Sequence[bool]) -> Paired:
    """Count trial by trial; both were asked the same, in the same order."""
    pairs = list(zip(baseline, other, strict=True))
    return Paired(
        both=pairs.count((True, True)),
        only_baseline=pairs.count((True, False)),
        only_other=pairs.count((False, True)),
        neither=pairs.count((False, False)),
    )


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of the share of hits. Unlike the plain normal one, it has width at 0 and at all.

    Source: Wilson, Journal of the American Statistical Association 22, 1927.
    """
    assert 0 <= hits <= trials and trials, f"{hits} hits of {trials} trials"
    share, z2 = hits / trials, _Z95**2
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z95 / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    # At the ends the interval touches 0 and 1 exactly; rounding must not carry it past the share itself.
    return (0.0 if hits == 0 else middle - half), (1.0 if hits == trials else middle + half)
