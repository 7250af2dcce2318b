"""Calls that may be repeated, by kind: their replies in memory, in the journal, and back from it.

A reply is kept as JSON. Its sizes are those that were promised when the session was made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Generic, TypeVar

from inference_engine.engine.results import HistoryLength, SessionForked, SessionOpened
from inference_engine.kv.strategies import parse_strategy
from inference_engine.metrics import EngineMetrics
from inference_engine.session.journal import ReplyRecord
from inference_engine.session.replies import Call, Replies
from inference_engine.session.session import Session
from inference_engine.session.store import SessionStore
from inference_engine.types import Bound

Reply = TypeVar("Reply", bound="SessionOpened | HistoryLength")


class Repeated(Generic[Reply]):
    """The replies to calls of one kind. A caller that finds none holds the store's lock until `remember`."""

    def __init__(
        self,
        kind: str,
        replies: Replies[Reply],
        store: SessionStore,
        metrics: EngineMetrics,
        *,
        to_text: Callable[[Reply], str],
        from_text: Callable[[str], Any],
        by_session: bool = False,
    ) -> None:
        """kind: its name in the journal. by_session: ids of calls are a session's, else an owner's."""
        self.kind = kind
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
        return self._replies.knows(request_id, owner=owner, session_id=session_id)

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

    def remember(self, call: Call | None, reply: Reply, session: Session) -> None:
        """Keep the reply to a call that has an id, in memory and in the journal."""
        if call is None:
            return
        self._replies.remember(call, reply, session_id=session.session_id)
        if session.journal.keeps:
            position, text = len(session.history), self._to_text(reply)
            session.journal.reply(
                ReplyRecord(session.session_id, call.owner, self.kind, call.request_id, call.digest, position, text)
            )

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

    def session_ended(self, session: Session) -> None:
        """From now on the session's replies expire."""
        self._replies.session_ended(session.session_id, session.owner)


class Calls:
    """All kinds of calls whose replies are remembered, but Generates, whose tokens are in the history."""

    def __init__(self, store: SessionStore, metrics: EngineMetrics) -> None:
        replies = store.replies
        opens, lengths = (_opened_to_text, _opened_from_text), (_length_to_text, _length_from_text)

        def kind(name: str, texts: tuple[Any, Any], page: Replies[Any], *, by_session: bool = False) -> Repeated[Any]:
            to_text, from_text = texts
            return Repeated(name, page, store, metrics, to_text=to_text, from_text=from_text, by_session=by_session)

        self.opened: Repeated[SessionOpened] = kind("opened", opens, replies.page())
        self.forked: Repeated[SessionForked] = kind("forked", opens, replies.page(most_per_session=1))
        self.appended: Repeated[HistoryLength] = kind("appended", lengths, _page_of_lengths(store), by_session=True)
        self.closed: Repeated[HistoryLength] = kind("closed", lengths, _page_of_lengths(store))
        self._by_kind: dict[str, Repeated[Any]] = {
            one.kind: one for one in (self.opened, self.forked, self.appended, self.closed)
        }

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
