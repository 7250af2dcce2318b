"""The tests whose subject runs on a GPU: kernels against their references, recorded steps, and the laws over both.

    python scripts/test_gpu.py                pytest's report, and a record in results/tests_cuda/
    python scripts/test_gpu.py --sanitize     kernels under compute-sanitizer, and a record in results/memcheck_cuda/

They run in `make test` too, by Triton's interpreter. Further arguments go to pytest. compute-sanitizer comes with the
CUDA toolkit. It runs the comparisons of the kernels with their references, whose sizes are odd ones. With its memcheck
every tensor is in an allocation of its own, so that what is read or written beside a tensor is an error; `--sanitize
racecheck` looks for threads of a block that use shared memory without waiting for each other, `synccheck` for barriers
that not all of them reach. One that has not ended in time is stopped and counts as one that failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_engine.config import child_environment
from laboratory.evaluation import record

TIERED = tuple(f"tests/kv/test_{name}.py" for name in ("tiered", "inbound", "chunk_view"))
PATHS = ("tests/kernels", "tests/backends", "tests/laws/test_ragged_laws.py", *TIERED)
OUTCOMES = ("passed", "failed", "skipped")
SANITIZED = (
    *(f"test_fused.compare_{each}" for each in ("products", "products_of_any_number", "heads", "heads_that_share")),
    *(f"test_experts.compare_{each}" for each in ("mixtures", "tokens_alone", "weights", "choices", "blocks")),
    *(f"test_quantised.compare_{each}" for each in ("products", "products_of_any_number", "numbers", "every_code")),
    *(f"test_choosing.compare_{each}" for each in ("choosing", "models", "equals", "rounded", "tiles")),
    *(f"test_choosing.compare_{each}" for each in ("restoring", "long_codes")),
    *(f"test_ragged_attention.compare_{each}" for each in ("kernel", "chunks_and_selections", "selecting_steps")),
    *(f"test_ragged_attention.compare_{each}" for each in ("beside_selections", "tiles")),
    *(f"test_{each}.compare_kernel" for each in ("offloaded", "noise", "topk", "trellis")),
    "test_step_ends.compare_draws",
    "test_step_ends.compare_ends",
    *(f"test_latent_attention.compare_{each}" for each in ("attention", "heads")),
    *(f"test_latents.compare_{each}" for each in ("codes", "restored", "analysed", "parts", "broken")),
    "test_long_chunks.compare_merged",
    *(f"test_states.compare_{each}" for each in ("neighbours", "rejected", "gates")),
)
_AT_ONCE = 8
_TOOL_FAILED = 97
# The tools that look at threads find some in cuDNN's and torch's attention, with which references compute: these use
# plain products there.
_FUSED = ("cudnn", "flash", "mem_efficient")
_WITHOUT_FUSED = "from torch.backends import cuda; " + "".join(f"cuda.enable_{each}_sdp(False); " for each in _FUSED)
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
TOOLS = ("memcheck", "racecheck", "synccheck")


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
                "machine": record.describe_machine(("torch", "triton", "transformers", "fa3-fwd")),
                "config": {"paths": list(PATHS), "device": torch.cuda.get_device_name()},
                "seeds": [],
                "values": values,
                "tables": {"tests by file": rows},
                "baseline": "no test fails",
            },
            **({"results_dir": self._results} if self._results else {}),
        )
        print(f"\n{path.relative_to(record.ROOT) if path.is_relative_to(record.ROOT) else path.name}")


def sanitizer() -> str:
    """The command. Raises SystemExit where there is none."""
    for place in ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"):
        if found := shutil.which(place):
            return found
    raise SystemExit("compute-sanitizer is not on the path; it comes with the CUDA toolkit, put its bin folder there")


def sanitize(arguments: argparse.Namespace) -> int:
    """Each of SANITIZED in a process of its own. Returns the exit status."""
    tool = (sanitizer(), "--tool", arguments.sanitize, "--error-exitcode", str(_TOOL_FAILED))
    command = (*tool, sys.executable, "-P", "-c")
    environment = child_environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1", OMP_NUM_THREADS="1")
    planned = [each for each in SANITIZED if arguments.comparisons in each]
    waiting, running, rows = planned[:], dict[str, tuple[float, subprocess.Popen[str]]](), list[dict[str, Any]]()
    ends = time.monotonic() + arguments.seconds
    try:
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                name = waiting.pop(0)
                module, _, function = name.partition(".")
                code = "" if arguments.sanitize == "memcheck" else _WITHOUT_FUSED
                code += f"import tests.kernels.{module} as test; test.{function}()"
                child = subprocess.Popen(
                    (*command, code),
                    cwd=record.ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,  # what it runs is a process of its own, and has to end with it
                )
                running[name] = time.monotonic(), child
            is_late = time.monotonic() > ends
            for name, (began, child) in list(running.items()):
                try:
                    printed, _ = child.communicate(timeout=0.2)
                except subprocess.TimeoutExpired:
                    if not is_late:
                        continue
                    os.killpg(child.pid, signal.SIGKILL)
                    printed, _ = child.communicate()
                del running[name]
                summary = _SUMMARY.search(printed)
                errors = int(summary[1] or summary[2]) if summary else -1
                row = {"comparison": name, "errors": errors, "status": child.returncode}
                rows.append({**row, "seconds": round(time.monotonic() - began, 1)})
                print(rows[-1], flush=True)
                if child.returncode:
                    print(printed[:6000], flush=True)  # the first error is what the others follow from
                _write_clean(rows, len(planned), arguments)  # again after each: nothing is lost
            if is_late:
                break
    finally:
        for _, child in running.values():
            os.killpg(child.pid, signal.SIGKILL)
    failed = sum(bool(row["status"] or row["errors"]) for row in rows) + len(waiting)
    path = _write_clean(rows, len(planned), arguments)
    print(f"{path.relative_to(record.ROOT) if path.is_relative_to(record.ROOT) else path.name}")
    print(f"{len(planned) - failed} clean, {failed} with errors or not ended")
    return min(1, failed)


def _write_clean(rows: list[dict[str, Any]], planned: int, arguments: argparse.Namespace) -> Path:
    clean = sum(not row["status"] and not row["errors"] for row in rows)
    return record.write_record(
        f"{arguments.sanitize}_cuda",
        {
            "command": f"python scripts/test_gpu.py --sanitize {arguments.sanitize}"
            + (f" --comparisons {arguments.comparisons}" if arguments.comparisons else ""),
            "commit": arguments.commit,
            "machine": record.describe_machine(("torch", "triton")),
            "config": {
                "tool": f"compute-sanitizer {arguments.sanitize}",
                "device": torch.cuda.get_device_name(),
                **({"comparisons": arguments.comparisons} if arguments.comparisons else {}),
            },
            "seeds": [],
            "values": {
                "comparisons without an error": record.exact(clean, "comparisons"),
                "comparisons planned": record.exact(planned, "comparisons"),
            },
            "tables": {"comparisons": rows},
            "baseline": "no error; status 0 says that the kernels equal their references too",
        },
        **({"results_dir": arguments.results} if arguments.results else {}),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The tests whose subject runs on a GPU.")
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--commit", default=record.commit(), help="what runs, where there is no repository to ask")
    parser.add_argument(
        "--sanitize",
        nargs="?",
        const=TOOLS[0],
        choices=TOOLS,
        help="kernels under this tool of compute-sanitizer instead (default: %(const)s)",
    )
    parser.add_argument(
        "--comparisons", default="", metavar="PART", help="of --sanitize: those with this in their name"
    )
    parser.add_argument("--seconds", type=float, default=180.0, help="of --sanitize: what has not ended is stopped")
    arguments, others = parser.parse_known_args()
    if not torch.cuda.is_available():
        raise SystemExit("these tests need a GPU, and torch sees none; `make test` runs them by Triton's interpreter")
    if arguments.sanitize:
        if not any(arguments.comparisons in each for each in SANITIZED):
            parser.error(f"no comparison has {arguments.comparisons} in its name; there are {', '.join(SANITIZED)}")
        sys.exit(sanitize(arguments))
    recorder = Recorder(arguments.results, arguments.commit)
    sys.exit(pytest.main([*PATHS, *others], plugins=[recorder]))


if __name__ == "__main__":
    main()
