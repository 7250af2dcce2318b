"""Idempotent calls, by kind: how each is done exactly once, and where its reply is: in memory, in the journal.

    Calls.once(kind, call, act)     does the session exist, or was the call answered? · its arguments
                                    · recall a reply · refuse · hold the session
                                    under the store's lock, as one unit of the journal:
                                    recall · expected length · act · remember

A reply is kept as JSON. Its sizes are those that were promised when the session was made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Generic, TypedDict, TypeVar

from inference_engine.engine.arguments import check_length
from inference_engine.engine.results import HistoryLength, SessionForked, SessionOpened
from inference_engine.kv.strategies import parse_strategy
from inference_engine.metrics import EngineMetrics
from inference_engine.session.holding import holding
from inference_engine.session.journal import APPENDED, OPENED, Journal, ReplyRecord
from inference_engine.session.replies import Call, Replies, identify
from inference_engine.session.session import Holder, Session
from inference_engine.session.store import SessionStore
from inference_engine.types import Bound

Reply = TypeVar("Reply", bound="SessionOpened | HistoryLength")


class CallOptions(TypedDict, total=False):
    """What a call on a session may say beside what it asks for.

    request_id: makes a retry safe: a second call with it does nothing, and returns the first reply.
    expected_history_length: HistoryLengthMismatch if the history has another. wait_seconds: SessionBusy if another
    operation holds the session for longer. may_be_undone: the caller uses the reply only once it is safe; if the disk
    has no space for it, it is as if the call had not come, and the session's receipt says so.
    """

    request_id: bytes
    owner: str
    expected_history_length: int | None
    wait_seconds: float
    may_be_undone: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionCall:
    """As `CallOptions`. session_id: None for a call that makes a session."""

    session_id: str | None = None
    request_id: bytes = b""
    owner: str = ""
    expected_history_length: int | None = None
    wait_seconds: float = 0.0
    may_be_undone: bool = False


class Repeated(Generic[Reply]):
    """The replies to calls of one kind, and what comes before one of them acts."""

    def __init__(
        self,
        kind: str,
        replies: Replies[Reply],
        store: SessionStore,
        metrics: EngineMetrics,
        *,
        to_text: Callable[[Reply], str],
        from_text: Callable[[str], Any],
        refuse: Callable[[], None],
        operation: Holder | None = None,
        by_session: bool = False,
    ) -> None:
        """kind: its name in the journal. refuse: raises while none of them is done. operation: holds the session
        meanwhile. by_session: ids of calls are a session's, else an owner's."""
        self.kind = kind
        self.refuse = refuse
        self.operation = operation
        self.by_session = by_session
        self._replies = replies
        self._store = store
        self._metrics = metrics
        self._to_text = to_text
        self._from_text = from_text

    def __len__(self) -> int:
        return len(self._replies)

    def knows(self, request_id: bytes, *, owner: str, session_id: str = "") -> bool:
        """Is a reply to this id in memory? `recall` checks whether the content is equal."""
        with self._store.locked():
            return self._replies.knows(request_id, owner=owner, session_id=session_id if self.by_session else "")

    def identify(self, call: SessionCall, *content: object) -> Call | None:
        of_session = call.session_id or "" if self.by_session else ""
        return identify(call.request_id, *content, owner=call.owner, session_id=of_session)

    def find(self, call: SessionCall) -> Session:
        """Its session. One that failed can be closed, and nothing else."""
        find = self._store.find if self.operation is None else self._store.find_healthy
        return find(call.session_id or "", call.owner)

    def recall(self, call: Call | None) -> Reply | None:
        """The reply to an earlier call, marked as replayed. Raises RequestIdReused if that had another content."""
        if call is None:
            return None
        with self._store.locked():
            reply = self._replies.recall(call)
        if reply is None:
            return None
        self._metrics.replays.inc()
        return replace(reply, is_replayed=True)

    def remember(
        self, call: Call | None, reply: Reply, session_id: str, journal: Journal, *, length: int, is_closed: bool
    ) -> None:
        """Keep the reply to a call that has an id, in memory and in the journal. length: of the session's history."""
        if call is None:
            return
        self._replies.remember(call, reply, session_id=session_id)
        if is_closed:
            self._replies.session_ended(session_id, call.owner)  # from now on it expires
        if journal.keeps:
            text = self._to_text(reply)
            journal.reply(ReplyRecord(session_id, call.owner, self.kind, call.request_id, call.digest, length, text))

    def forget(self, call: Call | None) -> None:
        """The call was undone. Called with the store locked."""
        self._replies.forget(call)

    def restore(self, record: ReplyRecord) -> None:
        """Bring a kept reply back into memory. Called with the store locked."""
        of_session = record.session_id if self.by_session else ""
        if self._replies.knows(record.request_id, owner=record.owner, session_id=of_session):
            return
        call = Call(record.owner, of_session, record.request_id, record.digest)
        self._replies.remember(call, self._from_text(record.body), session_id=record.session_id)
        if not self._store.is_resident(record.session_id):
            self._replies.session_ended(record.session_id, record.owner)  # else nothing would make it expire


