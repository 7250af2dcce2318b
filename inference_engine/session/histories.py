"""Token quotas, how long histories may become: each, all of an owner's, and those of an owner that the journal keeps.

Tokens that forks share count once, in memory; in the journal those of each fork count. Tokens of an ended session that
a reader has not read yet count until it has, and ids of an append that is under way count from its arrival on. Called
with the store's lock held.
"""

from __future__ import annotations

from collections import Counter
from weakref import WeakValueDictionary

from inference_engine.errors import QuotaExceeded
from inference_engine.session.capacity import RETRY_SECONDS, SessionLimits
from inference_engine.session.history import History, Holdings, Leaves
from inference_engine.session.journal import Journal
from inference_engine.session.session import Session

_ID_BYTES = 4


class Histories:
    """The histories of all sessions. journals: those that hold records of them; the first one may keep sessions."""

    def __init__(self, limits: SessionLimits, *journals: Journal) -> None:
        self._limits = limits
        self._journal, self._journals = journals[0], set(journals)
        self.leaves = Leaves()  # `tidy` frees those of histories that ended
        self._holdings: WeakValueDictionary[str, Holdings] = WeakValueDictionary()  # of histories, by owner
        self._carried: Counter[str] = Counter()  # token ids of appends that are under way, by owner

    def begin(self, owner: str) -> History:
        """An empty one."""
        holdings = self._holdings.get(owner)
        if holdings is None:
            holdings = self._holdings[owner] = Holdings()
        return History(holdings, self.leaves)

    # -- what there is ----------------------------------------------------------------------------------------------

    def tokens_of(self, owner: str) -> int:
        """In the histories of the owner's sessions; tokens shared by forks count once."""
        self.leaves.recount()
        holdings = self._holdings.get(owner)
        return 0 if holdings is None else holdings.tokens

    def held(self) -> Holdings:
        """Tokens and bytes of all owners' histories and appends under way, the journals' bytes included."""
        self.leaves.recount()
        held = list(self._holdings.values())
        carried = self._carried.total()
        nbytes = sum(one.nbytes for one in held) + carried * _ID_BYTES + self.leaves.going_bytes
        nbytes += sum(journal.held_bytes() for journal in self._journals)
        return Holdings(tokens=sum(one.tokens for one in held) + carried, nbytes=nbytes)

    # -- what may be added ------------------------------------------------------------------------------------------

    def room(self, session: Session) -> int | None:
        """How many more tokens the history may take; None: any number."""
        most, longest = self._limits.history_tokens_per_owner, session.longest
        room = None if longest is None else max(0, longest - len(session.history))
        if most:
            self.leaves.recount()
            of_owner = max(0, most - session.history.holdings.tokens)
            room = of_owner if room is None else min(room, of_owner)
        if (kept := self._kept_room(session)) is not None:
            room = kept if room is None else min(room, kept)
        return room

    def has_room(self, session: Session, tokens: int) -> bool:
        """May the history take so many more tokens?"""
        history, longest, most = session.history, session.longest, self._limits.history_tokens_per_owner
        if longest is not None and history.length + tokens > longest:
            return False
        if (kept := self._kept_room(session)) is not None and tokens > kept:
            return False
        if not most or history.holdings.tokens + tokens <= most:
            return True
        self.leaves.recount()
        return history.holdings.tokens + tokens <= most

    def _kept_room(self, session: Session) -> int | None:
        most = self._limits.kept_tokens_per_owner
        if not most or session.is_transient or not self._journal.keeps:
            return None
        return max(0, most - self._journal.kept_by(session.owner).tokens)

    def check(self, session: Session, adding: int) -> None:
        """Raise QuotaExceeded if `adding` more tokens are more than the session's owner may have.

        The session's own limit is `check_room`'s.
        """
        self.check_owner(session, adding)
        if not session.is_transient:
            self.check_kept(session.owner, tokens=adding)

    def check_owner(self, session: Session, adding: int) -> None:
        """The same, of what is in memory."""
        self.leaves.recount()
        most, held = self._limits.history_tokens_per_owner, session.history.holdings.tokens
        if most and held + adding > most:
            raise QuotaExceeded(
                "history_tokens_per_owner",
                most,
                f"your sessions hold {held} tokens of history, what forks share counted once, and what streams of "
                f"closed sessions have still to send; {adding} more would pass the {most} that one owner may have, and "
                "nothing was added. Close sessions, fork less, read or cancel such streams, or have the operator raise "
                "history_tokens_per_owner",
            )

    def check_kept(self, owner: str, *, sessions: int = 0, tokens: int = 0) -> None:
        """Raise QuotaExceeded if so much more would be kept than one owner may have in the state folder."""
        if not self._journal.keeps:
            return
        kept, limits = self._journal.kept_by(owner), self._limits
        for quota, most, held, adding, what in (
            ("kept_sessions_per_owner", limits.kept_sessions_per_owner, kept.sessions, sessions, "sessions"),
            ("kept_tokens_per_owner", limits.kept_tokens_per_owner, kept.tokens, tokens, "tokens of history"),
        ):
            if most and adding and held + adding > most:
                raise QuotaExceeded(
                    quota,
                    most,
                    f"{held} {what} of yours are kept, in memory or not, those of each fork counted; {adding} more "
                    f"would pass the {most} that one owner may have, and nothing was added. Close sessions that you do "
                    f"not need (ListSessions names them), or have the operator raise {quota}",
                )

    # -- appends under way ------------------------------------------------------------------------------------------

    def carry(self, owner: str, tokens: int) -> None:
        """So many ids are in memory until `put_down`: they count as the owner's history. Raises QuotaExceeded if that
        makes too many.
        """
        most, carried = self._limits.history_tokens_per_owner, self._carried[owner]
        if most and carried and (held := self.tokens_of(owner)) + carried + tokens > most:
            raise QuotaExceeded(
                "history_tokens_per_owner",
                most,
                f"your sessions hold {held} tokens of history, and your appends under way carry {carried}; "
                f"{tokens} more would pass the {most} that one owner may have, and nothing was added. Try again "
                "once they are done, or close sessions",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._carried[owner] += tokens

    def put_down(self, owner: str, tokens: int) -> None:
        self._carried[owner] -= tokens
        if not self._carried[owner]:
            del self._carried[owner]
