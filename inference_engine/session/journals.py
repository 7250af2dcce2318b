"""The journals that there are, by the kind that the setting `journal` names: `KIND:PLACE`."""

from __future__ import annotations

from inference_engine.config import EngineConfig, in_full
from inference_engine.errors import ConfigError
from inference_engine.metrics import EngineMetrics
from inference_engine.session.journal import Journal, MemoryJournal
from inference_engine.types import Durability

KINDS = ("sqlite",)


def open_journal(config: EngineConfig, *, weights: str, metrics: EngineMetrics) -> Journal:
    """What the settings keep sessions in; in memory, if nothing.

    weights: digest of the model's, whose journal it is. Raises ConfigError for a kind that there is not, and for a
    place that cannot be used; then nothing was written.
    """
    if config.kept is Durability.NONE:
        return MemoryJournal()
    kind, _, place = config.journal_place.partition(":")
    if kind not in KINDS:
        # Without the place, which may hold a password.
        known = ", ".join(f"{name}:FOLDER" for name in KINDS)
        raise ConfigError(f"journal: there is no journal of the kind {kind!r}; name one as {known}")
    from inference_engine.session.sqlite_journal import SQLiteJournal

    return SQLiteJournal(
        in_full(place), config.kept, weights=weights, metrics=metrics, keep_seconds=config.session_keep_seconds
    )
