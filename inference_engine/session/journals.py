"""The journals that there are, by the kind that the setting `journal` names: `KIND:PLACE`."""

from __future__ import annotations

import hashlib
import re
import secrets
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inference_engine.config import EngineConfig, in_full
from inference_engine.errors import ConfigError
from inference_engine.metrics import EngineMetrics
from inference_engine.session.clock_jumps import even_clock
from inference_engine.session.journal import Journal, MemoryJournal
from inference_engine.types import Durability

if TYPE_CHECKING:
    from inference_engine.session.postgres_journal import PostgresJournal
    from inference_engine.session.sqlite_journal import SQLiteJournal

KINDS = {"sqlite": "FOLDER", "postgres": "DSN"}
_NAME_BYTES = 56  # with `kakeya ` before them, the most of a connection's name
_NAME = re.compile(f"(?! )[ -~]{{1,{_NAME_BYTES}}}(?<! )")


def open_journal(
    config: EngineConfig, *, weights: str, metrics: EngineMetrics, facts: Mapping[str, str] | None = None
) -> Journal:
    """What the settings keep sessions in; in memory, if nothing.

    weights: digest of the model's, whose journal it is. facts: what decides tokens beside them. Raises ConfigError for
    a kind that there is not, and for a place that cannot be used; then nothing was written.
    """
    if config.kept is Durability.NONE:
        return MemoryJournal()
    kind, _, place = config.journal_place.partition(":")
    if kind == "sqlite":
        from inference_engine.session.sqlite_journal import SQLiteJournal

        return SQLiteJournal(
            in_full(place),
            config.kept,
            weights=weights,
            metrics=metrics,
            keep_seconds=config.session_keep_seconds,
            even_clock=even_clock,
        )
    if kind == "postgres":
        return _in_postgres(
            place,
            config.kept,
            weights=weights,
            metrics=metrics,
            replica=_name(config.replica),
            lease_seconds=config.lease_seconds,
            keep_seconds=config.session_keep_seconds,
            even_clock=even_clock,
            copies_folder=in_full(config.copies_dir) if config.copies_dir else None,
            facts=facts,
        )
    # Without the place, which may hold a password.
    known = " or ".join(f"{name}:{place}" for name, place in KINDS.items())
    raise ConfigError(f"journal: there is no journal of the kind {kind!r}; name one as {known}")


def _name(given: str) -> str:
    """Of a server, as its connections have it, too: PostgreSQL cuts that, and spells other letters in its own way.

    given: "" for the machine's. Raises ConfigError for one that cannot be had, or of a machine that has none.
    """
    name = given or socket.gethostname()
    if _NAME.fullmatch(name):
        return name
    if given or not name.strip():
        raise ConfigError(
            f"replica: {name!r} is no name of a server{'' if given else ', but this machine has it'}; give one of 1 to "
            f"{_NAME_BYTES} characters of ASCII with --replica"
        )
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{re.sub('[^!-~]', '_', name)[: _NAME_BYTES - 9]}-{digest}"


def open_for_tools(place: str) -> SQLiteJournal | PostgresJournal:
    """place: a state folder, which no server may use meanwhile, or `postgres:DSN`, which they may.

    Raises ConfigError.
    """
    if place.startswith("postgres:"):
        name = f"tool {secrets.token_hex(8)}"
        return _in_postgres(
            place.partition(":")[2], Durability.PROCESS, weights=None, metrics=EngineMetrics(), replica=name
        )
    from inference_engine.session.sqlite_journal import SQLiteJournal

    return SQLiteJournal(
        in_full(place.removeprefix("sqlite:")), Durability.POWER, weights=None, metrics=EngineMetrics()
    )


def _in_postgres(place: str, durability: Durability, **settings: Any) -> PostgresJournal:
    try:
        from inference_engine.session.postgres_database import parsed
        from inference_engine.session.postgres_journal import PostgresJournal
    except ImportError as error:
        raise ConfigError(
            f"journal: postgres needs psycopg, which cannot be imported ({error}): "
            "pip install 'kakeya-runtime[postgres]'"
        ) from error
    return PostgresJournal(parsed(place), durability, **settings)
