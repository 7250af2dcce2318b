"""Speculative decoding: which requests get a draft in this step, how long it is, and how a failing drafter is handled.

A drafter never changes a token, so correctness does not depend on this module. After an exception of the drafter the
Generate continues without drafts and reports `is_degraded` at its end.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch

from inference_engine.decode.draft import CommittedTokens, Drafter, DraftMethod, TokenIds, Tokens, Wanted
from inference_engine.decode.draft_length import (
    Acceptance,
    Balance,
    RecentSeconds,
    StepSeconds,
    best_length,
    steps_between,
)
from inference_engine.decode.verifier import Block, Outcome
from inference_engine.metrics import EngineMetrics
from inference_engine.scheduler.request import Request
from inference_engine.session.session import Session

logger = logging.getLogger(__name__)

# While drafts do not pay: the share of time that may be spent on finding out whether they would again.
_WATCH_SHARE = 0.01
_PROBE_STEPS, _PROBE_LENGTH = 256, 4
# Decoded tokens that are passed to the drafter together, unless a draft needs them earlier.
_REPORTED_TOGETHER = 16
_MOST_FORCED = 31  # draft tokens that a constraint forces, in one step
_NONE: TokenIds = np.zeros(0, dtype=np.uint32)


@dataclass(slots=True)
class _Pace:
    """Statistics of one session's drafts by one method, over all its Generates."""

    acceptance: Acceptance
    # A draft that is not verified, only compared with the tokens as they come.
    watched: TokenIds = field(default_factory=_NONE.copy)
    watched_right: int = 0
    steps_since_watch: int = 0
    steps_since_draft: int = 0

    def watch(self, draft: TokenIds) -> None:
        self.watched, self.watched_right, self.steps_since_watch = draft, 0, 0

    def compare(self, token_id: int) -> None:
        if not len(self.watched):
            return
        is_right = int(self.watched[self.watched_right]) == token_id
        self.watched_right += is_right
        if not is_right or self.watched_right == len(self.watched):
            self.acceptance.saw(len(self.watched), self.watched_right)
            self.watched = _NONE


@dataclass(slots=True)
class _Course:
    """Of one session: the statistics of its drafts by method, and what they may still lose."""

    paces: dict[DraftMethod, _Pace] = field(default_factory=dict)
    balance: Balance = field(default_factory=Balance)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A draft of `length` tokens to request, to be verified or only watched."""

    request: Request
    method: DraftMethod
    history: Tokens
    length: int
    is_watched: bool

    def wanted(self) -> Wanted:
        request = self.request
        return Wanted(
            request.session.kv.draft_memory,
            self.history,
            self.length,
            temperature=request.params.sampling.temperature,
            seed=request.seed,
        )


def draft_room(request: Request) -> int:
    """Draft tokens for which there is memory, and after which another token may be generated."""
    session = request.session
    kv = session.kv
    room = min(kv.room() - 1, kv.most_rejected, request.params.max_tokens - request.generated - 1)
    return room if session.longest is None else min(room, session.longest - len(session.history) - 1)


class Speculation:
    """What the loop asks and tells about drafts; this one is without a drafter, and drafts nothing."""

    has_taps = False  # does the drafter read hidden states of the target?

    def needs_taps(self, request: Request) -> bool:
        """Does it read those of this request's next tokens?"""
        return False

    def most_draft_tokens(self, request: Request) -> int:
        """Most draft tokens in its next step, whatever memory is free."""
        return 0

    def draft(
        self, decoding: Sequence[Request], tokens_left: int, *, on_work: Callable[[], None] = lambda: None
    ) -> dict[Request, TokenIds]:
        """Draft tokens for the requests that a step decodes; at most `tokens_left` in total.

        on_work: called before the drafter takes the device's time, if it does.
        """
        return {}

    def is_idle(self, decoding: Sequence[Request]) -> bool:
        """Would no draft be requested for them, by the tokens that are known? Then a step counts as decided on.

        Of a text that repeats itself, a draft begins one token later than if every token were waited for.
        """
        return True

    def took(self, sessions: int, tokens: int, seconds: float) -> None:
        """Record the duration of a step that only decoded."""

    def settle(self, request: Request, block: Block, outcome: Outcome, *, first: int, kept: int, taken: int) -> None:
        """The block's first `kept` tokens, from position `first` on, were committed, and `taken` samples recorded."""

    def flush_if_many(self) -> None:
        """After a step: pass committed tokens to the drafter once there are enough of them."""

    def flush(self) -> None:
        """Pass to the drafter all committed tokens that it has not seen."""


