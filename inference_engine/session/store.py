"""The session store: issues ids, admits by bytes, expires the idle, and lets one operation at a time hold a session.

Admission comes before allocation: a session's whole slab is reserved when it is created and nothing it does later
needs more. To make room, sessions of the same owner that have been idle long enough are evicted, least recently used
first; a session that something holds is never evicted. All methods are safe from any thread; the lock is held for
microseconds and never during a forward.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from inference_engine.errors import InvariantViolated, NoCapacity, SessionBusy, SessionEvicted, SessionNotFound
from inference_engine.kv.context import KVContext
from inference_engine.kv.session_kv import SessionKV, bound_of
from inference_engine.kv.strategy import KVStrategy
from inference_engine.metrics import EngineMetrics
from inference_engine.session.journal import Journal, SessionRecord
from inference_engine.session.session import Operation, Session
from inference_engine.types import Bound

_TOMBSTONES = 10_000


class SessionStore:
    """All sessions there are. `clock` gives monotonic seconds."""

    def __init__(
        self,
        context: KVContext,
        journal: Journal,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        *,
        max_sessions: int,
        idle_ttl_seconds: float,
        evictable_seconds: float,
    ) -> None:
        self._context = context
        self._journal = journal
        self._metrics = metrics
        self._clock = clock
        self._max_sessions = max_sessions
        self._idle_ttl_seconds = idle_ttl_seconds
        self._evictable_seconds = evictable_seconds
        self._lock = threading.RLock()
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self._evicted: OrderedDict[str, tuple[str, str]] = OrderedDict()  # id -> owner, cause
        metrics.kv_capacity_bytes.set(context.pool.capacity_bytes)
        metrics.tier_capacity_bytes.set(0 if context.tier is None else context.tier.capacity_bytes)

    # -- create, find, end ------------------------------------------------------------------------------------------

    def create(
        self, strategy: KVStrategy, *, eos_token_ids: frozenset[int], limit_tokens: int | None, owner: str
    ) -> Session:
        """Open a session, its memory reserved. Raises NoCapacity, with nothing changed but idle sessions evicted."""
        with self._lock:
            self._refuse_what_can_never_fit(strategy, limit_tokens)
            kv = self._reserve(strategy, limit_tokens, owner)
            session = Session(
                session_id=secrets.token_urlsafe(24),
                owner=owner,
                kv=kv,
                eos_token_ids=eos_token_ids,
                limit_tokens=limit_tokens,
                used_at=self._clock(),
            )
            try:
                self._journal.open(
                    SessionRecord(session.session_id, owner, str(strategy), limit_tokens, tuple(sorted(eos_token_ids)))
                )
            except BaseException:
                kv.release()
                raise
            self._sessions[session.session_id] = session
            self._update_gauges()
            return session

    def find(self, session_id: str, owner: str) -> Session:
        """Raises SessionNotFound alike for an unknown, a closed and somebody else's id; SessionEvicted to the owner."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is not None and session.owner == owner:
                return session
            evicted = self._evicted.get(session_id)
            if evicted is not None and evicted[0] == owner:
                raise SessionEvicted(evicted[1])
            raise SessionNotFound

    def close(self, session_id: str, owner: str) -> int:
        """End a session; returns its final length. What a running Generate did not commit yet, it will not."""
        with self._lock:
            session = self.find(session_id, owner)
            self._remove(session, "closed")
            return len(session.history)

    def fail(self, session: Session, reason: str) -> None:
        """The session broke an invariant: free its memory, keep its facts readable until its TTL."""
        with self._lock:
            session.failure_reason = reason
            session.live_bytes = session.tier_live_bytes = 0
            session.kv.release()
            self._journal.close(session.session_id)
            self._metrics.sessions_total.labels(outcome="failed").inc()
            self._update_gauges()

    def expire(self) -> None:
        """Evict sessions idle longer than the TTL. To be called now and then."""
        with self._lock:
            horizon = self._clock() - self._idle_ttl_seconds
            # Least recently used first: the first one that is young enough ends the search.
            old = list(itertools.takewhile(lambda session: session.used_at < horizon, self._sessions.values()))
            for session in old:
                if session.operation is None:
                    self._evict(session, "ttl")

    def close_all(self) -> None:
        with self._lock:
            for session in list(self._sessions.values()):
                self._remove(session, "closed")

    # -- one operation at a time ------------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store's lock over a few host instructions, so that a change and its journal record are one."""
        with self._lock:
            yield

    def acquire(self, session: Session, operation: Operation) -> None:
        """Let `operation` hold the session. Raises SessionBusy at once if something else does."""
        with self._lock:
            # It may have ended since it was found; then this says how.
            self.find(session.session_id, session.owner)
            if session.failure_reason:
                raise InvariantViolated(session.failure_reason, "the session failed earlier")
            if session.operation is not None:
                raise SessionBusy(0.0)
            session.operation = operation
            self._touch(session)

    def free(self, session: Session) -> None:
        """The operation ended. Wakes those who wait; finishes a close that came in between."""
        with self._lock:
            session.operation = None
            waiters, session.waiters = session.waiters, []
            if session.is_closed:
                session.kv.release()
            self._touch(session)
            self._update_gauges()
        for wake in waiters:
            wake()

    def when_free(self, session_id: str, callback: Callable[[], None]) -> None:
        """Call back once, from any thread, when nothing holds the session (at once if nothing does, or it is gone)."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is not None and session.operation is not None:
                session.waiters.append(callback)
                return
        callback()

    def __len__(self) -> int:
        return len(self._sessions)

    # -- helpers, lock held -----------------------------------------------------------------------------------------

    def _touch(self, session: Session) -> None:
        session.used_at = self._clock()
        if session.session_id in self._sessions:
            self._sessions.move_to_end(session.session_id)

    def _refuse_what_can_never_fit(self, strategy: KVStrategy, limit_tokens: int | None) -> None:
        """No session is evicted for one that would not fit into the empty pool either."""
        bound = bound_of(strategy, self._context, limit_tokens)
        if self._context.tier is not None:
            self._context.tier.refuse_what_can_never_fit(bound.tier_bytes)
        needed = bound.peak_bytes
        capacity = self._context.pool.capacity_bytes
        if needed > capacity:
            raise NoCapacity(
                f"the session needs {needed} bytes of K/V and the server has {capacity} in all; ask for a smaller "
                "limit_tokens or another strategy",
                needed_bytes=needed,
                capacity_bytes=capacity,
            )

    def _reserve(self, strategy: KVStrategy, limit_tokens: int | None, owner: str) -> SessionKV:
        needed = bound_of(strategy, self._context, limit_tokens)
        while True:
            idle = self._idle(owner)
            if len(self._sessions) >= self._max_sessions:
                if not idle:
                    raise NoCapacity(
                        f"the server holds {self._max_sessions} sessions already, its maximum; close some",
                        retry_after_seconds=1.0,
                        max_sessions=self._max_sessions,
                    )
                self._evict(idle[0], "lru")
                continue
            # A failed session holds no bytes any more, and answers for itself until its TTL.
            holding = [session for session in idle if not session.failure_reason]
            try:
                self._keep_room_to_wake(strategy, limit_tokens)
                return SessionKV(strategy, self._context, limit_tokens)
            except NoCapacity:
                pool = self._context.pool
                within_reach = pool.capacity_bytes - pool.reserved_bytes
                within_reach += sum(session.kv.bound.sustained_bytes for session in holding)
                if not holding or within_reach < needed.sustained_bytes:
                    raise
                if (short := self._short_of_tier(needed)) > 0:
                    # Only those that hold some of it can make room there.
                    holding = [session for session in holding if session.kv.bound.tier_bytes]
                    if sum(session.kv.bound.tier_bytes for session in holding) < short:
                        raise
                # Nobody is evicted for a session that would be refused even then.
                self._keep_room_to_wake(strategy, limit_tokens, without=holding)
                self._evict(holding[0], "lru")

    def _short_of_tier(self, needed: Bound) -> int:
        """Bytes of the second tier that would have to be given back first."""
        tier = self._context.tier
        return 0 if tier is None else needed.tier_bytes - (tier.capacity_bytes - tier.reserved_bytes)

    def _keep_room_to_wake(
        self, strategy: KVStrategy, limit_tokens: int | None, *, without: Sequence[Session] = ()
    ) -> None:
        """Raise NoCapacity if the new session left too little room for the most that one session needs to wake.

        without: sessions that would be evicted first.
        """
        new = bound_of(strategy, self._context, limit_tokens)
        staying = [session for session in self._sessions.values() if session not in without]
        bounds = [session.kv.bound for session in staying if not session.failure_reason] + [new]
        sustained = sum(bound.sustained_bytes for bound in bounds)
        waking = max(bound.peak_bytes - bound.sustained_bytes for bound in bounds)
        capacity = self._context.pool.capacity_bytes
        if waking and sustained + waking > capacity:
            raise NoCapacity(
                f"with this session {sustained} bytes of K/V would be reserved and {waking} are needed to wake one, "
                f"of {capacity} in all. Close sessions, or ask for a smaller limit_tokens or another strategy",
                retry_after_seconds=1.0,
                needed_bytes=sustained + waking,
                capacity_bytes=capacity,
            )

    def _idle(self, owner: str) -> list[Session]:
        """The owner's sessions that may make room, least recently used first."""
        horizon = self._clock() - self._evictable_seconds
        return [
            session
            for session in self._sessions.values()
            if session.owner == owner and session.operation is None and session.used_at <= horizon
        ]

    def _evict(self, session: Session, cause: str) -> None:
        self._evicted[session.session_id] = (session.owner, cause)
        while len(self._evicted) > _TOMBSTONES:
            self._evicted.popitem(last=False)
        self._metrics.evicted.labels(reason=cause).inc()
        self._remove(session, "evicted")

    def _remove(self, session: Session, outcome: str) -> None:
        session.is_closed = True
        del self._sessions[session.session_id]
        if session.operation is None:
            session.kv.release()
        if not session.failure_reason:
            self._journal.close(session.session_id)
            self._metrics.sessions_total.labels(outcome=outcome).inc()
        self._update_gauges()

    def _update_gauges(self) -> None:
        self._metrics.sessions_active.set(len(self._sessions))
        self._metrics.kv_live_bytes.set(sum(session.live_bytes for session in self._sessions.values()))
        self._metrics.kv_reserved_bytes.set(self._context.pool.reserved_bytes)
        if self._context.tier is not None:
            self._metrics.tier_reserved_bytes.set(self._context.tier.reserved_bytes)
            self._metrics.tier_live_bytes.set(sum(session.tier_live_bytes for session in self._sessions.values()))
