"""The control of kills: a journal that tells before it records."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from inference_engine.session.journal import SAFE, Receipt
from inference_engine.session.sqlite_journal import SQLiteJournal


class Early(SQLiteJournal):
    """Answers at once, and records a little later."""

    def receipt(self, session_id: str) -> Receipt:
        return SAFE

    def on_saved(self, words: Callable[[], object], receipt: Receipt | None = None) -> None:
        words()

    def open(self, record: Any) -> Any:
        return self._all_sent(super().open(record))

    def load(self, session_id: str, owner: str) -> Any:
        kept = super().load(session_id, owner)
        if kept is not None:
            self._all_sent(kept.saved)
        return kept

    def _commit(self, changes: Any) -> None:
        time.sleep(0.02)
        super()._commit(changes)

    @staticmethod
    def _all_sent(saved: Any) -> Any:
        saved.tokens = sys.maxsize
        return saved
