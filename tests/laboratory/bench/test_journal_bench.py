"""What the bench of the journal counts, and what its servers do."""

from __future__ import annotations

from pathlib import Path

import pytest

from laboratory.bench import journal as bench_journal
from laboratory.bench.journal import FRAME_BYTES, logs, many, sizes, verdicts


def test_a_database_of_short_turns_is_hardly_larger_than_its_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_journal, "TURNS", ((5000, 500), (100, 100)))
    monkeypatch.setattr(bench_journal, "TURNED_IDS", 200_000)
    values = sizes(tmp_path)
    long, short = (value["median"] for value in values.values())
    assert 0.75 < long < short < 1.1  # an id takes three bytes of four


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


def test_servers_start_on_many_kept_sessions_and_each_goes_on(tmp_path: Path) -> None:
    values = many(10, 1, 3, tmp_path)
    assert values["first call of a kept session"]["count"] == 3
    assert values["start, 10 sessions of 8,192 ids"]["median"] > 0
