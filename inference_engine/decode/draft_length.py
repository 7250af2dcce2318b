"""Choice of the draft length, from measured acceptance rates and step durations: a draft must pay for its tokens.

    tokens a second with n draft tokens = (others + 1 + r₁ + r₁r₂ + … + r₁…rₙ) ÷ (seconds(tokens + n) + drafting)

rᵢ is the acceptance rate of draft token i, given that those before it were accepted. Step durations are measured by
number of sessions; older ones count less. Other load on the machine slows all steps alike: when plain steps become
slower, the expected durations of the others, measured less often, are scaled by the same factor. Numbers of tokens
between measured ones are interpolated. Beyond the largest measured one the cost is assumed not to rise, so that such a
length is tried and then measured.

    accepted of the last draft       new session   3   7   15
    the next may have                7             7   15  31

A rejected long draft costs a step or two, a short one a part of a step. So a session must earn long drafts by its own
acceptance: that of other sessions predicts little.

Expectations can be wrong for a whole answer. So a session has a balance, in plain steps: a draft costs what its step
takes longer, each accepted draft token is worth a plain step's share, and a draft whose rejection the balance could not
pay is not made. A session that drafts is then slower than one that does not by at most `_CREDIT` steps and `_ALLOWANCE`
of its steps, as far as measured durations are right.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from dataclasses import dataclass, field
from operator import truediv

# The prior acceptance rate, and its weight in drafts: for all sessions together, and for a new session, whose prior is
# the rate of all. A few rejected drafts in a row do not stop drafting; the rate of all sessions changes slowly.
_PRIOR_RATE, _PRIOR_WEIGHT, _LIKE_WEIGHT = 0.6, 2.0, 8.0
_COMMON_MEMORY, _SESSION_MEMORY = 0.99, 0.95  # decay: the weight of a draft when the next one is verified
_STEP_MEMORY = 0.9
_OUTLIER = 3.0  # a duration is capped at this many times the expected one
# Few lengths, so that the step duration of each is soon measured, and kernels run with few shapes.
_LENGTHS = (1, 2, 4, 7, 15, 31)
_LEAST_GAIN = 1.05  # least expected speedup of a draft
_UNEARNED = 7  # the longest draft of a session without accepted draft tokens
# Of a balance, in plain steps: at the beginning, what each step adds, and the most of it.
_CREDIT, _ALLOWANCE, _MOST_BALANCE = 2.0, 0.01, 8.0


@dataclass(slots=True)
class Acceptance:
    """Acceptance rates of draft tokens, by their place in the draft.

    like: the rates of all sessions, which are the prior of a session's; None for those of all sessions themselves.
    """

    like: Acceptance | None = None
    _right: list[float] = field(default_factory=list)
    _tried: list[float] = field(default_factory=list)
    _last_right: int = 0

    @property
    def earned(self) -> int:
        """Most tokens of the next draft, given the last one."""
        return max(_UNEARNED, 2 * self._last_right + 1)

    def saw(self, proposed: int, accepted: int) -> None:
        """Record a draft: of `proposed` tokens the first `accepted` were accepted."""
        self._last_right = accepted
        tried = min(proposed, accepted + 1)
        weight, memory = (_PRIOR_WEIGHT, _COMMON_MEMORY) if self.like is None else (_LIKE_WEIGHT, _SESSION_MEMORY)
        while len(self._tried) < tried:
            self._right.append(weight * self.rate(len(self._tried)))
            self._tried.append(weight)
        for place in range(tried):
            self._right[place] = memory * self._right[place] + (place < accepted)
            self._tried[place] = memory * self._tried[place] + 1.0

    def rates(self, count: int) -> list[float]:
        """The rates of the first `count` places."""
        found = list(map(truediv, self._right[:count], self._tried))
        if len(found) < count:
            if self.like is not None:
                return found + self.like.rates(count)[len(found) :]
            found += [found[-1] if found else _PRIOR_RATE] * (count - len(found))
        return found

    def rate(self, place: int) -> float:
        """Acceptance rate of the draft token in `place`, given those before it; an unseen place is like the last."""
        if place < len(self._tried):
            return self._right[place] / self._tried[place]
        if self.like is not None:
            return self.like.rate(place)
        return self.rate(len(self._tried) - 1) if self._tried else _PRIOR_RATE


@dataclass(slots=True)
class Balance:
    """What drafts of one session may still lose, in plain steps."""

    steps: float = _CREDIT

    def stepped(self) -> None:
        """A step was decided on, with or without a draft."""
        self.steps = min(self.steps + _ALLOWANCE, _MOST_BALANCE)

    def pay(self, cost: float) -> None:
        """A draft was made whose step takes `cost` plain steps longer."""
        self.steps -= cost

    def won(self, accepted: int, sessions: int) -> None:
        """Draft tokens were accepted; a plain step would have given `sessions` tokens."""
        self.steps = min(self.steps + accepted / sessions, _MOST_BALANCE)


@dataclass(slots=True)
class RecentSeconds:
    """A moving average of durations. The first one is not counted: it includes preparing kernels and memory."""

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
    """Durations of steps, by their number of tokens."""

    _by_tokens: dict[int, RecentSeconds] = field(default_factory=dict)
    _measured: list[int] = field(default_factory=list)  # numbers of tokens whose duration is known, ascending

    def saw(self, tokens: int, seconds: float, *, is_plain: bool) -> None:
        """Record that a step of `tokens` took `seconds`. is_plain: it verified no draft token; the durations of the
        others are scaled with it."""
        recent = self._by_tokens.setdefault(tokens, RecentSeconds())
        before = recent.seconds
        recent.saw(seconds)
        if before is None and recent.seconds is not None:
            insort(self._measured, tokens)
        if is_plain and before and recent.seconds:
            for other in self._by_tokens.values():
                if other is not recent and other.seconds is not None:
                    other.seconds *= recent.seconds / before

    def expected(self, tokens: int) -> float | None:
        """Seconds of a step of `tokens`, interpolated between measured numbers; None before any is measured."""
        known = self._measured
        if not known:
            return None
        after = bisect_right(known, tokens)
        if not after or after == len(known) or known[after - 1] == tokens:
            return self._by_tokens[known[max(0, after - 1)]].seconds
        below, above = known[after - 1], known[after]
        share = (tokens - below) / (above - below)
        shorter, longer = self._by_tokens[below].seconds, self._by_tokens[above].seconds
        assert shorter is not None
        assert longer is not None
        return (1 - share) * shorter + share * longer

    def cost(self, sessions: int, drafted: int, draft_seconds: float, plain: float) -> float:
        """How much longer a step of `sessions` takes with a draft of so many tokens, in plain steps of `plain` seconds.

        Measurements of different times may say that more tokens are faster; they never are.
        """
        seconds = self.expected(sessions + drafted)
        assert seconds is not None, "a plain step was measured"
        return (max(plain, seconds) + draft_seconds) / plain - 1.0


def best_length(
    acceptance: Acceptance,
    step: StepSeconds,
    *,
    sessions: int,
    longest: int,
    draft_seconds: float,
    most_cost: float = math.inf,
) -> int:
    """The number of draft tokens, at most `longest`, with the most tokens a second; 0: a plain step has, or no plain
    step was measured.

    sessions: how many decode in the step, one token each besides draft tokens. draft_seconds: the cost of drafting.
    most_cost: what a draft may cost if it is rejected, in plain steps.
    """
    plain = step.expected(sessions)
    if not plain:
        return 0
    best, best_rate = 0, _LEAST_GAIN * sessions
    tokens, chance = float(sessions), 1.0
    for length, rate in enumerate(acceptance.rates(min(longest, acceptance.earned)), start=1):
        chance *= rate
        tokens += chance
        if length not in _LENGTHS:
            continue
        cost = step.cost(sessions, length, draft_seconds, plain)
        if cost > most_cost:
            break
        if tokens / (1.0 + cost) > best_rate:
            best, best_rate = length, tokens / (1.0 + cost)
    return best


def steps_between(cost_seconds: float, step_seconds: float, share: float) -> int:
    """The interval in steps at which something that costs `cost_seconds` takes at most `share` of the time."""
    return max(1, math.ceil(cost_seconds / (share * step_seconds))) if step_seconds > 0 else 1
