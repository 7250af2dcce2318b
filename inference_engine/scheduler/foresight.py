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

from inference_engine.scheduler.pace import StepPace
from inference_engine.scheduler.request import Prediction, Request

_MEMORY = 0.98  # what an ended Generate counts when the next one has ended
_LEAST_SHARE = 0.01
_MOST_ENDS = 256  # of Generates that are played, so that it takes milliseconds at most; the wait is at least that long
# A wait is told by its size: those that were predicted to be shorter than this part of the limit say nothing about it.
_TELLING = 1 / 8
_REMEMBERED = 64  # waits that are over, and how far their predictions were off
_UNKNOWN_LATENESS = 1.25  # until so many are known
_MOST_LATENESS = 4.0


@dataclass(frozen=True, slots=True)
class Load:
    """What a Generate still needs: rows to prefill, then tokens. all_tokens: and those that it has generated."""

    owner: str
    prefill_rows: int
    tokens: float
    all_tokens: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How many Generates run at the same time, and how much prefill goes along in a step beside them."""

    max_running: int
    max_running_per_owner: int
    max_batch: int
    segment_rows: int


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is done for others before a Generate has its first token."""

    steps: float
    prefill_rows: float


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
            self._run(load, 0.0)
        self._lines: dict[str, deque[tuple[int, Load]]] = {}
        for index, load in enumerate(waiting):
            self._lines.setdefault(load.owner, deque()).append((index, load))
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
                self._run(load, now)
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

    def _run(self, load: Load, now: float) -> None:
        over, tokens = now, load.tokens
        if load.prefill_rows:
            segments = load.prefill_rows / self._room.segment_rows
            self._prefilled_at = max(self._prefilled_at, now) + segments
            self._prefills.append((self._prefilled_at, segments, load.owner))
            over, tokens = max(self._prefilled_at, now + 1), load.tokens - 1  # the last piece gives the first token
        end = over + max(0.0, tokens) * self._steps_a_token
        heapq.heappush(self._ends, (end, load.owner, load.all_tokens))

    def _ahead(self, new: Load, now: float) -> Ahead:
        """`new` begins now. Owners take turns with their prefills, and so do an owner's Generates."""
        left: dict[str, list[float]] = {}
        done = 0.0
        for over, segments, owner in self._prefills:
            rest = min(segments, max(0.0, over - now))
            done += segments - rest
            if rest:
                left.setdefault(owner, []).append(rest)
        own = new.prefill_rows / self._room.segment_rows
        beside = sum(min(rest, own) for rest in left.pop(new.owner, ()))
        between = sum(min(sum(rests), own + beside) for rests in left.values())
        return Ahead(
            steps=now + beside + between + (1.0 if self._total else 0.0),  # the step under way
            prefill_rows=(done + beside + between) * self._room.segment_rows,
        )


@dataclass(slots=True)
class Foresight:
    """Predicts waits from what steps took, what Generates said of what they were asked for, and how right it was.

    Not thread-safe: the scheduler's lock is held.
    """

    room: Room
    limit_seconds: float
    _pace: StepPace = field(default_factory=StepPace)
    _asked: float = 0.0
    _said: float = 0.0
    _lateness: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def stepped(self, rows: int, seconds: float) -> None:
        """A step of so many rows began so long before the next one."""
        self._pace.saw(rows, seconds)

    def ended(self, request: Request) -> None:
        """It gave its place back."""
        if request.forced is None:
            self._asked = _MEMORY * self._asked + request.params.max_tokens
            self._said = _MEMORY * self._said + request.generated

    def answered(self, request: Request, now: float) -> None:
        """It has its first token now."""
        predicted = request.predicted
        if predicted is not None and predicted.wait > _TELLING * self.limit_seconds:
            self._lateness.append((now - request.accepted_at - predicted.own) / predicted.wait)

    def predict(self, new: Request, running: Iterable[Request], waiting: Iterable[Request]) -> Prediction | None:
        """What `new` would wait if it came now and nobody after it; None until a few steps were measured."""
        share = self.share_said
        load = _load(new, share)
        ours = [_load(request, share) for request in running]
        found = ahead_of(load, ours, [_load(request, share) for request in waiting], self.room)
        beside = min(len(ours), self.room.max_batch)
        step_seconds = self._pace.seconds(beside) or self._pace.mean_seconds
        if step_seconds is None:
            return None
        row_seconds = self._pace.row_seconds
        own_steps = ceil(load.prefill_rows / self.room.segment_rows)
        return Prediction(
            wait=found.steps * step_seconds + found.prefill_rows * row_seconds,
            own=own_steps * step_seconds + load.prefill_rows * row_seconds,
        )

    @property
    def share_said(self) -> float:
        """Tokens that Generates gave, of those that they were asked for: many stop before."""
        return max(_LEAST_SHARE, self._said / self._asked) if self._asked else 1.0

    @property
    def lateness(self) -> float:
        """The longest of the last waits over its prediction, at least 1: others came who had an earlier turn.

        It is what keeps all but one in a hundred in time; a place stays filled, as a shorter queue fills it too.
        """
        least = 1.0 if len(self._lateness) == _REMEMBERED else _UNKNOWN_LATENESS
        return min(max((least, *self._lateness)), _MOST_LATENESS)


def _load(request: Request, share_said: float) -> Load:
    forced = 0 if request.forced is None or request.has_recorded_forced else len(request.forced.token_ids)
    rows = forced
    if request.is_prefilling:
        rows += max(1, request.prefill_tokens - request.prefilled_tokens)
    all_tokens = 1.0 if request.forced is not None else max(1.0, request.params.max_tokens * share_said)
    left = max(1.0, (request.params.max_tokens - request.generated) * share_said)
    return Load(request.session.owner, rows, min(left, all_tokens), all_tokens)
