"""The journal: every change of a session is recorded here before a client hears of it (write-ahead).

    engine, under the store's lock      record, record, …             in memory only, never waits
    the journal's own thread            commit of all of them         while the device is at the next step
    what answers clients                on_saved(callback, receipt)   called once what was recorded of a session is safe

`Journal` is the interface of any log. `MemoryJournal` keeps the records of open sessions in memory, and calls at once:
its sessions end with the process. `SQLiteJournal` (sqlite_journal.py) keeps them in a folder, and sessions outlive the
process, being put out of memory, and an invariant that broke. A fork is one record, however long its history.

What is recorded within `unit()` is kept whole or not at all, and not before anything that was recorded before it. A
session has a receipt of what was recorded of it last: an answer about the session waits for that.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inference_engine.session.history import History, Holdings, Leaves, TokenIds
from inference_engine.types import Durability, Mark, TokenUsage

# [tokens]; or [tokens, 1 + 2 k], where a Generate's tokens have the k likeliest ones beside them: the token's own, and
# ids and log-probabilities of the others by turns.
Logprobs = NDArray[np.float32]
APPENDED = "appended"  # the kind of replies to appends; those of the other kinds are few
OPENED = "opened"  # of a call that made a session


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """How a session began, and what decides its tokens. `strategy` is its text form.

    codec: digest of the latent codec, or the components of keys, that its strategy uses; "": it uses none. created_at:
    seconds since 1970.
    """

    session_id: str
    owner: str
    strategy: str
    limit_tokens: int | None
    eos_token_ids: tuple[int, ...]
    is_growing: bool = False
    segment_tokens: int = 0
    mode: str = ""
    codec: str = ""
    label: str = ""
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class TokensRecord:
    """Tokens that joined a history at `position`, and how; logprobs, if their Generate reports them."""

    position: int
    token_ids: TokenIds
    mark: Mark
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class GenerateRecord:
    """The Generate whose first token is at `position`. Without a request id it can only be where another one ends."""

    position: int
    request_id: bytes
    digest: bytes
    seed: int


@dataclass(frozen=True, slots=True)
class ReplyRecord:
    """The answer to a call with a request id. kind: of call. position: the history's length. body: what it answered."""

    session_id: str
    owner: str
    kind: str
    request_id: bytes
    digest: bytes
    position: int
    body: str


@dataclass(frozen=True, slots=True)
class CopyRecord:
    """A file with a copy of a session's K/V after `length` tokens. header_crc: checksum of the file's header."""

    session_id: str
    owner: str
    file: str
    length: int
    nbytes: int
    header_crc: int


@dataclass(slots=True, eq=False)
class Receipt:
    """Of changes that were recorded together. They become safe in the order of `number`; those that were refused, for
    which the disk had no space, are undone, and those that were lost go with their session. The journal changes it; any
    thread may read it."""

    number: int = 0
    is_safe: bool = False
    is_refused: bool = False
    is_lost: bool = False  # refused, for another server has taken over the session, or has answered the call before


SAFE = Receipt(is_safe=True)


@dataclass(slots=True)
class Saved:
    """Tokens of a session that are safe, and may be sent; less than 0: not even that there is one. receipt: of what was
    recorded of it last. The journal changes both; any thread may read them."""

    tokens: int = sys.maxsize
    receipt: Receipt = SAFE


