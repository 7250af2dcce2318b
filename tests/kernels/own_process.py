"""Triton decides when it is imported whether it interprets: what compares its kernels runs in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import torch

from inference_engine.config import child_environment


class _IsInt(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, int)


class _IntOfArray(metaclass=_IsInt):
    """int() as Triton's interpreter calls it: of arrays of one number too, which numpy no longer allows."""

    def __new__(cls, number: object) -> int:  # type: ignore[misc]
        return int(np.asarray(number).reshape(()))


def accept_this_numpy() -> None:
    """Called in the child, before kernels are imported."""
    from triton.runtime import interpreter

    interpreter.int = _IntOfArray


def run_with_triton(compare: Callable[[], None]) -> None:
    """Call `compare`, a function of a module's own, on a GPU, or interpreted where there is none; it must not raise."""
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    first = f"import {__name__} as own; own.accept_this_numpy()\n" if interpreted else ""
    done = subprocess.run(
        [sys.executable, "-c", f"{first}import {compare.__module__} as test; test.{compare.__name__}()"],
        check=False,
        env=child_environment(OMP_NUM_THREADS="1", **interpreted),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
