"""Which sessions of one owner begin with the same tokens: their histories by chained hashes of their segments.

    h1 = H(owner, strategy, segment 1)      h2 = H(h1, segment 2)      h3 = H(h2, segment 3)      …

Two histories with the same h3 have their first three segments in common. Sessions in memory are entered, and those
alone: they have one model and one numeric identity. An owner's are never compared with another's, so no owner can tell
by time or counts what another one has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from inference_engine.errors import SessionClosed
from inference_engine.session.session import Session

_DIGEST_BYTES = 16
_MOST_ALIKE = 32  # sessions that are looked at for one


class Prefixes:
    """lock: the store's. of_all: a session finds all of its owner's; else those alone that were forked from it or with
    it.
    """

    def __init__(self, lock: AbstractContextManager[object], *, of_all: bool) -> None:
        self._lock = lock
        self._of_all = of_all
        self._entered: dict[bytes, dict[Session, None]] = {}  # by digest; last entered at the end

    def enter(self, session: Session) -> None:
        """Let others find its history as it is now. From one thread."""
        if not self._of_all and session.family is None:
            return
        try:
            self._extend(session)
        except SessionClosed:  # just now
            return
        with self._lock:
            if session.is_closed or session.failure_reason:
                return
            for digest in session.digests[session.entered_digests :]:
                self._entered.setdefault(digest, {})[session] = None
            session.entered_digests = len(session.digests)

    def forget(self, session: Session) -> None:
        """It leaves memory. Called with the lock held."""
        for digest in session.digests[: session.entered_digests]:
            sessions = self._entered.get(digest)
            if sessions is not None:
                sessions.pop(session, None)
                if not sessions:
                    del self._entered[digest]

    def alike(self, session: Session) -> Iterator[tuple[Session, int]]:
        """Sessions that begin with a segment of its history at least, and how many first tokens they have in common.

        Those with the most segments first, and the last entered of them. Called with the lock held, by the thread that
        enters; the session itself need not be entered.
        """
        if not self._of_all and session.family is None:
            return
        self._extend(session)
        seen = {session}
        for digest in reversed(session.digests):
            for other in reversed(self._entered.get(digest, {})):
                if other in seen or not (self._of_all or are_kin(session, other)):
                    continue
                seen.add(other)
                yield other, _in_common(session, other)
                if len(seen) > _MOST_ALIKE:
                    return

    def _extend(self, session: Session) -> None:
        """Hash the whole segments that are new in its history."""
        step, history, digests = session.kv.context.geometry.segment_tokens, session.history, session.digests
        reads_marks = session.kv.is_selective
        last = digests[-1] if digests else f"{session.owner}\0{session.kv.strategy}".encode()
        for first in range(len(digests) * step, len(history) - step + 1, step):
            hashed = hashlib.blake2b(last, digest_size=_DIGEST_BYTES)
            hashed.update(history.ids(first, first + step).tobytes())
            if reads_marks:
                hashed.update(history.marks(first, first + step).tobytes())
            digests.append(last := hashed.digest())


def are_kin(session: Session, other: Session) -> bool:
    """Was one forked from the other, or both from a third?"""
    return session.family is not None and session.family is other.family


def _in_common(session: Session, other: Session) -> int:
    """First tokens that both histories have; with equal marks, where entries depend on those."""
    length = min(len(session.history), len(other.history))
    differ = session.history.ids(0, length) != other.history.ids(0, length)
    if session.kv.is_selective:
        differ |= session.history.marks(0, length) != other.history.marks(0, length)
    return int(differ.argmax()) if differ.any() else length
