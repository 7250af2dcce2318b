"""The session store: issues ids, admits, expires idle sessions, and lets one operation at a time hold a session.

Admission (`session/capacity.py`) comes before allocation. A guaranteed session is granted all memory that it may need
when it is created. A growing one is granted more before its history becomes longer (`secure`), or is refused and stays
as it is. All methods are safe from any thread; the lock is held for microseconds and never during a forward.

Histories have limits, too: per session, and per owner, where tokens shared by forks count once. Tokens of an ended
session that a reader has not read yet count until it has.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TypeVar

from inference_engine.errors import (
    InvariantViolated,
    NoCapacity,
    QuotaExceeded,
    SessionBusy,
    SessionClosed,
    SessionEvicted,
    SessionNotFound,
)
from inference_engine.kv.context import KVContext
from inference_engine.kv.parts.shared_prefix import SharedPrefix
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategy import KVStrategy
from inference_engine.metrics import EngineMetrics
from inference_engine.session.capacity import RETRY_SECONDS, Admission, SessionLimits, orphaned_bytes
from inference_engine.session.histories import Histories
from inference_engine.session.history import Holdings
from inference_engine.session.journal import Journal, MemoryJournal, SessionKept
from inference_engine.session.kept_prefixes import KeptPrefix, KeptPrefixes
from inference_engine.session.making import SessionMaker
from inference_engine.session.prefixes import Lender, Prefixes
from inference_engine.session.replies import ReplyBook
from inference_engine.session.session import Holder, Session, Violations
from inference_engine.types import Bound, Mode, TokenUsage

T = TypeVar("T")

_TOMBSTONES = 10_000
# That one call of `expire` ends: sessions, and tokens of their histories.
_EXPIRED_SESSIONS = 32
_EXPIRED_TOKENS = 2**22
_PREFIX_SHARE = 4  # without a setting, one part in this many of the pool's bytes may be kept of sessions that closed


class SessionStore:
    """All open sessions. `clock` gives monotonic seconds."""

    def __init__(
        self,
        context: KVContext,
        journal: Journal,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        *,
        limits: SessionLimits,
        idle_ttl_seconds: float,
        mode: Mode = Mode.BATCHED,
        codec: str = "",
        components: str = "",
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """mode, and the digests codec and components, are recorded with sessions. wall_clock: seconds since 1970."""
        self._context = context
        self._journal = journal
        # Of sessions that belong to one call, and of those alone.
        self._transient = MemoryJournal() if journal.keeps else journal
        self._metrics = metrics
        self._clock = clock
        self._wall_clock = wall_clock
        self._idle_ttl_seconds = idle_ttl_seconds
        self._limits = limits
        self.histories = Histories(limits, journal, self._transient)  # called with the lock held
        self._maker = SessionMaker(
            context,
            journal,
            self._transient,
            self.histories,
            clock,
            wall_clock,
            cap_tokens=limits.history_tokens_per_session or None,
            mode=mode,
            codec=codec,
            components=components,
        )
        self.codec_of = self._maker.codec_of
        self._admission = Admission(
            context, limits, clock, evict=lambda session: self._evict(session, "lru"), drop=self._drop
        )
        self._lock = threading.RLock()
        self.replies = ReplyBook(clock)  # for retries of calls
        is_sharing = limits.share_prefixes == "owner"
        self.prefixes = Prefixes(self._lock, of_all=is_sharing)
        most_bytes = (limits.prefix_bytes or context.pool.capacity_bytes // _PREFIX_SHARE) if is_sharing else 0
        self.kept_prefixes = KeptPrefixes(self._lock, self.prefixes, context, metrics, clock, most_bytes=most_bytes)
        context.pool.spare = self.kept_prefixes
        context.pool.rooms.choices = limits.restore_cache_choices
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self._evicted: OrderedDict[str, tuple[str, str]] = OrderedDict()  # id -> owner, cause
        self._violations: OrderedDict[str, Violations] = OrderedDict()  # of failed sessions that may come back
        # When sessions that left memory were used last: for the journal, leaving is a use.
        self._used: OrderedDict[str, float] = OrderedDict()
        metrics.kv_capacity_bytes.set(context.pool.capacity_bytes)
        metrics.tier_capacity_bytes.set(context.tier.capacity_bytes)

    # -- create, find, end ------------------------------------------------------------------------------------------

    def create(
        self,
        strategy: KVStrategy,
        *,
        eos_token_ids: frozenset[int],
        limit_tokens: int | None,
        owner: str,
        is_growing: bool = False,
        route: str = "",
        label: str = "",
        is_transient: bool = False,
    ) -> Session:
        """Open a session, its memory reserved, or granted as it grows. Raises NoCapacity or QuotaExceeded.

        route: its id begins with it and a dot, if it is not empty. is_transient: it belongs to one call.
        """
        with self._lock:
            if not is_transient:
                self.histories.check_kept(owner, sessions=1)
            tokens = 1 if is_growing else None
            kv = self._admission.admit(self._sessions.values(), strategy, limit_tokens, owner, tokens=tokens)
            session = self._maker.open(kv, eos_token_ids, owner, route=route, label=label, is_transient=is_transient)
            self._add(session)
            return session

    def fork(self, parent: Session, at: int, limit_tokens: int | None, label: str = "") -> Session:
        """Open a session with the first `at` tokens of `parent`, which the caller holds; its entries are not copied
        yet.

        Both are pinned until `unpin`. Raises NoCapacity or QuotaExceeded.
        """
        with self._lock:
            if parent.is_closed:
                raise SessionClosed
            self.histories.check_owner(parent, parent.history.unshared_tokens(at))
            if not parent.is_transient:
                self.histories.check_kept(parent.owner, sessions=1, tokens=at)
            kv = self._admission.admit(
                self._sessions.values(),
                parent.kv.strategy,
                limit_tokens,
                parent.owner,
                tokens=at + 1 if parent.kv.grant.grows else None,
                parent=parent.kv,
                kept_tokens=entries_kept(at),
            )
            kv.coming = kv.kept_of(parent.kv, entries_kept(at))
            session = self._maker.open(kv, parent.eos_token_ids, parent.owner, parent=parent, at=at, label=label)
            parent.family = session.family = parent.family or object()
            self.prefixes.begin_as(session, parent)
            parent.pins += 1
            session.pins += 1
            self._add(session)
            return session

    def rewind(self, session: Session, at: int) -> Session:
        """End a session, which the caller holds, and open another with its first `at` tokens in its place.

        It takes over the memory; entries that the new one would not have are still in it (`SessionKV.rewind`), and it
        is pinned until `unpin`. If other sessions have a part in them, it begins without memory of its own, behind the
        shared prefix; it is reserved now if there is room, or else at the next use, as after a drop. So the call needs
        no more room, sessions or tokens than there are.
        """
        with self._lock:
            if session.is_closed:
                raise SessionClosed
            kv, ended = session.kv, self._without_memory(session)
            is_its_own = kv.can_rewind(entries_kept(at))
            if not is_its_own:
                kv = self._without_memory(session, self._admission.shared(kv, entries_kept(at)))
            new = self._maker.open(
                kv, session.eos_token_ids, session.owner, parent=session, at=at, label=session.label, keeps=is_its_own
            )
            new.family = session.family
            self.prefixes.begin_as(new, session)
            new.pins += 1
            if is_its_own:
                kv.will_rewind(entries_kept(at))
                new.take_memory(session, ended)
            self._metrics.evicted.labels(reason="close").inc()
            self._remove(session, "closed")
            self._add(new)
            if not is_its_own:
                if not session.pins:
                    session.kv.release()
                with suppress(NoCapacity, QuotaExceeded):
                    self._admission.readmit(self._sessions.values(), new)
            return new

    def _without_memory(self, session: Session, prefixes: Sequence[SharedPrefix] = ()) -> SessionKV:
        kv = session.kv
        return SessionKV(
            kv.strategy, self._context, kv.limit_tokens, prefixes, tokens=1 if kv.grant.grows else None, is_dropped=True
        )

    def find(self, session_id: str, owner: str) -> Session:
        """Raises SessionNotFound for an unknown, a closed and another owner's id alike; SessionEvicted to the owner."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is not None and session.owner == owner:
                return session
            evicted = self._evicted.get(session_id)
            if evicted is not None and evicted[0] == owner:
                raise SessionEvicted(evicted[1])
            raise SessionNotFound

    def find_healthy(self, session_id: str, owner: str) -> Session:
        """As `find`, but raises InvariantViolated if the session failed earlier."""
        with self._lock:
            session = self.find(session_id, owner)
            if session.failure_reason:
                raise InvariantViolated(session.failure_reason, "the session failed earlier")
            return session

    def page(self, owner: str, *, after: str, most: int) -> list[Session]:
        """The first `most` of the owner's sessions in the order of their ids, with ids greater than `after`."""
        with self._lock:
            own = [each for each in self._of(owner) if each.session_id > after and not each.is_transient]
        return heapq.nsmallest(most, own, key=lambda session: session.session_id)

    def count_of(self, owner: str) -> int:
        """How many of the owner's sessions are in memory."""
        with self._lock:
            return sum(not session.is_transient for session in self._of(owner))

    def close(self, session_id: str, owner: str) -> int:
        """End a session; returns its final length. A running Generate commits nothing more."""
        with self._lock:
            session = self.find(session_id, owner)
            if not session.failure_reason:  # then its memory was given back when it failed
                self._metrics.evicted.labels(reason="close").inc()
            self._remove(session, "closed")
            return len(session.history)

    def forget(self, session: Session) -> None:
        """The journal has refused to open the session, and its call was not answered."""
        with self._lock:
            if session.session_id in self._sessions:
                session.journal.forget(session.session_id)
                self._remove(session)

    def fail(self, session: Session, reason: str) -> None:
        """The session broke an invariant: free its memory.

        If the journal keeps it, it leaves memory and can be restored; else its facts stay readable until its TTL.
        """
        with self._lock:
            session.failure_reason = reason
            session.live_bytes = session.tier_live_bytes = 0
            session.live_kinds = {}
            session.kv.release()
            if session.journal.keeps:
                # Its records are sound: it begins anew from them when it is asked for.
                _put_last(self._violations, session.session_id, session.violations)
                self._leave(session)
            else:
                self.prefixes.forget(session)
                session.end_history()
                session.journal.close(session.session_id)
            self._metrics.sessions_total.labels(outcome="failed").inc()

    def expire(self) -> bool:
        """Evict sessions idle longer than the TTL, and free memory of ended histories; a little at a time.

        One that was brought back has the TTL from then on. Call it now and then. Is there more to do?
        """
        with self._lock:
            horizon = self._clock() - self._idle_ttl_seconds
            tokens, has_old = 0, False
            old: list[Session] = []
            for session in self._sessions.values():  # least recently used first
                if session.here_at >= horizon:
                    break
                if session.operation is None:
                    if has_old := len(old) == _EXPIRED_SESSIONS or tokens > _EXPIRED_TOKENS:
                        break
                    old.append(session)
                    tokens += len(session.history)
            for session in old:
                self._evict(session, "ttl")
            self.kept_prefixes.expire(horizon)
            self.replies.expire()
            is_more = self.histories.leaves.tidy()
        # A journal that keeps sessions has nothing to tidy between steps.
        return self._transient.tidy() or is_more or has_old

    def close_all(self) -> None:
        """The engine stops. No client closed the sessions: those that the journal keeps are there when it starts."""
        with self._lock:
            self.kept_prefixes.stop()
            for session in list(self._sessions.values()):
                if session.journal.keeps:
                    self._leave(session)
                else:
                    self._remove(session, "closed")

    def has_closed(self, session_id: str, owner: str) -> None:
        """A session that is not in memory. Called with the lock held."""
        self._used.pop(session_id, None)
        self._violations.pop(session_id, None)
        self.replies.session_ended(session_id, owner)
        self._metrics.sessions_total.labels(outcome="closed").inc()

    def restore(self, kept: SessionKept, strategy: KVStrategy) -> Session:
        """Bring back a session that the journal has. It has no memory yet, as if its K/V had been dropped.

        Raises ModelMismatch if its tokens would change, NoCapacity or QuotaExceeded if there is no place for it.
        """
        record = kept.record
        with self._lock:
            self._maker.check(record, strategy)
            self._place_history(record.owner, sum(len(tokens.token_ids) for tokens in kept.tokens))
            kv = self._admission.place(
                self._sessions.values(), strategy, record.limit_tokens, record.owner, is_growing=record.is_growing
            )
            session = self._maker.come_back(kept, kv)
            session.violations = self._violations.pop(record.session_id, session.violations)
            by_journal = self._clock() - max(0.0, self._wall_clock() - kept.used_at)
            session.used_at = self._used.pop(record.session_id, by_journal)
            self._add(session)
            self.replies.session_came_back(record.session_id, record.owner)
            return session

    def is_resident(self, session_id: str) -> bool:
        """Is the session in memory? Waits for one that is leaving, which must not be read again before it has left."""
        with self._lock:
            return session_id in self._sessions

    def used_at(self, session_id: str) -> float | None:
        """When a session that left memory was used last, on the store's clock; None: that is not known here."""
        with self._lock:
            return self._used.get(session_id)

    def violations_of(self, session_id: str) -> Violations:
        """Of a session that left memory."""
        with self._lock:
            return self._violations.get(session_id, Violations())

    def ensure_memory(self, session: Session) -> None:
        """The caller holds the session and needs its K/V: if it was dropped, reserve memory for it again.

        Raises NoCapacity or QuotaExceeded; the session keeps its history, and may try again.
        """
        with self._lock:
            if session.kv.is_dropped and not session.is_closed:
                self._admission.readmit(self._sessions.values(), session)

    def secure(self, session: Session, tokens: int) -> None:
        """The caller holds the session: grant it memory for a history of `tokens`.

        A session whose K/V was dropped is granted memory when it needs it (`ensure_memory`). Raises NoCapacity or
        QuotaExceeded; then nothing changed.
        """
        with self._lock:
            if not session.kv.is_dropped and not session.is_closed:
                self._admission.grow(self._sessions.values(), session, tokens)

    def secure_if_free(self, session: Session, tokens: int) -> bool:
        """As `secure`, but from free memory only: nothing is dropped. Returns False if there is none."""
        with self._lock:
            if session.kv.is_dropped or session.is_closed:
                return False
            return self._admission.grow_if_free(self._sessions.values(), session, tokens)

    def check_history(self, session: Session, adding: int) -> None:
        """Raise HistoryLimit or QuotaExceeded if `adding` more tokens are too many. Called with the lock held."""
        session.check_room(adding)
        self.histories.check(session, adding)

    def have_room(self, sessions: Iterable[Session], tokens: int) -> bool:
        """May each history take so many more tokens?"""
        with self._lock:
            return all(self.histories.room(session, tokens) == tokens for session in sessions)

    def refuse_without_place(self, session: Session) -> None:
        """Raise QuotaExceeded if the owner's histories may not take one more token."""
        with self._lock:
            if not self.histories.room(session, 1):
                self.histories.check(session, 1)

    @contextmanager
    def lent(self, lender: Lender) -> Iterator[SessionKV | None]:
        """Engine's thread: its entries, to be copied within, whether or not it ends meanwhile. None: they are gone."""
        with self._lock:
            kv = None if lender.is_gone or lender.kv.is_dropped else lender.kv.as_it_is()
            pinned = lender if isinstance(lender, Session) and kv is not None else None
            if pinned is not None:
                pinned.pins += 1
            if isinstance(lender, KeptPrefix):
                self.kept_prefixes.used(lender)
        try:
            yield kv
        finally:
            if pinned is not None:
                self.unpin(pinned)

    def continue_behind(self, session: Session, lender: Lender, at: int) -> bool:
        """Engine's thread: have a session without entries of its own read the first `at` of another's in place, and
        keep memory for what follows alone. False, and nothing changed, if it has to copy them.
        """
        with self._lock:
            return not session.is_closed and not session.pins and self._admission.lend(lender.kv, session, at)

    def unpin(self, *sessions: Session) -> None:
        """Release the pins that `fork` set."""
        with self._lock:
            for session in sessions:
                session.pins -= 1
                self._release_if_over(session)
                self._hand_over(session)

    @contextmanager
    def undisturbed(self, session: Session, uses: int) -> Iterator[bool]:
        """Within, the K/V of an idle session stays where it is, unless it was used since `session.uses` was `uses`.

        Engine's thread. Gives whether it stays.
        """
        with self._lock:
            is_idle = session.uses == uses and session.operation is None
            is_idle &= not (session.is_closed or session.failure_reason or session.kv.is_dropped)
            session.pins += is_idle
        try:
            yield is_idle
        finally:
            if is_idle:
                self.unpin(session)

    # -- one operation at a time ------------------------------------------------------------------------------------

    def locked(self) -> AbstractContextManager[object]:
        """Hold the store's lock over a few host instructions, so that a change and its journal record are one."""
        return self._lock

    def acquire(self, session: Session, operation: Holder) -> None:
        """Let `operation` hold the session. Raises SessionBusy at once if something else does, or if the session left
        memory and came back since it was found: then it has to be found again."""
        with self._lock:
            # It may have ended since it was found; then this raises how.
            found = self.find_healthy(session.session_id, session.owner)
            if found is not session or session.operation is not None:
                raise SessionBusy(0.0)
            session.operation = operation
            session.uses += 1
            self._touch(session)

    def use(self, session: Session, usage: TokenUsage) -> None:
        """A Generate of the session ended, and took this."""
        with self._lock:
            self._journal.use(session.owner, usage)

    def free(self, session: Session) -> None:
        """The operation ended. Calls those waiting for the session, and finishes a close that came meanwhile."""
        with self._lock:
            if session.operation is Holder.GENERATE:
                session.granted_length = 0
                if session.journal.keeps:
                    session.journal.rest(session.session_id)
            session.operation = None
            waiters, session.waiters = session.waiters, []
            self._release_if_over(session)
            self._touch(session)
            self._hand_over(session)
        for wake in waiters:
            wake()

    def let_go(self, session_id: str) -> None:
        """See `Resident`."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is not None and not session.is_transient:
                session.is_wanted = True
                self._hand_over(session)

    def lose(self) -> None:
        """See `Resident`. Their Generates end with SessionElsewhere."""
        for session in [one for one in self._sessions.values() if one.journal.keeps]:
            session.is_closed = session.is_lost = True
            self.prefixes.forget(session)
            del self._sessions[session.session_id]
            self._release_if_over(session, keeps=True)
        self.replies.clear()
        self._used.clear()

    def _hand_over(self, session: Session) -> None:
        """Leave memory if another server asks for it and nothing holds it. Lock held."""
        is_free = session.operation is None and not session.pins
        if session.is_wanted and is_free and not session.is_closed:
            self._metrics.evicted.labels(reason="handed_over").inc()
            self._leave(session)

    def when_free(self, session_id: str, callback: Callable[[], None]) -> None:
        """Call back once, from any thread, when the session is free (at once if it is, or does not exist)."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is not None and session.operation is not None:
                session.waiters.append(callback)
                return
        callback()

    def __len__(self) -> int:
        return len(self._sessions)

    def sessions(self) -> tuple[Session, ...]:
        """The open sessions."""
        with self._lock:
            return tuple(self._sessions.values())

    def reserved_by(self, owner: str) -> Bound:
        """Bytes that the owner's sessions have reserved between Generates, on the device and off it."""
        with self._lock:
            own = self._of(owner)
            reserved = [session.kv.reserved for session in own]
            sustained = sum(bound.sustained_bytes for bound in reserved) + orphaned_bytes(own)
            return Bound(
                sustained_bytes=sustained,
                peak_bytes=sustained,
                tier_bytes=sum(bound.tier_bytes for bound in reserved),
            )

    def history_tokens_of(self, owner: str) -> int:
        """Tokens in the histories of the owner's sessions; tokens shared by forks count once."""
        with self._lock:
            return self.histories.tokens_of(owner)

    def held_history(self) -> Holdings:
        """Tokens and bytes of all owners' histories and appends under way, the journal's bytes included."""
        with self._lock:
            return self.histories.held()

    @contextmanager
    def carrying(self, owner: str, tokens: int) -> Iterator[None]:
        """Around an append of so many ids, which are in memory until it is done: they count as the owner's history.

        Raises QuotaExceeded if that makes too many. An owner's only append may pass: it is refused when it is done,
        unless it was done before and its reply is remembered.
        """
        with self._lock:
            self.histories.carry(owner, tokens)
        try:
            yield
        finally:
            with self._lock:
                self.histories.put_down(owner, tokens)

    def remembered_replies(self) -> int:
        """How many replies are remembered, of all owners."""
        with self._lock:
            return len(self.replies)

    def history_bytes(self, session: Session) -> int:
        """Bytes of its history: ids, marks, sets of ids, the journal; parts shared with forks included."""
        return session.history.nbytes + session.journal.held_bytes(session.session_id)

    # -- helpers, lock held -----------------------------------------------------------------------------------------

    def _of(self, owner: str) -> list[Session]:
        return [session for session in self._sessions.values() if session.owner == owner]

    def _place_history(self, owner: str, tokens: int) -> None:
        """Let the owner's idle sessions leave memory until so many more tokens of history have a place in it.

        Those alone leave that the journal keeps, and none for tokens that would be refused even then. Raises
        QuotaExceeded.
        """
        self.histories.end_grants(owner)
        most, held = self._limits.history_tokens_per_owner, self.histories.tokens_of(owner)
        if not most or held + tokens <= most:
            return
        idle = [session for session in self._admission.idle(self._sessions.values(), owner) if session.journal.keeps]
        if tokens <= most and held + tokens - sum(len(session.history) for session in idle) <= most:
            for session in idle:
                self._evict(session, "lru")
                if (held := self.histories.tokens_of(owner)) + tokens <= most:
                    return
        raise QuotaExceeded(
            "history_tokens_per_owner",
            most,
            f"the session has {tokens} tokens of history, your sessions in memory hold {held}, and one owner may have "
            f"{most}; it stays as it is. Close sessions, wait until others have been idle for a while, or have the "
            "operator raise history_tokens_per_owner",
            retry_after_seconds=RETRY_SECONDS if tokens <= most else None,
        )

    def _add(self, session: Session) -> None:
        self._sessions[session.session_id] = session

    def _release_if_over(self, session: Session, *, keeps: bool = False) -> None:
        """keeps: what it has may be kept for others of its owner."""
        if session.is_closed and session.operation is None:
            self.histories.end_grants(session.owner)  # its readers may keep what forks still hold
            may_keep = keeps and not session.pins and not session.failure_reason
            if may_keep and self.kept_prefixes.keep(session):
                session.kv = self._without_memory(session)
            session.end_history()
            if not session.pins:
                session.kv.release()

    def _touch(self, session: Session) -> None:
        session.used_at = session.here_at = self._clock()
        if session.session_id in self._sessions:
            self._sessions.move_to_end(session.session_id)

    def _drop(self, session: Session) -> None:
        session.drop_entries()
        self._metrics.dropped.inc()

    def _evict(self, session: Session, cause: str) -> None:
        self._metrics.evicted.labels(reason=cause).inc()
        if session.journal.keeps:
            self._leave(session)
            return
        _put_last(self._evicted, session.session_id, (session.owner, cause))
        self._remove(session, "evicted")

    def _leave(self, session: Session) -> None:
        """The session leaves memory. The journal keeps it, with its replies."""
        session.is_closed = True
        self.prefixes.forget(session)
        _put_last(self._used, session.session_id, session.used_at if session.operation is None else self._clock())
        del self._sessions[session.session_id]
        self.replies.session_left(session.session_id)
        self._release_if_over(session, keeps=True)
        # Leaving is no use: a session that is only looked at is unused, however often it comes back for that.
        session.journal.leave(session.session_id, self._wall_clock() - (self._clock() - session.used_at))

    def _remove(self, session: Session, outcome: str = "") -> None:
        """outcome: as it is counted; "": it is not, for there was no such session."""
        session.is_closed = True
        self.prefixes.forget(session)
        del self._sessions[session.session_id]
        self.replies.session_ended(session.session_id, session.owner)
        self._release_if_over(session, keeps=True)
        if not session.failure_reason:
            session.journal.close(session.session_id)
            if outcome:
                self._metrics.sessions_total.labels(outcome=outcome).inc()


def entries_kept(at: int) -> int:
    """Of a session that begins with `at` tokens of another: the last token is computed, for what comes after it."""
    return max(0, at - 1)


def _put_last(book: OrderedDict[str, T], key: str, value: T) -> None:
    """Add to a book of at most _TOMBSTONES entries."""
    book[key] = value
    while len(book) > _TOMBSTONES:
        book.popitem(last=False)
