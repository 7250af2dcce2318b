"""The tests whose subject runs on a GPU: kernels against their references, recorded steps, and the laws over both.

    python scripts/test_gpu.py        pytest's report, and a record in results/tests_cuda/

They run in `make test` too, by Triton's interpreter. Further arguments go to pytest.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from laboratory.evaluation import record

PATHS = ("tests/kernels", "tests/backends", "tests/laws/test_ragged_laws.py", "tests/kv/test_tiered.py")
OUTCOMES = ("passed", "failed", "skipped")


class Recorder:
    """A plugin of pytest that counts outcomes by file and writes the record before the closing line."""

    def __init__(self, results: Path | None, commit: str) -> None:
        self._results, self._commit = results, commit
        self._counts: Counter[tuple[str, str]] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._counts[report.location[0], report.outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput") or not self._counts:
            return
        files = sorted({name for name, _ in self._counts})
        rows: list[dict[str, Any]] = [
            {"file": name, **{each: self._counts[name, each] for each in OUTCOMES}} for name in files
        ]
        values: dict[str, Any] = {
            f"tests {each}": record.exact(sum(self._counts[name, each] for name in files), "tests") for each in OUTCOMES
        }
        path = record.write_record(
            "tests_cuda",
            {
                "command": "make test-gpu",
                "commit": self._commit,
                "machine": record.describe_machine(("torch", "triton", "transformers")),
                "config": {"paths": list(PATHS), "device": torch.cuda.get_device_name()},
                "seeds": [],
                "values": values,
                "tables": {"tests by file": rows},
                "baseline": "no test fails",
            },
            **({"results_dir": self._results} if self._results else {}),
        )
        print(f"\n{path.relative_to(record.ROOT) if path.is_relative_to(record.ROOT) else path.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description="The tests whose subject runs on a GPU.")
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--commit", default=record.commit(), help="what runs, where there is no repository to ask")
    arguments, others = parser.parse_known_args()
    if not torch.cuda.is_available():
        raise SystemExit("these tests need a GPU, and torch sees none; `make test` runs them by Triton's interpreter")
    recorder = Recorder(arguments.results, arguments.commit)
    sys.exit(pytest.main([*PATHS, *others], plugins=[recorder]))


if __name__ == "__main__":
    main()
