"""Tests of the MLX backend are there where the package is."""

from __future__ import annotations

import sys

import pytest

from inference_engine.config import has_mlx, multiply_float32_in_full

collect_ignore_glob = [] if has_mlx() else ["*"]
multiply_float32_in_full()  # as `open_mlx` does, which not every test calls


@pytest.fixture
def a_kernel() -> None:
    from tests.mlx.metal_kernels import IS_EMULATED, compiler

    if IS_EMULATED and not (sys.platform == "linux" and compiler()):
        pytest.skip("neither a GPU that runs Metal nor a C++ compiler is here")


@pytest.fixture
def emulation() -> None:
    from tests.mlx.metal_kernels import IS_EMULATED, compiler

    if not (IS_EMULATED and compiler()):
        pytest.skip("it is about the emulation")
