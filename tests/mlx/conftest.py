"""Tests of the MLX backend are there where the package is."""

from inference_engine.config import has_mlx

collect_ignore_glob = [] if has_mlx() else ["*"]
