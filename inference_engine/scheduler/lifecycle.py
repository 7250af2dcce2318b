"""The lifecycle of a Generate: how it begins and how it ends.

It runs once its session is active; the time it waited is reported. At the end its session is checked, made idle and
freed, and only then is the end reported to the client.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch

from inference_engine.decode.constraints import Constraints
from inference_engine.decode.stop_sequences import StopSequences
from inference_engine.errors import (
    InternalError,
    InvariantViolated,
    NoCapacity,
    OutOfMemory,
    RequestError,
    RestorationFailed,
)
from inference_engine.kernels.sampler import Sampler, permitted_by
from inference_engine.logs import about_session
from inference_engine.metrics import EngineMetrics
from inference_engine.scheduler.request import Request, RequestState
from inference_engine.scheduler.sharing import Sharing
from inference_engine.scheduler.speculation import Speculation
from inference_engine.scheduler.stream_notify import StreamNotifier
from inference_engine.session.session import Session
from inference_engine.session.snapshots import Snapshots
from inference_engine.session.store import SessionStore
from inference_engine.types import Event, Failed, Finished, StopReason

logger = logging.getLogger(__name__)

# torch has an exception type for its own device allocator. Failures of the CPU allocator, and of libraries that
# allocate device memory themselves, are recognised by the text of a RuntimeError.
_ALLOCATION_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


class Endings:
    """Engine's thread. `leave` takes a request out of the loop."""

    def __init__(
        self,
        store: SessionStore,
        metrics: EngineMetrics,
        sharing: Sharing,
        speculation: Speculation,
        leave: Callable[[Request], None],
        snapshots: Snapshots,
    ) -> None:
        self._store = store
        self._sharing = sharing
        self._snapshots = snapshots
        self._metrics = metrics
        self._speculation = speculation
        self._leave = leave

    def end(self, request: Request, event: Finished | Failed) -> None:
        request.move(RequestState.ENDED)
        self._speculation.flush()
        if isinstance(event, Finished):
            event = replace(event, is_degraded=request.is_degraded)
        if isinstance(event, Failed) and is_out_of_memory(event.error):
            event = Failed(OutOfMemory())
            self.forget_entries(request.session)
        try:
            if not request.session.is_closed and not request.session.failure_reason:
                request.session.kv.discard_staged()  # of a step that was launched ahead
                request.session.kv.check()
                self._make_idle(request.session)
                self._sharing.enter(request.session)
        except InvariantViolated as violation:
            event = Failed(self._mark_failed(request.session, violation))
        finally:
            self._leave(request)
            request.outcome = event
            self._store.use(request.session, request.usage)
            self._metrics.cached_tokens.inc(request.cached_tokens)
            # The session is free before the end is reported: the client's next call must not find it busy.
            self._store.free(request.session)
            self._metrics.generates.labels(outcome=_outcome(event)).inc()
            self._metrics.history_tokens.observe(len(request.session.history))
            _notify_observers(request, event)
            request.listener(event)

    def fail_session(self, request: Request, violation: InvariantViolated) -> None:
        """An invariant is broken: the session fails with its Generate."""
        self.end(request, Failed(self._mark_failed(request.session, violation)))

    def fail_all(self, requests: Sequence[Request], error: Exception) -> None:
        """End `requests` after an internal error or out of memory; their sessions stay."""
        if is_out_of_memory(error):
            self._run_out(requests, error)
            return
        incident = secrets.token_hex(8)
        logger.error("incident %s: a step failed", incident, exc_info=error)
        for request in requests:
            if request.state is not RequestState.ENDED:
                try:
                    self.end(request, Failed(InternalError(incident)))
                except Exception:
                    logger.exception(
                        "incident %s: a Generate could not be ended cleanly", incident, extra=request.about
                    )

    def _run_out(self, requests: Sequence[Request], error: Exception) -> None:
        """Entries that an out-of-memory step left are not trusted: its sessions drop all K/V and keep their tokens."""
        logger.error("a step of %d Generates ran out of memory", len(requests), exc_info=error)
        for request in requests:
            if request.state is not RequestState.ENDED:
                try:
                    self.end(request, Failed(error))
                except Exception:
                    logger.exception("a Generate that ran out of memory could not be ended cleanly")

    @staticmethod
    def forget_entries(session: Session) -> None:
        """Drop the session's K/V, even if the device cannot zero its entries now."""
        if session.is_closed or session.failure_reason:
            return
        try:
            session.forget_entries()
        except Exception:
            logger.exception(
                "a session's KV entries were dropped, and could not be zeroed", extra=about_session(session.session_id)
            )

    def invalidate_entries(self, session: Session) -> None:
        """Drop the session's K/V, and the copy of it: some entry may have been wrong when it was copied."""
        self._invalidate(session)
        self.forget_entries(session)

    def _mark_failed(self, session: Session, violation: InvariantViolated) -> InvariantViolated:
        """Returns the error for the client."""
        logger.error("invariant violated: %s", violation.message, extra=about_session(session.session_id))
        session.violations.count(violation.kind)
        self._metrics.count_violation(violation.kind)
        self._invalidate(session)
        self._store.fail(session, violation.kind)
        return violation.kept() if session.journal.keeps else violation

    def _make_idle(self, session: Session) -> None:
        try:
            session.kv.idle()
        except Exception:
            # The history is complete; the next Generate computes its entries again.
            logger.exception("a session could not become idle", extra=about_session(session.session_id))
            self._invalidate(session)
            session.forget_entries()
        else:
            session.refresh_facts()

    def _invalidate(self, session: Session) -> None:
        """Its entries may have been wrong for longer: no copy of them is used."""
        self._snapshots.invalidate(session)


