"""Token quotas, how long histories may become: each, all of an owner's, and those of an owner that the journal keeps.

Tokens that forks share count once, in memory; in the journal those of each fork count. Tokens of an ended session that
a reader has not read yet count until it has, and ids of an append that is under way count from its arrival on. Called
with the store's lock held.

A Generate is granted places for many tokens at once, and asks again when they are used up. Granted places are not
taken: all of an owner's grants end when another of its calls adds tokens, and none is made while its quota has fewer
places left than a grant.
"""

from __future__ import annotations

import sys
from collections import Counter
from weakref import WeakValueDictionary

from inference_engine.errors import QuotaExceeded
from inference_engine.session.capacity import RETRY_SECONDS, SessionLimits
from inference_engine.session.history import History, Holdings, Leaves
from inference_engine.session.journal import Journal
from inference_engine.session.session import Session

_ID_BYTES = 4
_GRANTED_TOKENS = 64


class Histories:
    """The histories of all sessions. journals: those that hold records of them; the first one may keep sessions."""

    def __init__(self, limits: SessionLimits, *journals: Journal) -> None:
        self._limits = limits
        self._journal, self._journals = journals[0], set(journals)
        self.leaves = Leaves()  # `tidy` frees those of histories that ended
        self._holdings: WeakValueDictionary[str, Holdings] = WeakValueDictionary()  # of histories, by owner
        self._carried: Counter[str] = Counter()  # token ids of appends that are under way, by owner
        self._granted: dict[str, set[Session]] = {}  # sessions with places that are granted, by owner

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

    def room(self, session: Session, wanted: int) -> int:
        """How many of `wanted` more tokens the history may take. Grants more places, if there are many."""
        length = session.history.length
        if length + wanted <= session.granted_length:
            return wanted
        longest = sys.maxsize if session.longest is None else session.longest
        room = min(wanted, max(0, longest - length))
        left = self._left(session)
        if left is None:
            session.granted_length = longest
            return room
        granted = self._granted.setdefault(session.owner, set())
        unused = sum(max(0, each.granted_length - each.history.length) for each in granted)
        if left - unused >= max(room, _GRANTED_TOKENS):
            granted.add(session)
            session.granted_length = min(longest, length + _GRANTED_TOKENS)
        else:
            self.end_grants(session.owner)
        return max(0, min(room, left))

    def end_grants(self, owner: str) -> None:
        """The owner's Generates have to ask again before their next tokens."""
        for session in self._granted.pop(owner, ()):
            session.granted_length = 0

    def _left(self, session: Session) -> int | None:
        """Tokens that its owner's quotas leave; None: any number."""
        left, most = sys.maxsize, self._limits.history_tokens_per_owner
        if most:
            self.leaves.recount()
            left = most - session.history.holdings.tokens
        kept = self._limits.kept_tokens_per_owner
        if kept and not session.is_transient and self._journal.keeps:
            left = min(left, kept - self._journal.kept_by(session.owner).tokens)
        return None if left == sys.maxsize else left

    def check(self, session: Session, adding: int) -> None:
        """Raise QuotaExceeded if `adding` more tokens are more than the session's owner may have.

        The session's own limit is `check_room`'s.
        """
        self.check_owner(session, adding)
        if not session.is_transient:
            self.check_kept(session.owner, tokens=adding)

    def check_owner(self, session: Session, adding: int) -> None:
        """The same, of what is in memory."""
        self.end_grants(session.owner)
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
