"""One command measures recall, KL, bytes and speed side by side, and nothing it cannot know beyond a trained length."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from inference_engine.config import EngineConfig, ModelConfig
from laboratory.evaluation import cost, ladder
from laboratory.evaluation.made_models import MadeTarget
from laboratory.evaluation.models import Target
from laboratory.evaluation.record import write_record
from laboratory.training.made_target import open_made_target
from tests.laboratory.typed import typed_for
from tests.tiny import SMALL

WINDOW = "sink_window:sink=2,window=32"
SELECT = "restored:sink=4,window=16,source=latent,mode=select,budget=160"
GATHER = "gather:budget=160,sink=4,window=16,scorer=components"
MISSING = "layer_window:full_layers=9"


def arguments(*typed: str) -> argparse.Namespace:
    common = ("--kind=looped", "--strategies", WINDOW, "--control=sink_window:sink=4,window=16", "--count=8")
    return typed_for(ladder.add_arguments, *common, "--texts=1", "--rounds=1", "--tokens=3", "--trials=2", *typed)


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
