"""The journal: every change of a history is recorded here before it is reported (write-ahead).

`Journal` is the interface of any log. `MemoryJournal`, the only implementation, keeps the records of open sessions in
memory; a session can be rebuilt from them while the process lives. A record is valid once `append` has returned; if it
raises, the history did not change. A fork is one record, however long its history.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from inference_engine.session.history import History, Holdings, Leaves, TokenIds
from inference_engine.types import Mark


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """How a session began. `strategy` is its text form."""

    session_id: str
    owner: str
    strategy: str
    limit_tokens: int | None
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokensRecord:
    """Tokens that joined a history at `position`, and how."""

    position: int
    token_ids: TokenIds
    mark: Mark


class Journal(Protocol):
    """A per-session, ordered log. Called with the session's operation held, from any thread."""

    def open(self, record: SessionRecord) -> None: ...

    def fork(self, record: SessionRecord, parent_id: str) -> None:
        """As `open`, for a session that begins with all tokens of the session `parent_id` until now."""

    def append(self, session_id: str, position: int, token_ids: TokenIds, mark: Mark) -> None: ...

    def close(self, session_id: str) -> None:
        """Forget the session: it was closed, evicted or failed."""

    def read(self, session_id: str) -> tuple[SessionRecord, Sequence[TokensRecord]]:
        """How the session began and all tokens since. Raises KeyError for one that is not open."""

    def held_bytes(self, session_id: str | None = None) -> int:
        """Bytes of memory for all sessions, or for one open session, parts shared with forks included; 0 for others."""

    def tidy(self) -> bool:
        """Do deferred work for less than a millisecond. Is there more? Called between steps."""


class MemoryJournal:
    """Records in memory, gone with the process. Tokens of one mark that follow each other are read as one record."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holdings, self._leaves = Holdings(), Leaves()
        self._sessions: dict[str, tuple[SessionRecord, History]] = {}

    def open(self, record: SessionRecord) -> None:
        with self._lock:
            assert record.session_id not in self._sessions
            self._sessions[record.session_id] = (record, History(self._holdings, self._leaves, keeps_seen=False))

    def fork(self, record: SessionRecord, parent_id: str) -> None:
        with self._lock:
            assert record.session_id not in self._sessions
            self._sessions[record.session_id] = (record, self._sessions[parent_id][1].fork())

    def append(self, session_id: str, position: int, token_ids: TokenIds, mark: Mark) -> None:
        with self._lock:
            history = self._sessions[session_id][1]
            assert position == len(history), f"a record for position {position} follows one that ends at {len(history)}"
            history.extend(token_ids, mark)

    def close(self, session_id: str) -> None:
        with self._lock:
            if (known := self._sessions.pop(session_id, None)) is not None:
                known[1].release()

    def read(self, session_id: str) -> tuple[SessionRecord, Sequence[TokensRecord]]:
        with self._lock:
            record, history = self._sessions[session_id]
            records, position = list[TokensRecord](), 0
            for token_ids, mark in history.runs():
                records.append(TokensRecord(position, np.array(token_ids), mark))
                position += len(token_ids)
            return record, records

    def held_bytes(self, session_id: str | None = None) -> int:
        with self._lock:
            if session_id is None:
                return self._holdings.nbytes + self._leaves.going_bytes
            known = self._sessions.get(session_id)
            return 0 if known is None else known[1].nbytes

    def tidy(self) -> bool:
        with self._lock:
            return self._leaves.tidy()
