"""Admission of sessions by number and bytes, before anything is allocated; idle ones are preempted or evicted for it.

    too many sessions   the owner's least recently used idle session is evicted
    too few bytes       the K/V of the owner's least recently used idle sessions are dropped, one session after another;
                        their histories stay, and their entries are computed again when the sessions are used

A session is never evicted or dropped for another owner's, nor while an operation holds it. Called with the store's lock
held.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from inference_engine.config import EngineConfig
from inference_engine.errors import NoCapacity, QuotaExceeded
from inference_engine.kv.context import KVContext
from inference_engine.kv.memory.allocation import allocation_bytes
from inference_engine.kv.memory.pool import Demand, Run
from inference_engine.kv.parts.shared_prefix import SharedPrefix
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategy import (
    KVStrategy,
    bound_of,
    demands_of,
    grows_with_history,
    no_address_space,
    no_capacity,
    whole_segments,
)
from inference_engine.session.session import Session
from inference_engine.types import Bound

RETRY_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLimits:
    """Limits of the operator, named like the settings. Limits per owner: 0 for no limit."""

    max_sessions: int
    evictable_seconds: float  # idle time before a session may be evicted or dropped for another
    max_sessions_per_owner: int = 0
    kv_bytes_per_owner: int = 0
    history_tokens_per_owner: int = 0
    history_tokens_per_session: int = 0
    kept_sessions_per_owner: int = 0
    kept_tokens_per_owner: int = 0
    share_forks: bool = True
    share_prefixes: str = "off"
    prefix_bytes: int = 0
    restore_cache_choices: int = 0

    @staticmethod
    def of(config: EngineConfig) -> SessionLimits:
        return SessionLimits(
            max_sessions=config.max_sessions,
            evictable_seconds=config.session_evictable_seconds,
            max_sessions_per_owner=config.max_sessions_per_owner,
            kv_bytes_per_owner=config.kv_bytes_per_owner,
            history_tokens_per_owner=config.history_tokens_per_owner,
            history_tokens_per_session=config.history_tokens_per_session,
            kept_sessions_per_owner=config.kept_sessions_per_owner,
            kept_tokens_per_owner=config.kept_tokens_per_owner,
            share_forks=config.share_forks,
            share_prefixes=config.share_prefixes,
            prefix_bytes=config.prefix_bytes,
            restore_cache_choices=config.restore_cache_choices,
        )


class Admission:
    """`sessions` are the open ones, least recently used first. `evict` ends a session, `drop` frees its K/V."""

    def __init__(
        self,
        context: KVContext,
        limits: SessionLimits,
        clock: Callable[[], float],
        *,
        evict: Callable[[Session], None],
        drop: Callable[[Session], None],
    ) -> None:
        self._context = context
        self._limits = limits
        self._clock = clock
        self._evict = evict
        self._drop = drop
        self._has_to_wake = False  # does any session hold more while it is active, or did one?

    def admit(
        self,
        sessions: Collection[Session],
        strategy: KVStrategy,
        limit_tokens: int | None,
        owner: str,
        *,
        tokens: int | None = None,
        parent: SessionKV | None = None,
        kept_tokens: int = 0,
    ) -> SessionKV:
        """Memory for a new session. With `parent` it is a fork, which reads the parent's first `kept_tokens` entries
        where it can.

        tokens: the length of its history, if its memory grows with it; None: it gets all memory that it may need.
        Raises NoCapacity or QuotaExceeded; then no session was evicted or dropped.
        """
        prefixes: tuple[SharedPrefix, ...] = ()
        if parent is not None and parent.context.geometry.rotates_as(self._context.geometry.within(limit_tokens)):
            prefixes = self.shared(parent, kept_tokens)
        base, limit = prefixes[0].end if prefixes else 0, limit_tokens
        if tokens is not None and grows_with_history(strategy, self._context, limit_tokens):
            assert limit_tokens is not None
            limit = whole_segments(max(tokens, base + 1), self._context.geometry, limit_tokens)
        needed = bound_of(strategy, self._context, limit, base=base)
        if limit != limit_tokens:  # all of the second tier is reserved at once
            whole = bound_of(strategy, self._context, limit_tokens, base=base)
            needed = replace(needed, tier_bytes=whole.tier_bytes)

        def demands() -> tuple[Demand, ...]:
            return demands_of(strategy, self._context, limit_tokens, base=base)

        kv: list[SessionKV] = []
        try:
            self._refuse_what_can_never_fit(needed)
            self._make_place(sessions, owner, needed, demands)
            self._make_room(
                sessions,
                needed,
                owner,
                lambda: kv.append(SessionKV(strategy, self._context, limit_tokens, prefixes, tokens=tokens)),
                demands,
            )
        except BaseException:
            if parent is not None:
                parent.end_lending()
            raise
        return kv[0]

    def shared(self, parent: SessionKV, kept_tokens: int) -> tuple[SharedPrefix, ...]:
        """What a session that begins as the parent did may read in its memory."""
        return parent.share(kept_tokens) if self._limits.share_forks else ()

    def place(
        self,
        sessions: Collection[Session],
        strategy: KVStrategy,
        limit_tokens: int | None,
        owner: str,
        *,
        is_growing: bool,
    ) -> SessionKV:
        """A session of the owner without memory, which it is given by `readmit`. Raises NoCapacity or QuotaExceeded."""
        self._make_place(sessions, owner)
        return SessionKV(strategy, self._context, limit_tokens, tokens=1 if is_growing else None, is_dropped=True)

    def readmit(self, sessions: Collection[Session], session: Session) -> None:
        """Memory for a session whose K/V was dropped. Raises as `admit`, and the session stays as it is."""
        kv, tokens = session.kv, len(session.history) + 1
        self._make_room(
            sessions, kv.grant.bound_at(tokens), session.owner, lambda: kv.reserve(tokens), lambda: kv.demands
        )

    def lend(self, lender: SessionKV, session: Session, at: int) -> bool:
        """Let a session without entries of its own go on behind the first `at` of `lender`. False, and nothing changed,
        if they cannot be read in place."""
        prefixes = lender.share(at) if self._limits.share_forks else ()
        kv, tokens = session.kv, len(session.history) + 1
        if not prefixes or prefixes[0].end <= kv.base:
            return False
        kv.drop()
        try:
            session.kv = SessionKV(
                kv.strategy, self._context, kv.limit_tokens, prefixes, tokens=tokens if kv.grant.grows else None
            )
        except NoCapacity:
            kv.reserve(tokens)  # it has just given as much back
            lender.end_lending()
            return False
        session.kv.take_prefix_states()
        kv.release()  # the prefix that it had
        return True

    def grow(self, sessions: Collection[Session], session: Session, tokens: int) -> None:
        """Memory for a history of `tokens`. Raises as `admit`, and the session stays as it is."""
        kv = session.kv
        if kv.grant.covers(tokens):
            return
        then = kv.grant.bound_at(tokens)

        def take() -> None:
            if not kv.grant.grow(tokens):
                raise no_capacity(self._context, then)

        # It has its runs already.
        self._make_room(sessions, _more(kv, then), session.owner, take, lambda: ())

    def grow_if_free(self, sessions: Collection[Session], session: Session, tokens: int) -> bool:
        """As `grow`, but from free memory only: no session is dropped. False if there is none; nothing changes then."""
        kv, pool = session.kv, self._context.pool
        if kv.grant.covers(tokens):
            return True
        needed = _more(kv, kv.grant.bound_at(tokens))
        # The cheapest check first: the others loop over all sessions.
        if needed.sustained_bytes > pool.capacity_bytes - pool.reserved_bytes:
            return False
        try:
            self._check_quota(sessions, needed, session.owner)
            self._keep_room_to_wake(sessions, needed)
        except (NoCapacity, QuotaExceeded):
            return False
        return kv.grant.grow(tokens)

    # -- places -----------------------------------------------------------------------------------------------------

    def _make_place(
        self,
        sessions: Collection[Session],
        owner: str,
        needed: Bound | None = None,
        demands: Callable[[], Sequence[Demand]] = lambda: (),
    ) -> None:
        """needed, demands: of the session that is to have the place; None: it is given its memory later."""
        while (refusal := self._no_place(sessions, owner)) is not None:
            idle = self.idle(sessions, owner)
            if not idle:
                raise refusal
            if needed is not None:
                self._refuse_without(idle, sessions, needed, owner, demands())
            self._evict(idle[0])

    def _refuse_without(
        self,
        idle: Collection[Session],
        sessions: Collection[Session],
        needed: Bound,
        owner: str,
        demands: Sequence[Demand],
    ) -> None:
        """Raise NoCapacity or QuotaExceeded if there were no memory even without these: then none ends for nothing."""
        going = frozenset(idle)
        others = [session for session in sessions if session not in going]
        self._check_quota(others, needed, owner)
        self._keep_room_to_wake(others, needed)
        pool = self._context.pool
        # At most: forks that stay keep what they read of sessions that go.
        freed = sum(session.kv.reserved.sustained_bytes for session in idle) + orphaned_bytes(idle)
        if pool.capacity_bytes - pool.reserved_bytes + freed < needed.sustained_bytes:
            raise no_capacity(self._context, needed)
        self._context.tier.refuse_without(sum(session.kv.reserved.tier_bytes for session in idle), needed.tier_bytes)
        if pool.least_released([], demands) is None and pool.least_released([_runs_of(idle)], demands) is None:
            raise no_address_space(allocation_bytes(demands, itemsize=self._context.geometry.itemsize))

    def _no_place(self, sessions: Collection[Session], owner: str) -> NoCapacity | QuotaExceeded | None:
        limits, most = self._limits, self._limits.max_sessions_per_owner
        if most and (own := sum(session.owner == owner for session in sessions)) >= most:
            return QuotaExceeded(
                "max_sessions_per_owner",
                most,
                f"{own} sessions of yours are open, as many as one owner may have; close some",
                retry_after_seconds=RETRY_SECONDS,
            )
        if len(sessions) >= limits.max_sessions:
            return NoCapacity(
                f"the server holds {limits.max_sessions} sessions already, its maximum; close some",
                retry_after_seconds=RETRY_SECONDS,
                max_sessions=limits.max_sessions,
            )
        return None

    # -- bytes ------------------------------------------------------------------------------------------------------

    def _make_room(
        self,
        sessions: Collection[Session],
        needed: Bound,
        owner: str,
        take: Callable[[], None],
        demands: Callable[[], Sequence[Demand]],
    ) -> None:
        """Drop idle sessions until `take` succeeds; it raises NoCapacity while there is too little memory.

        demands: the runs of the pool that it takes.
        """
        while True:
            try:
                self._check_quota(sessions, needed, owner)
                self._keep_room_to_wake(sessions, needed)
                return take()
            except (NoCapacity, QuotaExceeded):
                going = self._to_drop(sessions, needed, owner, demands())
                if not going:
                    raise
                for session in going:
                    self._drop(session)

    def _to_drop(
        self, sessions: Collection[Session], needed: Bound, owner: str, demands: Sequence[Demand]
    ) -> list[Session]:
        """The idle sessions of the owner that have to be dropped for `needed`; none if all of them are too few.

        Raises NoCapacity or QuotaExceeded if it would be refused even then: no session is dropped for that.
        """
        idle, missing = self.idle(sessions, owner), self._missing(sessions, needed, owner)
        # Mostly the first few suffice. To ask each what it gives back takes longer the more sessions there are.
        first = _first_that_free(idle, missing)
        if first:
            try:
                self._check_without(first, sessions, needed, owner)
            except (NoCapacity, QuotaExceeded):
                pass
            else:
                if (going := self._as_many_as_needed(first, missing, demands)) is not None:
                    return going
        holding = self._that_help(idle, needed)
        if not holding:
            return []
        self._check_without(holding, sessions, needed, owner)
        lacking = self._lacking_to_wake(list(holding), sessions, needed) if self._has_to_wake else None
        return self._as_many_as_needed(holding, missing, demands, lacking) or []

    def _check_without(
        self, going: Collection[Session], sessions: Collection[Session], needed: Bound, owner: str
    ) -> None:
        """Raise NoCapacity or QuotaExceeded if `needed` would be refused though `going` were dropped."""
        self._check_quota(sessions, needed, owner, without=going)
        self._keep_room_to_wake(sessions, needed, without=going)

    def _missing(self, sessions: Collection[Session], needed: Bound, owner: str) -> Bound:
        """What has to be given back for `needed`, at least."""
        pool, tier, most = self._context.pool, self._context.tier, self._limits.kv_bytes_per_owner
        missing = pool.reserved_bytes + needed.sustained_bytes - pool.capacity_bytes
        if most:
            missing = max(missing, self._held(sessions, owner) + needed.sustained_bytes - most)
        if needed.peak_bytes > needed.sustained_bytes:  # it has to be able to wake
            sustained = sum([session.kv.reserved.sustained_bytes for session in sessions]) + orphaned_bytes(sessions)
            missing = max(missing, sustained + needed.peak_bytes - pool.capacity_bytes)
        missing = max(0, missing)
        missing_tier = max(0, tier.reserved_bytes + needed.tier_bytes - tier.capacity_bytes)
        return Bound(sustained_bytes=missing, peak_bytes=missing, tier_bytes=missing_tier)

    def _lacking_to_wake(self, holding: Sequence[Session], sessions: Collection[Session], needed: Bound) -> list[int]:
        """Bytes that are missing for any one of those that stay to wake, once the first 0, 1, 2, … of `holding` are
        dropped; at most 0 if none are."""
        going = frozenset(holding)
        waking = max(
            [_waking_bytes(needed), *(_waking_bytes(each.kv.reserved) for each in sessions if each not in going)]
        )
        capacity = self._context.pool.capacity_bytes
        sustained = sum([session.kv.reserved.sustained_bytes for session in sessions if session not in going])
        sustained += needed.sustained_bytes + orphaned_bytes(sessions)
        lacking = [sustained + waking - capacity if waking else 0]
        for session in reversed(holding):  # one more stays
            reserved = session.kv.reserved
            sustained, waking = sustained + reserved.sustained_bytes, max(waking, _waking_bytes(reserved))
            lacking.append(sustained + waking - capacity if waking else 0)
        return lacking[::-1]

    def _as_many_as_needed(
        self,
        holding: Mapping[Session, Bound],
        missing: Bound,
        demands: Sequence[Demand],
        lacking: Sequence[int] | None = None,
    ) -> list[Session] | None:
        """Those of these sessions, in this order, that have to be dropped so that what is missing is free, with runs
        for the demands. At least one; None if all of them are too few. lacking: by `_lacking_to_wake`, if any session
        has to wake.

        All at once: to ask after each whether there is room would take longer the more sessions there are.
        """
        count, left, left_of_tier = 0, missing.sustained_bytes, missing.tier_bytes
        for freed in holding.values():
            if count and left <= 0 and left_of_tier <= 0 and (lacking is None or lacking[count] <= 0):
                break
            count, left, left_of_tier = count + 1, left - freed.sustained_bytes, left_of_tier - freed.tier_bytes
        sessions = list(holding)
        for number in dict.fromkeys((count, len(sessions))):  # mostly those that give back the bytes suffice
            held = [session.kv.runs for session in sessions[:number]]
            if (most := self._context.pool.least_released(held, demands, least=count)) is not None:
                return sessions[:most]
        return None

    def _that_help(self, idle: Sequence[Session], needed: Bound) -> dict[Session, Bound]:
        """Those of these sessions that may be dropped for `needed`, in order, and what each gives back.

        Empty if all of them together give back too little.
        """
        freeable = ((session, session.kv.freeable) for session in idle)
        holding = {session: freed for session, freed in freeable if freed.sustained_bytes}
        pool, tier = self._context.pool, self._context.tier
        within_reach = pool.capacity_bytes - pool.reserved_bytes
        within_reach += sum([freed.sustained_bytes for freed in holding.values()])
        if within_reach < needed.sustained_bytes:
            return {}
        short = needed.tier_bytes - (tier.capacity_bytes - tier.reserved_bytes)
        # If the second tier is short, as many as that takes of those that hold some of it come first.
        first: dict[Session, Bound] = {}
        for session, freed in holding.items():
            if short <= 0:
                break
            if freed.tier_bytes:
                first[session] = freed
                short -= freed.tier_bytes
        return {} if short > 0 else first | holding

    def _refuse_what_can_never_fit(self, needed: Bound) -> None:
        """Raise NoCapacity for a session that would not fit into the empty pool."""
        self._context.tier.refuse_what_can_never_fit(needed.tier_bytes)
        if needed.peak_bytes > self._context.pool.capacity_bytes:
            raise no_capacity(self._context, needed)

    def _check_quota(
        self, sessions: Collection[Session], needed: Bound, owner: str, *, without: Collection[Session] = frozenset()
    ) -> None:
        """Raise QuotaExceeded if the owner's sessions and this one would reserve too much between Generates."""
        most = self._limits.kv_bytes_per_owner
        if not most:
            return
        held = self._held(sessions, owner, without)
        if held + needed.sustained_bytes > most:
            raise QuotaExceeded(
                "kv_bytes_per_owner",
                most,
                f"the session needs {needed.sustained_bytes} bytes of K/V; your others hold {held}, and one owner may "
                f"have {most}. Close sessions, or ask for a smaller limit_tokens or another strategy",
                retry_after_seconds=RETRY_SECONDS if held else None,
            )

    def _held(self, sessions: Collection[Session], owner: str, without: Collection[Session] = frozenset()) -> int:
        """Bytes that the owner's sessions reserve between Generates."""
        own = [session for session in sessions if session.owner == owner]
        held = sum(session.kv.reserved.sustained_bytes for session in own if session not in without)
        return held + orphaned_bytes(own)

    def _keep_room_to_wake(
        self, sessions: Collection[Session], needed: Bound, *, without: Collection[Session] = frozenset()
    ) -> None:
        """Raise NoCapacity if the new session left too little memory for any one session to wake.

        without: sessions that would be dropped first.
        """
        # All memory is granted after this was asked, so no session there is has to wake if none ever had.
        self._has_to_wake |= needed.peak_bytes > needed.sustained_bytes
        if not self._has_to_wake:
            return
        bounds = [session.kv.reserved for session in sessions if session not in without] + [needed]
        waking = max([_waking_bytes(bound) for bound in bounds])
        capacity = self._context.pool.capacity_bytes
        # What the pool has reserved holds all of it, and what sessions that are awake have beyond: mostly that is the
        # answer, and nothing has to be added up over all sessions.
        if not waking or self._context.pool.reserved_bytes + needed.sustained_bytes + waking <= capacity:
            return
        sustained = sum([bound.sustained_bytes for bound in bounds]) + orphaned_bytes(sessions)
        if sustained + waking > capacity:
            raise NoCapacity(
                f"the session needs {needed.sustained_bytes} bytes of K/V, and would leave too few of the server's "
                f"{capacity} to wake a session. Close sessions, or ask for a smaller limit_tokens or another strategy",
                retry_after_seconds=RETRY_SECONDS,
                needed_bytes=needed.sustained_bytes,
                capacity_bytes=capacity,
            )

    def idle(self, sessions: Collection[Session], owner: str) -> list[Session]:
        """The owner's sessions that may be evicted or dropped, least recently used first."""
        horizon = self._clock() - self._limits.evictable_seconds
        return [
            session
            for session in sessions
            if session.owner == owner
            and session.operation is None
            and not session.pins
            and not session.is_transient  # its call goes on
            and session.here_at <= horizon
        ]


