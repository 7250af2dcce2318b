"""How long a Generate will wait for its first token: the queue is played forward, with what steps take here.

    places    ├ running, until it has said what it was asked for ┤├ the next: of the owner with the fewest running ┤
    prefill   ├ a segment a step beside those who decode, owners in turn ┤

Other owners do not stop asking: one of whose Generates ends, and who has none waiting, is taken to send another one. So
an owner who has its share of the places counts on its own to come free.

Only what others cause counts as waiting. A prompt takes its own time whoever else is there, so an engine without work
refuses nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from inference_engine.scheduler.request import Prediction, Request
from inference_engine.scheduler.step_time import StepPace

_MEMORY = 0.98  # what an ended Generate counts when the next one of its kind has ended
_MOST_OVER_MEAN = 4.0  # what a Generate of another size than any before says, over what they said on average
_LEAST_SHARE = 0.01
_MOST_ENDS = 256  # of Generates that are played, so that it takes milliseconds at most; the wait is at least that long
# Predictions of short waits say little: one below this part of the limit is compared as if it were that long.
_TELLING = 1 / 8
# Waits that are over, and how far their predictions were off: so many, and for so long, or one pause would keep others
# out for ever.
_REMEMBERED, _REMEMBERED_SECONDS = 64, 30.0
_UNKNOWN_LATENESS = 1.25  # until so many are known
_MOST_LATENESS = 4.0
# Steps that were measured first are those that loaded and compiled; of later ones, a pause is none.
_COLD_STEPS = 2
_MOST_OVER_LINE = 4.0
# A wait for the step under way and the next one is never refused, however long steps take: that is no queue.
_FREE_STEPS = 2.0


class Load(NamedTuple):
    """What a Generate still needs: rows to prefill, then tokens. all_tokens: and those that it has generated.

    A tuple, because a prediction makes one for each Generate there is.
    """

    owner: str
    prefill_tokens: int
    tokens: float
    all_tokens: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How many Generates run at the same time, and how much prefill goes along in a step beside them."""

    max_running: int
    max_running_per_owner: int
    max_batch: int
    segment_tokens: int


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is done for others before a Generate has its first token."""

    steps: float
    prefill_tokens: float


def ahead_of(new: Load, running: Sequence[Load], waiting: Sequence[Load], room: Room) -> Ahead:
    """What comes before `new`, which arrives last. running: as they are served, longest unserved first."""
    return _Play(running, waiting, room).until(new)


_NEW, _LATER = 1 << 62, 1 << 63  # in the order of arrival


class _Play:
    """The queue, played forward in steps, as `scheduler/policy.py` would run it."""

    def __init__(self, running: Sequence[Load], waiting: Sequence[Load], room: Room) -> None:
        self._room = room
        self._counts = Counter(load.owner for load in running)
        self._total = len(running)
        # Where more run than fit into a step, a Generate has a token every few steps.
        self._steps_a_token = max(1.0, len(running) / room.max_batch)
        self._prefilled_at = 0.0
        self._prefills: list[tuple[float, float, str]] = []  # when it is done, segments of it, whose it is
        self._ends: list[tuple[float, str, float]] = []  # when, whose, and how many tokens it had
        for load in running:
            self._ends.append(self._end(load, 0.0))
        self._lines: dict[str, deque[tuple[int, Load]]] = {}
        begun: set[str] = set()
        for index, load in enumerate(waiting):
            # Who has none running begins with the first, before all others and wherever it stands: there may be
            # thousands of these owners.
            if load.owner not in begun and not self._counts[load.owner]:
                begun.add(load.owner)
                self._ends.append(self._end(load, 0.0))
                continue
            self._lines.setdefault(load.owner, deque()).append((index, load))
        for owner in begun:
            self._counts[owner] = 1
        self._total += len(begun)
        heapq.heapify(self._ends)
        # Who comes next, by running ones and arrival; entries that are no longer true are passed over.
        self._order: list[tuple[int, int, str]] = []
        for owner in self._lines:
            self._stand_in_line(owner)

    def until(self, new: Load) -> Ahead:
        """`new` arrives now, behind all others of its owner; what is done before its first token."""
        line = self._lines.setdefault(new.owner, deque())
        line.append((_NEW, new))
        if len(line) == 1:
            self._stand_in_line(new.owner)
        now = 0.0
        for _ in range(_MOST_ENDS):
            while (load := self._next()) is not None:
                if load is new:
                    return self._ahead(new, now)
                heapq.heappush(self._ends, self._end(load, now))
                self._counts[load.owner] += 1
                self._total += 1
                self._stand_in_line(load.owner)
            now, owner, tokens = heapq.heappop(self._ends)
            self._counts[owner] -= 1
            self._total -= 1
            line = self._lines.setdefault(owner, deque())
            if not line and owner != new.owner:
                line.append((_LATER, Load(owner, 0, tokens, tokens)))
            self._stand_in_line(owner)
        return self._ahead(new, now)

    def _next(self) -> Load | None:
        """Who begins now, as `policy.admit` says; None if nobody may."""
        while self._order:
            count, index, owner = self._order[0]
            line = self._lines[owner]
            if not line or line[0][0] != index or self._counts[owner] != count:
                heapq.heappop(self._order)
                continue
            most = self._room.max_running_per_owner
            if (count and self._total >= self._room.max_running) or (most and count >= most):
                return None
            heapq.heappop(self._order)
            return line.popleft()[1]
        return None

    def _stand_in_line(self, owner: str) -> None:
        if line := self._lines.get(owner):
            heapq.heappush(self._order, (self._counts[owner], line[0][0], owner))

    def _end(self, load: Load, now: float) -> tuple[float, str, float]:
        """It begins now. When it ends, for `_ends`."""
        over, tokens = now, load.tokens
        if load.prefill_tokens:
            segments = load.prefill_tokens / self._room.segment_tokens
            self._prefilled_at = max(now, self._prefilled_at) + segments
            self._prefills.append((self._prefilled_at, segments, load.owner))
            # The last piece gives the first token.
            over, tokens = max(now + 1, self._prefilled_at), load.tokens - 1
        end = over + tokens * self._steps_a_token if tokens > 0 else over
        return end, load.owner, load.all_tokens

    def _ahead(self, new: Load, now: float) -> Ahead:
        """`new` begins now. Owners take turns with their prefills, and so do an owner's Generates."""
        left: dict[str, list[float]] = {}
        done = 0.0
        for over, segments, owner in self._prefills:
            if over <= now:
                done += segments
                continue
            rest = min(over - now, segments)
            done += segments - rest
            left.setdefault(owner, []).append(rest)
        own = new.prefill_tokens / self._room.segment_tokens
        beside = sum(min(rest, own) for rest in left.pop(new.owner, ()))
        between = sum(min(sum(rests), own + beside) for rests in left.values())
        return Ahead(
            steps=now + beside + between + (1.0 if self._total else 0.0),  # the step under way
            prefill_tokens=(done + beside + between) * self._room.segment_tokens,
        )


