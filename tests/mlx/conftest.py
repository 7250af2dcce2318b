"""Tests of the MLX backend are there where the package is."""

from __future__ import annotations

from inference_engine.config import has_mlx, multiply_float32_in_full

collect_ignore_glob = [] if has_mlx() else ["*"]
multiply_float32_in_full()  # as `open_mlx` does, which not every test calls
