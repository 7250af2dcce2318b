"""The journals of kills, and their controls: one tells before it records, one does not ask for its lease."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from inference_engine.metrics import EngineMetrics
from inference_engine.session.journal import SAFE, Receipt
from inference_engine.session.kept_journal import KeptJournal
from inference_engine.session.sqlite_journal import SQLiteJournal
from inference_engine.types import Durability


def opened(
    place: str,
    durability: Durability,
    metrics: EngineMetrics,
    *,
    is_early: bool,
    of_database: Mapping[str, Any] = MappingProxyType({"replica": "server"}),
) -> KeptJournal:
    """place: a folder, or the DSN of a database. is_early: the control. of_database: settings of such a journal, and
    whether it `is_unproved`."""
    if "=" not in place:
        kind = EarlyInAFolder if is_early else SQLiteJournal
        return kind(Path(place), durability, weights="scripted", metrics=metrics)
    from inference_engine.session.postgres_journal import PostgresJournal

    class EarlyInADatabase(Early, PostgresJournal):
        pass

    class Unproved(PostgresJournal):
        """Notices later than it answers, however the threads of one that wakes are scheduled."""

        def proof(self) -> Receipt:
            return SAFE

        def _asked(self, session_id: str) -> None:
            time.sleep(0.5)
            super()._asked(session_id)

        def _begin_anew(self, settle: Callable[[], object]) -> None:
            time.sleep(0.5)
            super()._begin_anew(settle)

    is_unproved = of_database.get("is_unproved")
    in_a_database = EarlyInADatabase if is_early else Unproved if is_unproved else PostgresJournal
    settings = {name: value for name, value in of_database.items() if name != "is_unproved"}
    return in_a_database(place, durability, weights="scripted", metrics=metrics, **settings)


class Early(KeptJournal):
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


class EarlyInAFolder(Early, SQLiteJournal):
    pass
