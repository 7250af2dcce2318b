"""The interface of snapshots of sessions' KV cache, and its null object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from inference_engine.session.session import Session


class Snapshots(Protocol):
    """The engine's thread calls all of it, but `keep_for_rewind`, `forked` and `foreseen`, which any may call, and
    `close`, after that has ended. See `Hibernation`.
    """

    def prefilled(self, tokens: int, seconds: float) -> None:
        """So long a prefill of so many tokens took."""

    def idle(self, session: Session) -> None:
        """A Generate of the session has ended."""

    def poll(self) -> bool:
        """Save a piece of a session. Is there more to do at once?"""

    def restore(self, session: Session, *, is_alone: bool, found: Callable[[], int]) -> bool:
        """Give an empty session the K/V of its snapshot, or have that of another one that begins alike kept in memory,
        if there is one. False: it is being read; ask again. found: how many tokens it begins with that others have in
        memory.
        """

    def keep_for_rewind(self, session: Session) -> Rewound:
        """The session is about to be rewound, and its snapshot goes with it: keep that for the new one."""

    def forked(self, parent: Session, fork: Session) -> None:
        """The fork of a session that the caller holds: it may be read from its parent's snapshot."""

    def foreseen(self, session: Session) -> int:
        """How many first tokens of an empty session would be read from a snapshot."""

    def invalidate(self, session: Session) -> None:
        """Entries of the session cannot be trusted, and a snapshot may have them."""

    def close(self) -> None:
        """The engine's thread has ended."""


# What is called with the session that took the place of another, or None where there is none.
Rewound = Callable[[Session | None], None]

# Made with what wakes the engine's thread.
OpenSnapshots = Callable[[Callable[[], None]], Snapshots]


class NoSnapshots:
    """Implements Snapshots: there are none, and a session that left memory is prefilled."""

    def __init__(self, wake: Callable[[], None]) -> None:
        pass

    def prefilled(self, tokens: int, seconds: float) -> None:
        pass

    def idle(self, session: Session) -> None:
        pass

    def poll(self) -> bool:
        return False

    def restore(self, session: Session, *, is_alone: bool, found: Callable[[], int]) -> bool:
        return True

    def keep_for_rewind(self, session: Session) -> Rewound:
        return lambda _: None

    def forked(self, parent: Session, fork: Session) -> None:
        pass

    def foreseen(self, session: Session) -> int:
        return 0

    def invalidate(self, session: Session) -> None:
        pass

    def close(self) -> None:
        pass
