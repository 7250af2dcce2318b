"""One Generate on its way through the engine: its states, what it reports, how it is stopped.

    QUEUED ──▶ RUNNING ──▶ ENDED          QUEUED ──▶ ENDED (stopped before its first step)

A stop may be requested from any thread. It takes effect at the next step boundary; what was committed until then stays.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from inference_engine.decode.automata import Grammar
from inference_engine.decode.matching import Matching
from inference_engine.decode.stop_sequences import StopSequences
from inference_engine.kernels.sampler import Sampler
from inference_engine.session.history import TokenIds
from inference_engine.session.journal import GenerateRecord
from inference_engine.session.session import Session
from inference_engine.tracing import OFF, GenerateTrace
from inference_engine.types import Event, Failed, Finished, GenerateParams, StopReason, TokenUsage, TopLogprobs

Listener = Callable[[Event], None]
# Of a request, the fields of TokenCommitted.
OnToken = Callable[["Request", int, int, float | None, TopLogprobs], None]
OnLogits = Callable[[int, Tensor], None]


@dataclass(frozen=True, slots=True)
class Forced:
    """Tokens to record as generated (teacher forcing), and the callback that gets the logits that predict them."""

    token_ids: TokenIds
    on_logits: OnLogits


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Seconds until a first token. wait: for other Generates; counted: the part of it that counts against the limit;
    own: of its own prefill, beside them.
    """

    wait: float
    counted: float
    own: float


