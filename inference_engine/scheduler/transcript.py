"""What a Generate has said so far, to be read by one caller after another, from any token on.

    engine's thread ── hear ──▶ Transcript ◀── read ── Reader         the newest reader is the one whose wishes count

Tokens are read where they are kept, in the session's history, when a reader wants them: nothing queues up for one that
is slow or gone, and the engine never waits for it. When the session ends, each reader keeps what it has still to read.
A Generate that was stopped goes on, with what it had left to do, in another request; tokens are a function of history,
parameters, seed and position, so nobody can tell from them.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from dataclasses import replace

from inference_engine.errors import InvalidArgument, SessionClosed, StreamTakenOver
from inference_engine.scheduler.request import Done, Forced, Listener, Request
from inference_engine.session.history import Stretch, TokenIds
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
    Truncated,
)

AT_ONCE = 256  # tokens in one read: after fewer, there were no more


class Transcript:
    """Heard on the engine's thread, read and stopped from any. `attach` and `run` are called with the session's store
    locked."""

    def __init__(self, session: Session, params: GenerateParams, seed: int, *, forced: Forced | None = None) -> None:
        self.session = session
        self.params = params
        self.first_position = len(session.history)
        self._seed = seed
        self._forced = forced
        self._lock = threading.Lock()
        self._request: Request | None = None  # the newest
        self._reader: Reader | None = None  # the newest
        self._tokens = 0
        # As exact as the wire, in an eighth of what objects would take.
        self._logprobs: array[float] | None = array("f") if params.logprobs else None
        self._accepted: Accepted | None = None
        self._progress: list[Progress] = []
        self._truncated: Truncated | None = None
        self._ending: Finished | Failed | None = None

    @property
    def end_position(self) -> int:
        """Behind the last token so far."""
        return self.first_position + self._tokens

    @property
    def is_stopping(self) -> bool:
        """Somebody wants it to end, and it has not ended yet: nobody can say now how it will."""
        request = self._request
        return request is not None and request.outcome is None and request.stop is not None

    @property
    def can_continue(self) -> bool:
        """It ended before it was through."""
        outcome = None if self._request is None else self._request.outcome
        return isinstance(outcome, Failed) or (
            isinstance(outcome, Finished) and outcome.stop_reason is StopReason.CANCELLED
        )

    def attach(self, *, position: int | None = None, is_replayed: bool, listener: Listener | None = None) -> Reader:
        """A reader from `position` on (None: the first token), in place of the one there was.

        listener: is told what comes from now on, on the engine's thread. Raises InvalidArgument for a position where
        no token is and none comes next.
        """
        with self._lock:
            position = self.first_position if position is None else position
            if not self.first_position <= position <= self.end_position:
                raise InvalidArgument(
                    "resume_from", f"must be from {self.first_position} to {self.end_position}, got {position}"
                )
            before, self._reader = self._reader, Reader(self, position, is_replayed=is_replayed, listener=listener)
            self.session.readers.add(self._reader)
        if before is not None:
            before._lose()
        return self._reader

    def run(self, now: float) -> Request:
        """A request for all that is left to do. The caller submits it, its session held."""
        before, done = self._request, Done()
        if before is not None:
            done = before.done(before.token_at or before.accepted_at)
        request = Request(
            session=self.session,
            params=replace(self.params, max_tokens=self.params.max_tokens - done.generated),
            seed=self._seed,
            listener=lambda event: self._receive(request, event),
            stop_ids=self.session.eos_token_ids | frozenset(self.params.stop_token_ids),
            accepted_at=now,
            earlier=done,
            forced=self._forced,
        )
        if before is not None:
            request.last_query, request.is_degraded = before.last_query, before.is_degraded
        with self._lock:
            self._request, self._accepted, self._progress, self._ending = request, None, [], None
        return request

    def refuse(self, error: BaseException) -> None:
        """The newest request could not be submitted: that is how this Generate ended."""
        request = self._request
        assert request is not None
        request.outcome = Failed(error)
        self._receive(request, request.outcome)

    def stop(self, reader: Reader, how: Callable[[], StopReason | BaseException]) -> None:
        """End it as `how` says, at the next step boundary, if `reader` still is the one to say so."""
        with self._lock:
            if reader is self._reader and self._request is not None:
                self._request.ask_to_stop(how)

    def _receive(self, request: Request, event: Event) -> None:
        with self._lock:
            if request is not self._request:
                return  # the last word of a request that another one continues already
            self._note(event)
            reader = self._reader
        if reader is not None:
            reader._notify(event)

    def _note(self, event: Event) -> None:
        # Tokens first: there are thousands of them for each of the others.
        if isinstance(event, TokenCommitted):
            self._tokens += 1
            if self._logprobs is not None:
                assert event.logprob is not None
                self._logprobs.append(event.logprob)
        elif isinstance(event, Progress):
            self._progress.append(event)
        elif isinstance(event, Accepted):
            self._accepted = event
        elif isinstance(event, Truncated):
            if not self._tokens:
                self._truncated = event
        else:
            self._ending = event


class Reader:
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
        # Reports of a prefill are for those who were there before it gave a token.
        self._begins_with_tokens = position < transcript.end_position
        self._has_greeted = self._has_warned = self._is_over = self._is_lost = False
        self._has_left = False
        self._is_under_way = False  # it gave a token, so what comes before them was said
        self._kept: Stretch | None = None  # of a history that ended
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
            # Tokens follow each other thousands of times, and what comes before them comes once.
            events = [] if self._is_under_way else self._preamble(end, ending)
            until = min(end, self.position + AT_ONCE)
            logprobs = transcript._logprobs
            first = transcript.first_position
            reported = None if logprobs is None else logprobs[self.position - first : until - first]
        if until > self.position:
            self._is_under_way = self._has_greeted
            for index, token_id in enumerate(self._ids(until).tolist()):
                events.append(
                    TokenCommitted(token_id, self.position + index, None if reported is None else reported[index])
                )
            self.position = until
        if ending is not None and until == end:
            self._is_over = True
            self.leave()
            events.append(replace(ending, is_replayed=self.is_replayed) if isinstance(ending, Finished) else ending)
        return events

    def keep(self) -> None:
        """The session ends, with all that this Generate will ever say: keep what was not read yet."""
        transcript = self._transcript
        with transcript._lock:
            start, stop = self.position, transcript.end_position
        if start < stop and not self._is_lost:
            self._kept = Stretch(transcript.session.history, start, stop)
        if self._has_left:  # meanwhile
            self.leave()

    def leave(self) -> None:
        """Nobody will read from here any more. From any thread, at any time; idempotent."""
        self._has_left = True
        self._transcript.session.readers.discard(self)
        if self._kept is not None:
            self._kept.give_up()

    def _ids(self, until: int) -> TokenIds:
        """Those that come next, from where they are now."""
        if self._kept is None:
            try:
                return self._transcript.session.history.ids(self.position, until)
            except SessionClosed:
                # Just now: they were kept before.
                if self._kept is None:
                    raise
        return self._kept.ids(self.position, until)

    def _preamble(self, end: int, ending: Finished | Failed | None) -> list[Event]:
        """What comes before the first token, as far as it is there."""
        transcript, events = self._transcript, list[Event]()
        if not self._has_greeted:
            # Who comes when it is under way, or over, waits for nothing.
            accepted = Accepted(0, 0) if self._begins_with_tokens or ending is not None else transcript._accepted
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
