"""Predicted time to first token (TTFT): the queue is simulated with the measured duration of steps.

    places    ├ running, until all its tokens are generated ┤├ the next: of the owner with the fewest running ┤
    prefill   ├ one segment per step beside decoding requests, owners in turn ┤

Other owners are assumed to keep sending: when a Generate of an owner ends and none of its own is waiting, another one
is assumed to arrive. So an owner that has its share of the places waits for one of its own to end.

A Generate is expected to use as much of its `max_tokens` as earlier ones of its owner did, once there were some.

Only work for other requests counts as waiting, not the prefill of the request itself. Against the limit counts the part
of it that is for other owners, the wait less what it would be if they had no Generates, and of the rest no more than
that. It is 0 for an owner whose own Generates are all that waits, however many they are, and the whole wait between
owners that ask for as much.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from inference_engine.scheduler.request import Prediction, Request
from inference_engine.scheduler.step_time import StepPace

_MEMORY = 0.98  # decay: the weight of an ended Generate when the next one of its kind has ended
_MOST_OVER_MEAN = 4.0  # most tokens assumed for a Generate of a new size, over the mean of many before
# What was expected before an owner's first Generate counts as this many before it: one that is short promises nothing.
_PRIOR = 2.0
_LEAST_SHARE = 0.01
MOST_OWNERS = 1024  # whose lengths are remembered
_MOST_PLAYS = 64  # owners whose predictions are kept until the queue changes
MOST_ENDS = 256  # simulated ends of Generates: bounds the time of a prediction to milliseconds, a lower bound then
# Predictions of short waits are imprecise: one below this part of the limit is compared as if it were that long.
_TELLING = 1 / 8
# Past waits and the errors of their predictions are remembered up to this number and age: otherwise one pause would
# make the engine refuse requests for ever.
_REMEMBERED, _REMEMBERED_SECONDS = 64, 30.0
_UNKNOWN_LATENESS = 1.25  # at least, until that many are known
_MOST_LATENESS = 4.0
# The first steps include loading and compiling, so they are not measured. A later step that takes far longer than
# expected was a pause, and is capped.
_COLD_STEPS = 2
_MOST_OVER_LINE = 4.0
# Waiting for the current step and the next one is never refused, however long steps with a segment of prefill take:
# that is no queue.
_FREE_STEPS = 2.0


class Load(NamedTuple):
    """Work that a Generate still needs: tokens to prefill, then tokens to decode. all_tokens: decoded ones included.

    A tuple, because a prediction makes one for each open Generate.
    """

    owner: str
    prefill_tokens: int
    tokens: float
    all_tokens: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How many Generates run at the same time, and how much prefill a step takes beside them."""

    max_running: int
    max_running_per_owner: int
    max_batch: int
    segment_tokens: int


@dataclass(frozen=True, slots=True)
class Ahead:
    """Work for other requests before a Generate has its first token."""

    steps: float
    prefill_tokens: float


_NEW = 1 << 62  # in the order of arrival; those that come later have greater numbers


