"""The events of a Generate so far. Callers read them one after another, each from any token on.

    engine's thread ── receive ──▶ Transcript ◀── read ── Reader      only the newest reader can stop the Generate

A reader takes tokens from the session's history when it is ready for them: nothing is queued for a slow or lost reader,
and the engine never waits for one. When the session ends, each reader keeps the tokens that it has not read yet. A
stopped Generate continues in another request. Tokens are a function of history, parameters, seed and position, so they
are the same as without the stop.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from inference_engine.decode.automata import Automaton, Grammar
from inference_engine.decode.stop_sequences import StopSequences
from inference_engine.errors import (
    HistoryBehindClient,
    InvalidArgument,
    SessionClosed,
    SessionElsewhere,
    StreamTakenOver,
)
from inference_engine.scheduler.request import Done, Forced, Listener, Request
from inference_engine.session.history import Stretch, TokenIds
from inference_engine.session.journal import GenerateRecord, Logprobs
from inference_engine.session.session import Session
from inference_engine.types import (
    Accepted,
    Event,
    Failed,
    Finished,
    GenerateParams,
    Progress,
    StopReason,
    TokenCommitted,
    TopLogprobs,
    Truncated,
)

_UNKNOWN = GenerateParams(max_tokens=1)  # of a recalled Generate
AT_ONCE = 256  # most tokens in one read; a read of fewer has returned all there were


def check_not_behind(session: Session, position: int) -> None:
    """Raise HistoryBehindClient if the client has a token that the history has not."""
    if position > len(session.history):
        raise HistoryBehindClient(position, len(session.history), session_id=session.session_id)


class Transcript:
    """Receives events on the engine's thread; read and stopped from any thread. `attach` and `run` are called with the
    session's store locked."""

    def __init__(
        self,
        session: Session,
        params: GenerateParams,
        seed: int,
        *,
        forced: Forced | None = None,
        grammar: Grammar | None = None,
        request_id: bytes = b"",
        digest: bytes = b"",
    ) -> None:
        self.session = session
        self._grammar = grammar  # of its constraint
        self.params = params
        self.first_position = len(session.history)
        self.identity = request_id, digest  # of the call; empty: it has none
        self._seed = seed
        self._forced = forced
        self._lock = threading.Lock()
        self._request: Request | None = None  # the newest
        self._reader: TranscriptReader | None = None  # the newest
        self._tokens = 0
        # As exact as the wire, in an eighth of what objects would take; `_width` numbers a token, as in a journal.
        self._logprobs: array[float] | None = array("f") if params.logprobs else None
        self._width = 1 + 2 * params.top_logprobs
        self._accepted: Accepted | None = None
        self._progress: list[Progress] = []
        self._truncated: Truncated | None = None
        self._ending: Finished | Failed | None = None

    @classmethod
    def recalled(cls, session: Session, record: GenerateRecord, tokens: int, logprobs: Logprobs | None) -> Transcript:
        """The Generate of a restored session, with `tokens` tokens; `complete` it with its parameters before use."""
        transcript = cls(session, _UNKNOWN, record.seed, request_id=record.request_id, digest=record.digest)
        transcript.first_position, transcript._tokens = record.position, tokens
        if logprobs is not None:
            transcript._logprobs = array("f", logprobs.tobytes())
            transcript._width = logprobs.size // tokens
        return transcript

    def complete(self, params: GenerateParams, grammar: Grammar | None = None) -> None:
        """A recalled one gets its parameters: those of the call that names it, whose digest was found equal."""
        if self.params is not _UNKNOWN:
            return
        self.params, self._grammar = params, grammar
        ids = self.session.history.ids(self.first_position, self.end_position).tolist()
        longest = self.session.longest
        automaton = None if grammar is None else _matched(grammar, ids)
        found = None
        if params.stop_sequences:
            found = StopSequences(params.stop_sequences, min_tokens=params.min_tokens).find(ids)
        reason: StopReason | None = None
        is_ended = bool(ids) and ids[-1] in self.session.eos_token_ids | frozenset(params.stop_token_ids)
        if is_ended:
            reason = StopReason.EOS
        elif automaton is not None and automaton.is_over:
            reason = StopReason.CONSTRAINT
        elif found is not None:
            reason = StopReason.EOS
        elif self._tokens >= params.max_tokens:
            reason = StopReason.MAX_TOKENS
        elif longest is not None and self.end_position >= longest:
            reason = StopReason.TRUNCATED
        if reason is not None:
            # What it took is not known any more.
            self._ending = Finished(
                stop_reason=reason,
                generated_tokens=self._tokens,
                history_length=self.end_position,
                prefill_seconds=0.0,
                total_seconds=0.0,
                seed=self._seed,
                prefilled_tokens=0,
                cached_tokens=0,
                attended_positions=0,
                evicted_positions=0,
                fits_constraint=None if automaton is None else is_ended or automaton.may_end,
                stop_sequence=None if found is None or reason is not StopReason.EOS else found.which,
            )

    @property
    def end_position(self) -> int:
        """The position after the last token so far."""
        return self.first_position + self._tokens

    @property
    def is_stopping(self) -> bool:
        """A stop was requested and it has not ended yet: how it will end is not known."""
        request = self._request
        return request is not None and request.outcome is None and request.stop is not None

    @property
    def can_continue(self) -> bool:
        """It failed, was cancelled before its end, or was cut by the end of the process."""
        if self._request is None:
            return self._ending is None
        outcome = self._request.outcome
        return isinstance(outcome, Failed) or (
            isinstance(outcome, Finished) and outcome.stop_reason is StopReason.CANCELLED
        )

    def attach(
        self, *, position: int | None = None, is_replayed: bool, listener: Listener | None = None
    ) -> TranscriptReader:
        """A reader from `position` on (None: the first token); it replaces the one before.

        listener: called with each event from now on, on the engine's thread. Raises InvalidArgument for a position
        outside the tokens so far and the next one, HistoryBehindClient for one beyond the history.
        """
        with self._lock:
            position = self.first_position if position is None else position
            check_not_behind(self.session, position)
            if not self.first_position <= position <= self.end_position:
                raise InvalidArgument(
                    "resume_from", f"must be from {self.first_position} to {self.end_position}, got {position}"
                )
            before, self._reader = (
                self._reader,
                TranscriptReader(self, position, is_replayed=is_replayed, listener=listener),
            )
            self.session.readers.add(self._reader)
        if before is not None:
            before._lose()
        return self._reader

    def run(self, now: float) -> Request:
        """A request for the rest of the work. The caller holds the session and submits the request."""
        before, done = self._request, Done(generated=self._tokens)
        if before is not None:
            done = before.done(before.token_at or before.accepted_at)
        request = Request(
            session=self.session,
            params=replace(
                self.params,
                max_tokens=self.params.max_tokens - done.generated,
                min_tokens=max(0, self.params.min_tokens - done.generated),
            ),
            seed=self._seed,
            listener=lambda event: self._receive(request, event),
            on_token=self._receive_token,
            stop_ids=self.session.eos_token_ids | frozenset(self.params.stop_token_ids),
            accepted_at=now,
            earlier=done,
            forced=self._forced,
            grammar=self._grammar,
            began=None if self._tokens else GenerateRecord(self.first_position, *self.identity, self._seed),
        )
        if before is not None:
            request.last_query, request.is_degraded = before.last_query, before.is_degraded
        with self._lock:
            self._request, self._accepted, self._progress, self._ending = request, None, [], None
        return request

    def refuse(self, error: BaseException) -> None:
        """End this Generate with `error`: its newest request could not be submitted."""
        request = self._request
        assert request is not None
        request.outcome = Failed(error)
        self._receive(request, request.outcome)

    def stop(self, reader: TranscriptReader, how: Callable[[], StopReason | BaseException]) -> None:
        """End it as `how` returns, at the next step boundary, if `reader` still is the newest reader."""
        with self._lock:
            if reader is self._reader and self._request is not None:
                self._request.ask_to_stop(how)

    def _receive(self, request: Request, event: Event) -> None:
        with self._lock:
            if request is not self._request:
                return  # the last event of a request that another one already continues
            self._note(event)
            reader = self._reader
        if reader is not None:
            reader._notify(event)

    def _receive_token(
        self, request: Request, token_id: int, position: int, logprob: float | None, tops: TopLogprobs
    ) -> None:
        """There are thousands of tokens for each other event, so one is an object only if asked for."""
        with self._lock:
            if request is not self._request:
                return
            self._tokens += 1
            if self._logprobs is not None:
                assert logprob is not None
                self._logprobs.append(logprob)
                for top in tops:
                    self._logprobs.extend(top)
            reader = self._reader
        if reader is not None:
            if reader._listener is not None:
                reader._listener(TokenCommitted(token_id, position, logprob, tops))
            if reader._on_readable is not None:
                reader._on_readable()

    def _note(self, event: Event) -> None:
        if isinstance(event, Progress):
            self._progress.append(event)
        elif isinstance(event, Accepted):
            self._accepted = event
        elif isinstance(event, Truncated):
            if not self._tokens:
                self._truncated = event
        elif isinstance(event, (Finished, Failed)):
            self._ending = event


