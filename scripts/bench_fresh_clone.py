"""The README's two commands on a fresh clone with empty caches: how long they take, and what they download.

    python scripts/bench_fresh_clone.py             writes results/fresh_clone/<date>-<machine>/

The clone, the virtual environment, pip's cache and the model cache are new, and gone afterwards.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import time
from pathlib import Path

from inference_engine.config import child_environment
from laboratory.evaluation import record

_DOWNLOAD = re.compile(r"Downloading \S+ \(([\d.]+) (kB|MB|GB)\)")
_BYTES = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
_LIMIT_SECONDS = 3600


def run(command: list[str], folder: Path, cache: Path) -> tuple[float, str]:
    """Seconds and output. Raises CalledProcessError, its output printed, if the command fails."""
    environment = child_environment(XDG_CACHE_HOME=str(cache), PIP_CACHE_DIR=str(cache / "pip"))
    began = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=_LIMIT_SECONDS,
    )
    if done.returncode:
        print(done.stdout[-4000:])
        done.check_returncode()
    return time.perf_counter() - began, done.stdout


def downloaded_bytes(pip_output: str) -> float:
    return sum(float(size) * _BYTES[unit] for size, unit in _DOWNLOAD.findall(pip_output))


def main() -> None:
    parser = argparse.ArgumentParser(description="The README's two commands on a fresh clone.")
    parser.parse_args()
    values = {}
    with tempfile.TemporaryDirectory() as temporary:
        clone, cache = Path(temporary) / "clone", Path(temporary) / "cache"
        cache.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(record.ROOT), str(clone)], check=True)
        seconds, _ = run(["make", "setup"], clone, cache)
        values["make setup (the first part of either command)"] = record.exact(round(seconds, 1), "seconds")
        log = (clone / ".venv" / "install.log").read_text(encoding="utf-8")
        values["downloaded by make setup"] = record.exact(round(downloaded_bytes(log)), "bytes")
        seconds, shown = run(["make", "demo"], clone, cache)
        values["make demo after setup, model fetched and converted"] = record.exact(round(seconds, 1), "seconds")
        seconds, shown = run(["make", "test"], clone, cache)
        values["make test after that"] = record.exact(round(seconds, 1), "seconds")
        closing = [line.strip("= ") for line in shown.splitlines() if " passed" in line]
        kept = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file() and "pip" not in path.parts)
        values["model cache afterwards"] = record.exact(kept, "bytes")
    path = record.write_record(
        "fresh_clone",
        {
            "command": record.command_line(),
            "config": {"tests": closing[-1] if closing else ""},
            "seeds": [],
            "values": values,
            "baseline": "none: these are absolute, and of one run on a shared machine",
        },
    )
    for name, value in values.items():
        print(f"{name}: {value['median']:,} {value['unit']}")
    print(path.relative_to(record.ROOT))


if __name__ == "__main__":
    main()
