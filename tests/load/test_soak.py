"""The long runs, made short: parts reach their amounts, shares add up, and what must not be is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laboratory.evaluation.record import load
from tests.further import further_test
from tests.load.mass import PARTS
from tests.load.population import Population, Wrong
from tests.load.turns import Held, Sample, judged
from tests.processes import run

SOAK = Path(__file__).resolve().parents[2] / "scripts" / "soak.py"
AMOUNTS = {"interleavings": 3, "cancels": 12, "calls": 120, "messages": 160}
COUNTS = {"turns": 1000, "tokens": 5000, "sessions": 50, "left": 40, "refused": 0, "wrong": 0}


@pytest.mark.parametrize("part", PARTS)
def test_a_share_reaches_its_amount_and_finds_nothing(part: str) -> None:
    tally = PARTS[part](AMOUNTS[part], 5)
    assert not tally.faults
    assert tally.counts[part] >= AMOUNTS[part]


def test_a_share_that_meets_a_fault_stops_and_says_with_which_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    interleave = Population.interleave

    def a_foreign_token(population: Population, rng: np.random.Generator) -> None:
        if population.counts.interleavings == 2:
            raise Wrong("a token of another session")
        interleave(population, rng)

    monkeypatch.setattr(Population, "interleave", a_foreign_token)
    tally = PARTS["interleavings"](10, 5)
    assert tally.counts["interleavings"] == 2
    assert tally.faults == ["seed 5, interleaving 2: Wrong: a token of another session"]


@further_test
def test_parts_are_shared_out_among_processes_and_recorded_together(tmp_path: Path) -> None:
    done = run(str(SOAK), "--cancels=9", "--processes=2", f"--results={tmp_path}")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("soak_cancels/*/record.json")
    found = load(path)
    assert found["values"]["cancels"]["median"] >= 9
    assert (found["values"]["processes"]["median"], found["values"]["faults"]["median"]) == (2, 0)
    assert found["seeds"] == [100, 101]


def samples(**growth: float) -> list[Sample]:
    """An hour in which nothing grows but what `growth` names: by so much in the second half."""
    steady = {"private_bytes": 2e8, "threads": 4.0, "descriptors": 18.0, "tasks": 40.0}
    middle = [
        {"seconds": 5.0 * number}
        | {name: value + growth.get(name, 0.0) * max(0, number - 50) / 50 for name, value in steady.items()}
        for number in range(100)
    ]
    idle: Any = {"seconds": 0.0, **steady, "tasks": 8.0}
    return [idle, *middle, idle]


def hour(reserved: int = 0, left: int = 0, wrong: int = 0, **growth: float) -> Held:
    before, *middle, after = samples(**growth)
    after = {**after, "descriptors": after["descriptors"] + left}
    return judged(60.0, {**COUNTS, "wrong": wrong}, [before, *middle, after], reserved)


FAULTS: list[tuple[Held, str]] = [
    (hour(private_bytes=4e6), "private memory"),
    (hour(threads=3.0), "threads more"),
    (hour(descriptors=9.0), "descriptors more"),
    (hour(left=2), "2 descriptors are left over"),
    (hour(reserved=64), "64 bytes of K/V are reserved"),
    (hour(wrong=1), "1 wrong"),
]


def test_what_grows_or_is_left_over_or_wrong_is_a_fault(subtests: pytest.Subtests) -> None:
    for found, fault in FAULTS:
        with subtests.test(fault):
            assert any(fault in reported for reported in found.faults), found.faults
