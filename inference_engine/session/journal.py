"""The journal: every change of a history is recorded here before anybody is told of it.

`Journal` is what any log has to offer. `MemoryJournal`, the only one there is, keeps the records of open sessions in
memory, from which a session can be rebuilt while the process lives. A record that `append` returned from is a record
that counts; if it raises, the history did not change.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inference_engine.types import Mark

TokenIds = NDArray[np.uint32]


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

    def append(self, session_id: str, position: int, token_ids: TokenIds, mark: Mark) -> None: ...

    def close(self, session_id: str) -> None:
        """Forget the session: it was closed, evicted or failed."""

    def read(self, session_id: str) -> tuple[SessionRecord, Sequence[TokensRecord]]:
        """How the session began and all that joined it since. Raises KeyError for one that is not open."""


class MemoryJournal:
    """Records in memory, gone with the process. One generated token joins the record of the one before it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, tuple[SessionRecord, list[tuple[int, Mark, bytearray]]]] = {}

    def open(self, record: SessionRecord) -> None:
        with self._lock:
            assert record.session_id not in self._sessions
            self._sessions[record.session_id] = (record, [])

    def append(self, session_id: str, position: int, token_ids: TokenIds, mark: Mark) -> None:
        data = token_ids.astype("<u4").tobytes()
        with self._lock:
            runs = self._sessions[session_id][1]
            end = runs[-1][0] + len(runs[-1][2]) // 4 if runs else 0
            assert position == end, f"a record for position {position} follows one that ends at {end}"
            if runs and mark is Mark.GENERATED and runs[-1][1] is Mark.GENERATED:
                runs[-1][2].extend(data)
            else:
                runs.append((position, mark, bytearray(data)))

    def close(self, session_id: str) -> None:
        with self._lock:
            self._sessions.pop(session_id, None)

    def read(self, session_id: str) -> tuple[SessionRecord, Sequence[TokensRecord]]:
        with self._lock:
            record, runs = self._sessions[session_id]
            return record, [
                TokensRecord(position, np.frombuffer(bytes(data), dtype="<u4").astype(np.uint32), mark)
                for position, mark, data in runs
            ]
