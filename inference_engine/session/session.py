"""One session: its history, its K/V, and the one operation that may hold it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.errors import HistoryLimit, InvariantViolated
from inference_engine.kv.session_kv import SessionKV
from inference_engine.session.history import History, TokenIds
from inference_engine.session.journal import GenerateRecord, Journal, Logprobs, Saved
from inference_engine.types import Footprint, Mark

# A plain number: comparing with a member of an enumeration takes numpy ten times as long.
_GENERATED = np.uint8(Mark.GENERATED)


class Holder(enum.Enum):
    """What holds a session. At most one does."""

    APPEND = "append"
    GENERATE = "generate"
    FORK = "fork"


@dataclass(kw_only=True, slots=True)
class Violations:
    """How often each invariant was found broken. A healthy session has zeros."""

    inv1: int = 0
    inv2: int = 0
    inv3: int = 0

    def count(self, kind: str) -> None:
        name = kind.lower()
        setattr(self, name, getattr(self, name) + 1)


class Unread(Protocol):
    """A reader of a session's history, which may lag behind."""

    def keep(self) -> None:
        """The history ends: keep the tokens not read yet. Called once, with the store's lock held."""


@dataclass(kw_only=True, slots=True, eq=False, weakref_slot=True)
class Session:
    """Owned by the store. `history` grows only through `record`, or is read from the journal; `kv` is touched by the
    engine's thread only.

    limit_tokens: its own limit of the history's length. cap_tokens: the server's limit for any session. None: no limit.
    used_at: when an operation held it last, on the clock of the store. here_at: the same, or when it was brought back
    into memory, if that is later: whatever it was brought back for needs it for a while.
    """

    session_id: str
    owner: str
    kv: SessionKV
    eos_token_ids: frozenset[int]
    limit_tokens: int | None
    used_at: float
    here_at: float
    cap_tokens: int | None = None
    label: str = ""  # the owner's name for it; reported to the owner only
    created_at: float = 0.0  # seconds since 1970
    is_transient: bool = False  # it belongs to one call, and is not listed
    journal: Journal
    saved: Saved  # how much of the history may be sent
    history: History = field(default_factory=History)
    granted_length: int = 0  # to which a Generate may extend the history without asking: see `Histories.room`
    operation: Holder | None = None
    waiters: list[Callable[[], None]] = field(default_factory=list)
    readers: set[Unread] = field(default_factory=set)  # of tokens of its Generates
    uses: int = 0  # how often an operation held it, or its K/V was dropped
    family: object | None = None  # that it has in common with its forks, and those with theirs
    digests: list[bytes] = field(default_factory=list)  # of the segments of its history: see `Prefixes`
    entered_digests: int = 0  # so many of them are in its index
    pins: int = 0  # while positive, the entries stay in place, even if the session is closed meanwhile
    is_closed: bool = False
    is_wanted: bool = False  # another server asks for it: it leaves memory once nothing holds it
    is_lost: bool = False  # it was closed because another server has taken it over
    failure_reason: str = ""
    live_bytes: int = 0  # on the device
    live_kinds: Mapping[str, int] = field(default_factory=dict)  # the same, by kind
    tier_live_bytes: int = 0  # in the second tier
    evicted_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0  # draft tokens that were verified, and those of them that were accepted
    accepted_tokens: int = 0
    violations: Violations = field(default_factory=Violations)
    longest: int | None = field(init=False)  # the most tokens its history may have; None: no limit
    _published: Footprint | None = None  # that the facts above were taken from

    def __post_init__(self) -> None:
        self.longest = min((most for most in (self.limit_tokens, self.cap_tokens) if most is not None), default=None)

    @property
    def is_gone(self) -> bool:
        """Can nothing be taken from it any more?"""
        return self.is_closed or bool(self.failure_reason)

    @property
    def saved_length(self) -> int:
        """Of its history, as far as it is safe."""
        return max(0, min(self.saved.tokens, self.history.length))

    def check_room(self, adding: int) -> None:
        """Raise HistoryLimit if `adding` more tokens would make its history too long."""
        length = len(self.history)
        if self.limit_tokens is not None and length + adding > self.limit_tokens:
            raise HistoryLimit(length, adding, self.limit_tokens)
        if self.cap_tokens is not None and length + adding > self.cap_tokens:
            raise HistoryLimit(length, adding, self.cap_tokens, setting="history_tokens_per_session")

    def record(
        self,
        token_ids: TokenIds,
        mark: Mark,
        *,
        began: GenerateRecord | None = None,
        logprobs: Logprobs | None = None,
    ) -> None:
        """Add to the history, the journal first. If there is no memory, or the journal raises, nothing changed.

        began: the Generate whose first tokens they are.
        """
        start = self.history.reserve(len(token_ids))
        self.journal.append(self.session_id, start, token_ids, mark, began=began, logprobs=logprobs)
        self.history.extend(token_ids, mark)

    def take_back(self, length: int) -> None:
        """Undo the `record` of all tokens from `length` on, which the journal has refused and no operation has used."""
        self.journal.take_back(self.session_id, length)
        self.history.take_back(length)

    def pending_ids(self, limit: int) -> TokenIds:
        """The next token ids whose K/V are to be computed, at most `limit`, as a copy."""
        start = self.kv.next_position
        return np.array(self.history.ids(start, start + limit))

    def pending_generated(self, limit: int) -> NDArray[np.bool_]:
        """Which of the tokens of `pending_ids` the model generated."""
        start = self.kv.next_position
        generated: NDArray[np.bool_] = self.history.marks(start, start + limit) == _GENERATED
        return generated

    def end_history(self) -> None:
        """Free the history, except tokens that its readers have not read yet. Called with the store's lock held."""
        for reader in tuple(self.readers):
            reader.keep()
        self.readers.clear()
        self.history.release()

    def forget_entries(self) -> None:
        """Engine's thread: drop all K/V. The history stays, and is prefilled again when it is needed."""
        with ExitStack() as stack:
            # Run in reverse order, each even if another raises.
            stack.callback(self._forget_facts)
            stack.callback(self.kv.forget)

    def _forget_facts(self) -> None:
        self.cached_tokens = 0
        self.refresh_facts()

    def drop_entries(self) -> None:
        """Give back the memory of K/V, of a session that nothing holds. The history stays."""
        self.kv.drop()
        self.uses += 1
        self.live_bytes = self.tier_live_bytes = self.evicted_tokens = 0
        self.live_kinds, self._published = {}, None
        self.cached_tokens = self.kv.length  # the shared prefix, which other sessions hold

    def take_memory(self, other: Session, left: SessionKV) -> None:
        """`other`, whose K/V this session has, gets `left` for it. Its bytes are this one's, until they are counted."""
        other.kv = left
        self.live_bytes, self.tier_live_bytes = other.live_bytes, other.tier_live_bytes
        self.live_kinds = other.live_kinds

    def commit(self, length: int, taps: Tensor | None = None) -> None:
        """Engine's thread: keep staged entries below `length`, and publish what other threads may read.

        taps: as `SessionKV.commit` has them. Raises InvariantViolated, and what `SessionKV.commit` raises.
        """
        self.kv.commit(length, taps)
        self.refresh_facts()

    def refresh_facts(self) -> None:
        """Engine's thread: publish what other threads may read of the entries. Raises InvariantViolated."""
        footprint = self.kv.footprint()
        length, recorded = self.kv.length, self.history.length
        if length > recorded:
            raise InvariantViolated("INV1", f"{length} positions are cached of {recorded} recorded")
        if length < self.cached_tokens:
            raise InvariantViolated("INV2", f"the cache went back from {self.cached_tokens} to {length} positions")
        if footprint is not self._published:
            self._published = footprint
            self.live_bytes, self.tier_live_bytes = sum(footprint.by_kind.values()), footprint.tier_bytes
            self.live_kinds = footprint.by_kind
        self.evicted_tokens = self.kv.evicted
        self.cached_tokens = length
