"""The bench of conversations over the gateway, on a tiny model."""

from __future__ import annotations

from pathlib import Path

from inference_engine.cli.main import main
from laboratory.evaluation.record import read_record
from tests.further import further_test
from tests.tiny_folder import save_tiny_chat_model


@further_test
def test_a_turn_over_the_gateway_prefills_what_is_new_in_it(tmp_path: Path) -> None:
    folder = save_tiny_chat_model(tmp_path / "tiny")
    results = str(tmp_path / "results")
    assert (
        main(["bench", "gateway", "--model", str(folder), "--turns", "2", "--tokens", "4", "--results", results]) == 0
    )
    (path,) = tmp_path.glob("results/gateway_tiny/*/record.json")
    found = read_record(path, "gateway_tiny", None)["values"]
    whole = found["prefilled in the last turn, the port, prefixes not shared"]["median"]
    assert found["prefilled in the last turn, gateway, chat completions"]["median"] < whole
