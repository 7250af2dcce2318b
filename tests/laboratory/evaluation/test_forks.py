"""Forks are measured against sessions that are given everything, and say what those say."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from inference_engine.errors import InvalidArgument
from laboratory.evaluation.forks import ANEW, COPIED, SHARED, add_arguments, main, measure
from laboratory.evaluation.models import Target
from laboratory.evaluation.record import write_record
from tests.tiny import VOCABULARY

TEXT = [(7 * place) % VOCABULARY for place in range(400)]


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    add_arguments(parser)
    return parser.parse_args(words)


def test_every_variant_gives_the_same_sessions_and_leaves_none_behind(tiny_target: Target) -> None:
    found = measure(tiny_target, TEXT, 100, forks=3, appended=5, tokens=8, rounds=1)
    assert set(found) == {SHARED, COPIED, ANEW}
    (shared,), (copied,), (anew,) = found[SHARED], found[COPIED], found[ANEW]
    assert shared.token_ids == copied.token_ids == anew.token_ids
    assert len(set(anew.token_ids)) == 3, "each was given something of its own"
    assert all(len(ids) == 1 + 8 for ids in anew.token_ids)
    # The target's model has a layer with a window of its own, so that every fork copies.
    assert shared.reserved_bytes == copied.reserved_bytes == anew.reserved_bytes
    assert shared.held_bytes == anew.held_bytes > 0


def test_a_record_says_bytes_seconds_and_agreement_of_each_variant(tiny_target: Target, tmp_path: Path) -> None:
    arguments = parsed("--lengths", "60", "--forks", "2", "--appended", "3", "--tokens", "8", "--rounds", "2")
    payload = main(arguments, tiny_target)
    write_record("forks", {"command": "kakeya evaluate forks", **payload}, results_dir=tmp_path)
    values = payload["values"]
    for variant in (SHARED, COPIED):
        assert values[f"sessions with the tokens of anew, {variant}, at 60"]["median"] == 1
        assert values[f"first_token_seconds ÷ anew, {variant}, at 60"]["count"] == 2
        assert values[f"reserved_bytes ÷ anew, {variant}, at 60"]["median"] == 1
    assert [row["method"] for row in payload["tables"]["forks"]] == [SHARED, COPIED, ANEW]


def test_numbers_that_measure_nothing_are_refused(tiny_target: Target) -> None:
    with pytest.raises(InvalidArgument, match="tokens"):
        main(parsed("--tokens", "1"), tiny_target)
