"""How long a draft should be, from what drafts gave and what steps took: a draft has to pay for its rows.

    tokens a second with n draft tokens = (others + 1 + r₁ + r₁r₂ + … + r₁…rₙ) ÷ (seconds(rows + n) + drafting)

rᵢ is how often the draft token in place i was right when those before it were. Steps are measured as they come, in
groups of as many sessions; older ones count less. What a machine is busy with meanwhile slows all steps alike: when
plain ones take longer, the others, measured seldom, count as longer by as much. Numbers of rows between known ones lie
on the line between them; beyond the largest known one they are taken to cost no more, so they are tried, and then
known.

    last draft: right draft tokens   new session   3   7   15
    the next may have           7             7   15  31

A long draft that is wrong costs a step or two, a short one a part of one. So a session has to earn long ones with its
own words, whatever others showed: how they write says little of how this one does.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

# What is expected of a first draft, and for how many drafts that counts: of anybody's ever, and of a session's, of
# which others tell more. A few wrong ones in a row are no reason to stop; what all give changes slowly.
_PRIOR_RATE, _PRIOR_WEIGHT, _LIKE_WEIGHT = 0.6, 2.0, 8.0
_COMMON_MEMORY, _SESSION_MEMORY = 0.99, 0.95  # what a draft counts when the next one has come
_STEP_MEMORY = 0.9
_OUTLIER = 3.0  # a step that took this many times what was expected counts no more than that
# Few lengths, so that what a step of each takes is soon known, and kernels meet few shapes.
_LENGTHS = (1, 2, 4, 7, 15, 31)
_LEAST_GAIN = 1.02  # a draft that promises less is not worth its risk
_UNEARNED = 7  # the longest draft that needs no right draft tokens before it


@dataclass(slots=True)
class Acceptance:
    """How often draft tokens are right, by their place in the draft.

    A session's begins `like` that of all sessions, which has none to be like.
    """

    like: Acceptance | None = None
    _right: list[float] = field(default_factory=list)
    _tried: list[float] = field(default_factory=list)
    _last_right: int = 0

    @property
    def earned(self) -> int:
        """How long a draft may be after the last one."""
        return max(_UNEARNED, 2 * self._last_right + 1)

    def saw(self, proposed: int, accepted: int) -> None:
        """A draft of `proposed` draft tokens had its first `accepted` right."""
        self._last_right = accepted
        tried = min(proposed, accepted + 1)
        weight, memory = (_PRIOR_WEIGHT, _COMMON_MEMORY) if self.like is None else (_LIKE_WEIGHT, _SESSION_MEMORY)
        while len(self._tried) < tried:
            self._right.append(weight * self.rate(len(self._tried)))
            self._tried.append(weight)
        for place in range(tried):
            self._right[place] = memory * self._right[place] + (place < accepted)
            self._tried[place] = memory * self._tried[place] + 1.0

    def rate(self, place: int) -> float:
        """How often the draft token in `place` is right if those before it are; an unseen place is like the last."""
        if place < len(self._tried):
            return self._right[place] / self._tried[place]
        if self.like is not None:
            return self.like.rate(place)
        return self.rate(len(self._tried) - 1) if self._tried else _PRIOR_RATE


@dataclass(slots=True)
class RecentSeconds:
    """What something takes, as it was lately. The first time does not count: it prepares kernels and memory."""

    seconds: float | None = None
    _is_warm: bool = False

    def saw(self, seconds: float) -> None:
        if not self._is_warm:
            self._is_warm = True
        elif self.seconds is None:
            self.seconds = seconds
        else:
            known = self.seconds
            self.seconds = _STEP_MEMORY * known + (1 - _STEP_MEMORY) * min(seconds, _OUTLIER * known)


@dataclass(slots=True)
class StepSeconds:
    """What steps took, by their rows."""

    _by_tokens: dict[int, RecentSeconds] = field(default_factory=dict)

    def saw(self, tokens: int, seconds: float, *, is_plain: bool) -> None:
        """A step of `tokens` took so long. is_plain: it verified no draft token; the others keep their ratios to it."""
        recent = self._by_tokens.setdefault(tokens, RecentSeconds())
        before = recent.seconds
        recent.saw(seconds)
        if is_plain and before and recent.seconds:
            for other in self._by_tokens.values():
                if other is not recent and other.seconds is not None:
                    other.seconds *= recent.seconds / before

    def expected(self, tokens: int) -> float | None:
        """Seconds of a step of `tokens`; between known numbers of rows, on the line; None before any is known."""
        known = sorted(count for count, recent in self._by_tokens.items() if recent.seconds is not None)
        if not known:
            return None
        after = bisect_right(known, tokens)
        if not after or after == len(known) or known[after - 1] == tokens:
            return self._known(known[max(0, after - 1)])
        below, above = known[after - 1], known[after]
        share = (tokens - below) / (above - below)
        return (1 - share) * self._known(below) + share * self._known(above)

    def _known(self, tokens: int) -> float:
        seconds = self._by_tokens[tokens].seconds
        assert seconds is not None
        return seconds


def best_length(acceptance: Acceptance, step: StepSeconds, *, sessions: int, longest: int, draft_seconds: float) -> int:
    """How many draft tokens give the most tokens a second, at most `longest`; 0: a plain step does, or is not known
    yet.

    sessions: how many decode in the step, one row each beside the draft tokens. draft_seconds: what a draft costs.
    """
    plain = step.expected(sessions)
    if not plain:
        return 0
    best, best_rate = 0, _LEAST_GAIN * sessions / plain
    tokens, chance = float(sessions), 1.0
    for length in range(1, min(longest, acceptance.earned) + 1):
        chance *= acceptance.rate(length - 1)
        tokens += chance
        if length not in _LENGTHS:
            continue
        seconds = step.expected(sessions + length)
        assert seconds is not None
        # What was measured at another time may say that more rows are faster; they never are.
        seconds = max(plain, seconds) + draft_seconds
        if tokens / seconds > best_rate:
            best, best_rate = length, tokens / seconds
    return best


def steps_between(cost_seconds: float, step_seconds: float, share: float) -> int:
    """So many steps apart, something that costs `cost_seconds` takes at most `share` of the time."""
    return max(1, math.ceil(cost_seconds / (share * step_seconds))) if step_seconds > 0 else 1
