"""The lock of a session: how a caller waits for one that another operation holds, and holds it itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from inference_engine.errors import SessionBusy
from inference_engine.session.session import Holder, Session
from inference_engine.session.store import SessionStore

T = TypeVar("T")


def when_not_busy(store: SessionStore, session: Session, wait_seconds: float, attempt: Callable[[], T]) -> T:
    """Call `attempt`, and again each time the session becomes free, until it does not raise SessionBusy.

    Raises SessionBusy once `wait_seconds` are over, or the session left memory and came back.
    """
    until = time.monotonic() + wait_seconds
    while True:
        try:
            return attempt()
        except SessionBusy:
            remaining = until - time.monotonic()
            has_come_back = session.is_closed and store.is_resident(session.session_id)
            if remaining <= 0 or has_come_back:
                raise SessionBusy(wait_seconds) from None
            freed = threading.Event()
            store.when_free(session.session_id, freed.set)
            freed.wait(remaining)


@contextmanager
def holding(store: SessionStore, session: Session, operation: Holder, wait_seconds: float) -> Iterator[None]:
    """Within, `operation` holds the session. Raises SessionBusy once `wait_seconds` are over."""
    when_not_busy(store, session, wait_seconds, lambda: store.acquire(session, operation))
    try:
        yield
    finally:
        store.free(session)
