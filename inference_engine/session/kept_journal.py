"""A journal that keeps sessions: what is the same whichever database has them.

Changes are recorded in memory, as calls of `Tables`, and applied by the writer's thread, all of a commit in one
transaction. Counts of what is kept are known at once; what is not in memory is read from the database.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from inference_engine.errors import EngineStalled, JournalAway, JournalFull, SessionElsewhere
from inference_engine.metrics import EngineMetrics
from inference_engine.session.clock_jumps import ClockJumps
from inference_engine.session.history import TokenIds
from inference_engine.session.journal import (
    SAFE,
    CopyBook,
    CopyRecord,
    FoundCopy,
    GenerateRecord,
    Kept,
    Logprobs,
    Receipt,
    ReplyRecord,
    Resident,
    Saved,
    SessionEntry,
    SessionKept,
    SessionRecord,
    TokensRecord,
    ignored,
)
from inference_engine.session.journal_reader import Reader
from inference_engine.session.journal_rows import damage_is_refused
from inference_engine.session.journal_tables import Tables
from inference_engine.session.writer import Callback, Change, Unit, Writer
from inference_engine.types import Durability, Mark, TokenUsage

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 30.0
EXPIRE_SECONDS = 30.0  # between two looks for what is too old


@dataclass(slots=True)
class _Count:
    """What is kept of one owner. receipt: of what was recorded last of any of their sessions."""

    sessions: int = 0
    tokens: int = 0
    receipt: Receipt = SAFE


_NONE_KEPT = _Count()


@dataclass(slots=True)
class _Open:
    """A session in memory. length: as recorded. count: its owner's."""

    number: int
    owner: str
    saved: Saved
    length: int
    count: _Count


