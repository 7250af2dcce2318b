"""Copies of idle sessions' KV cache in files, from which it comes back after it was dropped, or after a restart.

    idle        saved, a piece between two steps; given up if the session is used meanwhile
    used        if its K/V is gone: read from the file, checked, and put in place; then only the rest is prefilled
    rewound     its file is the new session's, which reads it up to where both are alike
    forked      the fork reads its file likewise, if it was not in memory
    begun like  by a session without a copy of its own: what both begin with is kept in memory, as of a closed session

Correctness never depends on a file: where anything of one does not agree, the K/V is computed from the history, which
the journal has.

The engine's thread reads and writes K/V. Two threads of this module read and write files, one at a time each.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from inference_engine.kv.part import Saved
from inference_engine.logs import about_session, unexplained
from inference_engine.metrics import EngineMetrics
from inference_engine.session.copy_file import (
    TENSOR_BYTES,
    CopyFacts,
    CopyUnusable,
    CopyWriter,
    read_copy,
    read_digests,
)
from inference_engine.session.copy_index import CopyIndex, HibernationLimits
from inference_engine.session.journal import CopyBook, CopyRecord
from inference_engine.session.prefixes import border
from inference_engine.session.session import Session
from inference_engine.session.snapshots import Rewound
from inference_engine.session.store import SessionStore, entries_kept

logger = logging.getLogger(__name__)

_MOST_LONGER = (
    2  # a copy of another session may be so many times as long as what is wanted of it, unless it is measured
)
_MOST_READ = 2  # copies in host memory at the same time
_WAIT_SECONDS = 0.05  # for a file, while no session runs
_STOP_SECONDS = 10.0  # for sessions that are saved when the engine stops
_PROBE_BYTES = 16 * 2**20
_PROBE_REPEATED_BYTES = 2 * 2**20
_LEAST_PREFILL_TOKENS = 32  # of a prefill whose time says how fast the model is
_MEMORY = 0.8  # weight of what was measured before


@dataclass(slots=True, eq=False)
class _Saving:
    """A session whose K/V is being saved."""

    session: Session
    uses: int
    file: str
    facts: CopyFacts
    digests: list[bytes]
    pieces: Iterator[tuple[str, int, tuple[Tensor, ...]]]
    writer: CopyWriter
    began: float
    written: Future[None] | None = None  # the piece before
    finished: Future[int] | None = None  # the whole file


@dataclass(slots=True, eq=False)
class _Reading:
    """A copy that is being read for a session whose Generate waits for it.

    tokens: so many of its first ones both have; None: all of it is the session's. is_own: is it a copy of what the
    session, or the one that was rewound to it or that it was forked from, had?
    """

    record: CopyRecord
    tokens: int | None
    is_own: bool
    copy: Future[Saved]
    began: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How many first tokens of a session have K/V in a copy. source: the session that the copy is of; "": itself.

    expected: what the file says if that is so, as far as only the file knows: it is from before this start.
    """

    tokens: int
    source: str = ""
    expected: Mapping[str, str] | None = None


