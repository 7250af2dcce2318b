"""Which copies of sessions' K/V there are in the folder, and which of them begin with the same tokens.

Files are removed in the order in which their sessions were used when they pass a budget.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile

from inference_engine.errors import ConfigError
from inference_engine.metrics import EngineMetrics
from inference_engine.session.journal import CopyBook, CopyRecord

_MOST_DIGESTS = 64  # of each file that are looked for: 16,000 tokens, with segments of 256
_SHARE = 2  # without a setting, one part in this many of the free space may be used


@dataclass(frozen=True, kw_only=True, slots=True)
class HibernationLimits:
    """Settings, named like them. is_measured: save only where reading a file is faster than computing its entries."""

    after_seconds: float
    is_measured: bool
    state_bytes: int = 0
    state_bytes_per_owner: int = 0


@dataclass(frozen=True, slots=True)
class LentCopy:
    """A second name of a file. digests: of what it begins with, as far as they are known."""

    record: CopyRecord
    digests: Sequence[bytes]


class CopyIndex:
    """The files in the folder, the one of the session used longest ago first. Any thread.

    Where several servers have their files in one folder, the budgets are of this one's, and others' are read in place:
    the next copy of a session, by any of them, takes the place of the one before. What another server removed of this
    one's is counted until the session comes back or its turn to be removed comes.
    """

    def __init__(self, book: CopyBook, limits: HibernationLimits, metrics: EngineMetrics) -> None:
        """Removes files that no record names, and records without a file. Raises ConfigError."""
        self.folder = book.copies_folder
        self._book = book
        self._metrics = metrics
        self._lock = threading.Lock()
        self._prefix = book.copies_prefix
        self.own_folder = self.folder / self._prefix
        self._records: OrderedDict[str, CopyRecord] = OrderedDict()  # by what their files' names begin with
        self._others: dict[str, CopyRecord] = {}  # of other servers, of sessions that are here now
        self._held: Counter[str | None] = Counter()  # bytes by owner, and of all under None
        self._most: dict[str | None, int] = {None: limits.state_bytes}
        self._most_of_owner = limits.state_bytes_per_owner
        self._begin: dict[bytes, dict[str, CopyRecord]] = {}  # by digest, and by what files' names begin with
        self._digests: dict[str, tuple[bytes, ...]] = {}
        records = book.copies(self._gone, self._found)
        try:
            for folder in (self.folder, self.own_folder):
                folder.mkdir(mode=0o700, exist_ok=True)
                folder.chmod(0o700)
            # A folder is none of ours: `lost+found` of a disk, a file system's snapshots.
            found = [entry for entry in os.scandir(self.own_folder) if not entry.is_dir(follow_symlinks=False)]
            files = {self._prefix + entry.name: entry.stat(follow_symlinks=False).st_size for entry in found}
            if not limits.state_bytes:
                self._most[None] = (shutil.disk_usage(self.folder).free + sum(files.values())) // _SHARE
            for file in files.keys() - {record.file for record in records}:
                (self.folder / file).unlink()
        except OSError as error:
            raise ConfigError(f"copies of K/V cannot be kept in {self.folder}: {error.strerror}") from error
        for record in records:
            if files.get(record.file) == record.nbytes:
                self._add(record)
            else:
                book.drop_copy(record.file)
        for owner in {record.owner for record in records}:
            self.make_room(owner, 0)
        self._report()

    # -- what copies begin with -------------------------------------------------------------------------------------

    def learn(self, record: CopyRecord, digests: Sequence[bytes]) -> None:
        """It begins so. Nothing happens if the file was removed meanwhile."""
        with self._lock:
            if self._records.get(stem := stem_of(record.session_id)) == record:
                self._digests[stem] = tuple(digests[:_MOST_DIGESTS])
                for digest in self._digests[stem]:
                    self._begin.setdefault(digest, {})[stem] = record

    def unlearn(self, record: CopyRecord) -> None:
        """It is of no use to others than its own session."""
        with self._lock:
            self._unlearn(stem_of(record.session_id))

    def _unlearn(self, stem: str) -> None:
        for digest in self._digests.pop(stem, ()):
            del self._begin[digest][stem]
            if not self._begin[digest]:
                del self._begin[digest]

    def unlearned(self) -> list[CopyRecord]:
        """Those of which it is not known what they begin with."""
        with self._lock:
            return [record for stem, record in self._records.items() if stem not in self._digests]

    def beginning_with(self, digests: Sequence[bytes]) -> tuple[CopyRecord, int] | None:
        """The smallest of the copies that have the most of these digests, and how many; None: none has any."""
        with self._lock:
            for number in range(min(len(digests), _MOST_DIGESTS), 0, -1):
                if records := self._begin.get(digests[number - 1]):
                    return min(records.values(), key=lambda record: record.nbytes), number
        return None

    def in_common(self, record: CopyRecord, digests: Sequence[bytes]) -> tuple[int, bool]:
        """How many of these digests the copy has, too, as far as they are known; and is that all that is known?"""
        with self._lock:
            own = self._digests.get(stem_of(record.session_id), ())
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, digests, strict=False)))
        return common, common == len(own)

    # -- files ------------------------------------------------------------------------------------------------------

    def new_file(self, session_id: str, length: int) -> str:
        """A name, in the folder, for a copy of so many tokens."""
        return f"{self._prefix}{stem_of(session_id)}-{length}-{secrets.token_hex(4)}.kv"

    def find(self, session_id: str) -> CopyRecord | None:
        with self._lock:
            return self._find(stem_of(session_id))

    def _find(self, stem: str) -> CopyRecord | None:
        return self._others.get(stem) or self._records.get(stem)

    def _found(self, session_id: str, record: CopyRecord | None) -> None:
        """What there is of a session that comes into memory, after it may have been at other servers."""
        stem = stem_of(session_id)
        with self._lock:
            self._others.pop(stem, None)
            if self._records.get(stem) != record:
                self._remove(stem)
                if record is not None and not record.file.startswith(self._prefix):
                    self._others[stem] = record

    def put(self, record: CopyRecord, digests: Sequence[bytes]) -> None:
        """A file that is whole and safe, in place of the one that its session had. digests: of its beginnings."""
        with self._lock:
            self._others.pop(stem_of(record.session_id), None)
            self._remove(stem_of(record.session_id))
            self._add(record)
        self.learn(record, digests)
        self._book.put_copy(record)
        self.make_room(record.owner, 0)
        self._report()

    def lend(self, session_id: str) -> LentCopy | None:
        """Another name for the session's file, so that it outlives the session. None: it has none, or the file system
        has no such names."""
        with self._lock:
            record = self._find(stem_of(session_id))
            digests = () if record is None else self._digests.get(stem_of(session_id), ())
        if record is None:
            return None
        file = f"{self._prefix}lent-{secrets.token_hex(8)}.kv"
        try:
            os.link(self.folder / record.file, self.folder / file)
        except OSError:
            return None
        return LentCopy(replace(record, file=file), digests)

    def hand_over(self, lent: LentCopy, session_id: str) -> None:
        """The file is now that of another session, which begins like the one that had it."""
        file = self.new_file(session_id, lent.record.length)
        try:
            (self.folder / lent.record.file).rename(self.folder / file)
        except OSError:  # removed by hand: the history has all
            return
        self.put(replace(lent.record, session_id=session_id, file=file), lent.digests)

    def give_up(self, lent: LentCopy) -> None:
        with suppress(OSError):  # the next start removes it
            (self.folder / lent.record.file).unlink()

    def used(self, session_id: str) -> None:
        with self._lock:
            if (stem := stem_of(session_id)) in self._records:
                self._records.move_to_end(stem)

    def drop(self, session_id: str) -> None:
        """Remove the session's file, if it has one."""
        stem = stem_of(session_id)
        with self._lock:
            record = self._others.pop(stem, None) or self._remove(stem)
        if record is not None:
            self._book.drop_copy(record.file)
            self._report()

    def make_room(self, owner: str, nbytes: int, *, kept: Collection[str] = ()) -> bool:
        """Remove files until `nbytes` more of `owner` are within the budgets. False, and none removed, if they never
        are. kept: sessions whose files stay."""
        stems = {stem_of(session_id) for session_id in kept}
        most = dict(self._most)
        if self._most_of_owner:
            most[owner] = self._most_of_owner
        with self._lock:
            staying = [self._records[stem] for stem in stems if stem in self._records]
            for whose, limit in most.items():
                if nbytes + sum(one.nbytes for one in staying if whose in (None, one.owner)) > limit:
                    return False
            going = [record for whose in reversed(most) for record in self._take(whose, most[whose] - nbytes, stems)]
        for record in going:
            self._book.drop_copy(record.file)
        return True

    def _take(self, owner: str | None, most: int, kept: Collection[str]) -> Iterator[CopyRecord]:
        """Take out files of `owner` (None: of all) until at most `most` bytes are left. Lock held."""
        for stem, record in list(self._records.items()):
            if self._held[owner] <= most:
                return
            if stem not in kept and owner in (None, record.owner):
                self._remove(stem)
                yield record

    def _add(self, record: CopyRecord) -> None:
        self._records[stem_of(record.session_id)] = record
        for whose in (None, record.owner):
            self._held[whose] += record.nbytes

    def _remove(self, stem: str) -> CopyRecord | None:
        record = self._records.pop(stem, None)
        self._unlearn(stem)
        if record is not None:
            for whose in (None, record.owner):
                self._held[whose] -= record.nbytes
            if not self._held[record.owner]:
                del self._held[record.owner]
        return record

    def _gone(self, file: str) -> None:
        """A file was removed: its session was closed or deleted, or it was asked for here."""
        stem = file.rpartition("/")[2].partition("-")[0]
        with self._lock:
            if stem in self._others and self._others[stem].file == file:
                del self._others[stem]
            if stem in self._records and self._records[stem].file == file:
                self._remove(stem)
        self._report()

    def _report(self) -> None:
        self._metrics.copies.set(len(self._records))
        self._metrics.copies_bytes.set(self._held[None])


def stem_of(session_id: str) -> str:
    """What the names of a session's files begin with."""
    return hashlib.sha256(session_id.encode()).hexdigest()[:32]