class QueuePlay:
    """A simulation of the queue in steps, under the rules of `scheduler/policy.py`, for the next Generate of an owner.

    Time 0 is the beginning of the step under way. Nothing begins before its end. At the end of a step all Generates
    that end with it give their places back; then those that wait begin.

    running: in the order they are served, longest unserved first. most_ends: where the simulation is cut short.
    """

    def __init__(
        self, owner: str, running: Sequence[Load], waiting: Sequence[Load], room: Room, most_ends: int = MOST_ENDS
    ) -> None:
        self._owner = owner
        self._room = room
        self._most_ends = most_ends
        self._new_begins: float | None = None
        self._counts = Counter(load.owner for load in running)
        self._total = len(running)
        # If more Generates run than fit into a step, each gets a token every few steps.
        self._steps_a_token = max(1.0, len(running) / room.max_batch)
        self._prefilled_at = 0.0
        self._prefills: list[tuple[float, float, str]] = []  # when it is done, its segments, its owner
        # When a Generate ends, its owner, and how many tokens it had.
        self._ends = [self._end(load, 0.0) for load in running]
        heapq.heapify(self._ends)
        self._now = 1.0 if running else 0.0
        self._ended = 0
        self._own_ended = 0  # of them, the owner's own
        self._later = _NEW
        ended = self._end_all()
        self._lines: dict[str, deque[tuple[int, Load]]] = {}
        begun: set[str] = set()
        for index, load in enumerate(waiting):
            # An owner with none running begins at once, wherever its request is in the queue. Handled here, without
            # the heap, since there may be thousands of such owners.
            if load.owner not in begun and not self._counts.get(load.owner):
                begun.add(load.owner)
                self._ends.append(self._end(load, self._now))
                continue
            self._lines.setdefault(load.owner, deque()).append((index, load))
        for each in begun:
            self._counts[each] = 1
        self._total += len(begun)
        heapq.heapify(self._ends)
        # Which owner comes next, by number of running Generates and arrival; outdated items are skipped.
        self._order: list[tuple[int, int, str]] = []
        for each in self._lines:
            self._stand_in_line(each)
        self._ask_again(ended, begun)

    def until(self, new: Load) -> Ahead:
        """`new` arrives now, behind all others of its owner. Returns the work before its first token.

        It may be called again for another one, instead of the one before.
        """
        return self._ahead(new, self._begins(new))

    def own_ends_until(self, new: Load) -> int:
        """How many of the owner's own have ended when `new` begins, if the simulation is cut short there; else the most
        that are simulated."""
        self._begins(new)
        return self._own_ended if self._ended >= self._most_ends else MOST_ENDS

    def _begins(self, new: Load) -> float:
        if self._new_begins is None:
            self._new_begins = self._played_until(new)
        return self._new_begins

    def _played_until(self, new: Load) -> float:
        """When `new` begins."""
        line = self._lines.setdefault(self._owner, deque())
        line.append((_NEW, new))
        if len(line) == 1:
            self._stand_in_line(self._owner)
        while True:
            while (load := self._next()) is not None:
                if load is new:
                    return self._now
                heapq.heappush(self._ends, self._end(load, self._now))
                self._counts[load.owner] += 1
                self._total += 1
                self._stand_in_line(load.owner)
            if self._ended >= self._most_ends:
                return self._now
            self._now = self._ends[0][0]
            self._ask_again(self._end_all())

    def _next(self) -> Load | None:
        """The Generate that begins now, by the rules of `policy.admit`; None if none may."""
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

    def _end_all(self) -> dict[str, list[float]]:
        """Those that are over by now give their places back, all of them. Returns their tokens by owner."""
        ended: dict[str, list[float]] = {}
        while self._ends and self._ends[0][0] <= self._now:
            _, owner, tokens = heapq.heappop(self._ends)
            self._counts[owner] -= 1
            self._total -= 1
            self._ended += 1
            self._own_ended += owner == self._owner
            ended.setdefault(owner, []).append(tokens)
        return ended

    def _ask_again(self, ended: Mapping[str, Sequence[float]], begun: Collection[str] = ()) -> None:
        """An owner for which fewer wait than have `ended` now sends others. begun: one of each began just now."""
        for owner, each in ended.items():
            line = self._lines.setdefault(owner, deque())
            if owner != self._owner:
                for tokens in each[len(line) + (owner in begun) :]:
                    self._later += 1
                    line.append((self._later, Load(owner, 0, tokens, tokens)))
            self._stand_in_line(owner)

    def _end(self, load: Load, now: float) -> tuple[float, str, float]:
        """`load` begins now. Returns when it ends, as an item of `_ends`."""
        over, tokens = now, load.tokens
        if load.prefill_tokens:
            segments = load.prefill_tokens / self._room.segment_tokens
            self._prefilled_at = max(now, self._prefilled_at) + segments
            self._prefills.append((self._prefilled_at, segments, load.owner))
            # The last chunk gives the first token.
            over, tokens = max(now + 1, self._prefilled_at), load.tokens - 1
        end = over + tokens * self._steps_a_token if tokens > 0 else over
        return end, load.owner, load.all_tokens

    def _ahead(self, new: Load, now: float) -> Ahead:
        """`new` begins now. Owners take turns with their prefills, and so do the Generates of one owner."""
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
        return Ahead(steps=now + beside + between, prefill_tokens=(done + beside + between) * self._room.segment_tokens)


_ANY = 0  # the size of all Generates together, each of which counts as if it had asked for one token


class Used(NamedTuple):
    """What an owner's Generates of one size asked for and generated, and their number. Each fades by `_MEMORY` as the
    next ends. expected: the share that was, before the first.
    """

    asked: float
    generated: float
    number: float
    expected: float


class Others(NamedTuple):
    """Of all owners with Generates of one size: how many they are, their shares together, and all their Generates."""

    owners: int
    shares: float
    number: float


_NONE = Others(0, 0.0, 0.0)


