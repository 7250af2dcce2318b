"""The cost of the server is measured over an engine that does nothing, which has to have what the server asks for."""

from __future__ import annotations

from pathlib import Path

from inference_engine.cli.main import main
from laboratory.evaluation.record import load
from tests.further import further_test


@further_test
def test_every_call_is_measured_beside_a_bare_echo(tmp_path: Path) -> None:
    words = ("--rounds", "1", "--unary-calls", "200", "--frames", "4000", "--results", str(tmp_path))
    assert main(["bench", "server", *words]) == 0
    (path,) = tmp_path.glob("server_overhead/*/record.json")
    values = load(path)["values"]
    for call in ("CreateSession", "AppendTokens(256)", "GetSessionInfo", "stream x1", "stream x8"):
        assert values[f"{call}: server CPU, runtime"]["median"] > 0
