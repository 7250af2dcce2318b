"""One command measures recall, KL, bytes and speed side by side, and nothing it cannot know beyond a trained length."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from inference_engine.errors import InvalidArgument
from laboratory.evaluation import cost, ladder
from laboratory.evaluation.models import Target
from laboratory.evaluation.record import write_record

WINDOW = "sink_window:sink=2,window=32"


def arguments(*typed: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ladder.add_arguments(parser)
    parser.add_argument("--quick", action="store_true")
    common = ("--kind=looped", "--strategies", WINDOW, "--control=sink_window:sink=4,window=16", "--count=8")
    return parser.parse_args([*common, "--texts=1", "--rounds=1", "--tokens=3", "--trials=2", *typed])


def test_a_length_has_a_line_for_each_strategy_with_all_that_was_measured(tiny_target: Target, tmp_path: Path) -> None:
    payload = ladder.main(arguments("--lengths", "401", "--trained=433", "--task", "values"), tiny_target)
    write_record("ladder", {"command": "kakeya evaluate ladder", **payload}, results_dir=tmp_path)
    rows = {(row["length"], row["strategy"]): row for row in payload["tables"]["ladder"]}
    full, window = rows[401, "full"], rows[401, WINDOW]
    assert window["bytes"] < full["bytes"] <= full["bytes at most"]
    assert window["KL"] > full["KL"] == 0
    for row in (full, window):
        assert row["values"] in range(3) and row["first token seconds"] > 0 and row["tokens/s"] > 0
    control = payload["tables"]["control"]
    assert all(row["out of its reach"] >= 1 and row["of those found"] == 0 for row in control)


def test_beyond_the_trained_length_there_are_bytes_and_times_only(tiny_target: Target) -> None:
    payload = ladder.main(arguments("--lengths=200", "--trained=0"), tiny_target)
    for row in payload["tables"]["ladder"]:
        assert row["KL"] is None and "single" not in row
        assert row["bytes"] > 0 and row["tokens/s"] > 0
    assert [row["strategy"] for row in payload["tables"]["ladder"]] == ["full", WINDOW]


def test_a_control_that_is_no_window_is_refused(tiny_target: Target) -> None:
    with pytest.raises(InvalidArgument, match="must be a sink_window"):
        ladder.main(arguments("--lengths=200", "--control=full"), tiny_target)


def test_lengths_that_are_done_are_kept_when_it_is_interrupted(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = cost.measure

    def measure(*given: Any, lengths: Sequence[int], **named: Any) -> Any:
        if lengths == [300]:
            raise KeyboardInterrupt
        return measured(*given, lengths=lengths, **named)

    monkeypatch.setattr(cost, "measure", measure)
    saved: list[dict[str, Any]] = []
    payload = ladder.main(arguments("--lengths", "300", "200", "--trained=0"), tiny_target, saved.append)
    assert [row["length"] for row in payload["tables"]["ladder"]] == [200, 200]
    assert [one["config"]["lengths"] for one in saved] == [[200]]
    assert payload["tables"]["left out"] == [{"cell": "all at 300", "reason": "ended before it"}]
