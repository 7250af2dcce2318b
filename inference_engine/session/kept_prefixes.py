"""K/V of sessions that closed, from which later ones of their owner copy what they begin with.

What a session held is kept in its place until its memory is needed, for anything: it is the pool's `spare`, counts as
reserved nowhere, and is given back before a session is refused, waits, or is dropped.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from inference_engine.errors import NoCapacity
from inference_engine.kv.context import KVContext
from inference_engine.kv.memory.pool import Run
from inference_engine.kv.part import Saved
from inference_engine.kv.session_kv import SessionKV
from inference_engine.metrics import EngineMetrics
from inference_engine.session.history import Marks, TokenIds
from inference_engine.session.prefixes import LEAST_TOKENS, Beginning, Prefixes, in_common
from inference_engine.session.session import Session


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Tokens of a history that ended."""

    token_ids: TokenIds
    token_marks: Marks

    @classmethod
    def of(cls, history: Beginning, length: int) -> KeptTokens:
        return cls(history.ids(0, length).copy(), history.marks(0, length).copy())

    def __len__(self) -> int:
        return len(self.token_ids)

    def ids(self, start: int, stop: int) -> TokenIds:
        return self.token_ids[start:stop]

    def marks(self, start: int, stop: int) -> Marks:
        return self.token_marks[start:stop]


@dataclass(kw_only=True, slots=True, eq=False)
class KeptPrefix:
    """The entries of a session that closed. Implements Lender.

    Its memory may be given back by any thread, at any time. The engine's thread may go on copying from it until it
    writes anything else: it alone writes what others take then (`SessionKV.as_it_is`).
    """

    owner: str
    kv: SessionKV
    history: KeptTokens
    digests: list[bytes]
    used_at: float
    nbytes: int
    family: None = None
    is_gone: bool = False


