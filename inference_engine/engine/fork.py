"""Fork and rewind of a session: open at once; the engine's thread sees to its KV entries between two steps.

A fork gets copies of the entries, or reads them where they are. A rewound session has the memory of the one that it
replaces, and drops what was written since. No later request on either begins before that is done. If it fails, or if
entries have left since that belong to it, they are computed from its history, like those of a session that was dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from inference_engine.errors import InvalidArgument
from inference_engine.scheduler.loop import Scheduler
from inference_engine.session.session import Session
from inference_engine.session.store import SessionStore, entries_kept

logger = logging.getLogger(__name__)


def open_fork(
    store: SessionStore, scheduler: Scheduler, parent: Session, at: int | None, limit_tokens: int | None, label: str
) -> Session:
    """A fork of `parent`, which the caller holds, that begins with its first `at` tokens; None: with all.

    Raises InvalidArgument, NoCapacity, QuotaExceeded, or Draining if the engine's thread takes no more work; then there
    is no fork.
    """
    length = _checked(parent, at)
    if limit_tokens is not None and limit_tokens < length:
        raise InvalidArgument("limit_tokens", f"must hold the history of {length} tokens, got {limit_tokens}")
    fork = store.fork(parent, length, limit_tokens, label)
    kv = parent.kv  # which a rewind may give to another session

    def copy() -> None:
        if not parent.failure_reason:
            fork.kv.copy_from(kv, entries_kept(length))

    try:
        scheduler.between_steps(lambda: _see_to(store, fork, copy, parent))
    except BaseException:
        store.unpin(parent, fork)
        store.close(fork.session_id, fork.owner)
        raise
    scheduler.snapshots.forked(parent, fork)
    return fork


def open_rewound(store: SessionStore, scheduler: Scheduler, session: Session, at: int) -> Session:
    """The session that takes the place of `session`, which the caller holds, with its first `at` tokens.

    Raises InvalidArgument, or Draining if the engine's thread takes no more work; then nothing was changed.
    """
    length = _checked(session, at)
    opened: list[Session] = []

    def cut() -> None:
        with store.locked():  # until the session is open, or the call has failed
            pass
        for new in opened:
            _see_to(store, new, partial(new.kv.rewind, entries_kept(length)))

    rewound = scheduler.snapshots.keep_for_rewind(session)
    try:
        with store.locked():
            scheduler.between_steps(cut)
            opened.append(store.rewind(session, length))
    finally:
        rewound(opened[0] if opened else None)
    return opened[0]


def _checked(session: Session, at: int | None) -> int:
    length = len(session.history)
    if at is not None and not 0 <= at <= length:
        raise InvalidArgument("at_position", f"must be from 0 to {length}, the history's length, got {at}")
    return length if at is None else at


def _see_to(store: SessionStore, session: Session, work: Callable[[], None], *others: Session) -> None:
    """Engine's thread, between steps: have the entries of a new session as they belong, and unpin it and others."""
    with ExitStack() as stack:
        stack.callback(store.unpin, session, *others)
        if session.is_closed:
            return
        try:
            work()
            session.refresh_facts()
            store.prefixes.enter(session)
        except Exception:
            logger.exception("the KV entries of a session that begins with another's could not be taken over")
            session.forget_entries()
        finally:
            session.kv.coming = 0