def _notify_observers(request: Request, event: Finished | Failed) -> None:
    """The trace and the log."""
    outcome, reason = _outcome(event), ""
    if isinstance(event, Failed):
        error = event.error
        reason = error.reason if isinstance(error, RequestError) else "INTERNAL"
        reason = error.kind if isinstance(error, InvariantViolated) else reason
    request.trace.end(
        error=reason,
        outcome=outcome,
        prefilled_tokens=request.prefilled_tokens,
        cached_tokens=request.cached_tokens,
        generated_tokens=request.generated,
        drafted_tokens=request.drafted_tokens,
        accepted_tokens=request.accepted_tokens,
    )
    facts = {"outcome": outcome, "reason": reason, "tokens": request.generated}
    logger.info("a Generate ended", extra={**request.about, **facts})


def _outcome(event: Event) -> str:
    """The `generate_total` label of an ending."""
    if isinstance(event, Finished):
        return event.stop_reason.value
    assert isinstance(event, Failed)
    named = {"SESSION_CLOSED": "closed", "DRAINING": "draining", "DEADLINE": "deadline"}
    return named.get(getattr(event.error, "reason", ""), "failed")


class Beginnings:
    """Engine's thread. `enter` moves a request from the waiting ones to the running ones."""

    def __init__(
        self,
        sharing: Sharing,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        endings: Endings,
        notifier: StreamNotifier,
        enter: Callable[[Request], None],
        *,
        vocab_size: int,
        snapshots: Snapshots,
        constraints: Constraints,
    ) -> None:
        self._sharing = sharing
        self._snapshots = snapshots
        self._constraints = constraints
        self._metrics = metrics
        self._clock = clock
        self._endings = endings
        self._notifier = notifier
        self._enter = enter
        self._vocab_size = vocab_size

    def that_may_begin(self, waiting: Iterable[Request]) -> list[Request]:
        """Those of them that wait for nothing but a place."""
        return [request for request in waiting if not self._sharing.is_held_back(request)]

    def begin_all(self, requests: Sequence[Request], running: Collection[Request]) -> None:
        """Let those of `requests` begin that can now; there is a place for each. running: changes with each that does.

        One that waits for memory to wake is not overtaken by others that need memory, too.
        """
        is_waited_for = False
        for request in requests:
            if is_waited_for and request.session.kv.takes_room:
                continue
            try:
                is_waited_for |= not self.begin(request, running)
            except Exception as error:  # noqa: BLE001 - ends that request alone
                self._endings.fail_all([request], error)

    def begin(self, request: Request, running: Iterable[Request]) -> bool:
        """Let it run, or end it. It keeps waiting while a copy of its session's K/V is read, or while another session
        prefills what it begins with. Also if there is no memory to wake its session now, but some of `running` will
        give memory back: then this returns False."""
        session, running = request.session, list(running)
        if session.kv.takes_room or session.kv.is_dropped:
            self._notifier.release()  # to wake, or to read a copy, may take a while
        found = partial(self._sharing.foresee, session, running)
        if not self._snapshots.restore(session, is_alone=not running, found=found):
            return True
        if not self._sharing.begin(request, running):
            return True
        if not request.params.max_tokens and session.kv.length + 1 >= len(session.history):
            request.cached_tokens = session.kv.length
            self._endings.end(request, request.finished(StopReason.MAX_TOKENS, self._clock()))
            return True
        needed = len(session.history) + request.params.max_tokens
        began = self._clock()
        try:
            is_active = session.kv.wake(needed)
        except RestorationFailed as failed:
            logger.exception("a session could not wake", extra=request.about)
            self._endings.end(request, Failed(failed))
            return True
        if not is_active:
            if any(other.session.kv.takes_room for other in running):
                return False  # they give memory back when they end
            self._endings.end(request, Failed(_no_room_to_wake(session, needed)))
            return True
        request.move(RequestState.RUNNING)
        self._enter(request)
        self._sharing.enter(session)
        request.started_at = request.token_at = self._clock()
        if session.kv.takes_room:
            self._metrics.wake_seconds.observe(request.started_at - began)
            request.trace.enter("wake", ago_seconds=request.started_at - began)
        self._metrics.queue_seconds.observe(began - request.accepted_at)
        request.trace.enter("prefill")
        request.prefill_tokens = request.pending_tokens
        request.cached_tokens = session.kv.length
        if request.samples and session.limit_tokens is not None and len(session.history) >= session.limit_tokens:
            self._endings.end(request, request.finished(StopReason.TRUNCATED, self._clock()))
            return True
        self._metrics.prefill_tokens.observe(request.prefill_tokens)
        if not request.samples:
            return True
        sampling = request.params.sampling
        seen = session.history.seen(self._vocab_size) if sampling.reads_history else None
        history, before = session.history, request.earlier.generated
        ids = history.ids(len(history) - before, len(history)).tolist() if before else []
        least = request.params.min_tokens
        request.sampler = Sampler.start(
            sampling,
            request.seed,
            seen,
            self._vocab_size,
            session.kv.context.device,
            generated=ids,
            ends=tuple(request.stop_ids) if least else (),
            ends_from=len(history) + least,
        )
        if request.params.stop_sequences:
            request.stops = StopSequences(request.params.stop_sequences, ids, min_tokens=before + least)
        if request.grammar is not None:
            request.matching = request.sampler.masks = self._constraints.start(
                request.grammar,
                ids,
                request.stop_ids,
                permitted=permitted_by(sampling, self._vocab_size),
                min_tokens=before + least,
            )
        return True


def _no_room_to_wake(session: Session, tokens: int) -> NoCapacity:
    pool = session.kv.context.pool
    return NoCapacity(
        f"restoring the session's KV entries for {tokens} tokens needs up to "
        f"{session.kv.bound.peak_bytes - session.kv.bound.sustained_bytes} bytes of K/V, and fewer of the server's "
        f"{pool.capacity_bytes} are free now. Close sessions, or ask for fewer max_tokens",
        retry_after_seconds=1.0,
        capacity_bytes=pool.capacity_bytes,
    )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Is the error, or one that it was raised from, a failed allocation?"""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(message in str(error) for message in _ALLOCATION_MESSAGES):
            return True
        error = error.__cause__
    return False
