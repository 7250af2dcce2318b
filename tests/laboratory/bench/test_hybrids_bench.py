"""The bench of hybrids, on four layers."""

from __future__ import annotations

from pathlib import Path

from inference_engine.cli.main import main
from laboratory.bench import open_chunk
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


def test_a_record_compares_how_many_tokens_are_folded_together(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    assert main(["bench", "open-chunk", "--rounds", "1", "--layers", "1", "--results", str(folder)]) == 0
    (path,) = folder.glob("open_chunk_cpu/*/record.json")
    found = read_record(path, "open_chunk_cpu", None)["values"]
    assert found["time of a token, chunks of 8 ÷ of 8"]["median"] == 1
    sizes = [found[f"bytes, chunks of {tokens} ÷ of the state alone"]["median"] for tokens in open_chunk.CHUNKS]
    assert sizes == sorted(sizes) and sizes[0] > 1