class KeptPrefixes:
    """Implements Spare. Least recently used first go those of the owner that has the most bytes, so one that has less
    than its share of `most_bytes` loses none to another's. All of it is called with the store's lock held, or takes it.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        index: Prefixes,
        context: KVContext,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        *,
        most_bytes: int,
    ) -> None:
        self._lock = lock
        self._context = context
        self._metrics = metrics
        self._clock = clock
        self.most_bytes = most_bytes
        self._index = index
        self._held: dict[str, OrderedDict[KeptPrefix, None]] = {}  # by owner, least recently used first
        self._bytes: Counter[str] = Counter()  # by owner
        self.nbytes = 0
        metrics.prefix_capacity_bytes.set(most_bytes)

    def bytes_of(self, owner: str) -> int:
        return self._bytes[owner]

    @property
    def runs(self) -> list[Run]:
        with self._lock:
            return [run for held in self._held.values() for kept in held for run in kept.kv.runs]

    # -- what comes -------------------------------------------------------------------------------------------------

    def keep(self, session: Session) -> bool:
        """Take over the entries of a session that closed, before its history ends. False: they are not worth it, or
        their memory could not be given back at once, because open sessions have a part in it.
        """
        kv, length = session.kv, session.kv.length
        if not self.most_bytes or not LEAST_TOKENS <= length <= len(session.history) or not kv.may_be_kept:
            return False
        kv.shrink()
        new = self._new(session, kv, length)
        if new.nbytes > self.most_bytes or self._is_elsewhere(new):
            return False
        for other in self._that_it_goes_on_from(new):
            self._release(other, "replaced")
        self._hold(new)
        if not new.is_gone:
            self._index.add(new, new.digests)
        return True

    def keep_copy(self, session: Session, length: int, tokens: int, saved: Saved) -> bool:
        """Engine's thread, without the lock: keep the first `tokens` of what a session saved after `length`, which
        began as this one does. From free memory only. False: there is too little, it was needed meanwhile, or what was
        saved cannot go back so far.

        Raises OSError. As with copying, this thread alone writes to what is given back.
        """
        # As long as it may be, so that its keys are rotated as this session's are.
        limit = max(length, session.kv.limit_tokens or 0)
        try:
            with self._lock:
                asked = length if session.kv.grant.grows else None
                kv = SessionKV(session.kv.strategy, self._context, limit, tokens=asked)
                try:
                    new = self._new(session, kv, tokens)
                except BaseException:
                    kv.release()
                    raise
                self._hold(new)
        except NoCapacity:
            return False
        is_done = False
        try:
            kv.load(length, saved)
            if is_done := kv.kept(tokens) == tokens:
                kv.rewind(tokens)
        finally:
            with self._lock:
                if new.is_gone:
                    is_done = False
                elif is_done:
                    kv.shrink()
                    self._count(new, kv.reserved.sustained_bytes - new.nbytes)
                    self._index.add(new, new.digests)
                else:
                    self._release(new, "room")
        return is_done

    def _new(self, session: Session, kv: SessionKV, length: int) -> KeptPrefix:
        return KeptPrefix(
            owner=session.owner,
            kv=kv,
            history=KeptTokens.of(session.history, length),
            digests=self._index.digests_of(session, length),
            used_at=self._clock(),
            nbytes=kv.reserved.sustained_bytes,
        )

    def _hold(self, new: KeptPrefix) -> None:
        """Let it be given back from now on. What is over the budget goes at once, be it this one."""
        self._held.setdefault(new.owner, OrderedDict())[new] = None
        nbytes, new.nbytes = new.nbytes, 0
        self._count(new, nbytes)
        if new.nbytes > self.most_bytes:
            self._release(new, "budget")
        while self.nbytes > self.most_bytes:
            self._release(self._next(), "budget")

    def _count(self, kept: KeptPrefix, more: int) -> None:
        kept.nbytes += more
        self._bytes[kept.owner] += more
        self.nbytes += more
        self._report()

    def _is_elsewhere(self, new: KeptPrefix) -> bool:
        """Could all of it be taken from another one that is kept, up to its last border? Then that one was used."""
        for other in self._at(new.digests[-1]):
            common = in_common(new, other)
            if common < len(other.history) and other.kv.kept(common) == common:
                self.used(other)
                return True
        return False

    def _that_it_goes_on_from(self, new: KeptPrefix) -> list[KeptPrefix]:
        """Those that it has whole, and that can be taken from it as well."""
        return [
            other
            for number, digest in enumerate(new.digests, 1)
            for other in self._at(digest)
            if len(other.digests) == number
            and (length := len(other.history)) == in_common(new, other) == new.kv.kept(length)
        ]

    def _at(self, digest: bytes) -> list[KeptPrefix]:
        return [one for one in self._index.at(digest) if isinstance(one, KeptPrefix)]

    def used(self, kept: KeptPrefix) -> None:
        """It was worth keeping."""
        if not kept.is_gone:
            kept.used_at = self._clock()
            self._held[kept.owner].move_to_end(kept)

    # -- what goes --------------------------------------------------------------------------------------------------

    def give_back(self) -> bool:
        """Any thread: release one of them. False: there is none."""
        with self._lock:
            if not self._held:
                return False
            self._release(self._next(), "room")
            return True

    def expire(self, horizon: float) -> None:
        """Release those that were not used since."""
        for held in list(self._held.values()):
            for kept in list(held):
                if kept.used_at >= horizon:
                    break
                self._release(kept, "idle")

    def stop(self) -> None:
        """Release all of them, and keep none any more."""
        self.most_bytes = 0
        while self._held:
            self._release(self._next(), "idle")

    def _next(self) -> KeptPrefix:
        return next(iter(self._held[max(self._held, key=self._bytes.__getitem__)]))

    def _release(self, kept: KeptPrefix, reason: str) -> None:
        kept.is_gone = True
        self._index.forget(kept)
        held = self._held[kept.owner]
        del held[kept]
        self._bytes[kept.owner] -= kept.nbytes
        if not held:
            del self._held[kept.owner], self._bytes[kept.owner]
        try:
            kept.kv.release()
        finally:
            self.nbytes -= kept.nbytes  # last: until then the pool counts too few bytes as reserved, not too many
            self._metrics.prefixes_released.labels(reason).inc()
            self._report()

    def _report(self) -> None:
        self._metrics.prefixes_kept.set(sum(map(len, self._held.values())))
        self._metrics.prefix_bytes.set(self.nbytes)
