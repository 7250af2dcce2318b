"""The benchmarks on a GPU, on a CPU: the references in the place of kernels, a tiny model."""

from __future__ import annotations

from pathlib import Path

import torch

from laboratory.bench import gpu_ops
from laboratory.bench.__main__ import main
from laboratory.evaluation.record import read_record


def test_steps_are_shown_beside_their_baselines_and_their_floors(tmp_path: Path) -> None:
    typed = "--shapes tiny --device cpu --dtype float32 --cells 1x700 1x700/sink_window:sink=4,window=256 2x24 1x100000"
    more = f"--compiled 700 --prefill 64 --attended 100 --rounds 2 --tokens 4 --turns 8 --kv-bytes {2**22}"
    where = ["--results", str(tmp_path)]
    assert main(["gpu-steps", *typed.split(), *more.split(), *where]) == 0
    (path,) = tmp_path.glob("steps_cpu_float32/*/record.json")
    found = read_record(path, "steps", "decode steps")
    assert set(found["left_out"]) == {"tiny, 1 x 100000"}
    rows = {(row["strategy"], row["sessions"]): row for row in found["tables"]["decode steps"]}
    full, windowed = rows["full", 1], rows["sink_window:sink=4,window=256", 1]
    assert full["entries read"] > 700 > windowed["entries read"] and full["floor ms"] > windowed["floor ms"]
    assert {"÷ full", "÷ transformers, compiled"} <= set(windowed)
    ratio = found["values"]["time of a step, tiny, sink_window:sink=4,window=256 ÷ full, 1 x 700"]
    assert (ratio["unit"], ratio["count"]) == ("ratio", 2)
    assert found["values"]["ceiling, bytes read"]["median"] > 0
    assert found["values"]["turn of 8 new tokens, tiny, full, 2 x 24"]["count"] == 2
    turns = {row["strategy"]: row for row in found["tables"]["turns"] if row["sessions"] == 1}
    assert set(turns) == {"full", "sink_window:sink=4,window=256"}
    assert found["values"]["turn of 8 new tokens, tiny, full, 1 x 700"]["count"] == 2
    assert "÷ full" in turns["sink_window:sink=4,window=256"] and turns["full"]["÷ a decode step"] > 0
    # Nothing is said of prefills that did not attend.
    assert [row["cell"] for row in found["tables"]["prefills"]] == ["full, 2 x 24", "in chunks of the default, 1 x 64"]


def test_steps_of_strategies_that_are_calibrated_and_of_other_engines_take_turns(tmp_path: Path) -> None:
    select = "restored:sink=2,window=256,source=latent,mode=select,budget=512"
    typed = f"--shapes tiny --device cpu --dtype float32 --cells 1x700 1x700/{select} --compiled --prefill --turns"
    more = f"--invariant --rounds 2 --tokens 4 --kv-bytes {2**24} --results {tmp_path}"
    assert main(["gpu-steps", *typed.split(), *more.split()]) == 0
    (path,) = tmp_path.glob("steps_cpu_float32/*/record.json")
    found = read_record(path, "steps", "decode steps")
    rows = {row["strategy"]: row for row in found["tables"]["decode steps"]}
    assert set(rows) == {"full", select, "full, batch-invariant"} and "÷ full" in rows["full, batch-invariant"]
    most = {name: found["values"][f"most bytes that a session may hold, tiny, {name}, 1 x 700"] for name in rows}
    assert 0 < most[select]["median"] != most["full"]["median"] == most["full, batch-invariant"]["median"]
    assert "--results" not in found["command"]


def test_operations_are_shown_beside_the_best_other_and_wrong_ones_are_left_out(tmp_path: Path) -> None:
    typed = "--device cpu --attention 2x48 --topk 2x300 --rounds 2"
    assert main(["gpu-ops", *typed.split(), "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("ops_cpu_bfloat16/*/record.json")
    found = read_record(path, "ops", "µs of an operation")
    cases = {row["case"]: row for row in found["tables"]["µs of an operation"]}
    assert cases["attention, 2 x 48"]["best other"] == "SDPA"
    assert found["values"]["attention, 2 x 48, ours ÷ SDPA"]["count"] == 2
    assert cases["2 x 150 of 300"]["best other"] == "torch.topk"
    assert found["left_out"] == {}


def test_an_operation_that_gives_something_else_is_not_timed() -> None:
    contenders = gpu_ops.Contenders(torch.device("cpu"))
    contenders.add("wrong", lambda _copy: 1, 1, lambda found: f"{found} is not 2")
    assert not contenders.timed and contenders.left_out == {"wrong": "1 is not 2"}
