"""The bench of K/V from files, on a tiny model."""

from __future__ import annotations

from pathlib import Path

from inference_engine.cli.main import main
from laboratory.evaluation.record import read_record
from tests.tiny_folder import save_tiny_chat_model


def test_a_record_says_how_long_both_take(tmp_path: Path) -> None:
    folder = save_tiny_chat_model(tmp_path / "tiny")
    typed = ["--model", str(folder), "--lengths", "90", "--rounds", "2", "--results", str(tmp_path / "results")]
    assert main(["bench", "hibernation", *typed, "--strategies", "full"]) == 0
    (path,) = tmp_path.glob("results/hibernation_tiny/*/record.json")
    found = read_record(path, "hibernation_tiny", None)["values"]
    assert found["first token, file ÷ prefill, full at 90"]["count"] == 2
    assert found["bytes of the file ÷ tokens, full at 90"]["median"] > 0
    assert found["rounds in which auto reads the file, full at 90"]["median"] in (0, 1, 2)
