"""The engine: create, append, generate, close. What the server, the tests and the evaluation call.

Thread-safe. Everything but iterating a Generation returns in microseconds and never waits for the device.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from inference_engine.answers import EngineInfo, SessionInfo, SessionOpened
from inference_engine.backends.base import Forward
from inference_engine.config import EngineConfig
from inference_engine.decode.drafting import Drafter
from inference_engine.decode.verifier import Verifier
from inference_engine.errors import (
    AppendTooLarge,
    Draining,
    HistoryLengthMismatch,
    InvalidArgument,
    InvariantViolated,
    SessionBusy,
    SessionClosed,
    TokenOutOfRange,
)
from inference_engine.generation import Generation
from inference_engine.kv.query_rings import MatchTotals
from inference_engine.kv.session_kv import bound_of
from inference_engine.kv.strategies import parse_strategy, strategy_names
from inference_engine.kv.strategy import KVStrategy
from inference_engine.kv.tier import open_tier
from inference_engine.kv.token_codec import TokenCodec
from inference_engine.kv.transfers import TransferTotals
from inference_engine.metrics import EngineMetrics
from inference_engine.scheduler.loop import Scheduler
from inference_engine.scheduler.request import Forced, Listener, OnLogits, Request
from inference_engine.session.journal import Journal, MemoryJournal, SessionRecord, TokenIds, TokensRecord
from inference_engine.session.session import Operation, Session
from inference_engine.session.store import SessionStore
from inference_engine.types import (
    MAX_STOP_TOKEN_IDS,
    Event,
    GenerateParams,
    Mark,
)

logger = logging.getLogger(__name__)

MAX_LABEL_CHARACTERS = 128
_STALL_SECONDS = 60.0
_FAILED_STEPS = 3  # in a row: the device, not a request, is at fault
_KV_SHARE = 4  # of the free memory, one part in this many goes to K/V unless the settings say


class Engine:
    """One model, one device thread, many sessions.

    Every method raises RequestError kinds for what callers get wrong.
    """

    def __init__(
        self,
        forward: Forward,
        config: EngineConfig | None = None,
        *,
        journal: Journal | None = None,
        metrics: EngineMetrics | None = None,
        latent: TokenCodec | None = None,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocate the pool and start the engine's thread.

        latent: serves sessions that restore rows from a latent. drafter: guesses ahead for Generates that allow it.
        Raises ConfigError or BackendError for what cannot be had.
        """
        config = config or EngineConfig()
        step_tokens = config.step_tokens or max(config.segment_tokens, 512 if forward.device.type == "cpu" else 4096)
        self.config = replace(config, step_tokens=step_tokens)
        self.metrics = metrics or EngineMetrics()
        self._forward = forward
        self._drafter = drafter
        self._clock = clock
        self._journal = journal or MemoryJournal()
        self._geometry = forward.geometry(
            mode=self.config.mode, page_tokens=self.config.page_tokens, segment_tokens=self.config.segment_tokens
        )
        self._default_strategy = parse_strategy(self.config.strategy).resolved(self._geometry)
        self._default_strategy.check(self._geometry)
        tap_layers = () if drafter is None else drafter.tap_layers
        kv_bytes = self.config.kv_bytes or forward.free_bytes() // _KV_SHARE
        opened = forward.open(self._geometry, kv_bytes, tap_layers=tap_layers)
        tier = open_tier(
            forward.device,
            capacity_bytes=self.config.tier_bytes,
            share=_KV_SHARE,
            folder=self.config.tier_dir,
            count=self.metrics.count_transfer,
        )
        self._context = replace(opened, latent=latent, draft_memories=drafter, tier=tier)
        if drafter is not None:
            drafter.prepare(self._context)
        self._check_ready(self._default_strategy)
        self._warn_if_too_small()
        self._store = SessionStore(
            self._context,
            self._journal,
            self.metrics,
            clock,
            max_sessions=self.config.max_sessions,
            idle_ttl_seconds=self.config.session_idle_ttl_seconds,
            evictable_seconds=self.config.session_evictable_seconds,
        )
        self._scheduler = Scheduler(
            Verifier(forward, self._context, tap_layers=tap_layers),
            self._store,
            self._journal,
            self.metrics,
            self.config,
            clock,
            vocab_size=forward.facts.vocab_size,
            drafter=drafter,
        )
        self._is_draining = False
        self._scheduler.start()

    # -- sessions ---------------------------------------------------------------------------------------------------

    def create_session(
        self,
        *,
        strategy: KVStrategy | None = None,
        eos_token_ids: Sequence[int] = (),
        limit_tokens: int | None = None,
        label: str = "",
        owner: str = "",
    ) -> SessionOpened:
        """Open a session, its memory reserved for good. Raises InvalidArgument, NoCapacity or Draining."""
        self._refuse_when_draining()
        spec = (strategy or self._default_strategy).resolved(self._geometry)
        spec.check(self._geometry)
        self._check_ready(spec)
        self._check_ids("eos_token_ids", eos_token_ids, at_most=MAX_STOP_TOKEN_IDS)
        if len(label) > MAX_LABEL_CHARACTERS or not (label.isprintable()):
            raise InvalidArgument(
                "client_label", f"must be at most {MAX_LABEL_CHARACTERS} printable characters, got {len(label)}"
            )
        limit = self._limit(spec, limit_tokens)
        session = self._store.create(spec, eos_token_ids=frozenset(eos_token_ids), limit_tokens=limit, owner=owner)
        return SessionOpened(
            session_id=session.session_id, strategy=spec, bound=session.kv.bound, limit_tokens=session.limit_tokens
        )

    def rebuild_session(self, began: SessionRecord, records: Sequence[TokensRecord]) -> SessionOpened:
        """A new session with the history of a recorded one, marks included, so that it goes on as that one would."""
        opened = self.create_session(
            strategy=parse_strategy(began.strategy),
            eos_token_ids=began.eos_token_ids,
            limit_tokens=began.limit_tokens,
            owner=began.owner,
        )
        session = self._find(opened.session_id, began.owner)
        with self._holding(session, Operation.APPEND, 0.0), self._store.locked():
            for record in records:
                assert record.position == len(session.history), "records follow each other"
                session.record(self._journal, record.token_ids, record.mark)
        return opened

    def append(
        self,
        session_id: str,
        token_ids: Sequence[int],
        *,
        expected_history_length: int | None = None,
        owner: str = "",
        wait_seconds: float = 0.0,
    ) -> int:
        """Add ids to the history, all or none; returns its new length. They are prefilled by the next Generate.

        Raises SessionBusy if something holds the session for longer than `wait_seconds`.
        """
        session = self._find(session_id, owner)
        ids = self._as_ids(token_ids)
        self._refuse_when_draining()
        with self._holding(session, Operation.APPEND, wait_seconds):
            _check_length(session, expected_history_length)
            session.check_room(len(ids))
            with self._store.locked():
                if session.is_closed:
                    raise SessionClosed
                if len(ids):
                    session.record(self._journal, ids, Mark.APPENDED)
                return len(session.history)

    def generate(
        self,
        session_id: str,
        params: GenerateParams,
        *,
        listener: Listener | None = None,
        owner: str = "",
        wait_seconds: float = 0.0,
    ) -> Generation:
        """Start generating. What is wrong with the call is raised here; what befalls it later comes as Failed.

        `listener` is called on the engine's thread: it must return at once and never raise.
        """
        session = self._find(session_id, owner)
        self._check_params(params)
        self._refuse_when_draining()
        return self._start(session, params, listener, wait_seconds)

    def score(
        self,
        session_id: str,
        token_ids: Sequence[int],
        on_logits: OnLogits,
        *,
        owner: str = "",
        wait_seconds: float = 0.0,
    ) -> Generation:
        """Add `token_ids` to the history as if the model had generated them, in blocks, and show what it thought.

        `on_logits(position, logits)` is called on the engine's thread for each block in order: float32 [n, V] on the
        device, row j predicts the token at `position + j`; each given token is predicted exactly once. The tensor is
        the callee's to keep. Iterate the Generation to wait for the end; an error of `on_logits` ends it.
        """
        session = self._find(session_id, owner)
        ids = self._as_ids(token_ids)
        if not len(ids):
            raise InvalidArgument("token_ids", "must hold at least one id to score")
        params = GenerateParams(max_tokens=len(ids))
        self._refuse_when_draining()
        return self._start(session, params, None, wait_seconds, Forced(ids, on_logits))

    def session_info(self, session_id: str, *, owner: str = "") -> SessionInfo:
        """Never waits, and does not count as use of the session."""
        session = self._store.find(session_id, owner)
        return SessionInfo(
            history_length=len(session.history),
            cached_tokens=session.cached_tokens,
            evicted_tokens=session.evicted_tokens,
            kv_live_bytes=session.live_bytes,
            tier_live_bytes=session.tier_live_bytes,
            bound=session.kv.bound,
            strategy=session.kv.strategy,
            limit_tokens=session.limit_tokens,
            inv1_violations=session.violations.inv1,
            inv2_violations=session.violations.inv2,
            inv3_violations=session.violations.inv3,
            drafted_tokens=session.drafted_tokens,
            accepted_tokens=session.accepted_tokens,
            idle_seconds=max(0.0, self._clock() - session.used_at),
            failure_reason=session.failure_reason,
            is_generating=session.operation is Operation.GENERATE,
        )

    def match_statistics(self, session_id: str, *, owner: str = "") -> dict[int, MatchTotals]:
        """What matching past queries saved and missed, by layer; empty where a strategy matches none. Never waits."""
        return self._store.find(session_id, owner).kv.statistics()

    def transfer_statistics(self, session_id: str, *, owner: str = "") -> TransferTotals:
        """What moved between the device and the second tier; zeros where a strategy has none. Never waits."""
        return self._store.find(session_id, owner).kv.transfers()

    def close_session(self, session_id: str, *, owner: str = "") -> int:
        """End a session at once; returns its final length. A running Generate ends with Failed(SessionClosed)."""
        length = self._store.close(session_id, owner)
        self._scheduler.nudge()
        return length

    def when_free(self, session_id: str, callback: Callable[[], None]) -> None:
        """Call back once, from any thread, when nothing holds the session (at once if nothing does, or it is gone)."""
        self._store.when_free(session_id, callback)

    def _start(
        self,
        session: Session,
        params: GenerateParams,
        listener: Listener | None,
        wait_seconds: float,
        forced: Forced | None = None,
    ) -> Generation:
        self._acquire(session, Operation.GENERATE, wait_seconds)
        try:
            _check_length(session, params.expected_history_length)
            if not len(session.history):
                raise InvalidArgument("session_id", "the session's history is empty; append tokens before generating")
            if forced is not None:
                session.check_room(len(forced.token_ids))
            events: queue.SimpleQueue[Event] | None = None
            if listener is None:
                events = queue.SimpleQueue()
                listener = events.put
            request = Request(
                session=session,
                params=params,
                seed=secrets.randbits(64) if params.sampling.seed is None else params.sampling.seed,
                listener=listener,
                stop_ids=session.eos_token_ids | frozenset(params.stop_token_ids),
                accepted_at=self._clock(),
                forced=forced,
            )
            self._scheduler.submit(request)
        except BaseException:
            self._store.free(session)
            raise
        return Generation(request, self._scheduler, events)

    # -- the engine itself ------------------------------------------------------------------------------------------

    def info(self) -> EngineInfo:
        tier = self._context.tier
        assert tier is not None
        return EngineInfo(
            facts=self._forward.facts,
            mode=self.config.mode,
            strategies=strategy_names(),
            default_strategy=self._default_strategy,
            kv_capacity_bytes=self._context.pool.capacity_bytes,
            kv_reserved_bytes=self._context.pool.reserved_bytes,
            tier_capacity_bytes=tier.capacity_bytes,
            tier_reserved_bytes=tier.reserved_bytes,
            drafter="" if self._drafter is None else self._drafter.name,
            config=self.config,
        )

    def is_alive(self) -> bool:
        """The engine's thread runs, came round lately if it has work, and its last forwards did not all fail."""
        scheduler = self._scheduler
        is_stalled = scheduler.has_work and self._clock() - scheduler.beat_at > _STALL_SECONDS
        return scheduler.is_alive and not is_stalled and scheduler.failed_steps < _FAILED_STEPS

    def drain(self, grace_seconds: float) -> None:
        """Refuse new sessions and Generates; wait for those that run; after the grace, end them with Draining."""
        self._is_draining = True
        self._scheduler.drain(grace_seconds)

    def close(self) -> None:
        """Stop the engine's thread and free every session. Idempotent."""
        self._is_draining = True
        if self._scheduler.is_alive:
            self._scheduler.stop()
        self._store.close_all()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- checks -----------------------------------------------------------------------------------------------------

    def _find(self, session_id: str, owner: str) -> Session:
        session = self._store.find(session_id, owner)
        if session.failure_reason:
            raise InvariantViolated(session.failure_reason, "the session failed earlier")
        return session

    def _check_ready(self, strategy: KVStrategy) -> None:
        if (restorer := strategy.restorer()) is not None:
            restorer.ready(self._context)

    def _warn_if_too_small(self) -> None:
        longest = self._default_strategy.length_limit(self._geometry)
        needed = bound_of(self._default_strategy, self._context, longest).peak_bytes
        if needed > self._context.pool.capacity_bytes:
            logger.warning(
                "a session of the default strategy %s needs %d bytes of K/V and there are %d in all: sessions must ask "
                "for a smaller limit_tokens, or the server be given more kv_bytes",
                self._default_strategy,
                needed,
                self._context.pool.capacity_bytes,
            )

    def _refuse_when_draining(self) -> None:
        if self._is_draining:
            raise Draining

    def _limit(self, strategy: KVStrategy, limit_tokens: int | None) -> int | None:
        longest = strategy.length_limit(self._geometry)
        if limit_tokens is None:
            return longest
        if limit_tokens < 1 or (longest is not None and limit_tokens > longest):
            upper = "" if longest is None else f" and at most {longest} with {strategy.name}"
            raise InvalidArgument("limit_tokens", f"must be at least 1{upper}, got {limit_tokens}")
        return limit_tokens

    def _as_ids(self, token_ids: Sequence[int]) -> TokenIds:
        if len(token_ids) > self.config.max_append_tokens:
            raise AppendTooLarge(len(token_ids), self.config.max_append_tokens)
        self._check_ids("token_ids", token_ids)
        return np.array(token_ids, dtype=np.uint32)

    def _check_ids(self, field: str, token_ids: Sequence[int], at_most: int | None = None) -> None:
        if at_most is not None and len(token_ids) > at_most:
            raise InvalidArgument(field, f"at most {at_most} ids, got {len(token_ids)}")
        ids = np.array(token_ids, dtype=np.int64)
        wrong = np.flatnonzero((ids < 0) | (ids >= self._forward.facts.vocab_size))
        if len(wrong):
            first = int(wrong[0])
            raise TokenOutOfRange(
                field,
                f"id {int(ids[first])} at index {first} is not in the vocabulary of {self._forward.facts.vocab_size}; "
                "nothing was changed",
                index=first,
                vocab_size=self._forward.facts.vocab_size,
            )

    def _check_params(self, params: GenerateParams) -> None:
        if params.max_tokens > self.config.max_generate_tokens:
            raise InvalidArgument(
                "max_tokens", f"at most {self.config.max_generate_tokens} on this server, got {params.max_tokens}"
            )
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", list(params.sampling.logit_bias))

    # -- holding a session ------------------------------------------------------------------------------------------

    def _acquire(self, session: Session, operation: Operation, wait_seconds: float) -> None:
        until = time.monotonic() + wait_seconds
        while True:
            try:
                return self._store.acquire(session, operation)
            except SessionBusy:
                remaining = until - time.monotonic()
                if remaining <= 0:
                    raise SessionBusy(wait_seconds) from None
                freed = threading.Event()
                self._store.when_free(session.session_id, freed.set)
                freed.wait(remaining)

    @contextmanager
    def _holding(self, session: Session, operation: Operation, wait_seconds: float) -> Iterator[None]:
        self._acquire(session, operation, wait_seconds)
        try:
            yield
        finally:
            self._store.free(session)


def _check_length(session: Session, expected: int | None) -> None:
    if expected is not None and expected != len(session.history):
        raise HistoryLengthMismatch(expected, len(session.history))