class RequestState(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


_MOVES = {
    RequestState.QUEUED: {RequestState.RUNNING, RequestState.ENDED},
    RequestState.RUNNING: {RequestState.ENDED},
    RequestState.ENDED: set(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What a Generate has done so far, over all its requests: a stopped one continues in another request."""

    generated: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0  # when it began
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prefill_seconds: float = 0.0
    seconds: float = 0.0


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """Mutable, and owned by the engine's thread, except `stop`, which any thread may set once."""

    session: Session
    params: GenerateParams
    seed: int
    listener: Listener  # of all events but tokens
    on_token: OnToken
    stop_ids: frozenset[int]
    accepted_at: float
    predicted: Prediction | None = None  # when it was accepted
    earlier: Done = Done()  # by requests that this one continues
    forced: Forced | None = None  # None: tokens are sampled
    began: GenerateRecord | None = None  # to be recorded with its first tokens
    has_recorded_forced: bool = False
    state: RequestState = RequestState.QUEUED
    sampler: Sampler | None = None
    grammar: Grammar | None = None  # None: its tokens may be any
    matching: Matching | None = None  # its place in the grammar, while it runs
    stops: StopSequences | None = None  # None: it has none
    stopped_by: int | None = None  # which of them its last tokens are
    # None until a stop is requested; then it returns how the request ends.
    stop: Callable[[], StopReason | BaseException] | None = None
    outcome: Finished | Failed | None = None  # known before its session is free
    started_at: float = 0.0
    token_at: float = 0.0
    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    generated: int = 0
    last_query: int = field(default=-1)  # position of the last token whose logits were sampled
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    is_degraded: bool = False  # the drafter failed and is not used again
    last_ids: TokenIds | None = None  # [1], the last token that it generated
    behind: Request | None = None  # waits for it to prefill what both begin with, up to the position `behind_until`
    behind_until: float = 0
    pauses_at: int = 0  # a chunk of its prefill ends there, because others wait for the entries before it
    secured_length: float = 0  # up to this length its history has places, and its entries memory, for one token more
    refused_behind: int | None = None  # tokens granted when memory for draft tokens after them was last refused
    trace: GenerateTrace = OFF
    about: Mapping[str, str] = field(default_factory=dict)  # fields of its log lines

    def move(self, state: RequestState) -> None:
        assert state in _MOVES[self.state], (self.state, state)
        self.state = state
        if state is RequestState.ENDED:
            # They hold memory, and the request may be remembered.
            self.sampler = self.matching = self.grammar = self.stops = self.behind = None

    def ask_to_stop(self, how: Callable[[], StopReason | BaseException]) -> None:
        """The first stop wins."""
        if self.stop is None:
            self.stop = how

    @property
    def pending_tokens(self) -> int:
        """Recorded tokens without K/V, or whose K/V must be computed again. While decoding, one: the last sampled.

        The last forced token is left to the next Generate, like the last sampled one, and the last one of a history
        that is prefilled only.
        """
        kv = self.session.kv
        return len(self.session.history) - kv.length + kv.pending_replay - self._leaves_last

    def foreseen_tokens(self, found: int) -> int:
        """`pending_tokens` as the engine's thread will find it: one that goes back has its later entries until then.

        found: of its first tokens, those whose entries it will have from others; 0: none.
        """
        kv, length = self.session.kv, len(self.session.history)
        is_as_it_is = kv.length < length and not found and kv.going is None
        return self.pending_tokens if is_as_it_is else kv.pending(length, found=found) - self._leaves_last

    @property
    def _leaves_last(self) -> bool:
        return self.has_recorded_forced or not self.params.max_tokens

    @property
    def samples(self) -> bool:
        """Does it draw tokens? Not to score given ones, nor to prefill."""
        return self.forced is None and self.params.max_tokens > 0

    @property
    def is_prefilling(self) -> bool:
        """Has it generated no token yet? A score prefills from beginning to end."""
        return self.generated == 0

    @property
    def is_waiting_for_verdict(self) -> bool:
        """Has it all tokens that it may have, and only whether they fit its grammar is not known yet?"""
        return self.matching is not None and self.reached_limit is not None

    @property
    def reached_limit(self) -> StopReason | None:
        """Why it may generate no more, whatever its last token is."""
        if self.stopped_by is not None:
            return StopReason.EOS
        if self.generated >= self.params.max_tokens:
            return StopReason.MAX_TOKENS
        longest = self.session.longest
        return StopReason.TRUNCATED if longest is not None and self.session.history.length >= longest else None

    def is_within_turn(self, tokens: int, turn_tokens: int) -> bool:
        """After a chunk of `tokens` of its prefill: does it come before others of its owner still?

        A turn is `turn_tokens` long, in however many chunks: if each were a turn, prefills that begin together would
        all end with the last of them.
        """
        done = self.prefilled_tokens
        is_same = (done + tokens) // turn_tokens == done // turn_tokens
        return self.is_prefilling and tokens < self.pending_tokens and is_same

    def finished(self, reason: StopReason, now: float) -> Finished:
        kv = self.session.kv
        strategy, geometry = kv.strategy, kv.context.geometry
        done = self.done(now)
        has_asked = self.last_query >= 0
        evicted = strategy.evicted(geometry, self.last_query) if has_asked else 0
        return Finished(
            stop_reason=reason,
            generated_tokens=done.generated,
            history_length=len(self.session.history),
            prefill_seconds=done.prefill_seconds,
            total_seconds=done.seconds,
            seed=self.seed,
            prefilled_tokens=done.prefilled_tokens,
            cached_tokens=done.cached_tokens,
            attended_positions=self.last_query + 1 - evicted,
            evicted_positions=evicted,
            restored_positions=strategy.restored(geometry, self.last_query) if has_asked else 0,
            drafted_tokens=done.drafted_tokens,
            accepted_tokens=done.accepted_tokens,
            is_degraded=self.is_degraded,
            fits_constraint=self._judged(reason),
            stop_sequence=self.stopped_by if reason is StopReason.EOS else None,
        )

    def _judged(self, reason: StopReason) -> bool | None:
        if self.params.constraint is None:
            return None
        if reason is StopReason.CONSTRAINT or (reason is StopReason.EOS and self.stopped_by is None):
            return True
        return self.matching is not None and self.matching.fits_constraint

    @property
    def usage(self) -> TokenUsage:
        """What this request took, without those that it continues."""
        return TokenUsage(
            prefilled_tokens=self.prefilled_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )

    def done(self, now: float) -> Done:
        """What the Generate has done until `now`, by this request and those it continues."""
        earlier = self.earlier
        has_begun_before = earlier.prefilled_tokens + earlier.cached_tokens > 0
        return Done(
            generated=earlier.generated + self.generated,
            prefilled_tokens=earlier.prefilled_tokens + self.prefilled_tokens,
            cached_tokens=earlier.cached_tokens if has_begun_before else self.cached_tokens,
            drafted_tokens=earlier.drafted_tokens + self.drafted_tokens,
            accepted_tokens=earlier.accepted_tokens + self.accepted_tokens,
            prefill_seconds=earlier.prefill_seconds + self.prefill_seconds,
            seconds=earlier.seconds + now - self.accepted_at,
        )

    def ending(self, how: StopReason | BaseException, now: float) -> Finished | Failed:
        return self.finished(how, now) if isinstance(how, StopReason) else Failed(how)
