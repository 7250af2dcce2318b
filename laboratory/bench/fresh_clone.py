"""A first `make demo` on a fresh clone with empty caches: time, processor time, bytes, the longest silence on the way.

The clone, the virtual environment, pip's cache and the model cache are new, and gone afterwards; what the system has in
memory of the package index is not emptied. Output goes through a pipe: where lines come seldom, none was printed.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_engine.config import child_environment
from laboratory.bench.experiments import Save
from laboratory.evaluation import record

_DOWNLOAD = re.compile(r"(?:Downloading|Processing) (\S+\.whl)(?: \(([\d.]+) (kB|MB|GB)\))?")
_BYTES = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
_LIMIT_SECONDS = 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a command took. silence_seconds: the longest time without output, from its start to its end."""

    seconds: float
    processor_seconds: float
    silence_seconds: float
    output: str


def run(command: list[str], folder: Path, cache: Path) -> Run:
    """Raises CalledProcessError, the output's end printed, if the command fails or takes an hour."""
    environment = child_environment(XDG_CACHE_HOME=str(cache), PIP_CACHE_DIR=str(cache / "pip"))
    used, began = _processor_seconds(), time.perf_counter()
    limited = ["timeout", "--kill-after=30", str(_LIMIT_SECONDS), *command]
    said, silence, heard = b"", 0.0, began
    with subprocess.Popen(
        limited, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        while chunk := os.read(process.stdout.fileno(), 2**16):
            now = time.perf_counter()
            said, silence, heard = said + chunk, max(silence, now - heard), now
    output = said.decode(errors="replace")
    if process.returncode:
        print(output[-4000:])
        raise subprocess.CalledProcessError(process.returncode, command)
    now = time.perf_counter()
    return Run(
        seconds=now - began,
        processor_seconds=_processor_seconds() - used,
        silence_seconds=max(silence, now - heard),
        output=output,
    )


def _processor_seconds() -> float:
    """Of all processes that have been started from here and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def package_bytes(pip_output: str) -> float:
    """Of the wheels that pip took from an index or from a folder, as it names them."""
    found = 0.0
    for name, size, unit in _DOWNLOAD.findall(pip_output):
        found += float(size) * _BYTES[unit] if size else Path(name).stat().st_size
    return found


def bytes_on_disk(*folders: Path) -> int:
    """Of their files, each once, whatever names it has."""
    found = {}
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                status = path.stat()
                found[status.st_dev, status.st_ino] = status.st_size
    return sum(found.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tests", action="store_true", help="`make test` after it, too")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    values = {}

    def note(name: str, value: float, unit: str) -> None:
        values[name] = record.exact(round(value, 1) if unit == "seconds" else round(value), unit)
        print(f"{name}: {values[name]['median']:,} {unit}", flush=True)

    def note_run(name: str, found: Run) -> None:
        note(name, found.seconds, "seconds")
        note(f"{name}: of processors", found.processor_seconds, "seconds")
        note(f"{name}: longest without a line", found.silence_seconds, "seconds")

    closing: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        clone, cache = Path(temporary) / "clone", Path(temporary) / "cache"
        cache.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(record.ROOT), str(clone)], check=True)
        environment, models = clone / ".venv", cache / "kakeya"
        note_run("first make demo", run(["make", "demo"], clone, cache))
        log = (environment / "setup-packages.log").read_text(encoding="utf-8")
        note("packages as wheels", package_bytes(log), "bytes")
        note(".venv", bytes_on_disk(environment), "bytes")
        note(".venv: torch", bytes_on_disk(*environment.glob("lib/*/site-packages/torch")), "bytes")
        note("model cache", bytes_on_disk(models), "bytes")
        note(".venv, model cache and clone", bytes_on_disk(clone, models), "bytes")
        note_run("second make demo", run(["make", "demo"], clone, cache))
        if arguments.tests:
            tests = run(["make", "test"], clone, cache)
            note_run("make test after that", tests)
            note(".venv after tests", bytes_on_disk(environment), "bytes")
            closing = [line.strip("= ") for line in tests.output.splitlines() if " passed" in line]
    return {
        "experiment": "fresh_clone",
        "config": {"tests": closing[-1] if closing else ""},
        "seeds": [],
        "values": values,
        "baseline": "none: these are absolute, and of one run",
    }
