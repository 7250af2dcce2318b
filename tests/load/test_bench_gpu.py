"""`make bench-gpu` on a CPU: the references in the place of kernels, a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from laboratory.evaluation.record import read_record
from scripts.bench_gpu import main


def test_a_record_says_what_was_measured_and_what_did_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = "--shapes tiny --device cpu --dtype float32 --lengths 24 100000 --sessions 1 2 --rounds 2 --tokens 4"
    where = ["--kv-bytes", str(2**21), "--results", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["scripts/bench_gpu.py", *typed.split(), *where])

    main()

    (path,) = tmp_path.glob("listed_cpu_float32/*/record.json")
    found = read_record(path, "listed", "ms of a step, by what the host does")
    assert set(found["left_out"]) == {"tiny, full, 1 at 100000", "tiny, full, 2 at 100000"}
    for sessions in (1, 2):
        cell = f"tiny, full, {sessions} at 24"
        ratio = found["values"][f"time of a step, listed ÷ torch's modules, {cell}"]
        assert (ratio["unit"], ratio["count"]) == ("ratio", 2)
        assert found["values"][f"prefill, listed, {cell}"]["count"] == sessions
        assert found["values"][f"first tokens equal, of {sessions}, {cell}"]["median"] == sessions
        assert found["values"][f"first token's logprob, largest difference, {cell}"]["median"] < 1e-4
    assert "--results" not in found["command"]
