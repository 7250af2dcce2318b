"""The engine: create, append, generate, close. What the server, the tests and the evaluation call.

Thread-safe. Everything but iterating a Generation returns in microseconds and never waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, Unpack

import numpy as np

from inference_engine.backends.base import Forward
from inference_engine.config import EngineConfig
from inference_engine.decode.automata import Grammar
from inference_engine.decode.constraints import Constraints
from inference_engine.decode.draft import Drafter, NoDrafter
from inference_engine.decode.verifier import Verifier
from inference_engine.engine.arguments import (
    MAX_PAGE_SESSIONS,
    MAX_PIECE_TOKENS,
    Arguments,
    check_first,
    check_label,
    check_page,
    check_route,
)
from inference_engine.engine.calls import CallOptions, Calls, SessionCall
from inference_engine.engine.fork import open_fork, open_rewound
from inference_engine.engine.generation import Generates, Generation
from inference_engine.engine.memory import check_one_session_fits, grows, open_memory, open_snapshots, taps_of
from inference_engine.engine.recall import Recall
from inference_engine.engine.results import (
    EngineInfo,
    HistoryLength,
    HistoryPiece,
    SessionForked,
    SessionInfo,
    SessionListed,
    SessionOpened,
)
from inference_engine.engine.stats import collect_statistics
from inference_engine.engine.warm_up import done_on, warm_up
from inference_engine.errors import Draining, EngineStalled, InvalidArgument, SessionNotFound
from inference_engine.kernels.components import ModelComponents, components_digest
from inference_engine.kv.context import TapCodec, TokenCodec
from inference_engine.kv.parts.recurrent import RecurrentStates
from inference_engine.kv.strategies import check_registry, parse_strategy, strategy_names
from inference_engine.kv.strategy import KVStrategy, bound_of
from inference_engine.metrics import EngineMetrics
from inference_engine.scheduler.loop import Scheduler
from inference_engine.scheduler.request import Forced, Listener, OnLogits
from inference_engine.scheduler.step_time import StepTimer
from inference_engine.session.capacity import SessionLimits
from inference_engine.session.history import TokenIds
from inference_engine.session.journal import Journal, MemoryJournal, SessionEntry, TokensRecord
from inference_engine.session.replies import identify
from inference_engine.session.session import Session
from inference_engine.session.store import SessionStore
from inference_engine.tracing import Tracing
from inference_engine.types import (
    MAX_STOP_TOKEN_IDS,
    Bound,
    GenerateParams,
    Mark,
    ReadTokenBytes,
    TokenUsage,
)

_FAILED_STEPS = 3  # consecutive: then the device, not a request, is at fault


class Engine:
    """One model, one device thread, many sessions.

    Every method raises kinds of RequestError for mistakes of the caller.
    """

    THREAD_NAME = Scheduler.THREAD_NAME

    def __init__(
        self,
        forward: Forward,
        config: EngineConfig | None = None,
        *,
        journal: Journal | None = None,
        metrics: EngineMetrics | None = None,
        tracing: Tracing | None = None,
        latent: TokenCodec | None = None,
        codec_digest: str = "",
        f_theta: TapCodec | None = None,
        why_no_f_theta: str = "",
        components: ModelComponents | None = None,
        drafter: Drafter | None = None,
        end_ids: Sequence[int] = (),
        read_tokens: ReadTokenBytes | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Allocate the pool and start the engine's thread.

        journal: keeps sessions; the engine stops it when it closes. None: they end with the process. `journal` says
        what is safe: what a client is sent waits for that.
        latent: serves sessions that restore KV entries from a latent; codec_digest: of it. f_theta: sessions that
        restore them from the drafter's taps; why_no_f_theta: and what to do about it. components: of the model's keys,
        by layer, for sessions that choose tokens by them. drafter: drafts tokens for Generates that allow it.
        end_ids: end a turn by the model's files, for sessions that ask for them. read_tokens: the bytes of tokens, for
        the first Generate that is constrained by them.
        Raises ConfigError or BackendError if a setting cannot be served.
        """
        config = config or EngineConfig()
        step_tokens = config.step_tokens or max(config.segment_tokens, 512 if forward.device.type == "cpu" else 4096)
        self.config = replace(config, step_tokens=step_tokens)
        self.metrics = metrics or EngineMetrics()
        self.tracing = tracing or Tracing()
        self._forward = forward
        self._drafter: Drafter = NoDrafter() if drafter is None else drafter
        self._clock = clock
        self._wall_clock = wall_clock
        self.journal = journal or MemoryJournal()
        geometry = forward.geometry(page_tokens=self.config.page_tokens, segment_tokens=self.config.segment_tokens)
        # Without an operation for it, choosing by components is far slower than by blocks: then it has to be asked for.
        indexes_keys = forward.indexes_keys
        check_registry()
        self._arguments = Arguments(
            self.config,
            geometry,
            forward.facts,
            prefers_components=indexes_keys and bool(components),
            lacks_components=indexes_keys and not components,
        )
        self._end_ids = frozenset(self._arguments.check_ids("end_ids", end_ids).tolist())
        default = self._arguments.default_strategy
        self._is_growing = grows(self.config, forward)
        self._context = open_memory(
            forward,
            geometry,
            self.config,
            self.metrics,
            default_strategy=default,
            latent=latent,
            f_theta=f_theta,
            why_no_f_theta=why_no_f_theta,
            components=components,
            drafter=self._drafter,
        )
        default.ready(self._context)
        limit = self._arguments.limit(default, None)
        check_one_session_fits(default, self._context, limit, is_growing=self._is_growing)
        self._store = SessionStore(
            self._context,
            self.journal,
            self.metrics,
            clock,
            limits=SessionLimits.of(self.config),
            idle_ttl_seconds=self.config.session_idle_ttl_seconds,
            mode=forward.facts.mode,
            codec=codec_digest,
            components=components_digest(components or {}),
            wall_clock=wall_clock,
        )
        self.journal.serves(self._store)
        self._constraints = Constraints(forward.facts.vocab_size, read_tokens)
        timer = StepTimer(self.metrics, clock)
        self._scheduler = Scheduler(
            Verifier(forward, self._context, tap_layers=taps_of(self._drafter, f_theta), lap=timer.lap),
            self._store,
            self.journal,
            self.metrics,
            self.config,
            clock,
            vocab_size=forward.facts.vocab_size,
            timer=timer,
            drafter=self._drafter,
            constraints=self._constraints,
            open_snapshots=open_snapshots(
                self.journal.book, self._store, self._context, forward, self.config, self.metrics, clock
            ),
        )
        self.metrics.watch(
            lambda: collect_statistics(self._store, self._scheduler, self._context, self._clock()), strategy_names()
        )
        self._calls = Calls(self._store, self.journal, self.metrics, self._refuse_when_draining)
        self._generates = Generates(
            self._store, self._scheduler, self.metrics, self.tracing, clock, refuse=self._refuse_when_draining
        )
        self._recall = Recall(self._context, self._store, self.journal, self._calls, self._generates, self.metrics)
        self._is_draining = False
        self._scheduler.start()
        if forward.device.type != "cpu":
            warmed = Verifier(forward, self._context)
            try:
                done_on(self._scheduler.between_steps, partial(warm_up, warmed, default, limit, step_tokens))
            except BaseException:
                self.close()
                raise

    # -- sessions ---------------------------------------------------------------------------------------------------

    def has_to_prepare(self, strategy: KVStrategy | None) -> bool:
        """Must something be read from disk before such a session can be created? Then `prepare` it first.

        `create_session` would read it, too, and its caller would wait. Raises InvalidArgument.
        """
        return self._arguments.strategy(strategy).waits(self._context)

    def prepare(self, strategy: KVStrategy | None) -> None:
        """Have in memory what all sessions of this strategy need, but for their own K/V. Waits for the disk.

        Nothing is locked meanwhile. Raises InvalidArgument if it is missing, damaged, or does not fit.
        """
        self._arguments.strategy(strategy).ready(self._context)

    def create_session(
        self,
        *,
        strategy: KVStrategy | None = None,
        eos_token_ids: Sequence[int] = (),
        limit_tokens: int | None = None,
        label: str = "",
        owner: str = "",
        request_id: bytes = b"",
        guaranteed: bool | None = None,
        model_ends: bool = False,
        route: str = "",
        is_transient: bool = False,
        may_be_undone: bool = False,
    ) -> SessionOpened:
        """Open a session. Raises InvalidArgument, NoCapacity or Draining.

        request_id, may_be_undone: see `CallOptions`.
        guaranteed: True reserves all its memory now, False grants memory as it grows; None: as the settings say.
        model_ends: what ends a turn by the model's files ends its Generates, beside eos_token_ids.
        route: its id, and those of its forks, begin with it and a dot. Hexadecimal digits; "": none.
        is_transient: it belongs to one call of its owner, who does not receive its id: it is not listed.
        """
        spec = self._arguments.strategy(strategy)
        limit, is_growing = self._arguments.limit(spec, limit_tokens), self._is_growing
        self._arguments.check_ids("eos_token_ids", eos_token_ids, at_most=MAX_STOP_TOKEN_IDS)
        eos_ids = frozenset(eos_token_ids) | (self._end_ids if model_ends else frozenset())
        check_label(label)
        check_route(route)
        if guaranteed is not None:
            if not guaranteed and not self._is_growing:
                raise InvalidArgument("guaranteed", "must not be false: this server reserves all memory at creation")
            is_growing = not guaranteed

        def open_session(_: None) -> tuple[SessionOpened, Session]:
            session = self._store.create(
                spec,
                eos_token_ids=eos_ids,
                limit_tokens=limit,
                owner=owner,
                is_growing=is_growing,
                route=route,
                label=label,
                is_transient=is_transient,
            )
            return SessionOpened.of(session), session

        spec.ready(self._context)
        asked = () if guaranteed is None else (guaranteed,)
        call = SessionCall(owner=owner, request_id=request_id, may_be_undone=may_be_undone)
        content = (str(spec), sorted(eos_ids), limit_tokens, label, *asked)
        return self._calls.once(self._calls.opened, call, open_session, lambda: content)

    def fork_session(
        self,
        session_id: str,
        *,
        at_position: int | None = None,
        limit_tokens: int | None = None,
        label: str = "",
        **how: Unpack[CallOptions],
    ) -> SessionForked:
        """A new session that continues from this one's history. It has memory for that history, and its KV entries
        follow at once.

        at_position: so many of its tokens; None: all of them.
        Memory for more is reserved, or granted as it grows, as for the parent. limit_tokens: None for the parent's.
        Raises what `create_session` and `append` raise.
        """
        call = SessionCall(session_id=session_id, **how)

        def fork(parent: Session) -> tuple[SessionForked, Session]:
            check_label(label)
            strategy, limit = parent.kv.strategy, parent.limit_tokens
            limit = limit if limit_tokens is None else self._arguments.limit(strategy, limit_tokens)
            session = open_fork(self._store, self._scheduler, parent, at_position, limit, label)
            return SessionForked.of(session, self._scheduler.snapshots.foreseen(session)), session

        asked = () if at_position is None else (at_position,)
        content = (session_id, call.expected_history_length, limit_tokens, label, *asked)
        return self._calls.once(self._calls.forked, call, fork, lambda: content)

    def rewind_session(self, session_id: str, position: int, **how: Unpack[CallOptions]) -> SessionForked:
        """Close a session, and open another with its first `position` tokens, its memory, limit and label: one call,
        done whole or not at all.

        It needs no room that the session does not give back. Raises what `append` raises, but NoCapacity and
        QuotaExceeded.
        """
        call = SessionCall(session_id=session_id, **how)

        def rewind(session: Session) -> tuple[SessionForked, Session]:
            rewound = open_rewound(self._store, self._scheduler, session, position)
            return SessionForked.of(rewound, self._scheduler.snapshots.foreseen(rewound)), rewound

        content = (session_id, call.expected_history_length, position)
        return self._calls.once(self._calls.rewound, call, rewind, lambda: content)

    def append(self, session_id: str, token_ids: Sequence[int] | TokenIds, **how: Unpack[CallOptions]) -> int:
        """Add ids to the history, all or none; returns its new length. They are prefilled by the next Generate."""
        return self.append_once(session_id, token_ids, **how).tokens

    def append_once(
        self, session_id: str, token_ids: Sequence[int] | TokenIds, **how: Unpack[CallOptions]
    ) -> HistoryLength:
        """As `append`; a call with the request id of an earlier one does nothing and returns the earlier reply.

        One that may be undone is undone only if nothing was done with the session since.
        """
        call = SessionCall(session_id=session_id, **how)
        ids = cache(partial(self._arguments.ids, token_ids))

        def append(session: Session) -> tuple[HistoryLength, Session]:
            length = len(session.history) + len(ids())
            if len(ids()):
                self._store.check_history(session, len(ids()))
                self._store.secure(session, length)
                session.record(ids(), Mark.APPENDED)
            return HistoryLength(tokens=length), session

        return self._calls.once(
            self._calls.appended, call, append, lambda: (ids().tobytes(), call.expected_history_length)
        )

    def generate(
        self,
        session_id: str,
        params: GenerateParams,
        *,
        request_id: bytes = b"",
        resume_from: int | None = None,
        listener: Listener | None = None,
        owner: str = "",
        wait_seconds: float = 0.0,
        refuse_late: bool = False,
    ) -> Generation:
        """Start generating. Errors of the call are raised here; later errors come as the event Failed.

        request_id: of an earlier Generate with the same parameters, to get its tokens from the position `resume_from`
        on. If it runs, this call takes its stream over. If it was stopped early, it continues, provided that the
        history still ends there; else HistoryLengthMismatch.
        refuse_late: raise Overloaded if the wait for other owners would exceed `max_first_token_seconds`. The server
        sets it; in-process callers wait instead.
        listener: called with each event on the engine's thread; must return at once and never raise.
        """
        session = self._store.find_healthy(session_id, owner)
        self._arguments.check_params(params, session.eos_token_ids)
        grammar = None if params.constraint is None else self.compile_constraint(params, owner=owner).result()
        call = identify(request_id, params, owner=owner, session_id=session_id)
        return self._generates.start(
            session,
            params,
            listener=listener,
            wait_seconds=wait_seconds,
            call=call,
            resume_from=resume_from,
            grammar=grammar,
            refuse_late=refuse_late,
        )

    def compile_constraint(self, params: GenerateParams, *, owner: str = "") -> Future[Grammar]:
        """Compile the constraint that `params` have, for Generates of the owner; the result is there at once if it is
        known. `generate` does it, too, and its caller waits.

        The result raises InvalidConstraint or ConstraintUnavailable. Raises InvalidArgument, and QuotaExceeded if so
        many of the owner's are being compiled already.
        """
        assert params.constraint is not None
        self._arguments.check_params(params)
        return self._constraints.compile(params.constraint, owner)

    def score(
        self,
        session_id: str,
        token_ids: Sequence[int],
        on_logits: OnLogits,
        *,
        owner: str = "",
        wait_seconds: float = 0.0,
    ) -> Generation:
        """Add `token_ids` to the history as generated tokens, in blocks, and report the logits that predict them.

        `on_logits(position, logits)` is called on the engine's thread for each block in order: float32 [n, V] on the
        device, logits[j] predict the token at `position + j`; each given token is predicted exactly once. The tensor is
        the callee's to keep. Iterate the Generation to wait for the end; an error of `on_logits` ends it.
        """
        session = self._store.find_healthy(session_id, owner)
        ids = self._arguments.ids(token_ids)
        if not len(ids):
            raise InvalidArgument("token_ids", "must hold at least one id to score")
        params = GenerateParams(max_tokens=len(ids))
        return self._generates.start(session, params, wait_seconds=wait_seconds, forced=Forced(ids, on_logits))

    def session_info(self, session_id: str, *, owner: str = "", saved_only: bool = False) -> SessionInfo:
        """Never waits, and does not count as use of the session. saved_only: of its history, what is safe."""
        session = self._store.find(session_id, owner)
        return SessionInfo.of(
            session,
            now=self._clock(),
            history_bytes=self._store.history_bytes(session),
            is_kept=session.journal.keeps,
            saved_only=saved_only,
        )

    def list_sessions(self, *, after: str = "", most: int = MAX_PAGE_SESSIONS, owner: str = "") -> list[SessionListed]:
        """The first `most` of the owner's sessions in the order of their ids, with ids greater than `after`, as far as
        they are safe.

        Is no use of a session. Reads the disk if not all of the owner's sessions are in memory. Raises InvalidArgument
        for more than MAX_PAGE_SESSIONS.
        """
        check_page(most)
        now, today = self._clock(), self._wall_clock()
        with self._store.locked():
            is_all_here = self.lists_from_memory(owner)
            resident = self._store.page(owner, after=after, most=most)
        kept: Sequence[SessionEntry] = ()
        if not is_all_here:
            kept = self.journal.page(owner, after=after, most=most)
            resident = self._store.page(owner, after=after, most=most)  # one may have come back meanwhile
        listed = [SessionListed.of(session, now=now, today=today) for session in resident if session.saved.tokens >= 0]
        for entry in kept:
            # One that came into memory or was closed meanwhile is known there.
            if not self._store.is_resident(entry.record.session_id):
                strategy, idle_seconds = parse_strategy(entry.record.strategy), self._idle_seconds(entry, now, today)
                listed.append(SessionListed.kept(entry, strategy, today=today, idle_seconds=idle_seconds))
        return sorted(listed, key=lambda one: one.session_id)[:most]

    def lists_from_memory(self, owner: str) -> bool:
        """Are all of the owner's sessions in memory? Else `list_sessions` reads the disk."""
        if self.journal.is_shared:
            return False
        return not self.journal.keeps or self._store.count_of(owner) == self.journal.kept_by(owner).sessions

    def read_history(
        self, session_id: str, *, first: int = 0, most: int = MAX_PIECE_TOKENS, owner: str = ""
    ) -> HistoryPiece:
        """Token ids from position `first` on, at most `most` of them and at most MAX_PIECE_TOKENS, as far as they are
        safe.

        Never waits, and is no use of the session. Raises InvalidArgument if `first` is beyond the history's end.
        """
        with self._store.locked():
            session = self._store.find_healthy(session_id, owner)
            history, length = session.history, session.saved_length
            check_first(first, length)
            until = min(first + min(most, MAX_PIECE_TOKENS), length)
            ids, marks = np.array(history.ids(first, until)), np.array(history.marks(first, until))
            return HistoryPiece(first, ids, marks, length)

    def kept_session_info(self, session_id: str, *, owner: str = "") -> SessionInfo:
        """As `session_info`, of a session that is in the journal, in memory or not, and stays where it is.

        Waits for the disk. Raises HistoryCorrupt if its record is damaged, and what `recall` raises if the journal
        cannot be read now.
        """
        entry, _ = self._look(session_id, owner)
        strategy = parse_strategy(entry.record.strategy)
        return SessionInfo.kept(
            entry,
            strategy,
            bound=bound_of(strategy, self._context, entry.record.limit_tokens),
            violations=self._store.violations_of(session_id),
            idle_seconds=self._idle_seconds(entry, self._clock(), self._wall_clock()),
        )

    def read_kept_history(
        self, session_id: str, *, first: int = 0, most: int = MAX_PIECE_TOKENS, owner: str = ""
    ) -> HistoryPiece:
        """As `read_history`, of a session that is in the journal, in memory or not, and stays where it is.

        Reads those tokens only. Waits and raises as `kept_session_info`.
        """
        entry, records = self._look(session_id, owner, first=first, most=min(most, MAX_PIECE_TOKENS))
        check_first(first, entry.history_length)
        return HistoryPiece.kept(first, records, entry.history_length)

    def _look(
        self, session_id: str, owner: str, *, first: int = 0, most: int = 0
    ) -> tuple[SessionEntry, Sequence[TokensRecord]]:
        found = self.journal.look(session_id, owner, first=first, most=most)
        if found is None:
            raise SessionNotFound
        return found

    def _idle_seconds(self, entry: SessionEntry, now: float, today: float) -> float:
        used_at = self._store.used_at(entry.record.session_id)
        return today - entry.used_at if used_at is None else now - used_at

    def layer_statistics(self, session_id: str, *, owner: str = "") -> dict[int, Any]:
        """What the mechanisms of a session's strategy count, by layer; empty if they count nothing. Never waits."""
        return self._store.find(session_id, owner).kv.statistics()

    def close_session(self, session_id: str, *, owner: str = "") -> int:
        """End a session at once; returns its final length. A running Generate ends with Failed(SessionClosed)."""
        return self.close_once(session_id, owner=owner).tokens

    def close_once(
        self,
        session_id: str,
        *,
        request_id: bytes = b"",
        expected_history_length: int | None = None,
        owner: str = "",
    ) -> HistoryLength:
        """As `close_session`; a call with the request id of an earlier one does nothing and returns its reply.

        Of a session that is not in memory: see `close_kept`.
        """

        def close(session: Session) -> tuple[HistoryLength, Session]:
            return HistoryLength(tokens=self._store.close(session_id, owner)), session

        call = SessionCall(
            session_id=session_id,
            request_id=request_id,
            owner=owner,
            expected_history_length=expected_history_length,
        )
        content = (session_id, expected_history_length)
        length = self._calls.once(self._calls.closed, call, close, lambda: content)
        self._scheduler.wake()
        return length

    def close_kept(
        self,
        session_id: str,
        *,
        request_id: bytes = b"",
        expected_history_length: int | None = None,
        owner: str = "",
    ) -> HistoryLength:
        """As `close_once`, also of a session that the journal has and memory has not. Waits for the disk.

        It does not come into memory: neither its history's size nor its model matter. Raises HistoryCorrupt if how long
        it is cannot be read, and JournalFull, JournalAway, SessionElsewhere or EngineStalled as `recall`.
        """
        call = SessionCall(
            session_id=session_id, request_id=request_id, owner=owner, expected_history_length=expected_history_length
        )
        while (closed := self._recall.close(call)) is None:
            with suppress(SessionNotFound):  # it has left memory meanwhile
                return self.close_once(
                    session_id, request_id=request_id, expected_history_length=expected_history_length, owner=owner
                )
        return closed

    # -- what the journal keeps -------------------------------------------------------------------------------------

    def is_elsewhere(self, session_id: str, *, owner: str = "", request_id: bytes = b"") -> bool:
        """May the journal have something that a call needs and that is not in memory? Then `recall` it first.

        session_id: of the session that the call is about; "": it makes one. request_id: of the call.
        """
        return self._recall.is_needed(session_id, owner, request_id)

    def recall(self, session_id: str, *, owner: str = "", request_id: bytes = b"") -> None:
        """Bring back into memory what `is_elsewhere` found missing, as far as the journal has it. Waits for the disk.

        Call it before the call itself, which then sees a session that was here all the time. The session has no memory
        for K/V until it is used. Raises HistoryCorrupt, ModelMismatch, NoCapacity or QuotaExceeded, and the session
        stays in the journal as it is; JournalFull, JournalAway or EngineStalled if the journal cannot be read now.
        """
        self._recall.of_call(session_id, owner, request_id)

    @property
    def forward_failure(self) -> str:
        """Why no more steps can run; "": they can. Then the process has to end."""
        return self._forward.failure()

    def when_free(self, session_id: str, callback: Callable[[], None]) -> None:
        """Call back once, from any thread, when the session is free (at once if it is, or does not exist)."""
        self._store.when_free(session_id, callback)

    # -- the engine itself ------------------------------------------------------------------------------------------

    def info(self) -> EngineInfo:
        tier, default = self._context.tier, self._arguments.default_strategy
        return EngineInfo(
            facts=self._forward.facts,
            mode=self._forward.facts.mode,
            strategies=self._arguments.strategies,
            default_strategy=default,
            limit_tokens=default.length_limit(self._context.geometry),
            default_limit_tokens=self._arguments.limit(default, None),
            growth_is_guaranteed=not self._is_growing,
            kv_capacity_bytes=self._context.pool.capacity_bytes,
            kv_reserved_bytes=self._context.pool.reserved_bytes,
            prefix_capacity_bytes=self._store.kept_prefixes.most_bytes,
            recurrent_state_bytes=RecurrentStates.bytes_of(self._context.geometry),
            tier_capacity_bytes=tier.capacity_bytes,
            tier_reserved_bytes=tier.reserved_bytes,
            drafter=self._drafter.name,
            end_ids=tuple(sorted(self._end_ids)),
            config=self.config,
            durability=self.journal.durability,
        )

    def reserved_by(self, owner: str) -> Bound:
        """Bytes that the owner's sessions have reserved between Generates."""
        return self._store.reserved_by(owner)

    def prefix_bytes_of(self, owner: str) -> int:
        """Bytes of K/V that are kept of the owner's closed sessions, while no session needs them."""
        return self._store.kept_prefixes.bytes_of(owner)

    def carrying(self, owner: str, tokens: int) -> AbstractContextManager[None]:
        """Around an append of so many ids, from when they are in memory: they count in the owner's quota of history.

        Raises QuotaExceeded if those of the owner's other appends leave no room for them.
        """
        return self._store.carrying(owner, tokens)

    def usage_of(self, owner: str) -> TokenUsage:
        """What the owner's Generates took that have ended, of sessions that closed, too. One that was cut by the end of
        the process counts from where it goes on."""
        return self.journal.used_by(owner)

    def history_tokens_of(self, owner: str) -> int:
        """Tokens in the histories of the owner's sessions; tokens shared by forks count once."""
        return self._store.history_tokens_of(owner)

    def is_stalled(self) -> bool:
        """The engine's thread has ended, or has work and finished no round for `stall_seconds`."""
        scheduler = self._scheduler
        is_late = scheduler.has_work and self._clock() - scheduler.beat_at > self.config.stall_seconds
        return is_late or not scheduler.is_alive

    def is_alive(self) -> bool:
        """The engine is not stalled, and its last forwards did not all fail."""
        return not self.is_stalled() and self._scheduler.failed_steps < _FAILED_STEPS

    def is_serving(self) -> bool:
        """The engine is alive, and what it does can be kept."""
        return self.is_alive() and not self.journal.is_full and not self.journal.is_away

    def drain(self, grace_seconds: float) -> None:
        """Refuse new sessions and Generates; wait for those that run; after the grace, end them with Draining."""
        self._is_draining = True
        self._scheduler.drain(grace_seconds)

    def close(self) -> None:
        """Stop the engine's thread and free every session. Idempotent."""
        self._is_draining = True
        if self._scheduler.is_alive:
            self._scheduler.stop()
        if not self._scheduler.is_alive:
            self._scheduler.snapshots.close()
        self._constraints.close()
        self._store.close_all()
        self.journal.stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _refuse_when_draining(self) -> None:
        """Raise Draining, or EngineStalled if the engine's thread does not run."""
        if self._is_draining:
            raise Draining
        if self.is_stalled():
            raise EngineStalled
        self.journal.refuse_when_blocked()