class Calls:
    """All kinds of calls whose replies are remembered, but Generates, whose tokens are in the history."""

    def __init__(
        self, store: SessionStore, journal: Journal, metrics: EngineMetrics, refuse: Callable[[], None]
    ) -> None:
        """refuse: raises while no new work is taken."""
        self._store = store
        self._journal = journal
        replies = store.replies
        opens, lengths = (_opened_to_text, _opened_from_text), (_length_to_text, _length_from_text)

        def kind(name: str, texts: tuple[Any, Any], page: Replies[Any], **how: Any) -> Repeated[Any]:
            to_text, from_text = texts
            return Repeated(
                name, page, store, metrics, to_text=to_text, from_text=from_text, **{"refuse": refuse} | how
            )

        append, fork = Holder.APPEND, Holder.FORK
        self.opened: Repeated[SessionOpened] = kind(OPENED, opens, replies.page())
        self.forked: Repeated[SessionForked] = kind("forked", opens, replies.page(most_per_session=1), operation=fork)
        # Not undone: it has ended a session, as a close has.
        self.rewound: Repeated[SessionForked] = kind("rewound", opens, replies.page(most_per_session=1), operation=fork)
        self.appended: Repeated[HistoryLength] = kind(
            APPENDED, lengths, _page_of_lengths(store), operation=append, by_session=True
        )
        self.closed: Repeated[HistoryLength] = kind(
            "closed", lengths, _page_of_lengths(store), refuse=partial(journal.refuse_when_blocked, to_close=True)
        )
        self._by_kind: dict[str, Repeated[Any]] = {
            one.kind: one for one in (self.opened, self.forked, self.rewound, self.appended, self.closed)
        }

    def once(
        self,
        kind: Repeated[Reply],
        call: SessionCall,
        act: Callable[[Any], tuple[Reply, Session]],
        content: Callable[[], Sequence[object]],
    ) -> Reply:
        """Do what a call asks, or return the reply to the same call of earlier.

        content: checks the arguments, and returns what is equal in a retry. Called once it is known that there is such
        a session. act: is given the session, held, or None if the call is about none; called with the store locked.
        Returns the reply and whose it is: the session, or one that it made. Raises SessionBusy,
        HistoryLengthMismatch, RequestIdReused, and what the callbacks raise; then nothing is remembered.
        """
        store = self._store
        if call.session_id is not None and not kind.knows(
            call.request_id, owner=call.owner, session_id=call.session_id
        ):
            kind.find(call)
        identity = kind.identify(call, *content())
        if (known := kind.recall(identity)) is not None:
            return known
        kind.refuse()
        session: Session | None = None
        answered: Session | None = None
        start = uses = 0

        def undo() -> bool:
            with store.locked():
                if session is not None and answered is session:
                    if session.uses != uses or session.is_closed:
                        return False
                    session.take_back(start)
                elif answered is not None:
                    store.forget(answered)
                kind.forget(identity)
            return True

        hold: AbstractContextManager[None] = nullcontext()
        if kind.operation is not None:
            hold = holding(store, kind.find(call), kind.operation, call.wait_seconds)
        with hold, store.locked(), self._journal.unit(undo if call.may_be_undone else None):
            if (known := kind.recall(identity)) is not None:
                return known
            if call.session_id is not None:
                session = kind.find(call)
                check_length(session.session_id, len(session.history), call.expected_history_length)
                start, uses = len(session.history), session.uses
            reply, answered = act(session)
            kind.remember(
                identity,
                reply,
                answered.session_id,
                answered.journal,
                length=len(answered.history),
                is_closed=answered.is_closed,
            )
            return reply

    def close_claimed(self, call: SessionCall, length: int) -> HistoryLength:
        """Close a session of which memory has nothing. Called with the store locked.

        Raises InvalidArgument, HistoryLengthMismatch, and as `refuse_when_blocked`; then the session is as it was.
        """
        session_id = call.session_id or ""
        identity = self.closed.identify(call, session_id, call.expected_history_length)
        check_length(session_id, length, call.expected_history_length)
        self.closed.refuse()
        reply = HistoryLength(tokens=length)
        with self._journal.unit():
            self._journal.close(session_id)
            self._store.has_closed(session_id, call.owner)
            self.closed.remember(identity, reply, session_id, self._journal, length=length, is_closed=True)
        return reply

    def knows(self, request_id: bytes, owner: str) -> bool:
        """Is a reply to a call with this id of the owner's in memory? Ids of a session's own calls are left aside."""
        return any(one.knows(request_id, owner=owner) for one in self._by_kind.values() if not one.by_session)

    def restore(self, records: Sequence[ReplyRecord]) -> None:
        """Bring kept replies back into memory. Called with the store locked."""
        for record in records:
            self._by_kind[record.kind].restore(record)


def _page_of_lengths(store: SessionStore) -> Replies[HistoryLength]:
    return store.replies.page(pack=lambda length: length.tokens, unpack=lambda tokens: HistoryLength(tokens=tokens))


def _opened_to_text(opened: SessionOpened) -> str:
    """Of a SessionForked, too."""
    fields = {name: getattr(opened, name) for name in opened.__dataclass_fields__ if name != "is_replayed"}
    return json.dumps({**fields, "strategy": str(opened.strategy), "bound": asdict(opened.bound)})


def _opened_from_text(text: str) -> SessionOpened:
    fields = json.loads(text)
    fields |= {"strategy": parse_strategy(fields["strategy"]), "bound": Bound(**fields["bound"])}
    if (ends := fields.get("eos_token_ids")) is not None:
        fields["eos_token_ids"] = tuple(ends)
    return SessionForked(**fields) if "history_length" in fields else SessionOpened(**fields)


def _length_to_text(length: HistoryLength) -> str:
    return json.dumps(length.tokens)


def _length_from_text(text: str) -> HistoryLength:
    return HistoryLength(tokens=json.loads(text))