class KeptJournal:
    """What a variant adds is how changes are committed, and how rows are read.

    A variant makes `_tables`, `_kept` and `_used` from what its database has, and starts `_writer`.
    """

    keeps = True
    is_shared = False
    # Is a session another server's once it has left memory? Then its calls wait for that to be safe.
    _lets_go: ClassVar[bool] = False
    copies_folder: Path
    copies_prefix = ""
    weights: str | None
    _tables: Tables
    _writer: Writer
    _is_corrupt: ClassVar[tuple[type[Exception], ...]] = ()  # what a commit raises that meets damage

    def __init__(
        self,
        durability: Durability,
        *,
        metrics: EngineMetrics,
        keep_seconds: float,
        wall_clock: Callable[[], float],
        even_clock: Callable[[], float] | None,
    ) -> None:
        """keep_seconds: sessions unused for longer are deleted; 0: none is. even_clock: as `ClockJumps` has it."""
        assert durability is not Durability.NONE
        self.durability: Durability = durability
        self._metrics = metrics
        self._keep_seconds = keep_seconds
        self._wall_clock = wall_clock
        self._jumps = ClockJumps(wall_clock, even_clock)
        self._db_lock = threading.Lock()  # of the connection that commits
        self._kept: dict[str, _Count] = {}
        self._used: dict[str, TokenUsage] = {}
        self._open: dict[str, _Open] = {}
        self._kept_lock = threading.Lock()
        self._expired: list[tuple[str, int]] = []  # owner and length
        self._on_copy_gone: Callable[[str], object] = lambda _: None
        self._on_copy_found: FoundCopy = ignored
        self._unit: Unit | None = None
        self._gone: dict[str, Receipt] = {}  # of sessions that left memory or were closed, by id
        self._expire_at = 0.0
        self._is_stopped = False
        self._term = 0  # one more each time that other servers took over the sessions

    # -- what a variant has -----------------------------------------------------------------------------------------

    @abstractmethod
    def _new_number(self) -> int:
        """Of a session, that no other one has."""

    @property
    @abstractmethod
    def failure(self) -> str:
        """See `Journal`."""

    @abstractmethod
    def _transact(self, changes: Sequence[Change]) -> None:
        """Apply changes, all or none, and make them safe. On the writer's thread; takes `_db_lock`."""

    def _claim(self, session_id: str, owner: str) -> int:
        """The session is to come into memory here. Returns in which term. Raises SessionElsewhere."""
        return self._term

    @abstractmethod
    def _reading(self) -> AbstractContextManager[Reader]:
        """A reader of what is committed, which sees one moment of it."""

    @abstractmethod
    def _close(self) -> None:
        """The writer has stopped. Called with `_db_lock` held."""

    @abstractmethod
    def _measure(self) -> None:
        """Report how much is kept. Called now and then, with `_db_lock` held."""

    def serves(self, sessions: Resident) -> None: ...

    def has(self, session_id: str) -> bool:
        return session_id in self._open

    def proof(self) -> Receipt:
        return SAFE  # no other server can have them

    # -- changes, in memory -----------------------------------------------------------------------------------------

    def unit(self, refuse: Callable[[], bool] | None = None) -> AbstractContextManager[object]:
        return self._one_unit(refuse)

    @contextmanager
    def _one_unit(self, refuse: Callable[[], bool] | None) -> Iterator[None]:
        assert self._unit is None, "units do not nest"
        self._unit = unit = Unit(refuse=refuse)
        try:
            yield
        finally:
            self._unit = None
            if unit.changes:
                self._writer.record(unit)

    def _record(self, change: Change, confirmed: tuple[Saved, int] | None = None, of: _Open | None = None) -> Receipt:
        """of: the session that the change is of, if answers about it have to wait for that."""
        unit = self._unit or Unit()
        unit.changes.append(change)
        if confirmed is not None:
            unit.confirmed.append(confirmed)
        if of is not None:
            saved = of.saved
            if saved.receipt is not unit and not saved.receipt.is_safe:
                unit.replaced = saved.receipt
            saved.receipt = of.count.receipt = unit
        if unit is not self._unit:
            self._writer.record(unit)
        return unit

    def open(self, record: SessionRecord) -> Saved:
        known = self._begin(record, 0)
        self._record((self._tables.put_session, (known.number, record, None, 0)), (known.saved, 0), known)
        return known.saved

    def fork(self, record: SessionRecord, parent_id: str, length: int) -> Saved:
        parent = self._open[parent_id]
        assert length <= parent.length
        known = self._begin(record, length)
        put = self._tables.put_session, (known.number, record, parent.number, known.length)
        self._record(put, (known.saved, known.length), known)
        return known.saved

    def _begin(self, record: SessionRecord, length: int) -> _Open:
        number = self._new_number()
        count = self._count_kept(record.owner, 1, length)
        known = self._open[record.session_id] = _Open(number, record.owner, Saved(-1), length, count)
        return known

    def forget(self, session_id: str) -> None:
        if (known := self._open.pop(session_id, None)) is not None:
            self._count_kept(known.owner, -1, -known.length)

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
        known = self._open[session_id]
        assert position == known.length, f"a record for position {position} follows {known.length}"
        known.length = end = position + len(token_ids)
        with self._kept_lock:
            known.count.tokens += len(token_ids)
        values = None if logprobs is None else logprobs.tobytes()
        self._record(
            (self._tables.put_tokens, (known.number, position, int(mark), token_ids.tobytes(), values, began)),
            (known.saved, end),
            known,
        )

    def take_back(self, session_id: str, length: int) -> None:
        known = self._open[session_id]
        with self._kept_lock:
            known.count.tokens -= known.length - length
        known.length = length
        if isinstance(known.saved.receipt, Unit):
            known.saved.receipt = known.saved.receipt.replaced

    def reply(self, record: ReplyRecord) -> None:
        known = self._open.get(record.session_id)
        self._record((self._tables.put_reply, (None if known is None else known.number, record)), of=known)

    def rest(self, session_id: str) -> None:
        if (known := self._open.get(session_id)) is not None:
            self._record((self._tables.rest, (known.number,)))

    def leave(self, session_id: str, used_at: float | None = None) -> None:
        if (known := self._open.pop(session_id, None)) is not None:
            receipt = self._record((self._tables.leave, (known.number, used_at)))
            if self._lets_go or not known.saved.receipt.is_safe:
                self._leaves_memory(session_id, receipt)

    def close(self, session_id: str) -> None:
        if (known := self._open.pop(session_id, None)) is not None:
            receipt = self._record((self._tables.end_session, (known.number,)), of=known)
            self._leaves_memory(session_id, receipt)
            self._count_kept(known.owner, -1, -known.length)

    def _leaves_memory(self, session_id: str, receipt: Receipt) -> None:
        """Calls about the session wait for its receipt though it is not here, until that is safe."""
        self._gone.pop(session_id, None)
        self._gone[session_id] = receipt
        while next(iter(self._gone.values())).is_safe:  # they become safe in this order
            del self._gone[next(iter(self._gone))]

    # -- copies of K/V ----------------------------------------------------------------------------------------------

    def copies(self, on_gone: Callable[[str], object], on_found: FoundCopy = ignored) -> list[CopyRecord]:
        self._flush()
        self._on_copy_gone, self._on_copy_found = on_gone, on_found
        with self._reading() as reader:
            return reader.copies()

    def put_copy(self, record: CopyRecord) -> None:
        """Record a file that is whole and safe. The one that the session had before is removed."""
        self._record((self._tables.put_copy, (record,)))

    def drop_copy(self, file: str) -> None:
        """Remove a file."""
        self._record((self._tables.drop_copy, (file,)))

    def use(self, owner: str, usage: TokenUsage) -> None:
        with self._kept_lock:
            self._used[owner] = total = self.used_by(owner) + usage
        self._record((self._tables.put_usage, (owner, total)))

    def used_by(self, owner: str) -> TokenUsage:
        return self._used.get(owner, TokenUsage())

    def kept_by(self, owner: str) -> Kept:
        count = self._kept.get(owner, _NONE_KEPT)
        return Kept(count.sessions, count.tokens)

    def _count_all(self, kept: Mapping[str, Kept]) -> None:
        self._kept = {owner: _Count(one.sessions, one.tokens) for owner, one in kept.items()}

    def _count_kept(self, owner: str, sessions: int, tokens: int) -> _Count:
        """Returns the owner's count, which stays the same while a session of theirs is kept."""
        with self._kept_lock:
            count = self._kept.setdefault(owner, _Count())
            count.sessions += sessions
            count.tokens += tokens
            if not count.sessions and count.receipt.is_safe:
                del self._kept[owner]
            return count

    # -- what is safe -----------------------------------------------------------------------------------------------

    def receipt(self, session_id: str) -> Receipt:
        known = self._open.get(session_id)
        return self._gone.get(session_id, SAFE) if known is None else known.saved.receipt

    def receipt_of_owner(self, owner: str) -> Receipt:
        return self._kept.get(owner, _NONE_KEPT).receipt

    def on_saved(self, callback: Callback, receipt: Receipt | None = None) -> None:
        self._writer.on_saved(callback, receipt)

    def request_sync(self) -> None:
        self._writer.request_sync()

    def is_behind(self) -> bool:
        return self._writer.is_behind()

    def refuse_when_blocked(self, *, to_close: bool = False) -> None:
        if self._writer.failure:
            raise EngineStalled
        if self._writer.is_away:
            raise JournalAway
        if self._writer.is_stuck if to_close else self._writer.is_full:
            raise JournalFull(can_close=not self._writer.is_stuck)

    @property
    def is_full(self) -> bool:
        return self._writer.is_full

    @property
    def is_away(self) -> bool:
        return self._writer.is_away  # a folder never is

    @property
    def book(self) -> CopyBook | None:
        return self

    def stop(self) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        self._writer.stop()
        with self._db_lock:
            self._close()

    # -- the writer's thread ----------------------------------------------------------------------------------------

    def _commit(self, changes: Sequence[Change]) -> None:
        self._transact(changes)

    def _remove_copy(self, file: str) -> None:
        try:
            (self.copies_folder / file).unlink(missing_ok=True)
        except OSError as error:  # the next start removes it
            logger.warning("%s could not be removed: %s", self.copies_folder / file, error)
        self._on_copy_gone(file)

    def _tidy(self) -> None:
        if self._tables.to_fold:
            numbers = self._tables.next_to_fold()
            self._fold(numbers)
            self._tables.has_folded(numbers)
        elif (now := time.monotonic()) >= self._expire_at:
            self._expire_at = now + EXPIRE_SECONDS
            self._delete_old()
            with self._db_lock:
                for owner, length in self._expired:
                    self._count_kept(owner, -1, -length)
                    self._metrics.sessions_forgotten.inc()
                self._measure()

    def _fold(self, numbers: Sequence[int]) -> None:
        """In one commit, or one each if some rows are damaged: those stay in the tail, which is read as well."""
        try:
            self._transact([(self._tables.fold, (number,)) for number in numbers])
        except self._is_corrupt as damage:
            if len(numbers) == 1:
                logger.error("a session's turns cannot be folded, because the journal is damaged: %s", damage)
                return
            for number in numbers:
                self._fold([number])

    def _delete_old(self) -> None:
        self._expired = []
        try:
            self._transact([(self._expire, ())])
        except self._is_corrupt as damage:  # they may stay: no call waits for it; after a restart it would be the same
            logger.error("old records cannot be deleted: %s: run kakeya journal check", damage)

    def _expire(self) -> None:
        resident = {known.number for known in list(self._open.values())}
        self._expired = self._tables.expire(self._keep_seconds, resident, self._jumps)

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self, session_id: str) -> tuple[SessionRecord, Sequence[TokensRecord]]:
        self._flush()
        with self._reading() as reader, damage_is_refused(0):
            number = reader.number(session_id)
            if number is None:
                raise KeyError(session_id)
            record, _ = reader.session(number, session_id)
            return record, reader.past(number).tokens

    def load(self, session_id: str, owner: str) -> SessionKept | None:
        self._flush(self.receipt(session_id))
        term = self._claim(session_id, owner)
        with self._reading() as reader, damage_is_refused(0):
            number = reader.find(session_id, owner)
            if number is None:
                return None
            record, used_at = reader.session(number, session_id)
            past = reader.past(number)
            saved = Saved(sum(len(one.token_ids) for one in past.tokens))
            replies = reader.replies_of(number, session_id, owner, past.appends)
            self._has(session_id, number, owner, saved, term)
            return SessionKept(record, used_at, past.tokens, past.generates, replies, saved)

    def claim(self, session_id: str, owner: str) -> SessionEntry | None:
        self._flush(self.receipt(session_id))
        term = self._claim(session_id, owner)
        with self._reading() as reader, damage_is_refused(0):
            number = reader.find(session_id, owner)
            if number is None:
                return None
            record, used_at = reader.session(number, session_id)
            length = reader.length(number)
            self._has(session_id, number, owner, Saved(length), term)
            return SessionEntry(record, used_at, length)

    def _has(self, session_id: str, number: int, owner: str, saved: Saved, term: int) -> None:
        """The session is in memory, in this term."""
        count = self._count_kept(owner, 0, 0)
        with self._kept_lock:
            if term != self._term:
                raise SessionElsewhere
            self._open[session_id] = _Open(number, owner, saved, saved.tokens, count)

    def look(
        self, session_id: str, owner: str, *, first: int = 0, most: int = 0
    ) -> tuple[SessionEntry, Sequence[TokensRecord]] | None:
        self._flush(self.receipt(session_id), unless_full=True)
        with self._reading() as reader, damage_is_refused(0):
            number = reader.find(session_id, owner)
            if number is None:
                return None
            record, used_at = reader.session(number, session_id)
            length = reader.length(number)
            tokens = reader.piece(number, first, min(first + most, length))
            return SessionEntry(record, used_at, length), tokens

    def replies_to(self, owner: str, request_id: bytes) -> Sequence[ReplyRecord]:
        self._flush(self.receipt_of_owner(owner))
        with self._reading() as reader, damage_is_refused(0):
            return reader.replies("owner = ? and request_id = ?", (owner, request_id))

    def page(self, owner: str, *, after: str, most: int) -> Sequence[SessionEntry]:
        with self._reading() as reader:  # what is recorded and not committed yet is of sessions in memory
            return reader.page(owner, after, most, self._wall_clock())

    def everyone(self) -> list[SessionEntry]:
        """The sessions of all owners, by their ids. For tools."""
        self._flush()
        with self._reading() as reader:
            return reader.everyone(self._wall_clock())

    def held_bytes(self, session_id: str | None = None) -> int:
        return 0  # histories are in memory once, with their sessions; what waits to be written is bounded

    def tidy(self) -> bool:
        return False

    def _flush(self, receipt: Receipt | None = None, *, unless_full: bool = False) -> None:
        """Wait until all is written that is read next. Raises as `refuse_when_blocked` if it cannot be.

        unless_full: then what is written is read.
        """
        is_written = self._writer.flush(_FLUSH_SECONDS, receipt) or (receipt is not None and receipt.is_refused)
        if not is_written and not (unless_full and self.is_full):
            self.refuse_when_blocked()
            raise EngineStalled
