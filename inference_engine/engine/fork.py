"""Fork of a session: open at once; the engine's thread copies its KV entries between two steps.

No later request on the fork begins before its entries are copied. If they cannot be copied, the fork computes them from
its history, like a session whose entries were dropped.
"""

from __future__ import annotations

import logging

from inference_engine.errors import InvalidArgument
from inference_engine.scheduler.loop import Scheduler
from inference_engine.session.session import Session
from inference_engine.session.store import SessionStore

logger = logging.getLogger(__name__)


def open_fork(
    store: SessionStore, scheduler: Scheduler, parent: Session, limit_tokens: int | None, label: str
) -> Session:
    """A fork of `parent`, which the caller holds.

    Raises InvalidArgument, NoCapacity, QuotaExceeded, or Draining if the engine's thread takes no more work; then there
    is no fork.
    """
    length = len(parent.history)
    if limit_tokens is not None and limit_tokens < length:
        raise InvalidArgument("limit_tokens", f"must hold the history of {length} tokens, got {limit_tokens}")
    fork = store.fork(parent, limit_tokens, label)
    try:
        scheduler.between_steps(lambda: _copy_entries(store, parent, fork))
    except BaseException:
        store.unpin(parent, fork)
        store.close(fork.session_id, fork.owner)
        raise
    return fork


def _copy_entries(store: SessionStore, parent: Session, fork: Session) -> None:
    """Engine's thread, between steps."""
    try:
        if not parent.failure_reason and not fork.is_closed:
            fork.kv.copy_from(parent.kv)
            fork.refresh_facts()
    except Exception:
        logger.exception("the KV entries of a fork could not be copied")
        fork.forget_entries()
    finally:
        store.unpin(parent, fork)
