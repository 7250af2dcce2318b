"""The suite of a Mac with Apple silicon: every test of MLX on its GPU, and the real model there; one command.

    python scripts/mlx/suite.py [--seconds 600]        pytest's report, and a record in results/tests_mlx/

Laws and families on the GPU stream, checkpoints in MLX's layout, greedy tokens beside torch, memory and its limits, a
session of so many seconds, speed beside mlx-lm and, where it is installed, llama.cpp. Further arguments go to pytest.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from inference_engine.config import configure_threads_environment, forbid_model_hub

configure_threads_environment()
forbid_model_hub()

import pytest

from laboratory.evaluation import record

TESTS = ("tests/mlx", "tests/laws", "--executor", "mlx", "-m", "not long")
OUTCOMES = ("passed", "failed", "skipped")
MODEL = "smollm2-135m"


class Recorder:
    """A plugin of pytest that collects what tests note, and writes the record before the closing line."""

    def __init__(self, seconds: float, results: Path) -> None:
        self._seconds, self._results = seconds, results
        self._values: dict[str, Any] = {}
        self._counts = dict.fromkeys(OUTCOMES, 0)
        self._failed: list[str] = []

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        parser.addoption("--seconds", type=float, default=self._seconds)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._counts[report.outcome] += 1
        if report.outcome == "failed":
            self._failed.append(report.nodeid)
        if report.when == "call":
            self._values |= dict(report.user_properties)

    def pytest_sessionfinish(self) -> None:
        if not any(self._counts.values()):
            return
        import mlx.core as mx

        values = {f"tests {outcome}": record.exact(count, "tests") for outcome, count in self._counts.items()}
        path = record.write_record(
            "tests_mlx",
            {
                "command": "make test-mac",
                "machine": record.describe_machine(("mlx", "mlx-lm", "torch", "transformers")),
                "config": {
                    "model": MODEL,
                    "chip": mx.device_info().get("device_name", ""),
                    "device": str(mx.default_device()),
                    "system": platform.mac_ver()[0] or platform.release(),
                    "long_session_seconds": self._seconds,
                    "failed": self._failed,
                },
                "seeds": [0, 1],
                "values": values | self._values,
                "tables": {},
                "baseline": "torch's tokens; mlx-lm's speed over the same weights",
            },
            results_dir=self._results,
        )
        print(f"\n{path.relative_to(record.ROOT) if path.is_relative_to(record.ROOT) else path.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description="The tests of MLX, on a Mac with Apple silicon.")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the long session (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    arguments, others = parser.parse_known_args()
    if reason := why_not():
        raise SystemExit(reason)
    subprocess.run([sys.executable, "-m", "inference_engine.cli.main", "models", "fetch", MODEL], check=True)
    recorder = Recorder(arguments.seconds, arguments.results)
    sys.exit(pytest.main([*TESTS, *others], plugins=[recorder]))


def why_not() -> str:
    """Why the suite does not run here; "" if it does."""
    if (platform.system(), platform.machine()) != ("Darwin", "arm64"):
        return (
            f"this suite needs a Mac with Apple silicon; this is {platform.system()} on {platform.machine()}. What of "
            "it runs on MLX's build for the CPU is part of `make test`: tests/mlx"
        )
    from inference_engine.backends.mlx import why_missing

    return why_missing()


if __name__ == "__main__":
    main()
