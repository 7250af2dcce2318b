"""What the journal keeps, back into memory: sessions, the replies to their calls, and Generates that may go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from inference_engine.engine.calls import Calls, SessionCall
from inference_engine.engine.generation import Generates
from inference_engine.engine.results import HistoryLength
from inference_engine.errors import (
    HistoryCorrupt,
    InvalidArgument,
    ModelMismatch,
    RestorationFailed,
    SessionElsewhere,
    SessionNotFound,
)
from inference_engine.kv.context import KVContext
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategy import KVStrategy
from inference_engine.metrics import EngineMetrics
from inference_engine.scheduler.transcript import Transcript
from inference_engine.session.journal import Journal, Logprobs, SessionKept, TokensRecord
from inference_engine.session.session import Session
from inference_engine.session.store import SessionStore
from inference_engine.types import Mark

_GENERATED = np.uint8(Mark.GENERATED)


class Recall:
    """Brings sessions back, side by side; each once, so that what was read is not older than what is in memory."""

    def __init__(
        self,
        context: KVContext,
        store: SessionStore,
        journal: Journal,
        calls: Calls,
        generates: Generates,
        metrics: EngineMetrics,
    ) -> None:
        self._context = context
        self._store = store
        self._journal = journal
        self._calls = calls
        self._generates = generates
        self._metrics = metrics
        self._coming: set[str] = set()  # sessions that are being brought back
        self._has_come = threading.Condition()

    def is_needed(self, session_id: str, owner: str, request_id: bytes) -> bool:
        """May the journal have something that the call needs and that is not in memory?"""
        if not self._journal.keeps:
            return False
        with self._store.locked():
            if request_id and self._calls.knows(request_id, owner):
                return False  # it was answered; its session may have ended by that
        return bool(request_id) or (bool(session_id) and not self._store.is_resident(session_id))

    def of_call(self, session_id: str, owner: str, request_id: bytes) -> None:
        """Bring back what the call needs, as far as the journal has it. See `Engine.recall`."""
        if not self._journal.keeps:
            return
        if session_id:
            with self._alone(session_id):
                if not self._store.is_resident(session_id):
                    self._restore(session_id, owner)
        if request_id:  # waits for what the owner has recorded, so that no session of others waits for that
            replies = self._journal.replies_to(owner, request_id)
            with self._store.locked():
                self._calls.restore(replies)

    def close(self, call: SessionCall) -> HistoryLength | None:
        """Close a session that is not in memory, as `Calls.once` does, and read nothing of it but its length.

        None: it is in memory, or the call was answered. Raises SessionNotFound.
        """
        session_id, owner = call.session_id or "", call.owner
        self.of_call("", owner, call.request_id)
        if self._calls.closed.knows(call.request_id, owner=owner):
            return None
        with self._alone(session_id):
            if self._store.is_resident(session_id):
                return None
            if (entry := self._journal.claim(session_id, owner)) is None:
                raise SessionNotFound
            with self._store.locked():
                if not self._journal.has(session_id):  # since it was read
                    raise SessionElsewhere
                try:
                    return self._calls.close_claimed(call, entry.history_length)
                except BaseException:
                    self._journal.leave(session_id, entry.used_at)
                    raise

    @contextmanager
    def _alone(self, session_id: str) -> Iterator[None]:
        """Within, nothing else brings the session back."""
        with self._has_come:
            self._has_come.wait_for(lambda: session_id not in self._coming)
            self._coming.add(session_id)
        try:
            yield
        finally:
            with self._has_come:
                self._coming.remove(session_id)
                self._has_come.notify_all()

    def _restore(self, session_id: str, owner: str) -> None:
        began, outcome = time.perf_counter(), "refused"
        try:
            kept = self._journal.load(session_id, owner)
            if kept is None:
                return
            try:
                strategy = parse_strategy(kept.record.strategy)
                self._prepare(strategy, kept.record.codec)
                with self._store.locked():
                    if not self._journal.has(session_id):  # since it was read
                        raise SessionElsewhere
                    session = self._store.restore(kept, strategy)
                    self._generates.recall(session, _recalled_generates(session, kept))
                    self._calls.restore(kept.replies)
            except BaseException:
                with self._store.locked():
                    self._journal.leave(session_id, kept.used_at)
                raise
            outcome = "restored"
            self._metrics.restore_seconds.observe(time.perf_counter() - began)
        except HistoryCorrupt:
            outcome = "corrupt"
            raise
        except ModelMismatch:
            outcome = "mismatch"
            raise
        except SessionElsewhere:
            outcome = "elsewhere"
            raise
        finally:
            self._metrics.restores.labels(outcome).inc()

    def _prepare(self, strategy: KVStrategy, codec: str) -> None:
        """Read what such sessions need before anything is locked. Raises RestorationFailed if it cannot be used."""
        if codec != self._store.codec_of(strategy) or not strategy.waits(self._context):
            return
        try:
            strategy.ready(self._context)
        except InvalidArgument as error:
            raise RestorationFailed(error) from error


def _recalled_generates(session: Session, kept: SessionKept) -> list[Transcript]:
    """The Generates of a restored session that a call can name, oldest first."""
    found = []
    for index, record in enumerate(kept.generates):
        later = kept.generates[index + 1 :]
        end = min([len(session.history), *(one.position for one in later[:1])])
        if not record.request_id:
            continue
        appended = np.flatnonzero(session.history.marks(record.position, end) != _GENERATED)
        tokens = int(appended[0]) if len(appended) else end - record.position
        logprobs = _logprobs(kept.tokens, record.position, record.position + tokens)
        found.append(Transcript.recalled(session, record, tokens, logprobs))
    return found


def _logprobs(records: Sequence[TokensRecord], start: int, stop: int) -> Logprobs | None:
    """Of the tokens at [start, stop), if they were reported."""
    pieces = []
    for record in records:
        first, last = max(start, record.position), min(stop, record.position + len(record.token_ids))
        if first < last:
            if record.logprobs is None:
                return None
            pieces.append(record.logprobs[first - record.position : last - record.position])
    return np.concatenate(pieces) if pieces else None