@dataclass(slots=True)
class Lengths:
    """How many tokens Generates say of those they are asked for, by how many that are: in powers of two."""

    _by_size: dict[int, tuple[float, float]] = field(default_factory=dict)  # asked, said
    _count: float = 0.0
    _generated: float = 0.0

    def saw(self, asked: int, generated: int) -> None:
        before = self._by_size.get(asked.bit_length(), (0.0, 0.0))
        self._by_size[asked.bit_length()] = (_MEMORY * before[0] + asked, _MEMORY * before[1] + generated)
        self._count, self._generated = _MEMORY * self._count + 1, _MEMORY * self._generated + generated

    def share(self, asked: int) -> float:
        """Of so many tokens, in (0, 1]: many Generates stop before."""
        if (seen := self._by_size.get(asked.bit_length())) is not None:
            return max(_LEAST_SHARE, seen[1] / seen[0])
        if not self._count:
            return 1.0
        return min(1.0, _MOST_OVER_MEAN * max(1.0, self._generated / self._count) / asked)


@dataclass(slots=True)
class Foresight:
    """Predicts waits from what steps took, what Generates said of what they were asked for, and how right it was.

    Not thread-safe: the scheduler's lock is held.
    """

    room: Room
    limit_seconds: float
    _pace: StepPace = field(default_factory=StepPace)
    _steps: int = 0
    _lengths: Lengths = field(default_factory=Lengths)
    _lateness: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))  # when, ratio

    def stepped(self, tokens: int, seconds: float) -> None:
        """A step of so many rows began so long before the next one."""
        self._steps += 1
        if self._steps <= _COLD_STEPS:
            return
        expected = self._pace.seconds(tokens)
        self._pace.saw(tokens, min(seconds, _MOST_OVER_LINE * expected) if expected else seconds)

    def ended(self, request: Request) -> None:
        """It gave its place back."""
        if request.forced is None:
            self._lengths.saw(request.params.max_tokens, request.generated)

    def answered(self, request: Request, now: float) -> None:
        """It has its first token now."""
        if (predicted := request.predicted) is not None:
            waited = now - request.accepted_at - predicted.own
            self._lateness.append((now, waited / max(predicted.wait, _TELLING * self.limit_seconds)))

    def predict(self, new: Request, running: Iterable[Request], waiting: Iterable[Request]) -> Prediction | None:
        """What `new` would wait if it came now and nobody after it; None until a few steps were measured."""
        if self._pace.mean_seconds is None:
            return None
        (load,), ours = self._loads([new]), self._loads(running)
        found = ahead_of(load, ours, self._loads(waiting), self.room)
        step_seconds = self._step_seconds(min(len(ours), self.room.max_batch))
        token_seconds = self._pace.token_seconds
        own_steps = ceil(load.prefill_tokens / self.room.segment_tokens)
        return Prediction(
            wait=found.steps * step_seconds + found.prefill_tokens * token_seconds,
            own=own_steps * step_seconds + load.prefill_tokens * token_seconds,
        )

    def longest_seconds(self, running: int) -> float:
        """What one may wait beside so many: the limit, or two steps where that is more."""
        return max(self.limit_seconds, _FREE_STEPS * self._step_seconds(min(running, self.room.max_batch)))

    def lateness(self, now: float) -> float:
        """The longest of the last waits over its prediction, at least 1: others came who had an earlier turn.

        It is what keeps all but one in a hundred in time; a place stays filled, as a shorter queue fills it too.
        """
        while self._lateness and now - self._lateness[0][0] > _REMEMBERED_SECONDS:
            self._lateness.popleft()
        least = 1.0 if len(self._lateness) == _REMEMBERED else _UNKNOWN_LATENESS
        return min(max((least, *(ratio for _, ratio in self._lateness))), _MOST_LATENESS)

    def _step_seconds(self, tokens: int) -> float:
        found = self._pace.seconds(tokens)
        return found if found is not None else self._pace.mean_seconds or 0.0

    def _loads(self, requests: Iterable[Request]) -> list[Load]:
        shares: dict[int, float] = {}  # many ask for as many
        loads = []
        for request in requests:
            asked = request.params.max_tokens
            if (share := shares.get(asked)) is None:
                share = shares[asked] = self._lengths.share(asked)
            loads.append(_load(request, share))
        return loads


def _load(request: Request, share_generated: float) -> Load:
    forced = 0 if request.forced is None or request.has_recorded_forced else len(request.forced.token_ids)
    tokens = forced
    if request.is_prefilling:
        tokens += max(1, request.prefill_tokens - request.prefilled_tokens)
    asked = request.params.max_tokens
    all_tokens = 1.0 if request.forced is not None else max(1.0, asked * share_generated)
    left = max(1.0, (asked - request.generated) * share_generated) if request.generated else all_tokens
    return Load(request.session.owner, tokens, min(left, all_tokens), all_tokens)
