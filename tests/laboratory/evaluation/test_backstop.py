"""How many layers are kept follows from answers beside full's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inference_engine.kv.geometry import Geometry
from laboratory.evaluation.backstop import (
    EVEN,
    NONE,
    RANKED,
    Found,
    Kept,
    chosen_sets,
    critical_mass,
    describe,
    draw,
    reach,
    values,
)
from laboratory.evaluation.layer_ranking import Windows
from laboratory.evaluation.record import VALUE_KEYS
from tests.tiny import tiny_forward

WINDOWS = Windows(sink=2, window=16)
FOUND = Found(
    kept=Kept(RANKED, (3,)),
    hits=39,
    trials=40,
    differing=1,
    lost=1,
    reach_tokens=100,
    divergence=0.1,
    bytes_per_token=10.0,
)


def geometry(*, windowed: bool) -> Geometry:
    return tiny_forward(windowed=windowed).geometry(page_tokens=4, segment_tokens=16)


def test_each_count_is_tried_with_ranked_and_with_evenly_spaced_layers() -> None:
    assert chosen_sets((5, 0, 2), (0, 2, 5), (1, 3)) == [
        Kept(NONE, ()),
        Kept(RANKED, (5,)),
        Kept(EVEN, (2,)),
        Kept(RANKED, (0, 2, 5)),
        Kept(EVEN, (0, 2, 5)),
    ]


def test_reach_ends_at_the_first_needle_that_full_finds_and_the_set_does_not() -> None:
    distances = [10, 40, 20, 30]
    assert reach([True, False, True, True], [True] * 4, distances) == 30
    assert reach([True, True, False, True], [True] * 4, distances) == 10
    assert reach([True, True, False, True], [True, True, False, True], distances) == 40
    assert reach([False] * 4, [True] * 4, distances) == 0


def test_critical_mass_is_the_smallest_set_that_answers_as_full_does() -> None:
    four = replace(FOUND, kept=Kept(RANKED, (1, 2, 3, 4)), differing=0)
    two = replace(FOUND, kept=Kept(RANKED, (1, 2)), differing=2)
    assert critical_mass([four, FOUND, two], RANKED) is FOUND
    assert critical_mass([four, two], RANKED) is four
    assert critical_mass([four], EVEN) is None


def test_each_set_is_reported_beside_full(tmp_path: Path) -> None:
    sets = [Kept(NONE, ()), Kept(RANKED, (1,)), Kept(EVEN, (1,)), Kept(RANKED, (0, 1, 2))]
    hits = {"full": [True, True, False], str(WINDOWS.control()): [False] * 3}
    hits[str(WINDOWS.keeping((1,)))] = [False, True, True]
    hits[str(WINDOWS.keeping((0, 1, 2)))] = [True, True, False]
    found = describe(
        sets,
        WINDOWS,
        geometry(windowed=False),
        hits=hits,
        distances=[80, 60, 40],
        divergence=[0.3, 0.2, 0.2, 0.0],
        length=400,
    )
    none, one, _, every = found
    assert (none.lost, none.reach_tokens, none.answers_as_full) == (2, 40, False)
    assert (one.lost, one.differing, one.reach_tokens) == (1, 2, 60)
    assert (every.differing, every.reach_tokens, every.answers_as_full) == (0, 80, True)
    assert none.bytes_per_token < one.bytes_per_token < every.bytes_per_token
    assert every.bytes_per_token == pytest.approx(geometry(windowed=False).entry_bytes)
    reported = values(hits["full"], found)
    assert reported["critical mass, ranked"]["median"] == 3
    assert "critical mass, evenly spaced" not in reported
    assert all(set(VALUE_KEYS) <= value.keys() for value in reported.values())
    draw({"tables": {"sweep": [one.row() for one in found]}}, tmp_path)
    assert {image.name for image in tmp_path.glob("*.svg")} == {"backstop_recall.svg", "backstop_kl.svg"}
