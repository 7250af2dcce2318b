"""Triton decides when it is imported whether it interprets: what compares its kernels runs in a process of its own."""

from __future__ import annotations

import atexit
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from inference_engine.config import child_environment
from tests.kernels import forking


def run_with_triton(compare: Callable[[], None]) -> None:
    """Call `compare`, a function of a module's own, on a GPU, or interpreted where there is none; it must not raise."""
    if not torch.cuda.is_available():
        _fork(compare)
        return
    done = subprocess.run(
        [sys.executable, "-c", f"import {compare.__module__} as test; test.{compare.__name__}()"],
        check=False,
        env=child_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def _fork(compare: Callable[[], None]) -> None:
    """In a child of a process that has imported the libraries, which takes longer than many a comparison."""
    with TemporaryDirectory() as folder:
        printed = Path(folder) / "printed"
        printed.touch()
        parent = _parent()
        assert parent.stdin is not None and parent.stdout is not None
        try:
            print(compare.__module__, compare.__name__, printed, sep="\t", file=parent.stdin, flush=True)
            status = parent.stdout.readline()
        except BaseException:  # its time is up, or the tester's patience
            _end()
            raise
        if status != "0\n":
            _end()
        assert status == "0\n", (status, printed.read_text(encoding="utf-8")[-2000:])


@lru_cache(maxsize=1)
def _parent() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", forking.__name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(OMP_NUM_THREADS="1", TRITON_INTERPRET="1"),
    )
    atexit.register(_end)
    return process


def _end() -> None:
    if _parent.cache_info().currsize:
        process = _parent()
        _parent.cache_clear()
        with process:
            process.kill()
