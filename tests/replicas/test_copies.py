"""Servers with one folder for copies of K/V: a session goes on elsewhere from the copy that another server made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inference_engine.engine import Engine
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategy import KVStrategy
from inference_engine.metrics import EngineMetrics
from inference_engine.session.postgres_journal import PostgresJournal
from inference_engine.types import Durability, Mode
from tests.facade import save_copies
from tests.further import further_test
from tests.kept import WEIGHTS, Database, saved
from tests.laws.test_hibernation_laws import go_on, reads, with_turns
from tests.laws.variants import each_mechanism, engine_for, text
from tests.replicas.test_ownership import brought


@contextmanager
def replica(database: Database, name: str, folder: Path, **settings: Any) -> Iterator[Engine]:
    metrics = EngineMetrics()
    durability = Durability.PROCESS
    journal = PostgresJournal(
        database.dsn, durability, weights=WEIGHTS, metrics=metrics, replica=name, copies_folder=folder
    )
    given = {"journal": journal, "metrics": metrics, "state_dir": name, "hibernate": "always"}
    with engine_for(Mode.BATCHED, hibernate_after_seconds=3600.0, **given, **settings) as engine:
        yield engine


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


@further_test
@each_mechanism
def test_a_session_goes_on_at_another_server_as_if_it_had_stayed(
    database: Database, tmp_path: Path, strategy: KVStrategy
) -> None:
    with replica(database, "one", tmp_path) as one, replica(database, "two", tmp_path) as two:
        session, stays = with_turns(one, strategy), with_turns(one, strategy)
        had = one.session_info(session).cached_tokens
        save_copies(one, tmp_path)
        for each in (session, stays):
            one.append(each, text(25, seed=8))
        saved(one)
        brought(two, session)
        (expected, _), (found, cached) = go_on(one, stays), go_on(two, session)
        assert found == expected
        assert (reads(two, "used"), cached) == (1, had)


def test_a_copy_is_replaced_by_the_next_one_and_goes_with_its_session(database: Database, tmp_path: Path) -> None:
    with replica(database, "one", tmp_path) as one, replica(database, "two", tmp_path) as two:
        session = with_turns(one, Full())
        save_copies(one, tmp_path)
        (first,) = files_of(tmp_path)
        with replica(database, "three", tmp_path):  # which removes nothing of others
            pass
        brought(two, session)
        go_on(two, session)
        had = two.session_info(session).cached_tokens
        save_copies(two, tmp_path)
        (second,) = files_of(tmp_path)
        assert second.parent != first.parent
        brought(one, session)
        one.append(session, text(3, seed=1))
        assert go_on(one, session)[1] == had
        assert reads(one, "used") == 1
        one.close_session(session)
        saved(one)
        assert not files_of(tmp_path)


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_a_copy_of_another_server_that_cannot_be_used_is_prefilled(
    database: Database, tmp_path: Path, harm: str
) -> None:
    with replica(database, "one", tmp_path) as one, replica(database, "two", tmp_path) as two:
        session, stays = (with_turns(one, Full()) for _ in range(2))
        save_copies(one, tmp_path)
        for file in files_of(tmp_path):
            if harm == "gone":
                file.unlink()
            else:
                file.write_bytes(file.read_bytes()[:-1] + b"?")
        brought(two, session)
        assert go_on(two, session)[0] == go_on(one, stays)[0]
        assert not reads(two, "used")
        saved(two)
        assert database.say("select count(*) from kakeya.copies") == [(1,)]


def test_a_server_that_ends_is_gone_on_from_its_copies(database: Database, tmp_path: Path) -> None:
    """One that stops saves them; of one that is killed those that it had made are there."""
    with replica(database, "two", tmp_path) as two:
        with replica(database, "one", tmp_path) as one:
            session = with_turns(one, Full())
            had = one.session_info(session).cached_tokens
        brought(two, session)
        two.append(session, text(5, seed=3))
        assert go_on(two, session)[1] == had