class Drafting(Speculation):
    """One drafter for all sessions of an engine."""

    def __init__(
        self,
        drafter: Drafter,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        *,
        vocab_size: int,
        draft_tokens: int,
        lap: Callable[[str], None] = lambda _: None,
    ) -> None:
        """draft_tokens: the fixed length of every draft; 0: the length that pays most.

        lap: called before and after the drafter's parts of a step; see `StepTimer`.
        """
        self._drafter = drafter
        self.has_taps = bool(drafter.tap_layers)
        self._vocab_size = vocab_size
        self._metrics = metrics
        self._clock = clock
        self._fixed = draft_tokens
        self._lap = lap
        self._steps: defaultdict[int, StepSeconds] = defaultdict(StepSeconds)  # by the order of the sessions' number
        self._draft_seconds: defaultdict[DraftMethod, RecentSeconds] = defaultdict(RecentSeconds)
        self._acceptance: defaultdict[DraftMethod, Acceptance] = defaultdict(
            Acceptance
        )  # over all sessions: the prior of a new session
        self._courses: WeakKeyDictionary[Session, _Course] = WeakKeyDictionary()
        # Requests whose draft tokens the step verifies: by which method, and how many sessions the step decodes.
        self._given: dict[Request, tuple[DraftMethod, int]] = {}
        self._seen: list[tuple[Request, CommittedTokens]] = []

    def needs_taps(self, request: Request) -> bool:
        return self.has_taps and self._is_served(request)

    def most_draft_tokens(self, request: Request) -> int:
        if request.is_prefilling or not self._is_served(request):
            return 0
        return max(0, request.params.max_tokens - request.generated - 1)

    def _course(self, request: Request) -> _Course:
        found = self._courses.get(request.session)
        if found is None:
            found = self._courses[request.session] = _Course()
        return found

    def _state(self, request: Request, method: DraftMethod) -> tuple[_Pace, Balance]:
        course = self._course(request)
        pace = course.paces.get(method)
        if pace is None:
            pace = course.paces[method] = _Pace(Acceptance(self._acceptance[method]))
        return pace, course.balance

    # -- before a step ----------------------------------------------------------------------------------------------

    def draft(
        self, decoding: Sequence[Request], tokens_left: int, *, on_work: Callable[[], None] = lambda: None
    ) -> dict[Request, TokenIds]:
        self._lap("plan")
        drafts = self._draft(decoding, tokens_left, on_work)
        self._lap("draft")
        return drafts

    def _draft(
        self, decoding: Sequence[Request], tokens_left: int, on_work: Callable[[], None]
    ) -> dict[Request, TokenIds]:
        self._given.clear()
        asked = [one for request in decoding if (one := self._ask(request, tokens_left, len(decoding))) is not None]
        if not asked:
            return {}
        on_work()
        began = self._clock()  # passing committed tokens to the drafter is part of the cost of its draft
        if any(one.method.needs_entries for one in asked):
            self.flush()
            asked = [one for one in asked if not one.request.is_degraded]
        if not asked:
            return {}
        try:
            drafts = self._drafter.propose([one.wanted() for one in asked])
            self._check(drafts, len(asked))
        except Exception:
            logger.exception("the drafter cannot propose")
            self._degrade([one.request for one in asked])
            return {}
        self._saw_drafting({one.method for one in asked}, self._clock() - began)
        given: dict[Request, TokenIds] = {}
        for one, whole in zip(asked, drafts, strict=True):
            draft = whole[: one.length]
            if one.is_watched:
                self._state(one.request, one.method)[0].watch(draft)
            elif len(draft):
                given[one.request] = draft
                self._given[one.request] = one.method, len(decoding)
        return given

    def is_idle(self, decoding: Sequence[Request]) -> bool:
        sessions = len(decoding)
        found = [(request, self._method(request, self._drafter.longest)) for request in decoding]
        states = [(self._state(request, method[0]), *method) for request, method in found if method is not None]
        if any(self._fixed or self._best(*each, sessions)[0] for each in states):
            return False
        for (pace, balance), _, _ in states:
            _count_step(pace, balance)
        return True

    def _ask(self, request: Request, tokens_left: int, sessions: int) -> _Asked | None:
        """The draft to request, if any, in a step that decodes `sessions` sessions."""
        found = self._method(request, tokens_left // sessions)
        if found is None:
            return None
        method, room = found
        length, is_watched = self._length(request, method, room, sessions)
        return _Asked(request, method, request.session.history, length, is_watched) if length else None

    def _method(self, request: Request, most: int) -> tuple[DraftMethod, int] | None:
        """How to draft for it, if that is possible, and the longest draft, of `most` tokens at most."""
        room = min(self._drafter.longest, draft_room(request), most)
        if room <= 0 or not self._is_served(request):
            return None
        try:
            method = self._drafter.method(request.session.history)
        except Exception:
            logger.exception("the drafter cannot choose a method")
            self._degrade([request])
            return None
        return None if method is None else (method, min(room, method.longest))

    def _saw_drafting(self, methods: set[DraftMethod], seconds: float) -> None:
        """Drafts by these methods took `seconds` together. Only a method that reads entries (a network) has a cost."""
        dear = {method for method in methods if method.needs_entries} or methods
        if len(dear) == 1:
            self._draft_seconds[dear.pop()].saw(seconds)

    def _check(self, drafts: Sequence[TokenIds], count: int) -> None:
        """Raise ValueError for malformed drafts: an id outside the vocabulary would fail the whole step."""
        if len(drafts) != count:
            raise ValueError(f"{count} drafts were asked for, {len(drafts)} came")
        for draft in drafts:
            if draft.ndim != 1 or draft.dtype != np.uint32 or (draft >= self._vocab_size).any():
                raise ValueError(
                    f"a draft must be uint32 [n] below {self._vocab_size}, got {draft.dtype} {list(draft.shape)}"
                )

    def _is_served(self, request: Request) -> bool:
        return request.params.drafting and not request.is_degraded and request.forced is None

    def _length(self, request: Request, method: DraftMethod, longest: int, sessions: int) -> tuple[int, bool]:
        """How many draft tokens to request, and whether they are only watched. A step is decided on."""
        if self._fixed:
            return min(self._fixed, longest), False
        pace, balance = state = self._state(request, method)
        _count_step(pace, balance)
        length, is_watched = self._best(state, method, longest, sessions)
        if length and not is_watched:
            pace.steps_since_draft = 0
            pace.watched = _NONE
            step = self._steps[sessions.bit_length()]
            if plain := step.expected(sessions):
                cost = (self._draft_seconds[method].seconds or 0.0) / sessions
                balance.pay(step.cost(sessions, length, cost, plain))
        return length, is_watched

    def _best(self, state: tuple[_Pace, Balance], method: DraftMethod, longest: int, sessions: int) -> tuple[int, bool]:
        """As `_length`, and nothing is counted."""
        (pace, balance), step = state, self._steps[sessions.bit_length()]
        cost = (self._draft_seconds[method].seconds or 0.0) / sessions
        length = best_length(
            pace.acceptance,
            step,
            sessions=sessions,
            longest=longest,
            draft_seconds=cost,
            most_cost=balance.steps,
        )
        if length or pace.steps_since_draft > _PROBE_STEPS:
            return length or min(_PROBE_LENGTH, longest), False
        if not len(pace.watched):
            apart = steps_between(cost, step.expected(sessions) or 0.0, _WATCH_SHARE)
            if pace.steps_since_watch >= apart:
                return longest, True
        return 0, False

    # -- after a step -----------------------------------------------------------------------------------------------

    def took(self, sessions: int, tokens: int, seconds: float) -> None:
        self._steps[sessions.bit_length()].saw(tokens, seconds, is_plain=tokens == sessions)

    def settle(self, request: Request, block: Block, outcome: Outcome, *, first: int, kept: int, taken: int) -> None:
        if taken and block.drafted and request in self._given:  # else its constraint forced them
            right = len(outcome.samples) - 1
            method, sessions = self._given[request]
            pace, balance = self._state(request, method)
            balance.won(right, sessions)
            for acceptance in (pace.acceptance, self._acceptance[method]):
                acceptance.saw(block.drafted, right)
        elif request.is_prefilling:
            for pace in self._course(request).paces.values():
                pace.watched = _NONE  # what was watched belongs to an earlier Generate
        elif taken and not block.drafted:
            for pace in self._course(request).paces.values():
                pace.compare(outcome.samples[0].token_id)
        memory = request.session.kv.draft_memory
        if kept and (memory is not None or outcome.taps is not None) and self._is_served(request):
            taps = None if outcome.taps is None else outcome.taps[:kept]
            # A copy: the block of a step that was launched ahead is used again.
            self._seen.append((request, CommittedTokens(memory, first, block.token_ids[:kept].copy(), taps)))

    def flush_if_many(self) -> None:
        if self._seen and sum(len(seen.token_ids) for _, seen in self._seen) >= _REPORTED_TOGETHER:
            self._lap("settle")
            self.flush()
            self._lap("draft")

    def flush(self) -> None:
        # A session that was closed or has failed meanwhile has no memory any more.
        reported = [
            (request, seen)
            for request, seen in self._seen
            if not request.session.is_closed and not request.session.failure_reason
        ]
        self._seen = []
        if not reported:
            return
        try:
            self._drafter.observe(_joined([seen for _, seen in reported]))
        except Exception:
            logger.exception("the drafter cannot observe")
            self._degrade(list(dict.fromkeys(request for request, _ in reported)))

    def _degrade(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.is_degraded = True
            self._metrics.drafter_failures.inc()
            if request.session.kv.draft_memory is not None:
                request.session.kv.draft_memory.clear()


def draft_forced(
    speculation: Speculation, batch: Sequence[Request], tokens_left: int, *, on_work: Callable[[], None]
) -> dict[Request, TokenIds]:
    """As `Speculation.draft`, with constraints in the batch: what one forces is a draft, what it refuses is cut."""
    constrained = {each: each.matching for each in batch if each.matching is not None and each.params.drafting}
    forced = {
        request: np.array(ids[:room], dtype=np.uint32)
        for request, matching in constrained.items()
        if (ids := matching.forced())
        and (room := min(draft_room(request), tokens_left // len(batch), _MOST_FORCED)) > 0
    }
    tokens_left -= sum(map(len, forced.values()))
    others = [request for request in batch if request not in forced]
    drafts = speculation.draft(others, tokens_left, on_work=on_work) | forced
    for request, matching in constrained.items():
        if request in drafts:
            drafts[request] = drafts[request][: matching.cut(drafts[request].tolist())]
            if not len(drafts[request]):
                del drafts[request]
    return drafts


def most_draft_tokens(request: Request, speculation: Speculation) -> int:
    """Most draft tokens in its next step, whatever memory is free: the drafter's, or those that a constraint forces."""
    if request.matching is not None and request.params.drafting and request.generated:
        return max(0, request.params.max_tokens - request.generated - 1)
    return speculation.most_draft_tokens(request)


def _count_step(pace: _Pace, balance: Balance) -> None:
    balance.stepped()
    pace.steps_since_watch += 1
    pace.steps_since_draft += 1


def _joined(reported: Sequence[CommittedTokens]) -> list[CommittedTokens]:
    """Consecutive tokens of one session become one `CommittedTokens`."""
    joined: list[list[CommittedTokens]] = []
    last: dict[int, list[CommittedTokens]] = {}
    for seen in reported:
        run = last.get(id(seen.memory))
        if run is None or seen.memory is None or run[-1].first + len(run[-1].token_ids) != seen.first:
            run = last[id(seen.memory)] = []
            joined.append(run)
        run.append(seen)
    return [
        CommittedTokens(
            run[0].memory,
            run[0].first,
            np.concatenate([seen.token_ids for seen in run]),
            None if run[0].taps is None else torch.cat([seen.taps for seen in run if seen.taps is not None]),
        )
        for run in joined
    ]
