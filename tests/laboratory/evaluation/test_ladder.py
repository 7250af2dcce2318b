"""One command measures recall, KL, bytes and speed side by side, and nothing it cannot know beyond a trained length."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.errors import ConfigError, InvalidArgument
from laboratory.evaluation import bytes_and_speed, cost, ladder
from laboratory.evaluation.made_models import MadeTarget
from laboratory.evaluation.models import Target
from laboratory.evaluation.record import write_record
from laboratory.training.made_target import open_made_target
from tests.tiny import SMALL

WINDOW = "sink_window:sink=2,window=32"
SELECT = "restored:sink=4,window=16,source=latent,mode=select,budget=160"
GATHER = "gather:budget=160,sink=4,window=16,scorer=components"
MISSING = "layer_window:full_layers=9"


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


@pytest.fixture(scope="module")
def made_target() -> Iterator[MadeTarget]:
    strategies = arguments("--strategies", WINDOW, SELECT, GATHER, MISSING).strategies
    model = ModelConfig(device="cpu", threads=1)
    with open_made_target("tiny", model, EngineConfig(**SMALL), strategies) as target:
        yield target


def test_random_weights_give_bytes_and_times_of_all_that_fits_the_shape(
    made_target: MadeTarget, tmp_path: Path
) -> None:
    typed = arguments("--lengths", "400", "200", "--rounds=2", "--strategies", WINDOW, SELECT, GATHER, MISSING)
    payload = ladder.main(typed, made_target)
    write_record("ladder", {"command": "kakeya evaluate ladder", **payload}, results_dir=tmp_path)
    rows = {(row["length"], row["strategy"]): row for row in payload["tables"]["ladder"]}
    names = payload["config"]["strategies"][:-1]
    assert list(rows) == [(length, name) for length in (200, 400) for name in names]
    assert all(row["weights"] == "random" and row["bytes"] <= row["bytes at most"] for row in rows.values())
    window, select = names[1:3]
    assert rows[400, window]["bytes"] == rows[200, window]["bytes"] < rows[400, "full"]["bytes"]
    assert rows[400, select]["bytes"] < rows[400, select]["bytes at most"]
    for row in rows.values():
        assert min(row["prefill tokens/s"], row["first token seconds"], row["ms of a step"]) > 0
    values, config = payload["values"], payload["config"]
    for length, name in rows:
        # Round 0 is run and not counted, and neither is the first of two prefills.
        assert values[f"decode step, {name}, at {length}"]["count"] == 2
        assert values[f"first token of a later Generate, {name}, at {length}"]["count"] == 2
        assert values[f"prefill, {name}, at {length}"]["count"] == 1
    assert not any("KL" in name for name in values)
    assert config["model"] == "tiny-random" and config["weights"] == "random, made in memory"
    assert config["components"] == "calibrated on random ids" and "random bases" in config["latent"]
    assert {row["cell"] for row in payload["tables"]["left out"]} == {
        f"layer_window:sink=4,window=1024,full_layers=9, at {length}" for length in (200, 400)
    }


def test_ratios_of_random_weights_are_those_of_a_round(
    made_target: MadeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = iter((2.0, 8.0, 1.0, 1.0))  # window, full; full, window; the round before them is not counted
    monkeypatch.setattr(bytes_and_speed, "step_seconds", lambda _times: next(taken))
    payload = ladder.main(arguments("--lengths=40", "--rounds=2", "--prefills=1"), made_target)
    ratio = payload["values"][f"decode speed ÷ full, {WINDOW}, at 40"]
    assert (ratio["low"], ratio["median"], ratio["high"]) == (1.75, 2.5, 3.25)  # of 4 and 1


def test_lengths_of_random_weights_are_kept_as_they_are_done(
    made_target: MadeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = bytes_and_speed.measure

    def measure(target: Any, strategies: Any, length: int, typed: Any) -> Any:
        if length == 60:
            raise KeyboardInterrupt
        return measured(target, strategies, length, typed)

    monkeypatch.setattr(bytes_and_speed, "measure", measure)
    saved: list[dict[str, Any]] = []
    payload = ladder.main(arguments("--lengths", "80", "60", "40", "--prefills=1"), made_target, saved.append)
    assert [one["config"]["lengths"] for one in saved] == [[40]] == [payload["config"]["lengths"]]
    assert [row["cell"] for row in payload["tables"]["left out"]] == ["all at 60", "all at 80"]


@pytest.mark.parametrize("typed", ["--trained=0", "--published=loki"])
def test_what_random_weights_cannot_say_is_refused(made_target: MadeTarget, typed: str) -> None:
    with pytest.raises(InvalidArgument, match="no recall and no KL"):
        ladder.main(arguments("--lengths=40", typed), made_target)


def test_random_weights_are_for_torch() -> None:
    with (
        pytest.raises(ConfigError, match="made in memory, for torch"),
        open_made_target("tiny", ModelConfig(device="cpu", backend="native"), EngineConfig(**SMALL), []),
    ):
        pass
