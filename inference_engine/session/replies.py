"""Idempotent calls: a retry with the same request id gets the remembered reply, and nothing is done twice.

    call = identify(request_id, *content, owner=owner)        None: the caller gave no id
    with store.locked():                                      so that of two equal calls only one acts
        if (reply := replies.recall(call)) is not None:       or RequestIdReused: the same id, another content
            return replace(reply, is_replayed=True)
        reply = ...                                           act; a failure is not remembered, and may be retried
        replies.remember(call, reply, session_id=...)

A reply belongs to the session that it opened, closed or changed. The last few of each kind are kept while that session
is open, and for some minutes after, up to a number for each owner. The calls of one owner never displace another's.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Generic, TypeVar

from inference_engine.errors import InvalidArgument, RequestIdReused

R = TypeVar("R")

REQUEST_ID_BYTES = 16
DIGEST_BYTES = 8  # it finds an owner's own mistake; it is no protection
KEEP_SECONDS = 600.0  # after the session ended
MOST_PER_SESSION = 64  # of one kind of call
MOST_ENDED_PER_OWNER = 4096  # of one kind of call, over all sessions that ended


@dataclass(frozen=True, slots=True)
class Call:
    """The identity of a call: owner, request id and a digest of its content. Ids are unique per owner, or per session
    if `session_id` is given."""

    owner: str
    session_id: str
    request_id: bytes
    digest: bytes

    @property
    def key(self) -> tuple[str, str, bytes]:
        return self.owner, self.session_id, self.request_id


def identify(request_id: bytes, *content: object, owner: str, session_id: str = "") -> Call | None:
    """The identity of a call with this content; None if it has no id. Raises InvalidArgument for one of a wrong length.

    content: what must be equal in a retry: plain values, bytes, sequences, mappings and dataclasses of these.
    """
    if not request_id:
        return None
    if len(request_id) != REQUEST_ID_BYTES:
        raise InvalidArgument("request_id", f"must be empty or {REQUEST_ID_BYTES} bytes, got {len(request_id)}")
    return Call(owner, session_id, request_id, _digest(content))


def _digest(content: object) -> bytes:
    return hashlib.sha256(repr(_plain(content)).encode()).digest()[:DIGEST_BYTES]


def _as_it_is(value: Any) -> Any:
    return value


class Replies(Generic[R]):
    """The replies to one kind of call. Every method is called with the store's lock held."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        most_per_session: int,
        keep_seconds: float,
        pack: Callable[[R], Any] = _as_it_is,
        unpack: Callable[[Any], R] = _as_it_is,
    ) -> None:
        """pack, unpack: between a reply and what is stored of it. There may be tens of thousands: if that is a number
        or bytes, the garbage collector need not scan them, which would delay all sessions.
        """
        self._clock = clock
        self._most_per_session = most_per_session
        self._keep_seconds = keep_seconds
        self._pack, self._unpack = pack, unpack
        # By the call's key: its digest, the reply as it is packed, the session. Plain tuples, for the same reason.
        self._replies: dict[tuple[str, str, bytes], tuple[bytes, Any, str]] = {}
        self._of_session: dict[str, OrderedDict[tuple[str, str, bytes], None]] = {}  # oldest first
        self._ended: dict[str, OrderedDict[str, float]] = {}  # owner -> session id -> when it ended, oldest first
        self._ended_count: dict[str, int] = {}  # owner -> replies of those sessions
        self.due = math.inf  # no reply expires before this

    def knows(self, request_id: bytes, *, owner: str, session_id: str = "") -> bool:
        """Is a reply to this id remembered? `recall` checks whether the content is equal."""
        return (owner, session_id, request_id) in self._replies

    def recall(self, call: Call | None) -> R | None:
        """The earlier reply to this call, if any. Raises RequestIdReused if the content was another."""
        if call is None or (found := self._replies.get(call.key)) is None:
            return None
        digest, packed, session_id = found
        if digest != call.digest:
            raise RequestIdReused(session_id)
        return self._unpack(packed)

    def remember(self, call: Call | None, reply: R, *, session_id: str) -> None:
        """Keep the reply with its session; the oldest of its kind goes if there are too many."""
        if call is None:
            return
        self.forget(call)
        kept = self._of_session.setdefault(session_id, OrderedDict())
        self._replies[call.key] = call.digest, self._pack(reply), session_id
        kept[call.key] = None
        if session_id in self._ended.get(call.owner, ()):
            self._ended_count[call.owner] += 1
        while len(kept) > self._most_per_session:
            self._drop(next(iter(kept)))

    def forget(self, call: Call | None) -> None:
        """Remove the call: what it began has failed."""
        if call is not None and call.key in self._replies:
            self._drop(call.key)

    def session_ended(self, session_id: str, owner: str) -> None:
        """From now on the session's replies expire."""
        if session_id not in self._of_session:
            return
        ended = self._ended.setdefault(owner, OrderedDict())
        if session_id not in ended:
            self._ended_count[owner] = self._ended_count.get(owner, 0) + len(self._of_session[session_id])
        ended[session_id] = now = self._clock()
        ended.move_to_end(session_id)
        self.due = min(self.due, now + self._keep_seconds)
        self._expire_of(owner, now)

    def session_came_back(self, session_id: str, owner: str) -> None:
        """The session is in memory again. Replies to calls that came before it seemed to be those of an ended one."""
        ended = self._ended.get(owner)
        if ended is None or session_id not in ended:
            return
        del ended[session_id]
        self._ended_count[owner] -= len(self._of_session.get(session_id, ()))
        if not ended:
            del self._ended[owner], self._ended_count[owner]

    def session_left(self, session_id: str) -> None:
        """The session left memory, and its replies with it: the journal has them."""
        for key in self._of_session.pop(session_id, ()):
            del self._replies[key]

    def clear(self) -> None:
        """Forget all: the journal has those that count."""
        for book in (self._replies, self._of_session, self._ended, self._ended_count):
            book.clear()
        self.due = math.inf

    def expire(self) -> None:
        """Forget expired replies. There are none before `due`."""
        now = self._clock()
        if now < self.due:
            return
        for owner in list(self._ended):
            self._expire_of(owner, now)
        oldest = min((next(iter(ended.values())) for ended in self._ended.values()), default=math.inf)
        self.due = oldest + self._keep_seconds

    def __len__(self) -> int:
        return len(self._replies)

    def _expire_of(self, owner: str, now: float) -> None:
        """Forget an owner's expired replies, and the oldest of too many."""
        ended, horizon = self._ended[owner], now - self._keep_seconds
        while ended:
            session_id, at = next(iter(ended.items()))
            if at > horizon and self._ended_count[owner] <= MOST_ENDED_PER_OWNER:
                return
            self._forget_session(session_id, owner)
        del self._ended[owner], self._ended_count[owner]

    def _forget_session(self, session_id: str, owner: str) -> None:
        del self._ended[owner][session_id]
        for key in self._of_session.pop(session_id, ()):
            del self._replies[key]
            self._ended_count[owner] -= 1

    def _drop(self, key: tuple[str, str, bytes]) -> None:
        _, _, session_id = self._replies.pop(key)
        kept = self._of_session[session_id]
        del kept[key]
        if session_id in self._ended.get(key[0], ()):
            self._ended_count[key[0]] -= 1
        if not kept:
            del self._of_session[session_id]


