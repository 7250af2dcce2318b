"""The suite of a Mac: what it needs is said, what tests note is in its record, and its last line is pytest's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from laboratory.evaluation.record import load
from scripts.mlx import suite

RUN = """
import sys
from pathlib import Path
import pytest
from scripts.mlx.suite import Recorder

folder = Path(sys.argv[1])
sys.exit(pytest.main([str(folder), "-p", "no:cacheprovider", "-c", str(folder / "none.ini"), "--seconds", "3"],
    plugins=[Recorder(7.0, folder / "results")]))
"""
TESTS = """
def test_one(record_property, request):
    record_property("speed", {"unit": "tokens/s", "median": 2.5, "low": 2, "high": 3, "count": 3})
    assert request.config.getoption("--seconds") == 3

def test_other():
    assert False
"""


def test_a_record_has_what_tests_note_and_the_last_line_is_that_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "none.ini").write_text("[pytest]\n")
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 1, ran.stderr
    assert "1 failed, 1 passed in" in ran.stdout.rstrip().splitlines()[-1]
    (path,) = (tmp_path / "results").rglob("record.json")
    assert path.name in ran.stdout
    found = load(path)
    assert found["values"]["speed"]["median"] == 2.5
    assert found["values"]["tests passed"]["median"] == found["values"]["tests failed"]["median"] == 1
    assert found["config"]["failed"] == ["test_some.py::test_other"]
    assert {"chip", "device", "system", "long_session_seconds"} <= set(found["config"])
    assert found["machine"]["memory_bytes"] > 0


def test_on_a_mac_it_runs_every_test_of_mlx_and_the_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(suite, "why_not", lambda: "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(pytest, "main", lambda words, **_: asked.append(words))
    monkeypatch.setattr(sys, "argv", ["suite.py", "--seconds", "5", "-k", "speed"])
    with pytest.raises(SystemExit):
        suite.main()
    assert asked == [["tests/mlx", "tests/laws", "--executor", "mlx", "-m", "not long", "-k", "speed"]]