class Hibernation:
    """Implements Snapshots. Engine's thread only, but for `wake`, which others call, and `close`, after its end."""

    def __init__(
        self,
        store: SessionStore,
        book: CopyBook,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        *,
        limits: HibernationLimits,
        fingerprint: Callable[[Session], str],
        wake: Callable[[], None],
    ) -> None:
        """fingerprint: what decides the bits of a session's K/V. wake: wakes the engine's thread.

        Raises ConfigError.
        """
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._limits = limits
        self._fingerprint = fingerprint
        self._wake = wake
        self._book = book
        self._index = CopyIndex(book, limits, metrics)
        self._resting: OrderedDict[Session, float] = OrderedDict()  # since when
        self._saving: _Saving | None = None
        self._readings: dict[Session, _Reading] = {}
        # Sessions whose Generates may begin, and wait for a copy: in this round of the loop, and in the one before.
        self._asking: set[Session] = set()
        self._asked: set[Session] = set()
        # Of sessions that were saved since the start, that began with another's tokens, or both.
        self._cuts: WeakKeyDictionary[Session, _Cut] = WeakKeyDictionary()
        self._prefill_seconds = 0.0  # a token; 0: not known yet
        self._read_seconds = 0.0  # a byte
        self._writer = ThreadPoolExecutor(1, "kakeya-copy-writer")
        self._reader = ThreadPoolExecutor(1, "kakeya-copy-reader")
        if limits.is_measured:
            self._reader.submit(self._measure)
        if store.kept_prefixes.most_bytes:
            self._writer.submit(self._learn)  # not the reader, for which Generates wait

    # -- what is measured -------------------------------------------------------------------------------------------

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A prefill of so many tokens took so long, other sessions' steps between included."""
        if tokens >= _LEAST_PREFILL_TOKENS:
            each = seconds / tokens
            before = self._prefill_seconds or each
            self._prefill_seconds = _MEMORY * before + (1 - _MEMORY) * each

    def _has_read(self, nbytes: int, seconds: float) -> None:
        before = self._read_seconds or seconds / nbytes
        self._read_seconds = _MEMORY * before + (1 - _MEMORY) * seconds / nbytes

    def _pays(self, nbytes: int, tokens: int) -> bool:
        """Is reading so many bytes faster than computing K/V of so many tokens? Yes while one is not known."""
        if not self._limits.is_measured or not self._prefill_seconds or not self._read_seconds:
            return True
        return nbytes * self._read_seconds < tokens * self._prefill_seconds

    def _pays_for_another(self, record: CopyRecord, tokens: int) -> bool:
        """As `_pays`, for `tokens` of what may be a longer copy of another session."""
        if self._prefill_seconds and self._read_seconds:
            return record.nbytes * self._read_seconds < tokens * self._prefill_seconds
        return record.length <= _MOST_LONGER * tokens

    def _learn(self) -> None:
        """What the copies that were there at the start begin with."""
        for record in self._index.unlearned():
            try:
                self._index.learn(record, read_digests(self._index.folder / record.file, record.header_crc))
            except CopyUnusable as unusable:  # its own session will say so
                logger.debug("what a copy begins with could not be read: %s", unusable)

    def _measure(self) -> None:
        """How long the disk takes for a byte that is not in memory. Not where that would take most of its space."""
        if (free := shutil.disk_usage(self._index.folder).free) < 2 * _PROBE_BYTES:
            logger.info("the speed of the disk is not measured: %s has %d bytes of space", self._index.folder, free)
            return
        path = self._index.own_folder / f"probe-{secrets.token_hex(4)}"
        try:
            with path.open("w+b", buffering=0) as file:
                # Repeated at a distance over which no file system compresses: so many random bytes take longer to make
                # than to write and read.
                file.write(os.urandom(_PROBE_REPEATED_BYTES) * (_PROBE_BYTES // _PROBE_REPEATED_BYTES))
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                began = time.perf_counter()
                file.seek(0)
                file.readall()
                self._has_read(_PROBE_BYTES, time.perf_counter() - began)
        except OSError as error:
            logger.warning("the speed of the disk could not be measured in %s: %s", self._index.folder, error)
        finally:
            with suppress(OSError):
                path.unlink()

    # -- saving -----------------------------------------------------------------------------------------------------

    def idle(self, session: Session) -> None:
        """A Generate of the session has ended."""
        if reading := self._readings.pop(session, None):
            reading.copy.cancel()
        if not session.is_transient:
            self._resting[session] = self._clock()
            self._resting.move_to_end(session)

    def poll(self) -> bool:
        """Once a round of the loop: save a piece of a session. Is there more to do at once?

        When a piece was written, `wake` is called.
        """
        self._asked, self._asking = self._asking, set()
        saving = self._saving
        if saving is None:
            saving = self._saving = self._next()
            return saving is not None
        pending = saving.finished or saving.written
        if pending is not None and not pending.done():
            return False
        try:
            if saving.finished is not None:
                self._has_saved(saving, saving.finished.result())
                self._saving = None
                return True
            if saving.written is not None:
                saving.written.result()
            self._save_piece(saving)
        except Exception as error:  # noqa: BLE001 - logged, and the history has all
            _log_failure(saving.session, error)
            self._give_up(saving, "failed")
        return False

    def _next(self) -> _Saving | None:
        while self._resting:
            session, since = next(iter(self._resting.items()))
            if self._clock() - since < self._limits.after_seconds:
                return None
            del self._resting[session]
            try:
                if (saving := self._begin(session)) is not None:
                    return saving
            except Exception as error:  # noqa: BLE001 - logged, and the history has all
                _log_failure(session, error)
                self._metrics.copies_saved.labels("failed").inc()
        return None

    def _begin(self, session: Session, *, kept: Collection[str] = ()) -> _Saving | None:
        """kept: sessions whose files are not removed to make room."""
        uses, kv = session.uses, session.kv
        with self._store.undisturbed(session, uses) as is_idle:
            if not is_idle or kv.length <= kv.base:
                return None
            known = self._index.find(session.session_id)
            if known is not None and known.length == kv.length:
                return None
            saved, geometry = kv.save(), kv.context.geometry
            # A part saves by segments or by layers, a few tensors at a time.
            tensors = 4 * len(saved) * (len(geometry.layers) + kv.length // geometry.segment_tokens + 2)
            live_bytes = (session.live_bytes + kv.shared_bytes) * kv.context.pool.ranks
            nbytes = live_bytes + session.tier_live_bytes + tensors * TENSOR_BYTES
            if not self._pays(nbytes, kv.length):
                self._metrics.copies_saved.labels("slower").inc()
                return None
            if self._book.is_full or not self._index.make_room(session.owner, nbytes, kept=kept):
                self._metrics.copies_saved.labels("no_room").inc()
                return None
            facts = CopyFacts.of(self._fingerprint(session), session.history, kv.length)
            file = self._index.new_file(session.session_id, kv.length)
            digests = self._store.prefixes.digests_of(session, kv.length)
            writer = CopyWriter(self._index.folder / file, facts, list(saved), digests, most_tensors=tensors)
            return _Saving(session, uses, file, facts, digests, _pieces(saved), writer, time.perf_counter())

    def _save_piece(self, saving: _Saving) -> None:
        with self._store.undisturbed(saving.session, saving.uses) as is_idle:
            piece = next(saving.pieces, None) if is_idle else None
        if not is_idle:
            self._give_up(saving, "given_up")
        elif piece is None:
            saving.finished = self._writer.submit(saving.writer.finish)
            saving.finished.add_done_callback(lambda _: self._wake())
        else:
            saving.written = self._writer.submit(saving.writer.add, *piece)
            saving.written.add_done_callback(lambda _: self._wake())

    def _has_saved(self, saving: _Saving, header_crc: int) -> None:
        session, nbytes = saving.session, saving.writer.nbytes
        self._index.put(
            CopyRecord(session.session_id, session.owner, saving.file, saving.facts.length, nbytes, header_crc),
            saving.digests,
        )
        self._cuts[session] = _Cut(saving.facts.length)
        self._metrics.copies_saved.labels("saved").inc()
        self._metrics.copy_save_seconds.observe(time.perf_counter() - saving.began)

    def _give_up(self, saving: _Saving, outcome: str) -> None:
        self._saving = None
        saving.pieces = iter(())
        self._metrics.copies_saved.labels(outcome).inc()
        # After what the writer does now.
        self._writer.submit(saving.writer.give_up)

    # -- reading ----------------------------------------------------------------------------------------------------

    def restore(self, session: Session, *, is_alone: bool, found: Callable[[], int]) -> bool:
        """Give an empty session, which its Generate holds, the K/V of its copy, or have that of another one that begins
        alike kept in memory. False: it is being read; ask again.

        Afterwards the session has the copy's K/V, or none, and goes on with what it has. is_alone: no session runs, so
        that the call may wait a moment. found: how many tokens it begins with that others have in memory.
        """
        reading = self._readings.get(session)
        if reading is None:
            record, tokens = self._wanted(session, found)
            if not (is_own := record is not None):
                record, tokens = self._of_another(session, found)
            if record is None:
                return True
            is_being_read = any(one.record.file == record.file for one in self._readings.values())
            if not is_being_read and (len(self._readings) < _MOST_READ or self._has_dropped_one()):
                reading = self._begin_reading(session, record, tokens, is_own=is_own)
        self._asking.add(session)
        if is_alone:
            wait([one.copy for one in self._readings.values()], _WAIT_SECONDS, return_when="FIRST_COMPLETED")
        if reading is None or not reading.copy.done():
            return False
        del self._readings[session]
        return self._put_in_place(session, reading)

    def _has_dropped_one(self) -> bool:
        """Drop a copy that was read for a Generate that may not begin now: those of other owners came before it."""
        for session, reading in self._readings.items():
            is_waited_for = session in self._asking or session in self._asked
            if not is_waited_for and (reading.copy.done() or reading.copy.cancel()):
                del self._readings[session]
                return True
        return False

    def _begin_reading(
        self, session: Session, record: CopyRecord, tokens: int | None, *, is_own: bool
    ) -> _Reading | None:
        with self._store.locked():
            if session.is_closed:  # its history is gone; the Generate ends in the next round
                return None
            expected = {"fingerprint": self._fingerprint(session)}
            if (cut := self._cuts.get(session)) is not None and is_own and cut.expected is not None:
                expected = dict(cut.expected)
            elif tokens is None:
                expected = CopyFacts.of(expected["fingerprint"], session.history, record.length).as_text()
        copy = self._reader.submit(read_copy, self._index.folder / record.file, expected, record.header_crc)
        copy.add_done_callback(lambda _: self._wake())
        reading = self._readings[session] = _Reading(record, tokens, is_own, copy)
        return reading

    def _wanted(self, session: Session, found: Callable[[], int]) -> tuple[CopyRecord | None, int | None]:
        """Its own copy, if that has more than was `found` in memory, and reading it is worth that; and how many tokens
        of it both have, if not all."""
        record, tokens = self._own(session)
        if record is None:
            return None, None
        if (more := (record.length if tokens is None else tokens) - found()) <= 0:
            return None, None
        if not self._pays(record.nbytes, more):
            self._metrics.copies_read.labels("slower").inc()
            return None, None
        return record, tokens

    def _own(self, session: Session) -> tuple[CopyRecord | None, int | None]:
        """The copy that it would be read from, and how many tokens of it both have, if not all."""
        kv, record = session.kv, self._copy_of(session)
        if kv.length > kv.base or session.is_transient or record is None or kv.base >= record.length:
            return None, None
        tokens = self._cut(session, record)
        if tokens is not None and (
            tokens <= kv.base
            or not kv.would_keep(tokens, record.length)
            or (kv.limit_tokens is not None and record.length > kv.limit_tokens)
        ):
            return None, None
        return record, tokens

    def _cut(self, session: Session, record: CopyRecord) -> int | None:
        """Of how many first tokens its copy has K/V that belongs to it, where that is not all: of a session that was
        rewound to it, or that it was forked from."""
        length = entries_kept(len(session.history))
        if (known := self._cuts.get(session)) is not None:
            return None if known.tokens >= record.length else min(known.tokens, length)
        # From before this start: what both begin with, up to a border. Where all does that is known, the file will say.
        tokens, is_all = self._in_common(session, record)
        return None if is_all and record.length <= len(session.history) else min(tokens, length)

    def _in_common(self, session: Session, record: CopyRecord) -> tuple[int, bool]:
        """How many first tokens the session and a copy are known to have in common; and is more not known?"""
        digests = self._store.prefixes.digests_of(session, len(session.history))
        common, is_all = self._index.in_common(record, digests)
        return border(common - 1, session.kv.context.geometry.segment_tokens), is_all

    def _of_another(self, session: Session, found: Callable[[], int]) -> tuple[CopyRecord | None, int]:
        """A copy whose session began alike, and how many tokens of it are worth reading it: more than were `found`."""
        kv, store = session.kv, self._store
        if kv.length or session.is_closed or kv.bound.tier_bytes or not store.kept_prefixes.most_bytes:
            return None, 0
        segment = kv.context.geometry.segment_tokens
        known = self._index.beginning_with(store.prefixes.digests_of(session, len(session.history) - 1))
        if known is None:
            return None, 0
        record, borders = known
        tokens = border(borders - 1, segment)
        more = tokens - found()
        # What is kept has room of its own, or none. A file has the heads of all ranks.
        has_room = record.nbytes <= store.kept_prefixes.most_bytes * kv.context.pool.ranks
        if more < segment or not has_room or not self._pays_for_another(record, more):
            return None, 0
        if not kv.would_keep(tokens, record.length):
            return None, 0
        return record, tokens

    def _put_in_place(self, session: Session, reading: _Reading) -> bool:
        """False: less of it may be of use; ask again."""
        record = reading.record
        try:
            saved = reading.copy.result()
            if reading.is_own:
                # Of a longer one there has to be room for all, before it is cut.
                if reading.tokens is not None and not self._store.secure_if_free(session, record.length):
                    self._metrics.copies_read.labels("no_room").inc()
                    return True
                session.kv.load(record.length, saved)
                if reading.tokens is not None:
                    session.kv.rewind(reading.tokens)
                session.refresh_facts()
            elif not self._store.kept_prefixes.keep_copy(session, record.length, reading.tokens or 0, saved):
                self._index.unlearn(record)
                self._metrics.copies_read.labels("no_room").inc()
                return True
        except Exception as error:  # noqa: BLE001 - the history has all
            if self._may_be_cut(session, reading, error):
                return False
            self._not_usable(session, reading, error)
        else:
            seconds = time.perf_counter() - reading.began
            self._has_read(record.nbytes, seconds)
            self._index.used(record.session_id)
            self._metrics.copies_read.labels("used" if reading.is_own else "shared").inc()
            self._metrics.copy_read_seconds.observe(seconds)
        return True

    def _may_be_cut(self, session: Session, reading: _Reading, error: Exception) -> bool:
        """Of a copy of other tokens at its end: is it that of a session that was rewound, before this start, to this
        one? Then it is taken up to the last border that both are known to have."""
        is_foreign = isinstance(error, CopyUnusable) and error.outcome == "foreign"
        cut = self._cuts.get(session)
        is_known = cut is not None and cut.expected is None
        if not (is_foreign and reading.is_own) or is_known or (cut is None and reading.tokens is not None):
            return False
        common, _ = self._in_common(session, reading.record)
        self._cuts[session] = _Cut(common) if cut is None else _Cut(min(common, cut.tokens), cut.source)
        return self._cuts[session].tokens > session.kv.base

    def _not_usable(self, session: Session, reading: _Reading, error: Exception) -> None:
        outcome = error.outcome if isinstance(error, CopyUnusable) else "failed"
        if not reading.is_own:  # of another session, which will find out by itself
            logger.warning("a copy of a session that begins alike is not used (%s): %s", outcome, error)
            self._metrics.copies_read.labels(outcome).inc()
            self._index.unlearn(reading.record)
            return
        if outcome == "failed":
            session.forget_entries()
        self._not_used(session, outcome, error)

    def _not_used(self, session: Session, outcome: str, error: Exception) -> None:
        logger.warning(
            "a copy of a session's K/V is not used (%s), and its history is prefilled: %s",
            outcome,
            error,
            exc_info=None if isinstance(error, CopyUnusable) else unexplained(error),
            extra=_about(session),
        )
        self._metrics.copies_read.labels(outcome).inc()
        self._cuts.pop(session, None)
        self._index.drop(session.session_id)

    def keep_for_rewind(self, session: Session) -> Rewound:
        # What is in memory is taken over there, and newer.
        cut = self._begins_as(session)
        lent = None if cut is None else self._index.lend(session.session_id)

        def rewound(new: Session | None) -> None:
            if new is None:
                if lent is not None:
                    self._index.give_up(lent)
            elif cut is not None:
                tokens = min(cut.tokens, entries_kept(len(new.history)))
                self._cuts[new] = replace(cut, tokens=tokens, source=cut.source if lent is None else "")
                if lent is not None:
                    self._index.hand_over(lent, new.session_id)

        return rewound

    def forked(self, parent: Session, fork: Session) -> None:
        if not fork.kv.context.geometry.rotates_as(parent.kv.context.geometry):
            return
        if (cut := self._begins_as(parent)) is not None:
            self._cuts[fork] = replace(cut, tokens=min(cut.tokens, entries_kept(len(fork.history))))

    def _begins_as(self, session: Session) -> _Cut | None:
        """What one that begins like this session may be read from; None: from nothing, or this one is in memory."""
        cut, record = self._cuts.get(session), self._copy_of(session)
        if record is None or session.kv.length > session.kv.base:
            return None
        if cut is not None:
            return replace(cut, source=record.session_id)
        if record.length > len(session.history):  # it was rewound before this start
            return _Cut(self._in_common(session, record)[0], record.session_id)
        facts = CopyFacts.of(self._fingerprint(session), session.history, record.length)
        return _Cut(record.length, record.session_id, facts.as_text())

    def _copy_of(self, session: Session) -> CopyRecord | None:
        record, cut = self._index.find(session.session_id), self._cuts.get(session)
        return record if record is not None or cut is None or not cut.source else self._index.find(cut.source)

    def foreseen(self, session: Session) -> int:
        record, tokens = self._own(session)
        if record is None or not self._pays(record.nbytes, found := tokens or record.length):
            return 0
        return found

    def invalidate(self, session: Session) -> None:
        """Entries of the session cannot be trusted, and a snapshot may have them: remove it."""
        if self._saving is not None and self._saving.session is session:
            self._give_up(self._saving, "given_up")
        self._index.drop(session.session_id)

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The engine's thread has ended: save what is not saved, for some seconds."""
        self._readings.clear()
        self._reader.shutdown(cancel_futures=True)
        self.save_all(_STOP_SECONDS)
        if self._saving is not None:
            self._give_up(self._saving, "given_up")
        self._writer.shutdown()

    def save_all(self, seconds: float) -> None:
        """Save the idle sessions that are not saved, those used last first, until so much time has passed."""
        until = time.monotonic() + seconds
        self._finish(until)
        sessions, kept = self._store.sessions(), set[str]()
        for session in reversed(sessions):
            if time.monotonic() > until:
                break
            self._resting.pop(session, None)
            kept.add(session.session_id)
            if not session.is_transient:
                try:
                    self._saving = self._begin(session, kept=kept)
                except Exception as error:  # noqa: BLE001 - logged, and the history has all
                    _log_failure(session, error)
                self._finish(until)
        for session in sessions:
            self._index.used(session.session_id)

    def _finish(self, until: float) -> None:
        while (saving := self._saving) is not None and (left := until - time.monotonic()) > 0:
            pending: Future[Any] | None = saving.finished or saving.written
            if pending is not None:
                wait([pending], left)
            self.poll()


def _pieces(saved: Saved) -> Iterator[tuple[str, int, tuple[Tensor, ...]]]:
    """All that is saved, in host memory of its own: what is saved may be views."""
    for name, pieces in saved.items():
        for index, tensors in enumerate(pieces):
            yield name, index, tuple([tensor.to("cpu", copy=True) for tensor in tensors])


def _log_failure(session: Session, error: Exception) -> None:
    logger.warning(
        "a copy of a session's K/V could not be saved: %s", error, exc_info=unexplained(error), extra=_about(session)
    )


def _about(session: Session) -> dict[str, str]:
    return about_session(session.session_id)
