"""The bench of hybrids, on four layers."""

from __future__ import annotations

from pathlib import Path

from inference_engine.cli.main import main
from laboratory.evaluation.record import read_record
from tests.tiny_native import library


def test_a_record_says_what_a_token_takes_natively_and_by_modules(tmp_path: Path) -> None:
    library()
    sizes = ["--layers", "4", "--lengths", "40", "--rounds", "1", "--tokens", "4"]
    assert main(["bench", "hybrids", *sizes, "--results", str(tmp_path / "results")]) == 0
    (path,) = tmp_path.glob("results/hybrids_cpu_float32/*/record.json")
    found = read_record(path, "hybrids_cpu_float32", None)["values"]
    for backend in ("native", "torch"):
        assert found[f"greedy tokens equal, {backend}, at 40"]["median"] == 1
        assert found[f"bytes of states, {backend}"]["median"] > 3 * 16 * 128 * 128 * 4
    assert found["decode speed, native ÷ torch, at 40"]["median"] > 0
