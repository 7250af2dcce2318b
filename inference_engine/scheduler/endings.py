"""How a Generate ends: its session is checked, put to sleep and freed, and only then its client hears of it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from inference_engine.errors import InternalError, InvariantViolated
from inference_engine.metrics import EngineMetrics
from inference_engine.scheduler.drafting import Drafting
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
        if request.state is RequestState.RUNNING:
            self._metrics.generates_active.dec()
        request.move(RequestState.ENDED)
        if self._drafting is not None:
            self._drafting.tell()
            if isinstance(event, Finished):
                event = replace(event, is_degraded=request.is_degraded)
        try:
            if not request.session.is_closed and not request.session.failure_reason:
                request.session.kv.check()
                _put_to_sleep(request.session)
        except InvariantViolated as violation:
            event = Failed(violation)
            self._condemn(request.session, violation)
        finally:
            self._leave(request)
            # The session is free before the client hears of the end: its next call must not find it busy.
            self._store.free(request.session)
            self._metrics.generates.labels(outcome=_outcome(event)).inc()
            self._metrics.history_tokens.observe(len(request.session.history))
            request.listener(event)

    def fail_session(self, request: Request, violation: InvariantViolated) -> None:
        """An invariant is broken: the session fails with its Generate."""
        self._condemn(request.session, violation)
        self.end(request, Failed(violation))

    def fail_all(self, requests: Sequence[Request], error: Exception) -> None:
        """A bug of ours ends `requests`; their sessions stay."""
        incident = secrets.token_hex(8)
        logger.error("incident %s: a step failed", incident, exc_info=error)
        for request in requests:
            if request.state is not RequestState.ENDED:
                try:
                    self.end(request, Failed(InternalError(incident)))
                except Exception:
                    logger.exception("incident %s: a Generate could not be ended cleanly", incident)

    def _condemn(self, session: Session, violation: InvariantViolated) -> None:
        logger.error("invariant violated: %s", violation.message)
        session.violations.count(violation.kind)
        self._metrics.invariant_violations.labels(kind=violation.kind).inc()
        self._store.fail(session, violation.kind)


def _put_to_sleep(session: Session) -> None:
    try:
        session.kv.sleep()
    except Exception:
        # The history is whole; its rows are computed anew by the next Generate.
        logger.exception("a session's rows could not be put away")
        session.forget_rows()
    else:
        session.refresh_facts()


def _outcome(event: Event) -> str:
    """The `generate_total` label of an ending."""
    if isinstance(event, Finished):
        return event.stop_reason.value
    assert isinstance(event, Failed)
    named = {"SESSION_CLOSED": "closed", "DRAINING": "draining", "DEADLINE": "deadline"}
    return named.get(getattr(event.error, "reason", ""), "failed")