@dataclass(slots=True)
class Lengths:
    """The share of `max_tokens` that Generates use, cancelled ones included, by owner and by `max_tokens` in powers of
    two.

    For an owner whose first of a size it is: the mean of the other owners' shares. Each owner counts once there, and
    nowhere else for others, so that its cancelled Generates do not make others' seem short. Where that mean is longer
    than the owner's own, it counts as `_PRIOR` Generates before the owner's first, and fades like them.
    """

    # By size. The owner whose Generate ended last is at the end.
    _owners: OrderedDict[str, dict[int, Used]] = field(default_factory=OrderedDict)
    _others: dict[int, Others] = field(default_factory=dict)

    def saw(self, owner: str, asked: int, generated: int) -> None:
        expected = self.share(owner, asked)
        sizes = self._owners.setdefault(owner, {})
        self._owners.move_to_end(owner)
        for size, each in ((asked.bit_length(), asked), (_ANY, 1)):
            if (before := sizes.get(size)) is not None:
                self._count(size, before, -1)
            else:
                before = Used(0.0, 0.0, 0.0, expected)
            sizes[size] = Used(
                _MEMORY * before.asked + each,
                _MEMORY * before.generated + generated,
                _MEMORY * before.number + 1,
                before.expected,
            )
            self._count(size, sizes[size], 1)
        if len(self._owners) > MOST_OWNERS:
            for size, used in self._owners.popitem(last=False)[1].items():
                self._count(size, used, -1)

    def share(self, owner: str, asked: int) -> float:
        """The expected share of `asked` tokens, in (0, 1]: many Generates stop early."""
        if (found := self._seen(owner, asked.bit_length()))[1]:
            return max(_LEAST_SHARE, found[0])
        mean, number = self._seen(owner, _ANY)
        # The more Generates there were, the more their mean says of a size that none of them had.
        return _weighed(min(1.0, _MOST_OVER_MEAN * max(1.0, mean) / asked), number, 1.0)

    def _seen(self, owner: str, size: int) -> tuple[float, float]:
        """The share of this owner's Generates, or else of others', and the number of them: 0 for none."""
        if (sizes := self._owners.get(owner)) is not None and (used := sizes.get(size)) is not None:
            return _share(size, used), used.number
        others = self._others.get(size, _NONE)
        return others.shares / (others.owners or 1), others.number

    def _count(self, size: int, used: Used, owners: int) -> None:
        """Take an owner's Generates of a size into what is known of all, 1, or out of it, -1."""
        others = self._others.get(size, _NONE)
        # Exactly nothing is left of those that are forgotten.
        self._others[size] = (
            Others(
                others.owners + owners,
                others.shares + owners * _share(size, used),
                others.number + owners * used.number,
            )
            if others.owners + owners
            else _NONE
        )


def _share(size: int, used: Used) -> float:
    mean = used.generated / used.asked
    # What is longer than was expected is believed at once: others would be promised too much.
    if size == _ANY or mean >= used.expected:
        return mean
    return _weighed(max(_LEAST_SHARE, mean), used.number, used.expected)


def _weighed(seen: float, number: float, expected: float) -> float:
    """The share `seen` of so many Generates, and what was expected before them, which counts as `_PRIOR` and fades.

    The geometric mean: the arithmetic one would take a hundred short Generates to believe what ten of them say.
    """
    before = max(0.0, _PRIOR * (1.0 - (1.0 - _MEMORY) * number))
    return math.exp((number * math.log(seen) + before * math.log(expected)) / (number + before))


