"""A journal whose disk fails, is full, or loses power keeps what it has confirmed."""

from __future__ import annotations

import random
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw
import pytest

from inference_engine.metrics import EngineMetrics
from inference_engine.session.journal_folder import RESERVE
from inference_engine.session.sqlite_journal import FILE, SQLiteJournal
from inference_engine.session.writer import Change, DiskFull
from inference_engine.types import Durability
from tests.facade import a_checkpoint_after_each_commit
from tests.further import further
from tests.kept import sqlite_journal as open_journal
from tests.session.faulty_disk import FaultyDisk
from tests.session.talks import (
    Talk,
    cut_power,
    fail_calls,
    fill_disk,
    start_read_only,
)


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_after_any_error_of_the_disk_nothing_more_is_confirmed_and_what_was_is_there(tmp_path: Path, kind: str) -> None:
    assert fail_calls(tmp_path, kind, (*range(1, 12), 17, 29, 60, 111))["whole"] == 15


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_a_checkpoint_that_fails_is_an_error_of_the_disk(tmp_path: Path, kind: str) -> None:
    with a_checkpoint_after_each_commit():
        assert fail_calls(tmp_path, kind, range(1, 9))["whole"] == 8


def test_a_full_disk_is_waited_for_and_loses_nothing(tmp_path: Path) -> None:
    assert fill_disk(tmp_path, (1, 2, 3, 5, 8, 13, 40)) == {"whole": 14}


def test_a_limit_on_what_a_process_may_write_is_a_full_disk(tmp_path: Path) -> None:
    """As a quota is: the system has a name of its own for each, and SQLite knows one."""
    journal = open_journal(tmp_path, Durability.POWER)
    talk = Talk(journal)
    talk.step()
    talk.wait()
    was = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = tmp_path / f"{FILE}-wal"
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size, was[1]))
    try:
        while not journal.is_full:
            talk.step()
            assert journal._writer.flush(0.05) or not journal.failure
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, was)
    talk.wait()
    assert not journal.is_full
    journal.stop()
    assert talk.check(tmp_path) == "whole"


def test_a_session_is_purged_on_a_full_disk_from_the_reserve(tmp_path: Path) -> None:
    talk = Talk(open_journal(tmp_path, Durability.POWER))
    while not (session_ids := list(talk.journal._open)):
        talk.step()
    talk.wait()
    talk.journal.stop()

    class OnAFullDisk(SQLiteJournal):
        def _transact(self, changes: Sequence[Change]) -> None:
            if (tmp_path / RESERVE).exists():
                raise DiskFull
            super()._transact(changes)

    journal = OnAFullDisk(tmp_path, Durability.POWER, weights=None, metrics=EngineMetrics())
    (owner,) = {entry.record.owner for entry in journal.everyone() if entry.record.session_id == session_ids[0]}
    journal.purge(session_ids[0], owner)
    assert session_ids[0] not in {entry.record.session_id for entry in journal.everyone()}
    journal.stop()


def test_a_folder_that_cannot_be_written_is_refused_and_loses_nothing() -> None:
    assert start_read_only((0, 7)) == {"whole": 6}


@pytest.mark.parametrize(("seed", "states"), [(0, 400), *(further(seed, 1000) for seed in range(10))])
def test_whatever_a_loss_of_power_leaves_has_all_that_was_confirmed(tmp_path: Path, seed: int, states: int) -> None:
    assert cut_power(tmp_path, seed=seed, states=states) == {"whole": states}


def test_a_log_whose_syncs_are_left_out_is_caught(tmp_path: Path) -> None:
    """The control: so many states are enough to notice."""
    assert cut_power(tmp_path, seed=2, states=80, without_syncs_of="-wal").keys() != {"whole"}


def test_cuts_that_are_said_to_leave_the_same_leave_equal_files(tmp_path: Path) -> None:
    """Only one of them is looked at."""
    with FaultyDisk("power") as disk:
        journal = open_journal(tmp_path, Durability.POWER, vfs=disk.name)
        disk.record(tmp_path)
        talk = Talk(journal)
        for step in range(6):
            talk.step()
            talk.wait()
            if step == 3:
                with journal._db_lock:
                    journal._checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)
        journal.stop()
        for without in ("\0", "-wal"):
            known = dict[tuple[Any, ...], dict[str, bytes]]()
            for cut in disk.cuts(random.Random(1), draws=1000, without_syncs_of=without):
                assert known.setdefault(cut.left, cut.files()) == cut.files()
            assert 10 < len(known) < 1000
