"""What the bench of the journal counts without servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_engine.session.journal import SessionRecord
from laboratory.evaluation.record import exact
from scripts import bench_journal
from scripts.bench_journal import FRAME_BYTES, fill, journal_of, logs, sizes, verdicts


def test_a_database_of_short_turns_is_hardly_larger_than_its_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_journal, "TURNS", ((5000, 500), (100, 100)))
    monkeypatch.setattr(bench_journal, "TURNED_IDS", 200_000)
    values = sizes(tmp_path)
    long, short = (value["median"] for value in values.values())
    assert 0.75 < long < short < 1.1  # an id takes three bytes of four


def test_sessions_that_are_added_to_a_folder_are_like_the_one_that_is_there(tmp_path: Path) -> None:
    with journal_of(tmp_path / "state") as journal:
        journal.open(SessionRecord("session-" + "0" * 16, "alice", "full", None, (1,), label="a label"))
        journal.leave("session-" + "0" * 16)
    ids = fill(tmp_path / "state", 3)
    with journal_of(tmp_path / "state") as journal:
        kept = journal.load(ids[0], "alice")
        assert kept is not None
        assert kept.record.label == "a label"
        assert sum(len(row.token_ids) for row in kept.tokens) == bench_journal.IDS
        assert len(journal.everyone()) == 4
        assert not journal._tables.tail.sessions(), "no turn of theirs goes on"


def test_the_log_of_a_step_is_counted_and_rows_by_session_take_many_times_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("STEPS", 20), ("STEPPED_IDS", 200), ("STREAMS", (32,))):
        monkeypatch.setattr(bench_journal, name, value)
    values = logs(tmp_path)
    as_written, by_session = (value["median"] for value in values.values())
    assert [row["value"] for row in verdicts(values)] == ["log of a commit, 32 streams, a token each"]
    assert FRAME_BYTES <= 1024 * as_written <= 4 * FRAME_BYTES
    assert by_session > 4 * as_written


def test_a_goal_that_is_missed_is_said() -> None:
    values = {"database ÷ ids, a": exact(1.05, "ratio"), "database ÷ ids, b": exact(1.2, "ratio")}
    assert [row["met"] for row in verdicts(values)] == [True, False]