def _tops(numbers: array[float]) -> TopLogprobs:
    return tuple((int(token_id), logprob) for token_id, logprob in zip(numbers[::2], numbers[1::2], strict=True))


def _matched(grammar: Grammar, token_ids: Sequence[int]) -> Automaton:
    """After all of a Generate's tokens but one that ends it."""
    automaton = grammar.start()
    for token_id in token_ids:
        automaton.consume(token_id)
    return automaton


class TranscriptReader:
    """One caller's place in a transcript. One thread reads."""

    def __init__(
        self, transcript: Transcript, position: int, *, is_replayed: bool, listener: Listener | None = None
    ) -> None:
        self.position = position  # of the next token
        self.is_replayed = is_replayed
        self._transcript = transcript
        self._listener = listener
        self._on_readable: Callable[[], None] | None = None
        self._first_position = position
        # Progress of the prefill is only for readers that attached before the first token.
        self._begins_with_tokens = position < transcript.end_position
        self._found_ending = transcript._ending  # a Generate that goes on after it gets another
        self._has_greeted = self._has_warned = self._is_over = self._is_lost = False
        self._has_left = False
        self._is_under_way = False  # a token was read, so all events that come before tokens were too
        self._kept: Stretch | None = None  # unread tokens of a history that ended
        self._reports = 0

    def when_readable(self, callback: Callable[[], None]) -> None:
        """Call back, from any thread, whenever there may be something to read; now, too."""
        self._on_readable = callback
        callback()

    def read(self) -> list[Event]:
        """The next events in their order, none if there are none yet; the last one is Finished or Failed."""
        transcript = self._transcript
        if self._is_over or self._has_left:
            return []
        if self._is_lost:
            self._is_over = True
            self.leave()
            return [Failed(StreamTakenOver(self.position))]
        with transcript._lock:
            end, ending = transcript.end_position, transcript._ending
            saved = transcript.session.saved.tokens
            if saved < end:  # the others are not to be sent yet
                end, ending = max(saved, self.position), None
                if transcript.session.is_lost:  # and never will be
                    ending = Failed(SessionElsewhere(is_pending=True))
            # A fast path: other events come once, tokens thousands of times.
            events = [] if self._is_under_way else self._preamble(end, ending)
            until = min(end, self.position + AT_ONCE)
            logprobs, width = transcript._logprobs, transcript._width
            first = transcript.first_position
            reported = None if logprobs is None else logprobs[(self.position - first) * width : (until - first) * width]
        if until > self.position:
            self._is_under_way = self._has_greeted
            for index, token_id in enumerate(self._ids(until).tolist()):
                logprob, tops = None, TopLogprobs()
                if reported is not None:
                    logprob = reported[index * width]
                    tops = _tops(reported[index * width + 1 : (index + 1) * width]) if width > 1 else ()
                events.append(TokenCommitted(token_id, self.position + index, logprob, tops))
            self.position = until
        if ending is not None and until == end:
            self._is_over = True
            self.leave()
            events.append(replace(ending, is_replayed=self.is_replayed) if isinstance(ending, Finished) else ending)
        return events

    def keep(self) -> None:
        """The session ends, and no more tokens will come: keep those that were not read yet."""
        transcript = self._transcript
        with transcript._lock:
            start, stop = self.position, transcript.end_position
        if start < stop and not self._is_lost:
            self._kept = Stretch(transcript.session.history, start, stop)
        if self._has_left:  # meanwhile
            self.leave()

    def leave(self) -> None:
        """Detach: this reader will not be read again. From any thread, at any time; idempotent."""
        self._has_left = True
        self._transcript.session.readers.discard(self)
        if self._kept is not None:
            self._kept.give_up()

    def _ids(self, until: int) -> TokenIds:
        """The next token ids, from the history or from those kept."""
        if self._kept is None:
            try:
                return self._transcript.session.history.ids(self.position, until)
            except SessionClosed:
                # Just now: they were kept before.
                if self._kept is None:
                    raise
        return self._kept.ids(self.position, until)

    def _preamble(self, end: int, ending: Finished | Failed | None) -> list[Event]:
        """The events that come before the first token, as far as there are any."""
        transcript, events = self._transcript, list[Event]()
        if not self._has_greeted:
            # A reader that attaches after the first token, or after the end, does not wait in the queue. One that only
            # reads so late did.
            found = self._found_ending
            is_late = self._begins_with_tokens or (found is not None and found is transcript._ending)
            accepted = None if is_late else transcript._accepted
            if accepted is None and (is_late or ending is not None):
                accepted = Accepted(0, 0)
            if accepted is not None:
                self._has_greeted = True
                first = self._first_position
                events.append(replace(accepted, first_position=first, is_replayed=self.is_replayed))
        if self.position == self._first_position and not self._begins_with_tokens:
            events += transcript._progress[self._reports :]
            self._reports = len(transcript._progress)
        if transcript._truncated is not None and not self._has_warned:
            self._has_warned = True
            events.append(transcript._truncated)
        return events

    def _notify(self, event: Event) -> None:
        if self._listener is not None:
            self._listener(event)
        if self._on_readable is not None:
            self._on_readable()

    def _lose(self) -> None:
        """Another reader has taken over."""
        self._is_lost = True
        if self._kept is not None:
            self._kept.give_up()
        self._transcript.session.readers.discard(self)
        if not self._is_over:
            self._notify(Failed(StreamTakenOver(self.position)))