@dataclass(frozen=True, slots=True)
class SessionKept:
    """A session as a journal has it: all that is needed to go on with it."""

    record: SessionRecord
    used_at: float  # seconds since 1970, about
    tokens: Sequence[TokensRecord]
    generates: Sequence[GenerateRecord]
    replies: Sequence[ReplyRecord]
    saved: Saved


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """What a look at a journal says of a session."""

    record: SessionRecord
    used_at: float
    history_length: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Sessions in a journal, and the tokens of their histories, what forks share counted for each: each has its own."""

    sessions: int = 0
    tokens: int = 0


# Called with a session's id and its copy.
FoundCopy = Callable[[str, CopyRecord | None], object]


def ignored(_session_id: str, _copy: CopyRecord | None) -> None:
    pass


class CopyBook(Protocol):
    """Where a journal that keeps sessions records the files with copies of their K/V. From any thread."""

    copies_folder: Path
    copies_prefix: str  # of the names of this server's files in the folder, where several servers have theirs there
    weights: str | None  # digest of those of the model

    def copies(self, on_gone: Callable[[str], object], on_found: FoundCopy = ignored) -> list[CopyRecord]:
        """This server's copies that are recorded, of the session used longest ago first. Waits for the disk.

        on_gone: called with the name of a file that was removed for any reason, from any thread. on_found: with each
        session that comes into memory of which another server may have made the copy, before it is there.
        """

    def put_copy(self, record: CopyRecord) -> None:
        """Record a file that is whole and safe. The one that the session had before is removed."""

    def drop_copy(self, file: str) -> None:
        """Remove a file, and forget it."""

    @property
    def is_full(self) -> bool:
        """Is the disk full?"""


class Resident(Protocol):
    """The sessions in memory, for a journal that several servers share."""

    def locked(self) -> AbstractContextManager[object]:
        """Within, no session comes, goes or changes."""

    def let_go(self, session_id: str) -> None:
        """Another server asks for the session: it leaves memory now, or once nothing holds it. Any thread."""

    def lose(self) -> None:
        """Other servers have taken over what is kept: it leaves memory, and nothing of it is recorded. Lock held."""


class Journal(Protocol):
    """A per-session, ordered log. Changes are recorded under the store's lock, from any thread."""

    durability: Durability

    @property
    def book(self) -> CopyBook | None:
        """None: sessions end with the process, and so does their K/V."""

    is_shared: bool  # may other servers have sessions in it at the same time?

    def serves(self, sessions: Resident) -> None:
        """These are the sessions in memory that it keeps. Called once, before anything is recorded."""

    def has(self, session_id: str) -> bool:
        """Is it open here? False, too, for one that other servers took over since it was read."""

    # -- changes ----------------------------------------------------------------------------------------------------

    def unit(self, refuse: Callable[[], bool] | None = None) -> AbstractContextManager[object]:
        """What is recorded within is kept whole or not at all. Called with the store's lock held.

        refuse: called, on the journal's thread, if the disk has no space for it: undoes in memory what was done, with
        `take_back` and `forget`, or returns False if something was done since that builds on it. Without it, or then,
        the unit waits for space.
        """

    def open(self, record: SessionRecord) -> Saved: ...

    def fork(self, record: SessionRecord, parent_id: str, length: int) -> Saved:
        """As `open`, for a session that begins with the first `length` tokens of the session `parent_id`."""

    def append(
        self,
        session_id: str,
        position: int,
        token_ids: TokenIds,
        mark: Mark,
        *,
        began: GenerateRecord | None = None,
        logprobs: Logprobs | None = None,
    ) -> None:
        """Record tokens; with `began`, those are the first ones of a Generate. If it raises, nothing was recorded."""

    def take_back(self, session_id: str, length: int) -> None:
        """The unit with the tokens from `length` on was refused."""

    def forget(self, session_id: str) -> None:
        """The unit that opened the session was refused."""

    def reply(self, record: ReplyRecord) -> None: ...

    def rest(self, session_id: str) -> None:
        """A Generate of the session has ended: a good moment to tidy what was recorded of it."""

    def leave(self, session_id: str, used_at: float | None = None) -> None:
        """The session leaves memory, and its owner has not closed it: it was evicted, expired or failed, or the engine
        stops. If sessions outlive that, all that was recorded stays. used_at: seconds since 1970; None: now."""

    def close(self, session_id: str) -> None:
        """The session is over: forget it, but for its replies."""

    # -- what is safe -----------------------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        """Do sessions outlive the process?"""

    def receipt(self, session_id: str) -> Receipt:
        """Of what was recorded of a session last, also if it left memory since, or was closed."""

    def receipt_of_owner(self, owner: str) -> Receipt:
        """Of what was recorded last of any of the owner's sessions."""

    def on_saved(self, callback: Callable[[], object], receipt: Receipt | None = None) -> None:
        """Call `callback`, from any thread, once everything is safe that was recorded until now; perhaps at once.

        With a receipt: once that is safe or refused, and also when the disk has no space for it now, or the journal is
        away.
        """

    def proof(self) -> Receipt:
        """That the sessions in memory are still this server's: safe now, or once a commit has shown it. Any thread."""

    def request_sync(self) -> None:
        """A step was recorded: make it safe soon."""

    def is_behind(self) -> bool:
        """Is more waiting to be written than should be? Then no step should run."""

    @property
    def is_full(self) -> bool:
        """Is the disk full?"""

    @property
    def is_away(self) -> bool:
        """Is it out of reach for now? What is recorded becomes safe when it is back. Reading raises JournalAway."""

    def refuse_when_blocked(self, *, to_close: bool = False) -> None:
        """Raise JournalAway while it is away, EngineStalled once it has failed, and JournalFull while there is no space
        for more; to_close: not even for what closes a session."""

    @property
    def failure(self) -> str:
        """Why nothing can be recorded any more, and the way out; "": it can. Then the process has to end."""

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self, session_id: str) -> tuple[SessionRecord, Sequence[TokensRecord]]:
        """How the session began and all tokens since. Raises KeyError for one that is not there."""

    def load(self, session_id: str, owner: str) -> SessionKept | None:
        """A session that is not in memory; None if the owner has none of this id. Waits for the disk.

        Raises HistoryCorrupt if its records are damaged, JournalAway while they are out of reach, SessionElsewhere if
        another server has it, which is then asked for it.
        """

    def claim(self, session_id: str, owner: str) -> SessionEntry | None:
        """As `load`, of a session that is to be closed: nothing of its tokens is read but how many they are."""

    def look(
        self, session_id: str, owner: str, *, first: int = 0, most: int = 0
    ) -> tuple[SessionEntry, Sequence[TokensRecord]] | None:
        """A session that stays where it is, as far as it is safe, and of its tokens `most` from `first` on.

        None if the owner has none of this id. Waits for the disk, but not for space on a full one. Raises
        HistoryCorrupt if what it reads is damaged; other rows of the session may be.
        """

    def replies_to(self, owner: str, request_id: bytes) -> Sequence[ReplyRecord]:
        """The owner's remembered replies to calls with this id. Waits for the disk."""

    def page(self, owner: str, *, after: str, most: int) -> Sequence[SessionEntry]:
        """The first `most` of the owner's sessions in the order of their ids, after `after`, as far as it is safe."""

    def use(self, owner: str, usage: TokenUsage) -> None:
        """A Generate of the owner ended, and took this. Kept with what is committed next; nothing waits for it."""

    def used_by(self, owner: str) -> TokenUsage:
        """What all Generates of the owner took that have ended, since the journal was made. Any thread."""

    def kept_by(self, owner: str) -> Kept:
        """What the owner's sessions take that outlive the process, in memory or not. Any thread."""

    def held_bytes(self, session_id: str | None = None) -> int:
        """Bytes of memory for all sessions, or for one open session, parts shared with forks included; 0 for others."""

    def tidy(self) -> bool:
        """Do deferred work for less than a millisecond. Is there more? Called between steps."""

    def stop(self) -> None:
        """Make everything safe, and record no more. Idempotent."""


