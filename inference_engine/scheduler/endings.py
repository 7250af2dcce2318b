"""How a Generate ends: its session is checked, put to sleep and freed, and only then its client hears of it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from inference_engine.errors import InternalError, InvariantViolated, OutOfMemory, RequestError
from inference_engine.logs import about_session
from inference_engine.metrics import EngineMetrics
from inference_engine.scheduler.drafting import Drafting
from inference_engine.scheduler.out_of_memory import is_out_of_memory
from inference_engine.scheduler.request import Request, RequestState
from inference_engine.session.session import Session
from inference_engine.session.store import SessionStore
from inference_engine.types import Event, Failed, Finished

logger = logging.getLogger(__name__)


class Endings:
    """Engine's thread. `leave` takes a request out of the loop."""

    def __init__(
        self,
        store: SessionStore,
        metrics: EngineMetrics,
        drafting: Drafting | None,
        leave: Callable[[Request], None],
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._drafting = drafting
        self._leave = leave

    def end(self, request: Request, event: Finished | Failed) -> None:
        request.move(RequestState.ENDED)
        if self._drafting is not None:
            self._drafting.tell()
            if isinstance(event, Finished):
                event = replace(event, is_degraded=request.is_degraded)
        if isinstance(event, Failed) and is_out_of_memory(event.error):
            event = Failed(OutOfMemory())
            self.forget_rows(request.session)
        try:
            if not request.session.is_closed and not request.session.failure_reason:
                request.session.kv.check()
                _put_to_sleep(request.session)
        except InvariantViolated as violation:
            event = Failed(violation)
            self._condemn(request.session, violation)
        finally:
            self._leave(request)
            request.outcome = event
            # The session is free before the client hears of the end: its next call must not find it busy.
            self._store.free(request.session)
            self._metrics.generates.labels(outcome=_outcome(event)).inc()
            self._metrics.history_tokens.observe(len(request.session.history))
            _tell_observers(request, event)
            request.listener(event)

    def fail_session(self, request: Request, violation: InvariantViolated) -> None:
        """An invariant is broken: the session fails with its Generate."""
        self._condemn(request.session, violation)
        self.end(request, Failed(violation))

    def fail_all(self, requests: Sequence[Request], error: Exception) -> None:
        """A bug of ours ends `requests`; their sessions stay. So does want of memory, and then it is nobody's bug."""
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
        """What a step without memory left of rows is not trusted: its sessions go back to their tokens."""
        logger.error("a step of %d Generates ran out of memory", len(requests), exc_info=error)
        for request in requests:
            if request.state is not RequestState.ENDED:
                try:
                    self.end(request, Failed(error))
                except Exception:
                    logger.exception("a Generate that ran out of memory could not be ended cleanly")

    @staticmethod
    def forget_rows(session: Session) -> None:
        """Drop a session to its tokens, even if the device cannot wipe its rows now."""
        if session.is_closed or session.failure_reason:
            return
        try:
            session.forget_rows()
        except Exception:
            logger.exception(
                "a session's rows were dropped, and could not be wiped", extra=about_session(session.session_id)
            )

    def _condemn(self, session: Session, violation: InvariantViolated) -> None:
        logger.error("invariant violated: %s", violation.message, extra=about_session(session.session_id))
        session.violations.count(violation.kind)
        self._metrics.invariant_violations.labels(kind=violation.kind).inc()
        self._store.fail(session, violation.kind)


def _put_to_sleep(session: Session) -> None:
    try:
        session.kv.sleep()
    except Exception:
        # The history is whole; its rows are computed anew by the next Generate.
        logger.exception("a session's rows could not be put away", extra=about_session(session.session_id))
        session.forget_rows()
    else:
        session.refresh_facts()


def _tell_observers(request: Request, event: Finished | Failed) -> None:
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
