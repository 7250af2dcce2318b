"""The bench of more sessions than memory, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_engine.cli.main import main
from laboratory.evaluation.record import read_record
from tests.further import FURTHER
from tests.tiny_folder import save_tiny_chat_model

pytestmark = pytest.mark.usefixtures("warm_servers")


@pytest.mark.parametrize(
    "words", [(), pytest.param(("--restart", "--own=20"), marks=FURTHER)], ids=["in turn", "forks, restarted"]
)
def test_a_session_that_goes_on_computes_its_delta_alone(tmp_path: Path, words: tuple[str, ...]) -> None:
    folder = save_tiny_chat_model(tmp_path / "tiny")
    typed = ["--model", str(folder), "--sessions", "6", "--room", "3", "--tokens", "90", *words]
    assert (
        main(["bench", "kept-sessions", *typed, "--results", str(tmp_path / "results"), "--folder", str(tmp_path)]) == 0
    )
    (path,) = tmp_path.glob("results/kept_sessions_tiny/*/record.json")
    found = read_record(path, "kept_sessions_tiny", None)["values"]
    assert found["sessions that it has room for"]["median"] == 3
    assert found["tokens that had K/V"]["low"] == 90 + 7  # what was generated last has none yet
    assert found["tokens computed for one"]["high"] == 17