class MemoryJournal:
    """Records in memory, gone with the process. Tokens of one mark that follow each other are read as one record."""

    durability = Durability.NONE
    book = None
    keeps = is_shared = False
    is_full = is_away = False
    failure = ""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holdings, self._leaves = Holdings(), Leaves()
        self._sessions: dict[str, tuple[SessionRecord, History]] = {}
        self._used: dict[str, TokenUsage] = {}

    def serves(self, sessions: Resident) -> None: ...

    def has(self, session_id: str) -> bool:
        return session_id in self._sessions

    def unit(self, refuse: Callable[[], bool] | None = None) -> AbstractContextManager[object]:
        return nullcontext()

    def open(self, record: SessionRecord) -> Saved:
        with self._lock:
            assert record.session_id not in self._sessions
            self._sessions[record.session_id] = (record, History(self._holdings, self._leaves, keeps_seen=False))
        return Saved()

    def fork(self, record: SessionRecord, parent_id: str, length: int) -> Saved:
        with self._lock:
            assert record.session_id not in self._sessions
            self._sessions[record.session_id] = (record, self._sessions[parent_id][1].fork(length))
        return Saved()

    def append(
        self,
        session_id: str,
        position: int,
        token_ids: TokenIds,
        mark: Mark,
        *,
        began: GenerateRecord | None = None,
        logprobs: Logprobs | None = None,
    ) -> None:
        with self._lock:
            history = self._sessions[session_id][1]
            end = history.length
            assert position == end, f"a record for position {position} follows one that ends at {end}"
            history.extend(token_ids, mark)

    def take_back(self, session_id: str, length: int) -> None:
        with self._lock:
            self._sessions[session_id][1].take_back(length)

    def forget(self, session_id: str) -> None:
        self.close(session_id)

    def reply(self, record: ReplyRecord) -> None:
        """The engine's own memory of replies lasts as long."""

    def rest(self, session_id: str) -> None: ...

    def leave(self, session_id: str, used_at: float | None = None) -> None:
        self.close(session_id)

    def close(self, session_id: str) -> None:
        with self._lock:
            if (known := self._sessions.pop(session_id, None)) is not None:
                known[1].release()

    def receipt(self, session_id: str) -> Receipt:
        return SAFE

    def receipt_of_owner(self, owner: str) -> Receipt:
        return SAFE

    def on_saved(self, callback: Callable[[], object], receipt: Receipt | None = None) -> None:
        callback()

    def proof(self) -> Receipt:
        return SAFE

    def request_sync(self) -> None: ...

    def is_behind(self) -> bool:
        return False

    def refuse_when_blocked(self, *, to_close: bool = False) -> None: ...

    def read(self, session_id: str) -> tuple[SessionRecord, Sequence[TokensRecord]]:
        with self._lock:
            record, history = self._sessions[session_id]
            records, position = list[TokensRecord](), 0
            for token_ids, mark in history.runs():
                records.append(TokensRecord(position, np.array(token_ids), mark))
                position += len(token_ids)
            return record, records

    def load(self, session_id: str, owner: str) -> SessionKept | None:
        return None

    def claim(self, session_id: str, owner: str) -> SessionEntry | None:
        return None

    def look(
        self, session_id: str, owner: str, *, first: int = 0, most: int = 0
    ) -> tuple[SessionEntry, Sequence[TokensRecord]] | None:
        return None

    def replies_to(self, owner: str, request_id: bytes) -> Sequence[ReplyRecord]:
        return ()

    def page(self, owner: str, *, after: str, most: int) -> Sequence[SessionEntry]:
        return ()

    def use(self, owner: str, usage: TokenUsage) -> None:
        with self._lock:
            self._used[owner] = self.used_by(owner) + usage

    def used_by(self, owner: str) -> TokenUsage:
        return self._used.get(owner, TokenUsage())

    def kept_by(self, owner: str) -> Kept:
        return Kept()

    def held_bytes(self, session_id: str | None = None) -> int:
        with self._lock:
            if session_id is None:
                return self._holdings.nbytes + self._leaves.going_bytes
            known = self._sessions.get(session_id)
            return 0 if known is None else known[1].nbytes

    def tidy(self) -> bool:
        with self._lock:
            return self._leaves.tidy()

    def stop(self) -> None: ...