class ReplyBook:
    """The replies to all kinds of calls. Called with the store's lock held."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pages: list[Replies[Any]] = []

    def page(
        self,
        *,
        most_per_session: int = MOST_PER_SESSION,
        keep_seconds: float = KEEP_SECONDS,
        pack: Callable[[Any], Any] = _as_it_is,
        unpack: Callable[[Any], Any] = _as_it_is,
    ) -> Replies[Any]:
        """The replies of one more kind of call; see `Replies`."""
        page: Replies[Any] = Replies(
            self._clock, most_per_session=most_per_session, keep_seconds=keep_seconds, pack=pack, unpack=unpack
        )
        self._pages.append(page)
        return page

    def __len__(self) -> int:
        return sum(len(page) for page in self._pages)

    def session_ended(self, session_id: str, owner: str) -> None:
        for page in self._pages:
            page.session_ended(session_id, owner)

    def session_came_back(self, session_id: str, owner: str) -> None:
        for page in self._pages:
            page.session_came_back(session_id, owner)

    def session_left(self, session_id: str) -> None:
        for page in self._pages:
            page.session_left(session_id)

    def clear(self) -> None:
        for page in self._pages:
            page.clear()

    def expire(self) -> None:
        """Forget expired replies. Call it now and then; it is cheap enough for every step."""
        now = self._clock()
        for page in self._pages:
            if now >= page.due:
                page.expire()


_PLAIN = frozenset({int, float, bool, str, type(None)})


def _plain(value: object) -> object:
    """A value whose `repr` is equal exactly for equal contents. One `repr` at the end is fast: every call is
    identified, refused ones too."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, bytes):
        return b"", len(value), hashlib.sha256(value).digest()  # their repr would be four times as long
    if isinstance(value, (tuple, list)):
        return "l", *(value if _PLAIN.issuperset(map(type, value)) else map(_plain, value))  # ids: thousands
    if specs := _specs(kind):
        # A field with its default is left out, so that one more field changes no digest: a retry may come after an
        # upgrade of the server.
        given = [(name, getattr(value, name)) for name, _ in specs]
        return "m", *[
            (name, _plain(one)) for (name, one), (_, default) in zip(given, specs, strict=True) if one != default
        ]
    if isinstance(value, Mapping):
        return "m", *sorted(repr(_plain(item)) for item in value.items())
    return "v", repr(value)


@functools.cache
def _specs(kind: type[Any]) -> tuple[tuple[str, object], ...]:
    """Fields of a dataclass by name, each with its default. MISSING, which equals no value, if it has none."""
    if not is_dataclass(kind):
        return ()
    return tuple(
        (spec.name, spec.default if spec.default_factory is MISSING else spec.default_factory())
        for spec in fields(kind)
    )
