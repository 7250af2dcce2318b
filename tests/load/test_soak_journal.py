"""The long runs of the journal: parts that are done count once, and what several runs did is in one record."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from inference_engine.errors import ConfigError
from laboratory.evaluation.record import read_record
from scripts.soak_journal import Part, Soak, journal_digest, main, read_parts
from tests.further import further_test

HERE = {"commit": "a" * 40, "journal": journal_digest(), "machine": "a machine"}
ONE = Part("states", "states", 7, {"whole": 150}, [], 2.5, HERE)


def written(path: Path, *parts: Part) -> Path:
    path.write_text("".join(json.dumps(asdict(part)) + "\n" for part in parts), encoding="utf-8")
    return path


def test_parts_of_another_journal_and_a_seed_that_comes_twice_are_refused(tmp_path: Path) -> None:
    mine = written(tmp_path / "mine", ONE, replace(ONE, seed=8))
    assert len(read_parts([mine, tmp_path / "not there"], HERE)) == 2
    other = written(tmp_path / "other", replace(ONE, where={**HERE, "journal": "0"}))
    with pytest.raises(ConfigError, match="another journal"):
        read_parts([mine, other], HERE)
    with pytest.raises(ConfigError, match="is there twice"):
        read_parts([mine, written(tmp_path / "again", ONE)], HERE)


def test_a_run_does_what_is_missing_with_seeds_that_were_not_used() -> None:
    soak = Soak(1, float("inf"), HERE, [ONE, replace(ONE, name="states control", seed=9)], None)
    assert list(soak.batches("states", 500, 200, 6)) == [(8, 200), (9, 150)]
    assert not list(soak.batches("states", 150, 200, 6))


@further_test
def test_a_record_sums_what_runs_before_did_and_says_where(tmp_path: Path) -> None:
    before = replace(ONE, where={**HERE, "machine": "another machine"})
    parts = written(tmp_path / "parts", before)
    assert main(["power", "--count", "170", "--parts", str(parts), "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("soak_power/*/record.json")
    found = read_record(path, "soak_power", "machines")
    assert found["values"]["states, in all"]["median"] == 170
    machines = {row["machine"]: row["amount"] for row in found["tables"]["machines"]}
    assert machines.pop("another machine") == 150
    assert list(machines.values()) == [20 + 150]  # and its control
    assert len(parts.read_text(encoding="utf-8").splitlines()) == 3
