"""Which sessions of one owner begin with the same tokens: their histories by chained hashes, up to certain borders.

    border    32    64    128    256                512                768 …        with segments of 256 tokens
    digest    h1 ─▶ h2 ─▶ h3 ──▶ h4 ──────────────▶ h5 ──────────────▶ h6           h1 = H(owner, strategy, 32 tokens)

Behind 64 segments there are fewer, each a thirty-second further than the last at most: 256 in a million tokens.
Two histories with the same h3 have their first 128 tokens in common; how many more is found token by token. Sessions in
memory are entered, and what is kept of some that closed (`session/kept_prefixes.py`): all of it has one model and one
numeric identity. An owner's are never compared with another's, so no owner can tell by time or counts what another has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from inference_engine.errors import SessionClosed
from inference_engine.kv.session_kv import SessionKV
from inference_engine.session.history import Marks, TokenIds
from inference_engine.session.session import Session

LEAST_TOKENS = 32  # that are worth looking for
_DIGEST_BYTES = 16
_EACH_SEGMENT = 64  # has a border at its end; behind them, each second one has, each fourth, …
_MOST_ALIKE = 32  # sessions that are looked at for one


class Beginning(Protocol):
    """The tokens that others may begin with."""

    def __len__(self) -> int: ...

    def ids(self, start: int, stop: int) -> TokenIds: ...

    def marks(self, start: int, stop: int) -> Marks: ...


class Lender(Protocol):
    """What has entries that others begin with: a session, or what is kept of one."""

    @property
    def owner(self) -> str: ...

    @property
    def kv(self) -> SessionKV: ...

    @property
    def history(self) -> Beginning: ...

    @property
    def digests(self) -> list[bytes]:
        """Of its tokens up to each border."""

    @property
    def family(self) -> object | None: ...

    @property
    def is_gone(self) -> bool:
        """Can nothing be taken from it any more?"""


class Prefixes:
    """lock: the store's. of_all: a session finds all of its owner's; else those alone that were forked from it or with
    it.
    """

    def __init__(self, lock: AbstractContextManager[object], *, of_all: bool) -> None:
        self._lock = lock
        self._of_all = of_all
        self._entered: dict[bytes, dict[Lender, None]] = {}  # by digest; last entered at the end

    def enter(self, session: Session) -> None:
        """Let others find its history as it is now."""
        if not self._of_all and session.family is None:
            return
        try:
            self._extend(session)
        except SessionClosed:  # just now
            return
        with self._lock:
            if not session.is_gone:
                self.add(session, session.digests[session.entered_digests :])
                session.entered_digests = len(session.digests)

    @staticmethod
    def begin_as(fork: Session, parent: Session) -> None:
        """What it begins with need not be hashed once more. Called with the lock held."""
        step = fork.kv.context.geometry.segment_tokens
        for index, digest in enumerate(parent.digests):
            if border(index, step) > len(fork.history):
                break
            fork.digests.append(digest)

    def add(self, lender: Lender, digests: Iterable[bytes]) -> None:
        """Let others find these of its digests. Called with the lock held."""
        for digest in digests:
            self._entered.setdefault(digest, {})[lender] = None

    def forget(self, lender: Lender) -> None:
        """Nothing more can be taken from it. Called with the lock held."""
        for digest in lender.digests:
            lenders = self._entered.get(digest)
            if lenders is not None:
                lenders.pop(lender, None)
                if not lenders:
                    del self._entered[digest]

    def at(self, digest: bytes) -> Sequence[Lender]:
        """Those that begin so. Called with the lock held."""
        return tuple(self._entered.get(digest, ()))

    def digests_of(self, session: Session, length: int) -> list[bytes]:
        """Of its first `length` tokens."""
        self._extend(session)
        step = session.kv.context.geometry.segment_tokens
        return [digest for index, digest in enumerate(session.digests) if border(index, step) <= length]

    def alike(self, session: Session, is_of_use: Callable[[Lender], bool]) -> Iterator[tuple[Lender, int]]:
        """Those of use that have at least the first border in common with it, and how many first tokens.

        Those with the most borders first, and the last entered of them. Called with the lock held. It need not be
        entered itself.
        """
        if not self._of_all and session.family is None:
            return
        self._extend(session)
        seen: set[Lender] = {session}
        looked_at = 0
        for digest in reversed(session.digests):
            for other in reversed(self._entered.get(digest, {})):
                if other in seen or not (self._of_all or are_kin(session, other)):
                    continue
                seen.add(other)
                if not is_of_use(other):
                    continue
                yield other, in_common(session, other)
                if (looked_at := looked_at + 1) == _MOST_ALIKE:
                    return

    def _extend(self, session: Session) -> None:
        """Hash up to the borders that its history has passed since."""
        step, history, digests = session.kv.context.geometry.segment_tokens, session.history, list(session.digests)
        reads_marks, known = session.kv.is_selective, len(digests)
        last = digests[-1] if digests else _begin(session)
        first = border(known - 1, step)
        while (until := border(len(digests), step)) <= len(history):
            hashed = hashlib.blake2b(last, digest_size=_DIGEST_BYTES)
            hashed.update(history.ids(first, until).tobytes())
            if reads_marks:
                hashed.update(history.marks(first, until).tobytes())
            digests.append(last := hashed.digest())
            first = until
        with self._lock:
            if len(session.digests) == known:  # else another thread has done so
                session.digests += digests[known:]


def border(index: int, segment: int) -> int:
    """So many tokens are before border number `index`: powers of two times LEAST_TOKENS, then whole segments."""
    short = max(0, (segment - 1) // LEAST_TOKENS).bit_length()
    if index < short:
        return LEAST_TOKENS << index if index >= 0 else 0
    if (segments := index - short + 1) > _EACH_SEGMENT:
        doubled, further = divmod(segments - _EACH_SEGMENT - 1, _EACH_SEGMENT // 2)
        segments = (_EACH_SEGMENT << doubled) + (further + 1) * (2 << doubled)
    return segments * segment


def are_kin(session: Session, other: Lender) -> bool:
    """Was one forked from the other, or both from a third?"""
    return session.family is not None and session.family is other.family


def _begin(session: Session) -> bytes:
    """What a segment's hash begins with: whose entries can be read if the ids are equal."""
    kv = session.kv
    rotaries = sorted({layer.rotary for layer in kv.context.geometry.layers})
    return "\0".join((session.owner, str(kv.strategy), *rotaries)).encode()


def in_common(one: Lender, other: Lender) -> int:
    """First tokens that both have; with equal marks, where entries depend on those. Both have the same strategy."""
    length = min(len(one.history), len(other.history))
    differ = one.history.ids(0, length) != other.history.ids(0, length)
    if one.kv.is_selective:
        differ |= one.history.marks(0, length) != other.history.marks(0, length)
    return int(differ.argmax()) if differ.any() else length
