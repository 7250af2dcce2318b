"""The loop: the one thread that owns the device. It takes requests in, runs steps, commits, and reports.

Everything it shares with other threads goes through the store's lock, a queue, or frozen events. A request's error
ends that request only; a step's error ends the requests that were in it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from inference_engine.config import EngineConfig
from inference_engine.decode.drafting import Drafter, TokenIds
from inference_engine.decode.sampling import Sampler
from inference_engine.decode.verifier import Block, BlockFailed, Outcome, Sample, Verifier
from inference_engine.errors import (
    Draining,
    InternalError,
    InvariantViolated,
    NoCapacity,
    NonFiniteLogits,
    Overloaded,
    RestorationFailed,
    SessionClosed,
)
from inference_engine.kv.plan import SpanFailed
from inference_engine.metrics import EngineMetrics
from inference_engine.scheduler.drafting import Drafting
from inference_engine.scheduler.endings import Endings
from inference_engine.scheduler.policy import Candidate, choose
from inference_engine.scheduler.request import Request, RequestState
from inference_engine.session.journal import Journal
from inference_engine.session.session import Session
from inference_engine.session.store import SessionStore
from inference_engine.types import (
    Accepted,
    Failed,
    Mark,
    Progress,
    StopReason,
    TokenCommitted,
    Truncated,
)

logger = logging.getLogger(__name__)

_HOUSEKEEPING_SECONDS = 1.0
_STUCK_SECONDS = 30.0  # a step that takes longer keeps nobody from shutting down


class Scheduler:
    """`submit` from any thread; everything else happens on the loop's own."""

    def __init__(
        self,
        verifier: Verifier,
        store: SessionStore,
        journal: Journal,
        metrics: EngineMetrics,
        config: EngineConfig,
        clock: Callable[[], float],
        *,
        vocab_size: int,
        drafter: Drafter | None = None,
    ) -> None:
        self._verifier = verifier
        self._store = store
        self._journal = journal
        self._metrics = metrics
        self._config = config
        self._clock = clock
        self._vocab_size = vocab_size
        self._drafting: Drafting | None = None
        if drafter is not None:
            self._drafting = Drafting(drafter, metrics, clock, vocab_size=vocab_size, draft_tokens=config.draft_tokens)
        self._endings = Endings(store, metrics, self._drafting, self._leave)
        self._wake = threading.Condition()
        self._queued: deque[Request] = deque()
        self._running: deque[Request] = deque()  # longest unserved first
        self._is_draining = False
        self._is_stopping = False
        self.beat_at = clock()  # when the loop last came round
        self.failed_steps = 0  # forwards in a row that raised
        self._thread = threading.Thread(target=self._run, name="kakeya-engine", daemon=True)

    # -- other threads ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request whose session it holds. Raises Overloaded or Draining, and then the session is not freed."""
        with self._wake:
            if not self._thread.is_alive():
                raise InternalError("engine-thread-ended")
            if self._is_draining or self._is_stopping:
                raise Draining
            if len(self._queued) >= self._config.max_queued:
                raise Overloaded(
                    f"{len(self._queued)} Generates are waiting already; retry later", retry_after_seconds=1.0
                )
            # Said before the loop can know of the request, so that it comes first.
            request.listener(Accepted(len(self._queued) + len(self._running), request.pending_tokens))
            self._queued.append(request)
            self._metrics.queue_depth.set(len(self._queued))
            self._wake.notify_all()

    def nudge(self) -> None:
        """Something changed that the loop should look at: a stop was asked for."""
        with self._wake:
            self._wake.notify_all()

    def drain(self, grace_seconds: float) -> None:
        """Refuse new requests; wait for those in flight; after the grace, end them with Draining."""
        with self._wake:
            self._is_draining = True
            if self._wake.wait_for(self._is_idle, timeout=grace_seconds):
                return
            for request in (*self._queued, *self._running):
                request.ask_to_stop(Draining)
            self._wake.notify_all()
            self._wake.wait_for(self._is_idle, timeout=_STUCK_SECONDS)

    def stop(self) -> None:
        """End everything with Draining and join the thread."""
        self.drain(0.0)
        with self._wake:
            self._is_stopping = True
            self._wake.notify_all()
        self._thread.join(timeout=_STUCK_SECONDS)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def has_work(self) -> bool:
        return not self._is_idle()

    def _is_idle(self) -> bool:
        return not self._queued and not self._running

    # -- the loop ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                if self._is_idle():
                    self._wake.notify_all()
                    if self._is_stopping:
                        return
                    self._wake.wait(timeout=_HOUSEKEEPING_SECONDS)
                while self._queued:
                    self._running.append(self._queued.popleft())
                self._metrics.queue_depth.set(0)
            self.beat_at = self._clock()
            try:
                self._store.expire()
                self._end_stopped()
                self._step()
            except Exception as error:
                # A bug of ours outside any request: nothing in flight can be trusted to go on.
                self._endings.fail_all(list(self._running), error)

    def _end_stopped(self) -> None:
        is_waited_for = False
        for request in list(self._running):
            if request.session.is_closed:
                self._endings.end(request, Failed(SessionClosed()))
            elif request.stop is not None:
                self._endings.end(request, request.ending(request.stop(), self._clock()))
            elif request.state is RequestState.QUEUED and not (is_waited_for and request.session.kv.takes_room):
                self._begin(request)
                # Who waits for room to wake is not overtaken by others who need some, too.
                is_waited_for |= request.state is RequestState.QUEUED

    def _begin(self, request: Request) -> None:
        session = request.session
        needed = len(session.history) + request.params.max_tokens
        try:
            is_awake = session.kv.wake(needed)
        except RestorationFailed as failed:
            logger.exception("a session could not wake")
            self._endings.end(request, Failed(failed))
            return
        if not is_awake:
            running = (other for other in self._running if other.state is RequestState.RUNNING)
            if any(other.session.kv.takes_room for other in running):
                return  # they give room back when they end
            self._endings.end(request, Failed(_no_room_to_wake(session, needed)))
            return
        request.move(RequestState.RUNNING)
        request.started_at = request.token_at = self._clock()
        request.prefill_tokens = request.pending_tokens
        request.cached_tokens = session.kv.length
        self._metrics.generates_active.inc()
        if session.limit_tokens is not None and len(session.history) >= session.limit_tokens:
            self._endings.end(request, request.finished(StopReason.TRUNCATED, self._clock()))
            return
        self._metrics.prefill_tokens.observe(request.prefill_tokens)
        request.sampler = Sampler.start(
            request.params.sampling,
            request.seed,
            session.history.ids(),
            self._vocab_size,
            session.kv.context.device,
        )

    def _step(self) -> None:
        requests = [request for request in self._running if request.state is RequestState.RUNNING]
        if not requests:
            return
        # Beside decoders a prefill moves a segment at a time, so that nobody waits long for a token.
        alone = all(request.is_prefilling for request in requests)
        most = self._config.step_tokens if alone else self._config.segment_tokens
        candidates = [
            Candidate(
                min(request.pending_tokens, self._room(request), self._most(request, most)), request.is_prefilling
            )
            for request in requests
        ]
        chosen = choose(candidates, step_rows=self._config.step_tokens, max_batch=self._config.max_batch)
        batch = [requests[index] for index in chosen]
        is_decoding = not any(request.is_prefilling for request in batch)
        drafts: dict[Request, TokenIds] = {}
        if self._drafting is not None and is_decoding:
            drafts = self._drafting.draft(batch, self._config.step_tokens - len(batch))
        blocks = [self._block(requests[index], candidates[index].rows, drafts.get(requests[index])) for index in chosen]
        began = self._clock()
        try:
            outcomes = self._verifier.run(blocks)
        except BlockFailed as failed:
            self._endings.fail_session(batch[failed.index], failed.violation)
            return
        except SpanFailed as failed:
            logger.exception("a session's old rows could not be read")
            self._endings.end(batch[failed.index], Failed(failed.failure))
            return
        except Exception as error:
            self.failed_steps += 1
            self._endings.fail_all(batch, error)
            return
        self.failed_steps = 0
        seconds, rows = self._clock() - began, sum(len(block.token_ids) for block in blocks)
        self._metrics.step_seconds.observe(seconds)
        self._metrics.step_rows.observe(rows)
        if self._drafting is not None and is_decoding:
            self._drafting.took(len(batch), rows, seconds)
        for request, block, outcome in zip(batch, blocks, outcomes, strict=True):
            # Served: to the back of the line. At once, or a drain would see nobody running.
            with self._wake:
                self._running.remove(request)
                self._running.append(request)
            try:
                self._settle(request, block, outcome)
            except InvariantViolated as violation:
                self._endings.fail_session(request, violation)
            except Exception as error:
                self._endings.fail_all([request], error)
        if self._drafting is not None:
            self._drafting.tell_if_many()

    def _most(self, request: Request, most: int) -> int:
        """Of a block whose logits are all wanted, no more rows than a segment: logits are large."""
        return min(most, self._config.segment_tokens) if request.has_recorded_forced else most

    @staticmethod
    def _room(request: Request) -> int:
        session = request.session
        generated = session.pending_generated(request.pending_tokens)
        return session.kv.room(generated=bool(generated.any()))

    def _block(self, request: Request, rows: int, draft: TokenIds | None = None) -> Block:
        is_last = rows == request.pending_tokens
        is_scored = request.forced is not None
        wanted = rows if request.has_recorded_forced else int(is_last and is_scored)
        token_ids, generated = request.session.pending_ids(rows), request.session.pending_generated(rows)
        if draft is not None:
            token_ids = np.concatenate([token_ids, draft])
            generated = np.concatenate([generated, np.ones(len(draft), dtype=np.bool_)])
        return Block(
            kv=request.session.kv,
            token_ids=token_ids,
            generated=generated,
            drafted=0 if draft is None else len(draft),
            sampler=request.sampler if is_last and not is_scored else None,
            wants_logprob=request.params.logprobs,
            wanted_logits=wanted,
            wants_taps=self._drafting is not None
            and not request.session.kv.pending_replay
            and self._drafting.wants_taps(request),
        )

    def _leave(self, request: Request) -> None:
        with self._wake:
            self._running.remove(request)

    # -- after a step -----------------------------------------------------------------------------------------------

    def _settle(self, request: Request, block: Block, outcome: Outcome) -> None:
        """Commit what this step gave the request: history first, then rows, then the client hears of it."""
        session, kv = request.session, request.session.kv
        first, is_replayed = kv.next_position, kv.pending_replay > 0
        try:
            kept, taken = self._accept(request, block, outcome)
        except BaseException:
            kv.commit(first)
            raise
        failure = self._commit(session, first + kept)
        if self._drafting is not None and not is_replayed:
            self._drafting.settle(request, block, outcome, first=first, kept=kept, taken=len(taken))
        if request.is_prefilling:
            request.prefilled_tokens += kept
            self._metrics.prefilled_tokens.inc(kept)
            request.listener(Progress(request.prefilled_tokens, request.prefill_tokens))
        if outcome.logits is not None and kept:
            self._report_logits(request, first + kept, outcome.logits)
        self._report_tokens(request, taken)
        if outcome.samples and not outcome.samples[-1].is_finite and request.state is RequestState.RUNNING:
            self._metrics.non_finite_logits.inc()
            self._endings.end(request, Failed(NonFiniteLogits(len(session.history))))
        if failure is not None and request.state is RequestState.RUNNING:
            self._endings.end(request, Failed(failure))

    @staticmethod
    def _commit(session: Session, length: int) -> RestorationFailed | None:
        """Commit the session's rows. If old ones could not be kept, all are dropped: the history has them still."""
        try:
            session.kv.commit(length)
        except RestorationFailed as failed:
            logger.exception("rows could not be kept")
            session.forget_rows()
            return failed
        session.refresh_facts()
        return None

    def _accept(self, request: Request, block: Block, outcome: Outcome) -> tuple[int, Sequence[Sample]]:
        """Record the samples, unless the request was stopped while the step ran; how many rows to keep, and for what.

        A row whose sample nobody takes is not kept: its logits would be lost, and the next Generate needs them.
        """
        rows, session = len(block.token_ids), request.session
        if block.sampler is not None:
            taken = _up_to_stop(outcome.samples, request.stop_ids)
            if not taken:
                return 0, ()
            with self._store.locked():
                if session.is_closed or request.stop is not None:
                    return rows - block.drafted - 1, ()
                ids = np.array([sample.token_id for sample in taken], dtype=np.uint32)
                session.record(self._journal, ids, Mark.GENERATED)
            return rows - block.drafted + len(taken) - 1, taken
        if outcome.logits is not None and request.forced is not None and not request.has_recorded_forced:
            with self._store.locked():
                if session.is_closed or request.stop is not None:
                    return rows - 1, ()
                session.record(self._journal, request.forced.token_ids, Mark.GENERATED)
                request.has_recorded_forced = True
                request.prefill_tokens += len(request.forced.token_ids) - 1
        return rows, ()

    def _report_logits(self, request: Request, position: int, logits: Tensor) -> None:
        """Hand over the logits of a block whose last row predicts the token at `position`."""
        assert request.forced is not None
        request.last_query = position - 1
        request.forced.on_logits(position - len(logits) + 1, logits)
        if not request.pending_tokens:
            self._endings.end(request, request.finished(StopReason.MAX_TOKENS, self._clock()))

    def _report_tokens(self, request: Request, samples: Sequence[Sample]) -> None:
        """Tell of tokens that are at the history's end."""
        session, now = request.session, self._clock()
        if samples and request.generated == 0:
            request.prefill_seconds = now - request.started_at
            self._metrics.prefill_seconds.observe(request.prefill_seconds)
            self._metrics.first_token_seconds.observe(now - request.accepted_at)
            if dropped := self._unreadable(session, len(session.history) - len(samples) - 1):
                request.listener(Truncated(dropped))
        for position, sample in enumerate(samples, start=len(session.history) - len(samples)):
            if request.generated:
                self._metrics.inter_token_seconds.observe(now - request.token_at)
            request.token_at = now
            request.last_query = position - 1
            request.generated += 1
            assert request.sampler is not None
            request.sampler.observe(sample.token_id)
            self._metrics.generated_tokens.inc()
            request.listener(TokenCommitted(sample.token_id, position, sample.logprob))
        if samples and (reason := self._stop_reason(request, samples[-1].token_id)):
            self._endings.end(request, request.finished(reason, now))

    @staticmethod
    def _unreadable(session: Session, query: int) -> int:
        return session.kv.strategy.evicted(session.kv.context.geometry, query)

    @staticmethod
    def _stop_reason(request: Request, token_id: int) -> StopReason | None:
        session = request.session
        if token_id in request.stop_ids:
            return StopReason.EOS
        if request.generated >= request.params.max_tokens:
            return StopReason.MAX_TOKENS
        if session.limit_tokens is not None and len(session.history) >= session.limit_tokens:
            return StopReason.TRUNCATED
        return None


def _up_to_stop(samples: Sequence[Sample], stop_ids: frozenset[int]) -> Sequence[Sample]:
    """The finite samples up to the first that ends the Generate, that one included."""
    for count, sample in enumerate(samples):
        if not sample.is_finite:
            return samples[:count]
        if sample.token_id in stop_ids:
            return samples[: count + 1]
    return samples


def _no_room_to_wake(session: Session, tokens: int) -> NoCapacity:
    pool = session.kv.context.pool
    return NoCapacity(
        f"restoring the session's rows for {tokens} tokens needs up to "
        f"{session.kv.bound.peak_bytes - session.kv.bound.sustained_bytes} bytes of K/V; {pool.reserved_bytes} of "
        f"{pool.capacity_bytes} are reserved by other sessions. Close sessions, or ask for fewer max_tokens",
        retry_after_seconds=1.0,
        capacity_bytes=pool.capacity_bytes,
    )
