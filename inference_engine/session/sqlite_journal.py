"""The journal in a folder: sessions outlive the process.

    tail        one row for each step of a session, in the order in which they came; a step adds rows at its end only
    tokens      the same, folded when a Generate ends: full rows, by position
    ends        what did not fill a row, one row a session; the next fold takes it up again
    sessions    how each began, and how many of its tokens are folded; also generates, replies
    appends     the last replies to a session's appends, folded too, one row a session
    copies      the files with copies of sessions' K/V, which are in a folder of their own (`hibernation.py`)

One connection, which a lock shares: the writer's thread commits, others read what is not in memory. Every row of a
history carries a checksum, and a history must be without a hole: a damaged session is refused, and others are not
concerned.

`power`: a commit is synced before it is confirmed. `process`: the system may write it later; checkpoints sync.
Any error of the disk but a full one is final (see `writer.py`): after a failed sync SQLite may take the next commit and
lose this one. Checkpoints are made here, not by SQLite, which does not report when one fails.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import apsw

from inference_engine.errors import ConfigError, EngineStalled, HistoryCorrupt, JournalFull
from inference_engine.metrics import EngineMetrics
from inference_engine.session.history import TokenIds
from inference_engine.session.journal import (
    APPENDED,
    CopyBook,
    CopyRecord,
    GenerateRecord,
    Kept,
    Logprobs,
    ReplyRecord,
    Saved,
    SessionEntry,
    SessionKept,
    SessionRecord,
    TokensRecord,
)
from inference_engine.session.journal_database import PAGE_BYTES, open_database
from inference_engine.session.journal_folder import check_private, take_folder
from inference_engine.session.journal_rows import (
    appends_crc,
    copy_crc,
    crc_of,
    damage_is_refused,
    most_recent,
    packed,
    packed_append,
    reply_crc,
    session_crc,
    session_record,
    tokens_crc,
    tokens_record,
    unpacked,
    unpacked_appends,
)
from inference_engine.session.replies import DIGEST_BYTES, KEEP_SECONDS
from inference_engine.session.writer import Callback, Change, DiskFull, Writer
from inference_engine.types import Durability, Mark

logger = logging.getLogger(__name__)

FILE, COPIES = "journal.db", "copies"
MOST_GENERATES = 8  # of a session, that a client may continue

_WAL_PAGES = 1000  # before a checkpoint
_FLUSH_SECONDS = 30.0
_EXPIRE_SECONDS, _EXPIRE_SESSIONS = 30.0, 16


class SQLiteJournal:
    """The sessions in one folder. One process has a folder at a time."""

    keeps = True

    def __init__(
        self,
        folder: Path,
        durability: Durability,
        *,
        weights: str | None,
        metrics: EngineMetrics,
        keep_seconds: float = 0.0,
        vfs: str | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """weights: digest of the model's; the folder belongs to it. None: whichever it is, for tools; the folder must
        have a journal then. keep_seconds: sessions unused for longer are deleted; 0: none is.

        Raises ConfigError, before anything is written, for a folder that is another process's, another model's, of a
        newer format, damaged, or not private.
        """
        assert durability is not Durability.NONE
        self.durability: Durability = durability
        self._metrics = metrics
        self._keep_seconds = keep_seconds
        self._wall_clock = wall_clock
        if weights is None and not (folder / FILE).exists():
            raise ConfigError(f"{folder} has no journal: name the state_dir of a server")
        check_private(folder)
        self.copies_folder = folder / COPIES
        self.weights = weights
        self._folder_lock = take_folder(folder)
        try:
            self._db = open_database(folder / FILE, durability, weights, vfs, was=self._folder_lock.was)
            self._folder_lock.note(durability)
            self._db_lock = threading.Lock()
            self._numbers: dict[str, int] = {}  # of sessions in memory
            self._saved: dict[int, Saved] = {}
            self._lengths: dict[int, int] = {}  # as recorded
            self._owners: dict[int, str] = {}
            self._kept_lock = threading.Lock()
            self._kept = self._all_kept()
            self._tails: dict[int, list[int]] = {}  # of sessions with rows in the tail
            for entry, number in self._db.execute("select entry, session from tail order by entry"):
                self._tails.setdefault(number, []).append(entry)
            self._next_entry = 1 + (self._value("select max(entry) from tail") or 0)
            last = (self._value("select max(session) from sessions"), self._value("select max(session) from replies"))
            self._next_number = 1 + max(one or 0 for one in last)
        except BaseException as error:
            if isinstance(error, apsw.Error):  # a page that is read here first
                self._db.close()
            self._folder_lock.release()
            if isinstance(error, apsw.Error):
                raise ConfigError(f"the journal {folder / FILE} cannot be read: {error}") from error
            raise
        # Of the commit that is being made: rows of the tail, as session and entry.
        self._appended: list[tuple[int, int]] = []
        self._deleted: set[tuple[int, int]] = set()
        self._expired: list[tuple[str, int]] = []  # owner and length
        self._gone: list[str] = []  # files of copies that have no row any more
        self._on_copy_gone: Callable[[str], object] = lambda _: None
        self._unit: list[Change] | None = None
        self._unit_confirmed: list[tuple[Saved, int]] = []
        self._to_fold: deque[int] = deque(self._tails)
        self._expire_at = 0.0
        self._wal_pages = 0
        self._db.set_wal_hook(self._note_wal)
        self._is_stopped = False
        metrics.sessions_kept.set(self._value("select count(*) from sessions") or 0)
        self._writer = Writer(self._commit, self._tidy, metrics)

    # -- changes, in memory -----------------------------------------------------------------------------------------

    def unit(self) -> AbstractContextManager[object]:
        return self._one_unit()

    @contextmanager
    def _one_unit(self) -> Iterator[None]:
        assert self._unit is None, "units do not nest"
        self._unit = []
        try:
            yield
        finally:
            changes, confirmed = self._unit, self._unit_confirmed
            self._unit, self._unit_confirmed = None, []
            if changes:
                self._writer.record(changes, confirmed)

    def _record(self, change: Change, confirmed: tuple[Saved, int] | None = None) -> None:
        if self._unit is None:
            self._writer.record((change,), () if confirmed is None else (confirmed,))
        else:
            self._unit.append(change)
            if confirmed is not None:
                self._unit_confirmed.append(confirmed)

    def open(self, record: SessionRecord) -> Saved:
        number, saved = self._number(record.session_id), Saved(0)
        self._note(number, record.owner, saved, 0)
        self._count_kept(record.owner, 1, 0)
        self._record((self._put_session, (number, record, None)))
        return saved

    def fork(self, record: SessionRecord, parent_id: str) -> Saved:
        parent = self._numbers[parent_id]
        number, saved = self._number(record.session_id), Saved(0)
        self._note(number, record.owner, saved, self._lengths[parent])
        self._count_kept(record.owner, 1, self._lengths[parent])
        self._record((self._put_session, (number, record, parent)), (saved, self._lengths[parent]))
        return saved

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
        number = self._numbers[session_id]
        assert position == self._lengths[number], f"a record for position {position} follows {self._lengths[number]}"
        self._lengths[number] = end = position + len(token_ids)
        self._count_kept(self._owners[number], 0, len(token_ids))
        values = None if logprobs is None else logprobs.tobytes()
        self._record(
            (self._put_tokens, (number, position, int(mark), token_ids.tobytes(), values, began)),
            (self._saved[number], end),
        )

    def reply(self, record: ReplyRecord) -> None:
        self._record((self._put_reply, (self._numbers.get(record.session_id), record)))

    def rest(self, session_id: str) -> None:
        if (number := self._numbers.get(session_id)) is not None:
            self._record((self._rest, (number,)))

    def leave(self, session_id: str) -> None:
        if (number := self._numbers.pop(session_id, None)) is not None:
            del self._saved[number], self._lengths[number], self._owners[number]
            self._record((self._rest, (number,)))

    def close(self, session_id: str) -> None:
        if (number := self._numbers.pop(session_id, None)) is not None:
            self._count_kept(self._owners[number], -1, -self._lengths[number])
            del self._saved[number], self._lengths[number], self._owners[number]
            self._record((self._end_session, (number,)))

    # -- copies of K/V ----------------------------------------------------------------------------------------------

    def copies(self, on_gone: Callable[[str], object]) -> list[CopyRecord]:
        """The copies that are recorded, of the session used longest ago first. Waits for the disk.

        on_gone: called with the name of a file that was removed for any reason, from any thread.
        """
        self._flush()
        self._on_copy_gone = on_gone
        with self._db_lock:
            rows = list(
                self._db.execute(
                    "select session, id, owner, file, copies.length, bytes, header_crc, copies.crc from copies "
                    "join sessions using (session) order by used_at"
                )
            )
        records = [(number, CopyRecord(*fields), crc) for number, *fields, crc in rows]
        return [record for number, record, crc in records if crc == copy_crc(number, record)]

    def put_copy(self, record: CopyRecord) -> None:
        """Record a file that is whole and safe. The one that the session had before is removed."""
        self._record((self._put_copy, (record,)))

    def drop_copy(self, file: str) -> None:
        """Remove a file."""
        self._record((self._drop_copy, (file,)))

    def _put_copy(self, record: CopyRecord) -> None:
        found = list(self._db.execute("select session from sessions where id = ?", (record.session_id,)))
        if not found:  # closed meanwhile
            self._gone.append(record.file)
            return
        (number,) = found[0]
        self._forget_copy(number)
        self._db.execute(
            "insert into copies values (?, ?, ?, ?, ?, ?)",
            (number, record.file, record.length, record.nbytes, record.header_crc, copy_crc(number, record)),
        )

    def _forget_copy(self, number: int) -> None:
        self._gone += [file for (file,) in self._db.execute("select file from copies where session = ?", (number,))]
        self._db.execute("delete from copies where session = ?", (number,))

    def _drop_copy(self, file: str) -> None:
        self._gone.append(file)
        self._db.execute("delete from copies where file = ?", (file,))

    def _remove_gone(self) -> None:
        gone, self._gone = self._gone, []
        for file in gone:
            try:
                (self.copies_folder / file).unlink(missing_ok=True)
            except OSError as error:  # the next start removes it
                logger.warning("%s could not be removed: %s", self.copies_folder / file, error)
            self._on_copy_gone(file)

    def _note(self, number: int, owner: str, saved: Saved, length: int) -> None:
        self._saved[number], self._lengths[number], self._owners[number] = saved, length, owner

    def kept_by(self, owner: str) -> Kept:
        return self._kept.get(owner, Kept())

    def _count_kept(self, owner: str, sessions: int, tokens: int) -> None:
        with self._kept_lock:
            before = self._kept.get(owner, Kept())
            now = Kept(before.sessions + sessions, before.tokens + tokens)
            if now.sessions:
                self._kept[owner] = now
            else:
                self._kept.pop(owner, None)

    def _all_kept(self) -> dict[str, Kept]:
        """By owner, as the folder has it."""
        tails = dict(
            self._db.execute(
                "select owner, sum(length(ids)) / 4 from tail join sessions using (session) group by owner"
            )
        )
        return {
            owner: Kept(sessions, int(tokens) + int(tails.get(owner) or 0))
            for owner, sessions, tokens in self._db.execute(
                "select owner, count(*), sum(length) from sessions group by owner"
            )
        }

    def _number(self, session_id: str) -> int:
        number = self._numbers[session_id] = self._next_number
        self._next_number += 1
        return number

    # -- what is safe -----------------------------------------------------------------------------------------------

    @property
    def is_saved(self) -> bool:
        return self._writer.is_saved

    def say(self, callback: Callback) -> None:
        self._writer.say(callback)

    def kick(self) -> None:
        self._writer.kick()

    def is_behind(self) -> bool:
        return self._writer.is_behind()

    def refuse_when_full(self) -> None:
        if self._writer.failure:
            raise EngineStalled
        if self._writer.is_full:
            raise JournalFull

    @property
    def is_full(self) -> bool:
        return self._writer.is_full

    @property
    def failure(self) -> str:
        return self._writer.failure

    @property
    def book(self) -> CopyBook:
        return self

    def stop(self) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        self._writer.stop()
        with self._db_lock:
            try:
                if not self._writer.failure:
                    self._checkpoint(apsw.SQLITE_CHECKPOINT_TRUNCATE)
                self._db.set_wal_hook(None)
                self._db.close()
            except apsw.Error:  # what was confirmed is safe; the next start reads the log
                logger.exception("the journal could not be closed in order")
            finally:
                self._folder_lock.release()

    # -- the writer's thread ----------------------------------------------------------------------------------------

    def _commit(self, changes: Sequence[Change]) -> None:
        entry = self._next_entry
        with self._db_lock:
            try:
                self._transact(changes)
            except DiskFull:
                self._next_entry = entry
                raise
            if self._wal_pages >= _WAL_PAGES:
                self._checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)

    def _transact(self, changes: Sequence[Change]) -> None:
        """Apply changes, all or none."""
        self._appended, self._deleted, self._gone = [], set(), []
        try:
            self._db.execute("begin immediate")
            for apply, arguments in changes:
                apply(*arguments)
            self._db.execute("commit")
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("rollback")
            if isinstance(error, apsw.FullError):
                raise DiskFull from error
            raise
        for number, entry in self._appended:
            self._tails.setdefault(number, []).append(entry)
        for number in {number for number, _ in self._deleted}:
            self._tails[number] = [entry for entry in self._tails[number] if (number, entry) not in self._deleted]
            if not self._tails[number]:
                del self._tails[number]
        self._appended, self._deleted = [], set()
        self._remove_gone()

    def _tidy(self) -> bool:
        if self._to_fold:
            number = self._to_fold.popleft()
            with self._db_lock:
                if number in self._tails:
                    self._transact([(self._fold, (number,))])
            return True
        if (now := time.monotonic()) >= self._expire_at:
            self._expire_at = now + _EXPIRE_SECONDS
            with self._db_lock:
                self._transact([(self._expire, ())])
                for owner, length in self._expired:
                    self._count_kept(owner, -1, -length)
                self._metrics.sessions_kept.set(self._value("select count(*) from sessions"))
                self._metrics.journal_bytes.set(self._value("pragma page_count") * PAGE_BYTES)
        return False

    def _checkpoint(self, mode: int) -> None:
        """Raises if not all could be written into the database: a checkpoint that failed is a failed write."""
        try:
            logged, done = self._db.wal_checkpoint(mode=mode)
        except apsw.FullError:
            return  # nothing is lost, it stays in the log
        if done != logged:
            raise apsw.IOError(f"a checkpoint wrote {done} of {logged} pages")
        self._wal_pages = 0

    def _note_wal(self, _db: apsw.Connection, _name: str, pages: int) -> int:
        self._wal_pages = pages
        return apsw.SQLITE_OK

    def _put_session(self, number: int, record: SessionRecord, parent: int | None) -> None:
        length = 0
        if parent is not None:
            self._fold(parent)
            (length,) = next(self._db.execute("select length from sessions where session = ?", (parent,)))
            self._db.execute(
                "insert into tokens select ?, position, mark, ids, logprobs, crc from tokens where session = ? "
                "order by position",
                (number, parent),
            )
            for position, mark, ids, logprobs, crc in self._end_rows(parent):
                if crc == tokens_crc(position, mark, ids, logprobs, parent):  # else the fork lacks it, and is refused
                    self._put_end(number, position, mark, ids, logprobs)
        body = json.dumps({**asdict(record), "eos_token_ids": list(record.eos_token_ids)})
        self._db.execute(
            "insert into sessions values (?, ?, ?, ?, ?, ?, ?)",
            (
                number,
                record.session_id,
                record.owner,
                body,
                length,
                self._wall_clock(),
                session_crc(number, record.owner, body, length),
            ),
        )

    def _put_tokens(
        self, number: int, position: int, mark: int, ids: bytes, logprobs: bytes | None, began: GenerateRecord | None
    ) -> None:
        entry = self._next_entry
        self._next_entry += 1
        self._appended.append((number, entry))
        self._db.execute(
            "insert into tail values (?, ?, ?, ?, ?, ?, ?)",
            (entry, number, position, mark, ids, logprobs, tokens_crc(position, mark, ids, logprobs, number)),
        )
        if began is not None:
            seed = began.seed.to_bytes(8, "little")
            self._db.execute(
                "insert or replace into generates values (?, ?, ?, ?, ?, ?)",
                (
                    number,
                    began.position,
                    began.request_id,
                    began.digest,
                    seed,
                    crc_of(struct.pack("<QQ", number, began.position) + began.request_id + began.digest + seed),
                ),
            )

    def _put_reply(self, number: int | None, record: ReplyRecord) -> None:
        # The reply to a close comes after it.
        ended_at = self._wall_clock() if number is None else None
        self._db.execute(
            "insert or replace into replies values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                number,
                record.session_id,
                record.owner,
                record.kind,
                record.request_id,
                record.digest,
                record.position,
                record.body,
                reply_crc(record),
                ended_at,
            ),
        )

    def _rest(self, number: int) -> None:
        self._to_fold.append(number)
        self._db.execute("update sessions set used_at = ? where session = ?", (self._wall_clock(), number))

    def _end_session(self, number: int) -> None:
        for session_id, owner in list(self._db.execute("select id, owner from sessions where session = ?", (number,))):
            for record in unpacked_appends(session_id, owner, self._packed_appends(number)):
                self._put_reply(number, record)
        for table in ("sessions", "tokens", "ends", "generates", "appends"):
            self._db.execute(f"delete from {table} where session = ?", (number,))  # noqa: S608 - of the five above
        for entry in self._tail_of(number):
            self._delete_tail(number, entry)
        self._forget_copy(number)
        self._db.execute("update replies set ended_at = ? where session = ?", (self._wall_clock(), number))

    def _tail_of(self, number: int) -> list[int]:
        """Its rows in the tail, as the commit that is being made leaves them."""
        entries = [*self._tails.get(number, ()), *(entry for one, entry in self._appended if one == number)]
        return [entry for entry in entries if (number, entry) not in self._deleted]

    def _delete_tail(self, number: int, entry: int) -> None:
        self._db.execute("delete from tail where entry = ?", (entry,))
        self._deleted.add((number, entry))

    def _fold(self, number: int) -> None:
        """Move a session's rows from the tail into `tokens`. Damaged ones stay, for `load` to refuse."""
        entries = self._tail_of(number)
        found = list(self._db.execute("select id, owner, body, length from sessions where session = ?", (number,)))
        if not entries or not found:
            return
        _, owner, body, length = found[0]
        try:
            records = self._read_end(number, length)
            records += self._read_tail(number, entries, length)
        except HistoryCorrupt as damage:
            logger.error("records of a session are damaged, and kept as they are: %s", damage)
            return
        self._db.execute("delete from ends where session = ?", (number,))
        for row in packed(records):
            length = row.position + row.tokens
            values = (row.position, row.mark, row.ids, row.logprobs)
            if not row.is_full and length == records[-1].position + len(records[-1].token_ids):
                self._put_end(number, *values)
            else:
                self._db.execute("insert into tokens values (?, ?, ?, ?, ?, ?)", (number, *values, tokens_crc(*values)))
        for entry in entries:
            self._delete_tail(number, entry)
        self._db.execute(
            "update sessions set length = ?, used_at = ?, crc = ? where session = ?",
            (length, self._wall_clock(), session_crc(number, owner, body, length), number),
        )
        self._db.execute(
            "delete from generates where session = ?1 and position < (select position from generates where "
            "session = ?1 and request_id != x'' order by position desc limit 1 offset ?2)",
            (number, MOST_GENERATES - 1),
        )
        # One that no call can name is needed only to say where the one before it ends.
        self._db.execute(
            "delete from generates where session = ?1 and request_id = x'' and coalesce((select before.request_id from "
            "generates before where before.session = ?1 and before.position < generates.position "
            "order by before.position desc limit 1), x'') = x''",
            (number,),
        )
        self._fold_appends(number)

    def _put_end(self, number: int, position: int, mark: int, ids: bytes, logprobs: bytes | None) -> None:
        crc = tokens_crc(position, mark, ids, logprobs, number)
        self._db.execute("insert into ends values (?, ?, ?, ?, ?, ?)", (number, position, mark, ids, logprobs, crc))

    def _fold_appends(self, number: int) -> None:
        """Move the replies to a session's appends into one row, and forget all but the last."""
        found = self._replies("session = ? and kind = ? order by position", (number, APPENDED))
        for record in found:
            self._db.execute(
                "delete from replies where owner = ? and request_id = ? and kind = ? and id = ?",
                (record.owner, record.request_id, record.kind, record.session_id),
            )
        if found:
            replies = most_recent(self._packed_appends(number) + b"".join(map(packed_append, found)))
            self._db.execute(
                "insert or replace into appends values (?, ?, ?)", (number, replies, appends_crc(number, replies))
            )

    def _packed_appends(self, number: int) -> bytes:
        """Damaged ones are as if they had been forgotten."""
        for replies, crc in self._db.execute("select replies, crc from appends where session = ?", (number,)):
            if isinstance(replies, bytes) and crc == appends_crc(number, replies):
                return replies
        return b""

    def _expire(self) -> None:
        now = self._wall_clock()
        self._expired = []
        self._db.execute("delete from replies where ended_at < ?", (now - KEEP_SECONDS,))
        if not self._keep_seconds:
            return
        resident = set(self._numbers.values())
        old = self._db.execute(
            "select session from sessions where used_at < ? order by used_at limit ?",
            (now - self._keep_seconds, _EXPIRE_SESSIONS + len(resident)),
        )
        for number in [number for (number,) in old if number not in resident][:_EXPIRE_SESSIONS]:
            self._expired += self._db.execute("select owner, length from sessions where session = ?", (number,))
            self._end_session(number)
            self._metrics.sessions_forgotten.inc()

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self, session_id: str) -> tuple[SessionRecord, Sequence[TokensRecord]]:
        self._flush()
        with self._db_lock, damage_is_refused(0):
            found = list(
                self._db.execute("select session, owner, body, length, crc from sessions where id = ?", (session_id,))
            )
            if not found:
                raise KeyError(session_id)
            number, owner, body, length, crc = found[0]
            if crc != session_crc(number, owner, body, length) or session_record(body).session_id != session_id:
                raise HistoryCorrupt(0)
            return session_record(body), self._tokens(number)

    def load(self, session_id: str, owner: str) -> SessionKept | None:
        self._flush()
        with self._db_lock, damage_is_refused(0):
            # In both indexes: damage of one neither hides a session nor gives another one's.
            (found, known) = (
                list(self._db.execute(f"select session from sessions {condition}", (session_id, owner)))  # noqa: S608 - a text of ours
                for condition in (
                    "where id = ?1 and +owner = ?2",
                    "indexed by sessions_by_owner where owner = ?2 and id = ?1",
                )
            )
            if found != known:
                raise HistoryCorrupt(0)
            if not found:
                return None
            (number,) = found[0]
            body, length, used_at, crc = next(
                self._db.execute("select body, length, used_at, crc from sessions where session = ?", (number,))
            )
            if crc != session_crc(number, owner, body, length) or session_record(body).session_id != session_id:
                raise HistoryCorrupt(0)
            tokens = self._tokens(number)
            saved = Saved(sum(len(one.token_ids) for one in tokens))
            generates = [
                GenerateRecord(position, request_id, digest[:DIGEST_BYTES], int.from_bytes(seed, "little"))
                for position, request_id, digest, seed, kept in self._db.execute(
                    "select position, request_id, digest, seed, crc from generates where session = ? order by position",
                    (number,),
                )
                if kept == crc_of(struct.pack("<QQ", number, position) + request_id + digest + seed)
            ]
            replies = unpacked_appends(session_id, owner, self._packed_appends(number))
            replies += self._replies("session = ? order by position", (number,))
            self._numbers[session_id] = number
            self._note(number, owner, saved, saved.tokens)
            return SessionKept(session_record(body), used_at, tokens, generates, replies, saved)

    def replies_to(self, owner: str, request_id: bytes) -> Sequence[ReplyRecord]:
        self._flush()
        with self._db_lock:
            return self._replies("owner = ? and request_id = ?", (owner, request_id))

    def page(self, owner: str, *, after: str, most: int) -> Sequence[SessionEntry]:
        self._flush()
        entries = []
        with self._db_lock:
            for number, session_id, body, length, used_at, crc in self._db.execute(
                "select session, id, body, length, used_at, crc from sessions where owner = ? and id > ? "
                "order by id limit ?",
                (owner, after, most),
            ):
                try:
                    entries.append(self._entry(number, owner, body, length, used_at, crc))
                except HistoryCorrupt:  # it can be closed or purged, so it is in the list
                    nothing = SessionRecord(session_id, owner, "full", None, ())
                    entries.append(SessionEntry(nothing, self._wall_clock(), 0))
        return entries

    def _entry(self, number: int, owner: str, body: str, length: int, used_at: float, crc: int) -> SessionEntry:
        with damage_is_refused(0):
            if crc != session_crc(number, owner, body, length):
                raise HistoryCorrupt(0)
            if number in self._tails:
                last = self._tails[number][-1]
                for position, ids in self._db.execute("select position, ids from tail where entry = ?", (last,)):
                    length = position + len(ids) // 4
            return SessionEntry(session_record(body), float(used_at), length)

    def everyone(self) -> list[SessionEntry]:
        """The sessions of all owners, by their ids. For tools."""
        self._flush()
        with self._db_lock:
            owners = [owner for (owner,) in self._db.execute("select distinct owner from sessions order by owner")]
        found = [entry for owner in owners for entry in self.page(owner, after="", most=-1)]
        return sorted(found, key=lambda entry: entry.record.session_id)

    def check(self) -> str:
        """What is wrong with the database as a whole; "": nothing. Reads all of it."""
        self._flush()
        with self._db_lock:
            found = [str(text) for (text,) in self._db.execute("pragma integrity_check")]
        return "" if found == ["ok"] else "; ".join(found)

    def back_up(self, folder: Path) -> None:
        """Write all that is recorded into a new folder, which a server can take for its own. Raises ConfigError."""
        self._flush()
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}") from error
        with self._db_lock:
            self._db.execute("vacuum into ?", (str(folder / FILE),))  # without copies of K/V, which the start notices
        (folder / FILE).chmod(0o600)

    def purge(self, session_id: str, owner: str) -> None:
        """Delete a session, damaged or not."""
        self._flush()
        with self._db_lock:
            found = list(
                self._db.execute("select session from sessions where id = ? and owner = ?", (session_id, owner))
            )
            self._transact([(self._end_session, (number,)) for (number,) in found])

    def held_bytes(self, session_id: str | None = None) -> int:
        return 0  # histories are in memory once, with their sessions; what waits to be written is bounded

    def tidy(self) -> bool:
        return False

    def _flush(self) -> None:
        """Wait until all is written that is read next. Raises JournalFull or EngineStalled if it cannot be."""
        self.refuse_when_full()
        if not self._writer.flush(_FLUSH_SECONDS):
            self.refuse_when_full()
            raise EngineStalled

    def _tokens(self, number: int) -> list[TokensRecord]:
        """The history of a session. Raises HistoryCorrupt."""
        (length,) = next(self._db.execute("select length from sessions where session = ?", (number,)))
        rows, known, position = list[TokensRecord](), 0, 0
        for first, mark, ids, logprobs, crc in self._db.execute(
            "select position, mark, ids, logprobs, crc from tokens where session = ? order by position", (number,)
        ):
            if first != position or crc != tokens_crc(first, mark, ids, logprobs):
                raise HistoryCorrupt(position)
            rows += unpacked(first, mark, ids, logprobs)
            position += sum(len(record.token_ids) for record in rows[known:])
            known = len(rows)
        end = self._read_end(number, length)
        if position != (end[0].position if end else length):
            raise HistoryCorrupt(position)
        return rows + end + self._read_tail(number, self._tails.get(number, ()), length)

    def _end_rows(self, number: int) -> list[tuple[Any, ...]]:
        return list(
            self._db.execute("select position, mark, ids, logprobs, crc from ends where session = ?", (number,))
        )

    def _read_end(self, number: int, length: int) -> list[TokensRecord]:
        """The tokens that did not fill a row, the last of `length` that are folded. Raises HistoryCorrupt."""
        for position, mark, ids, logprobs, crc in self._end_rows(number):
            with damage_is_refused(position if isinstance(position, int) else 0):
                if crc != tokens_crc(position, mark, ids, logprobs, number):
                    raise HistoryCorrupt(position)
                records = unpacked(position, mark, ids, logprobs)
                if position + sum(len(record.token_ids) for record in records) != length:
                    raise HistoryCorrupt(position)
                return records
        return []

    def _read_tail(self, number: int, entries: Sequence[int], position: int) -> list[TokensRecord]:
        """Rows of the tail, the first of which is at `position`. Raises HistoryCorrupt."""
        rows = []
        for entry in entries:
            with damage_is_refused(position):
                of, first, mark, ids, logprobs, crc = next(
                    self._db.execute(
                        "select session, position, mark, ids, logprobs, crc from tail where entry = ?", (entry,)
                    )
                )
                if (of, first) != (number, position) or crc != tokens_crc(first, mark, ids, logprobs, number):
                    raise HistoryCorrupt(position)
                rows.append(tokens_record(first, mark, ids, logprobs))
                position += len(ids) // 4
        return rows

    def _replies(self, condition: str, values: tuple[Any, ...]) -> list[ReplyRecord]:
        """Replies that are intact: one that is not is as if it had been forgotten."""
        rows = self._db.execute(
            f"select id, owner, kind, request_id, digest, position, body, crc from replies where {condition}",  # noqa: S608 - a text of ours
            values,
        )
        found = [(ReplyRecord(*fields), crc) for *fields, crc in rows]
        # An older server's digests were longer.
        return [replace(one, digest=one.digest[:DIGEST_BYTES]) for one, crc in found if crc == reply_crc(one)]

    def _value(self, question: str) -> Any:
        return next(self._db.execute(question))[0]


# -- the folder -------------------------------------------------------------------------------------------------------