def _waking_bytes(bound: Bound) -> int:
    return bound.peak_bytes - bound.sustained_bytes


def _more(kv: SessionKV, then: Bound) -> Bound:
    """Bytes that a session must be granted in addition to those it has, to reach the bound `then`."""
    more = then.sustained_bytes - kv.reserved.sustained_bytes
    return Bound(sustained_bytes=more, peak_bytes=more + then.peak_bytes - then.sustained_bytes)


def _first_that_free(idle: Sequence[Session], missing: Bound) -> dict[Session, Bound]:
    """The first of these sessions, at least one, that together give back what is missing, and what each gives back.

    Empty if all of them give back too little, or if the second tier is short: then they do not go in this order.
    """
    first: dict[Session, Bound] = {}
    left = missing.sustained_bytes
    for session in () if missing.tier_bytes else idle:
        freed = session.kv.freeable
        if freed.sustained_bytes:
            first[session] = freed
            left -= freed.sustained_bytes
            if left <= 0:
                return first
    return {}


def _runs_of(sessions: Collection[Session]) -> set[Run]:
    """All runs of the pool that these sessions hold, with those of parents that ended."""
    own = {run for session in sessions for run in session.kv.runs}
    return own | {run for session in sessions for lent in session.kv.borrowed for run in lent.runs}


def orphaned_bytes(sessions: Collection[Session]) -> int:
    """Bytes that these sessions, as forks, keep reserved of parents that ended; each allocation counts once."""
    borrowed = {id(allocation): allocation.nbytes for session in sessions for allocation in session.kv.borrowed}
    owned = {id(allocation) for session in sessions for allocation in session.kv.allocations} if borrowed else ()
    return sum(nbytes for key, nbytes in borrowed.items() if key not in owned)
