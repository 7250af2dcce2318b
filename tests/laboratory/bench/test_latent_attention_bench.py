"""The bench of latent attention, on one layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_engine.cli.main import main
from laboratory.bench import expanded_attention
from laboratory.evaluation.record import read_record


def test_a_record_says_what_a_token_takes_in_time_and_bytes(tmp_path: Path) -> None:
    sizes = ["--layers", "1", "--heads", "2", "--lengths", "40", "--rounds", "1", "--tokens", "4"]
    assert main(["bench", "latent-attention", *sizes, "--results", str(tmp_path / "results")]) == 0
    (path,) = tmp_path.glob("results/latent_attention_cpu_float32/*/record.json")
    found = read_record(path, "latent_attention_cpu_float32", None)["values"]
    assert found["greedy tokens equal, ours, at 40"]["median"] == 1
    assert found["decode speed, ours ÷ transformers, at 40"]["median"] > 0
    assert found["bytes of a token"]["median"] == 4 * (512 + 64)


def test_a_record_compares_a_prompt_absorbed_and_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded_attention, "STEPS", ((40, 0), (200, 30)))
    folder = tmp_path / "results"
    assert main(["bench", "expanded-attention", "--rounds", "1", "--results", str(folder)]) == 0
    (path,) = folder.glob("expanded_attention_cpu_float32/*/record.json")
    found = read_record(path, "expanded_attention_cpu_float32", None)["values"]
    for step in ("40 tokens behind 0", "200 tokens behind 30"):
        assert found[f"speed, expanded ÷ absorbed, {step}"]["median"] > 0
        assert found[f"largest difference, {step}"]["median"] < 1e-4
