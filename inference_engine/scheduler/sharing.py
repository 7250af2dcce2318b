"""Prefix sharing: what several sessions of an owner begin with is prefilled once.

    asked for     A and B and C, which begin with the same tokens, of which no entries are there
    A begins      B and C stay in the queue while A prefills what they have in common
    A is there    B and C begin behind those entries: forks read them in place where forks can, all others copy them
    A ends early  the first of B and C prefills the rest

It is decided when a session without entries of its own begins a Generate. Entries are a cache of the history: a session
that finds none, or cannot take those it found, computes them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

from inference_engine.logs import about_session
from inference_engine.metrics import EngineMetrics
from inference_engine.scheduler.request import Request, RequestState
from inference_engine.session.kept_prefixes import KeptPrefix
from inference_engine.session.prefixes import LEAST_TOKENS, Lender, are_kin
from inference_engine.session.session import Session
from inference_engine.session.store import SessionStore

logger = logging.getLogger(__name__)

_MOST_ITS_OWN = 2  # what another one has still to prefill is waited for if that is at most so many times one's own


@dataclass(slots=True)
class PrefixFound:
    """What has the most entries of a prefix, and the request that prefills more of it, if there are any."""

    lender: Lender | None = None
    held: int = 0
    ahead: Request | None = None
    coming: int = 0


class Sharing:
    """Engine's thread."""

    def __init__(self, store: SessionStore, metrics: EngineMetrics) -> None:
        self._store = store
        self._metrics = metrics

    @staticmethod
    def is_held_back(request: Request) -> bool:
        """Does another one still prefill what it begins with?"""
        ahead = request.behind
        if ahead is None:
            return False
        if ahead.state is RequestState.RUNNING and ahead.session.kv.length < request.behind_until:
            return not ahead.session.is_closed
        request.behind = None
        return False

    def enter(self, session: Session) -> None:
        """What is recorded of its history has entries, or will have them soon."""
        self._store.prefixes.enter(session)

    def begin(self, request: Request, running: Iterable[Request]) -> bool:
        """Let a session without entries take those that others have of what it begins with. False: it waits for one of
        `running` that prefills them.
        """
        found = self._find(request.session, running)
        if found.ahead is not None:
            self._wait(request, found.ahead, found.coming)
            return False
        if found.lender is not None:
            self._take(request.session, found.lender, found.held)
        return True

    def foresee(self, session: Session, in_flight: Iterable[Request]) -> int:
        """How many of its first tokens will have entries of others when it begins, as far as is known now; also of
        those `in_flight` that it will wait for. Any thread.
        """
        found = self._find(session, in_flight)
        return found.coming if found.ahead is not None else found.held

    def _find(self, session: Session, others: Iterable[Request]) -> PrefixFound:
        """What of it would be worth taking over, or waiting for until one of `others` has prefilled it."""
        kv, found = session.kv, PrefixFound()
        segment = kv.context.geometry.segment_tokens
        least = kv.base + min(LEAST_TOKENS, segment)
        most = len(session.history) - 1  # the logits of the last token are wanted
        if kv.is_dropped or kv.length > kv.base or most < least:
            return found
        prefilling: dict[Lender, Request] = {one.session: one for one in others if one.is_prefilling}

        def is_of_use(other: Lender) -> bool:
            # Of one whose entries are about to be copied, none is there.
            has_any = other.kv.length > 0 and not other.kv.is_dropped and not other.kv.coming
            return (has_any or other in prefilling) and not other.is_gone

        with self._store.locked():
            for other, common in self._store.prefixes.alike(session, is_of_use):
                at, theirs = min(common, most), other.kv
                if at <= found.held:
                    continue
                held = theirs.kept(at) if theirs.can_be_copied else 0
                if held > found.held:
                    found.lender, found.held = other, held
                ahead = prefilling.get(other)
                # One that is active reads as it does until it ends.
                is_in_time = ahead is not None and not (theirs.takes_room and ahead.params.max_tokens)
                if is_in_time and theirs.length < at > found.coming:
                    found.ahead, found.coming = ahead, at
        if found.held < least:
            found.lender, found.held = None, 0
        if found.ahead is not None:
            own, its = found.coming - max(kv.base, found.held), found.coming - found.ahead.session.kv.length
            if own <= 0 or found.coming < kv.base + segment or its > _MOST_ITS_OWN * own:
                found.ahead, found.coming = None, 0
        return found

    @staticmethod
    def _wait(request: Request, ahead: Request, until: int) -> None:
        request.behind, request.behind_until = ahead, until
        kv = ahead.session.kv
        if kv.takes_room:
            request.behind_until = math.inf
        elif not kv.keeps_every_entry and not kv.length < ahead.pauses_at < until:
            ahead.pauses_at = until  # behind it, entries that are wanted may have left

    def _take(self, session: Session, lender: Lender, at: int) -> None:
        with self._store.lent(lender) as theirs:
            if theirs is None:
                return
            try:
                if not (are_kin(session, lender) and self._store.continue_behind(session, lender, at)):
                    session.kv.copy_from(theirs, at)
                session.refresh_facts()
            except Exception:
                logger.exception("a prefix could not be taken over", extra=about_session(session.session_id))
                session.forget_entries()
            self._metrics.shared_prefix_tokens.inc(session.kv.length)
            if isinstance(lender, KeptPrefix):
                self._metrics.kept_prefix_tokens.inc(session.kv.length)
