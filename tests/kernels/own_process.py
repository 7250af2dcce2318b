"""Triton decides when it is imported whether it interprets: what compares its kernels runs in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import torch

from inference_engine.config import child_environment
from tests.kernels import interpreter


def run_with_triton(compare: Callable[[], None]) -> None:
    """Call `compare`, a function of a module's own, on a GPU, or interpreted where there is none; it must not raise."""
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    first = f"import {interpreter.__name__} as own; own.prepare()\n" if interpreted else ""
    done = subprocess.run(
        [sys.executable, "-c", f"{first}import {compare.__module__} as test; test.{compare.__name__}()"],
        check=False,
        env=child_environment(OMP_NUM_THREADS="1", **interpreted),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
