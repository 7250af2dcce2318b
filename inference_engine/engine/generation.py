"""A Generate as its caller holds it, and how one starts: new, continued after a stop, or attached to.

    what is remembered of the call       the transcript      a request
    nothing                              a new one           its first
    it was stopped early                 the same            one more, for the rest
    it runs, or is complete              the same            none: the new reader gets the tokens there are

Decided under the store's lock, so that of two equal calls one begins and the other attaches.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from inference_engine.decode.automata import Grammar
from inference_engine.engine.arguments import check_length
from inference_engine.errors import (
    DeadlineExceeded,
    EngineStalled,
    InvalidArgument,
    RequestError,
    SessionBusy,
)
from inference_engine.logs import about_session
from inference_engine.metrics import EngineMetrics
from inference_engine.scheduler.loop import Scheduler
from inference_engine.scheduler.request import Forced, Listener, Request
from inference_engine.scheduler.transcript import Transcript, TranscriptReader, check_not_behind
from inference_engine.session.holding import when_not_busy
from inference_engine.session.replies import Call, Replies
from inference_engine.session.session import Holder, Session
from inference_engine.session.store import SessionStore
from inference_engine.tracing import Tracing
from inference_engine.types import Event, Failed, Finished, GenerateParams, StopReason, TokenCommitted

_REMEMBERED = 8  # of each session
_LOOK_SECONDS = 0.5  # between two looks at whether more can still come


class Generation:
    """A Generate that runs, or has run. Iterate it for its events, the last of which is Finished; a Failed is raised as
    its error. Once the journal has failed, EngineStalled is raised after the last event that is safe. An iteration goes
    on where one before it, or `read`, ended; after the last event it ends at once, or raises the error again.

    When a newer call attaches to the same Generate, this one ends with StreamTakenOver and stops nothing any more.
    """

    def __init__(self, transcript: Transcript, reader: TranscriptReader, scheduler: Scheduler) -> None:
        self._transcript = transcript
        self._reader = reader
        self._scheduler = scheduler
        self._taken: deque[Event] = deque()  # from the reader, and not given to the caller yet
        self._end: Finished | Failed | None = None  # once it was given
        self._has_left = False

    @property
    def position(self) -> int:
        """Of the next token to be read; for the thread that reads."""
        return self._reader.position - sum(isinstance(event, TokenCommitted) for event in self._taken)

    def read(self) -> list[Event]:
        """The next events, none if there are none yet; never waits. The last one is Finished or Failed."""
        events = self._reader.read()
        if self._taken:
            events = [*self._taken, *events]
            self._taken.clear()
        if events and isinstance(events[-1], Finished | Failed):
            self._end = events[-1]
        return events

    def when_readable(self, callback: Callable[[], None], wake: Callable[[], None] | None = None) -> None:
        """Call back, from any thread, whenever there may be something to read; now, too. It must return at once.

        wake: called after `callback`. After a step it is called while the device works on the next one, and equal ones
        are called once.
        """
        notifier = self._scheduler.notifier
        if notifier.waits_for_sync:
            self._reader.when_readable(partial(notifier.call, callback, wake))
        elif wake is None:
            self._reader.when_readable(callback)
        else:

            def notify() -> None:
                callback()
                notifier.wake(wake)

            self._reader.when_readable(notify)

    def leave(self) -> None:
        """Stop reading: frees what a closed session keeps for this reader. The Generate goes on; idempotent."""
        self._has_left = True
        self._reader.leave()

    def __del__(self) -> None:
        self._reader.leave()

    def cancel(self) -> None:
        """Stop at the next step boundary with Finished(CANCELLED). Idempotent, from any thread."""
        self._stop(lambda: StopReason.CANCELLED)

    def expire(self) -> None:
        """As `cancel`, but the Generate ends with DeadlineExceeded."""
        self._stop(lambda: DeadlineExceeded(len(self._transcript.session.history)))

    def abort(self, error: RequestError) -> None:
        """As `cancel`, but the Generate ends with `error`."""
        self._stop(lambda: error)

    def __iter__(self) -> Iterator[Event]:
        readable = threading.Event()
        self.when_readable(readable.set)
        while self._end is None and not self._has_left:
            if not self._taken:
                self._taken.extend(self._reader.read())
            if not self._taken:
                # A newer iteration may be the one that is called: this one looks by itself now and then.
                if not readable.wait(_LOOK_SECONDS) and self._transcript.session.journal.failure:
                    raise EngineStalled  # what is not safe is never sent, and no more comes
                readable.clear()
                continue
            event = self._taken.popleft()
            if isinstance(event, Finished | Failed):
                self._end = event
            if not isinstance(event, Failed):
                yield event
        if isinstance(self._end, Failed):
            raise self._end.error

    def _stop(self, how: Callable[[], StopReason | BaseException]) -> None:
        self._transcript.stop(self._reader, how)
        self._scheduler.wake()


class Generates:
    """The Generates of one engine. `refuse` raises while no new work is taken."""

    def __init__(
        self,
        store: SessionStore,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        tracing: Tracing,
        clock: Callable[[], float],
        *,
        refuse: Callable[[], None],
    ) -> None:
        self._store = store
        self._scheduler = scheduler
        self._metrics = metrics
        self._tracing = tracing
        self._clock = clock
        self._refuse = refuse
        # Their tokens are in the history, so they are forgotten with the session.
        self._remembered: Replies[Transcript] = store.replies.page(most_per_session=_REMEMBERED, keep_seconds=0.0)

    def start(
        self,
        session: Session,
        params: GenerateParams,
        *,
        listener: Listener | None = None,
        wait_seconds: float = 0.0,
        call: Call | None = None,
        resume_from: int | None = None,
        forced: Forced | None = None,
        grammar: Grammar | None = None,
        refuse_late: bool = False,
    ) -> Generation:
        """Start one once nothing else holds the session, or attach to the one that `call` names.

        Raises SessionBusy once `wait_seconds` are over. A refused call is not remembered.
        """
        transcript, reader, request = when_not_busy(
            self._store,
            session,
            wait_seconds,
            lambda: self._attach_or_begin(session, params, listener, call, resume_from, forced, grammar),
        )
        generation = Generation(transcript, reader, self._scheduler)
        if reader.is_replayed:
            self._metrics.replays.inc()
        if request is not None:
            try:
                self._scheduler.submit(request, refuse_late=refuse_late)
            except BaseException as error:
                transcript.refuse(error)
                # At once: the error's traceback holds this reader, and the session's set of readers the error.
                reader.leave()
                request.trace.end(error=getattr(error, "reason", "INTERNAL"), outcome="refused")
                if not reader.is_replayed:
                    with self._store.locked():
                        self._remembered.forget(call)
                self._store.free(session)
                raise
        return generation

    def _attach_or_begin(
        self,
        session: Session,
        params: GenerateParams,
        listener: Listener | None,
        call: Call | None,
        resume_from: int | None,
        forced: Forced | None,
        grammar: Grammar | None,
    ) -> tuple[Transcript, TranscriptReader, Request | None]:
        """A transcript, a reader and, if there is work, a request. It holds the session, and the caller submits it."""
        with self._store.locked():
            known = self._remembered.recall(call)
            if known is not None:
                known.complete(params, grammar)
            if known is None and resume_from is not None:
                # The session may have ended meanwhile, and its Generates with it; then this raises how.
                self._store.find_healthy(session.session_id, session.owner)
                check_not_behind(session, resume_from)
                raise InvalidArgument("resume_from", "needs the request_id of a Generate that is remembered")
            if known is not None and not known.can_continue:
                if known.is_stopping:
                    raise SessionBusy(0.0)
                # The session may have failed meanwhile, and its tokens are gone.
                self._store.find_healthy(session.session_id, session.owner)
                return known, known.attach(position=resume_from, is_replayed=True, listener=listener), None
            self._refuse()
            self._store.acquire(session, Holder.GENERATE)
            reader: TranscriptReader | None = None
            try:
                if known is not None:
                    check_length(session.session_id, len(session.history), known.end_position)
                self._refuse_without_place(session, params, known, forced)
                self._store.ensure_memory(session)
                self._store.secure(session, len(session.history) + (1 if forced is None else len(forced.token_ids)))
                transcript = known or _new_transcript(session, params, forced, grammar, call)
                reader = transcript.attach(position=resume_from, is_replayed=known is not None, listener=listener)
                request = transcript.run(self._clock())
                self._follow(request)
                self._remembered.remember(call, transcript, session_id=session.session_id)
            except BaseException:
                if reader is not None:
                    reader.leave()
                self._store.free(session)
                raise
            return transcript, reader, request

    def recall(self, session: Session, generates: Sequence[Transcript]) -> None:
        """Remember the Generates of a restored session. Called with the store locked."""
        for transcript in generates:
            request_id, digest = transcript.identity
            call = Call(session.owner, session.session_id, request_id, digest)
            self._remembered.remember(call, transcript, session_id=session.session_id)

    def _refuse_without_place(
        self, session: Session, params: GenerateParams, known: Transcript | None, forced: Forced | None
    ) -> None:
        """Raise HistoryLimit or QuotaExceeded if the history cannot grow, before anything is done.

        The session's own limit is no error: it ends the Generate.
        """
        if not params.max_tokens:
            return
        if forced is None:
            is_at_limit = session.limit_tokens is not None and len(session.history) >= session.limit_tokens
            if not is_at_limit:
                self._store.check_history(session, 1)
        elif known is None:
            self._store.check_history(session, len(forced.token_ids))

    def _follow(self, request: Request) -> None:
        """Label the request's trace spans and log lines with its session."""
        session = request.session
        request.about = about_session(session.session_id)
        request.trace = self._tracing.generate(
            session=request.about["session"],
            strategy=session.kv.strategy.name,
            history_length=len(session.history),
            max_tokens=request.params.max_tokens,
        )
        request.trace.enter("queue")


def _new_transcript(
    session: Session,
    params: GenerateParams,
    forced: Forced | None,
    grammar: Grammar | None,
    call: Call | None,
) -> Transcript:
    check_length(session.session_id, len(session.history), params.expected_history_length)
    if not len(session.history):
        raise InvalidArgument("history", "it is empty; append tokens to the session before generating")
    seed = secrets.randbits(64) if params.sampling.seed is None else params.sampling.seed
    if call is None:
        return Transcript(session, params, seed, forced=forced, grammar=grammar)
    request_id, digest = call.request_id, call.digest
    return Transcript(session, params, seed, forced=forced, grammar=grammar, request_id=request_id, digest=digest)
