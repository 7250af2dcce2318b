"""Makes sessions: their ids, and what the journal records of them and compares when they come back."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack

from inference_engine.errors import ModelMismatch
from inference_engine.kv.context import KVContext
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategy import COMPONENTS, F_THETA, LATENT, KVStrategy
from inference_engine.session.histories import Histories
from inference_engine.session.history import History
from inference_engine.session.journal import Journal, Saved, SessionKept, SessionRecord
from inference_engine.session.session import Session
from inference_engine.types import Mode


class SessionMaker:
    """Called with the store's lock held.

    transient: the journal of sessions that belong to one call. mode, and the digests codec and components, are recorded
    with sessions. cap_tokens: of each history.
    """

    def __init__(
        self,
        context: KVContext,
        journal: Journal,
        transient: Journal,
        histories: Histories,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        *,
        cap_tokens: int | None,
        mode: Mode,
        codec: str,
        components: str,
    ) -> None:
        self._context, self._journal, self._transient, self._histories = context, journal, transient, histories
        self._clock, self._wall_clock = clock, wall_clock
        self._cap_tokens = cap_tokens
        self._mode, self._codec, self._components = mode, codec, components

    def open(
        self,
        kv: SessionKV,
        eos_token_ids: frozenset[int],
        owner: str,
        *,
        parent: Session | None = None,
        at: int = 0,
        route: str = "",
        label: str = "",
        is_transient: bool = False,
        keeps: bool = False,
    ) -> Session:
        """A session around `kv`, with the first `at` tokens of `parent`, recorded in the journal.

        keeps: where the journal refuses it, `kv` is not released.
        """
        record = SessionRecord(
            _new_id(route if parent is None else _route_of(parent.session_id)),
            owner,
            str(kv.strategy),
            kv.limit_tokens,
            tuple(sorted(eos_token_ids)),
            is_growing=kv.grant.grows,
            segment_tokens=kv.context.geometry.segment_tokens,
            mode=self._mode.value,
            codec=self.codec_of(kv.strategy),
            label=label,
            created_at=self._wall_clock(),
        )
        journal = self._transient if is_transient else self._journal if parent is None else parent.journal
        with ExitStack() as undoing:
            if not keeps:
                undoing.callback(kv.release)
            history = self._histories.begin(owner) if parent is None else parent.history.fork(at)
            undoing.callback(history.release)
            saved = journal.open(record) if parent is None else journal.fork(record, parent.session_id, at)
            is_transient |= parent is not None and parent.is_transient
            session = self._session(record, kv, history, saved, is_transient=is_transient)
            undoing.pop_all()
        return session

    def check(self, record: SessionRecord, strategy: KVStrategy) -> None:
        """Raises ModelMismatch if the session's tokens would change."""
        # Records name the latent of strategies that need none, too, if they are old.
        codec = record.codec if strategy.calibrated else ""
        for what, recorded, running in (
            ("segment_tokens", record.segment_tokens, strategy.geometry(self._context.geometry).segment_tokens),
            # A session that was promised equality up to rounding may have it to the bit.
            ("mode", record.mode, {Mode.BATCHED.value: record.mode}.get(record.mode, self._mode.value)),
            (strategy.calibrated, codec, self.codec_of(strategy)),
        ):
            if recorded != running:
                raise ModelMismatch(what, recorded, running)

    def come_back(self, kept: SessionKept, kv: SessionKV) -> Session:
        """A session that the journal has, with its history."""
        session = self._session(kept.record, kv, self._histories.begin(kept.record.owner), kept.saved)
        for tokens in kept.tokens:
            session.history.extend(tokens.token_ids, tokens.mark)
        return session

    def codec_of(self, strategy: KVStrategy) -> str:
        """The digest of what was calibrated, if the strategy depends on it."""
        f_theta = "" if self._context.f_theta is None else self._context.f_theta.digest
        digests = {LATENT: self._codec, F_THETA: f_theta, COMPONENTS: self._components}
        return " ".join(digests[one] for one in strategy.calibrated.split(" and ") if one)

    def _session(
        self, record: SessionRecord, kv: SessionKV, history: History, saved: Saved, *, is_transient: bool = False
    ) -> Session:
        return Session(
            session_id=record.session_id,
            owner=record.owner,
            kv=kv,
            eos_token_ids=frozenset(record.eos_token_ids),
            limit_tokens=record.limit_tokens,
            cap_tokens=self._cap_tokens,
            used_at=self._clock(),
            here_at=self._clock(),
            created_at=record.created_at,
            label=record.label,
            is_transient=is_transient,
            history=history,
            journal=self._transient if is_transient else self._journal,
            saved=saved,
        )


def _new_id(route: str) -> str:
    # The secret part has no dot, so what is before a dot is the route.
    # A command takes what begins with - for an option.
    while (secret := secrets.token_urlsafe(24)).startswith("-"):
        pass
    return f"{route}.{secret}" if route else secret


def _route_of(session_id: str) -> str:
    return session_id.rpartition(".")[0]