@dataclass(slots=True)
class TTFTPredictor:
    """Predicts waits from the duration of steps, the lengths of Generates, and the errors of earlier predictions.

    Not thread-safe: the scheduler's lock is held.
    """

    room: Room
    limit_seconds: float
    _pace: StepPace = field(default_factory=StepPace)
    _steps: int = 0
    _lengths: Lengths = field(default_factory=Lengths)
    # Of the queue as it is now, what runs and what waits, and by owner: under overload most calls are refused and leave
    # it so.
    _queue: tuple[Sequence[Load], Sequence[Load]] | None = None
    _plays: dict[str, tuple[QueuePlay, QueuePlay | None]] = field(
        default_factory=dict
    )  # of all, and of the owner's own alone
    _changes: int = 0
    _lateness: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))  # when, ratio

    def stepped(self, tokens: int, seconds: float) -> None:
        """Record that a step of `tokens` began `seconds` before the next one."""
        self._steps += 1
        if self._steps <= _COLD_STEPS:
            return
        expected = self._pace.seconds(tokens)
        self._pace.saw(tokens, min(seconds, _MOST_OVER_LINE * expected) if expected else seconds)

    def ended(self, request: Request) -> None:
        """It gave its place back."""
        if request.samples:
            self._lengths.saw(request.session.owner, request.params.max_tokens, request.generated)

    def answered(self, request: Request, now: float) -> None:
        """It has its first token now. One that waits for its owner's own, too, is taken whatever is predicted."""
        if (predicted := request.predicted) is not None and predicted.counted >= predicted.wait:
            waited = now - request.accepted_at - predicted.own
            self._lateness.append((now, waited / max(predicted.wait, _TELLING * self.limit_seconds)))

    def predict(
        self, new: Request, running: Collection[Request], waiting: Iterable[Request], *, changes: int
    ) -> Prediction | None:
        """The wait of `new` if it came now and no request after it; None until a few steps were measured.

        changes: how often requests came, went or had tokens so far. While it stays, `running` and `waiting` are taken
        to be as they were for the prediction before.
        """
        if changes != self._changes:
            self._changes = changes
            self._queue = None
            self._plays.clear()
        if self._pace.mean_seconds is None:
            return None
        (load,) = self._loads([new])
        every, own = self._played(load, running, waiting)
        step_seconds = self._step_seconds(min(len(running), self.room.max_batch))
        token_seconds = self._pace.token_seconds

        def seconds(ahead: Ahead) -> float:
            return ahead.steps * step_seconds + ahead.prefill_tokens * token_seconds

        wait = seconds(every)
        own_steps = math.ceil(load.prefill_tokens / self.room.segment_tokens)
        return Prediction(
            wait=wait,
            counted=0.0 if own is None else min(wait, 2 * max(0.0, wait - seconds(own))),
            own=own_steps * step_seconds + load.prefill_tokens * token_seconds,
        )

    def _played(
        self, new: Load, running: Collection[Request], waiting: Iterable[Request]
    ) -> tuple[Ahead, Ahead | None]:
        """The work before `new`, and what it would be if no other owner had any; None: the owner's own Generates are
        all that wait for a first token."""
        if self._queue is None:
            self._queue = self._loads(running), self._loads(waiting)
        if (plays := self._plays.get(new.owner)) is None:
            if len(self._plays) >= _MOST_PLAYS:
                self._plays.clear()
            runs, waits = self._queue
            every, own = QueuePlay(new.owner, runs, waits, self.room), None
            unserved = (*waits, *(load for load in runs if load.prefill_tokens))
            if any(load.owner != new.owner for load in unserved):
                ends = every.own_ends_until(new)
                runs, waits = ([load for load in loads if load.owner == new.owner] for loads in (runs, waits))
                own = QueuePlay(new.owner, runs, waits, self.room, most_ends=ends)
            plays = self._plays[new.owner] = every, own
        every, own = plays
        return every.until(new), None if own is None else own.until(new)

    def longest_seconds(self, running: int, lateness: float) -> float:
        """The longest wait, times `lateness`, allowed beside `running` Generates: the limit, or two steps of them with
        a segment of prefill if that is more."""
        tokens = min(running, self.room.max_batch) + self.room.segment_tokens
        return max(self.limit_seconds, lateness * _FREE_STEPS * self._step_seconds(tokens))

    def lateness(self, now: float) -> float:
        """The largest ratio of a recent wait to its prediction, at least 1: later arrivals may have an earlier turn.

        Predictions times this ratio keep 99 of 100 requests within the limit. No place stays empty: a shorter queue
        fills it too.
        """
        while self._lateness and now - self._lateness[0][0] > _REMEMBERED_SECONDS:
            self._lateness.popleft()
        least = 1.0 if len(self._lateness) == _REMEMBERED else _UNKNOWN_LATENESS
        return min(max((least, *(ratio for _, ratio in self._lateness))), _MOST_LATENESS)

    def _step_seconds(self, tokens: int) -> float:
        found = self._pace.seconds(tokens)
        return found if found is not None else self._pace.mean_seconds or 0.0

    def _loads(self, requests: Iterable[Request]) -> list[Load]:
        return [
            _load(request, self._lengths.share(request.session.owner, max(1, request.params.max_tokens)))
            for request in requests
        ]


def _load(request: Request, share_generated: float) -> Load:
    forced = 0 if request.forced is None or request.has_recorded_forced else len(request.forced.token_ids)
    tokens = forced
    if request.is_prefilling:
        tokens += max(1, request.prefill_tokens - request.prefilled_tokens)
    asked = request.params.max_tokens
    all_tokens = 1.0 if request.forced is not None else max(1.0, asked * share_generated)
    left = max(1.0, (asked - request.generated) * share_generated) if request.generated else all_tokens
    return Load(request.session.owner, tokens, min(left, all_tokens), all_tokens)
