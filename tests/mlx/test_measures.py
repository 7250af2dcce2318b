"""The parts of the Mac's suite, small, on whatever MLX computes on here: that they measure what they say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inference_engine.compose import open_backend
from tests.mlx.measures import long_session, memory_held, sessions_under_pressure, speeds
from tests.mlx.test_loading import DENSE, IDS, config_of, saved
from tests.mlx.tiny import tiny_mlx


def test_memory_is_the_weights_and_the_pool_and_the_pool_goes(tmp_path: Path) -> None:
    config = config_of(saved(DENSE, tmp_path / "model"))
    held = memory_held(lambda: open_backend(config), kv_bytes=2**22)
    parameters = 4 * (128 * 64 + 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96))  # norms and biases are beside it
    assert parameters <= held.weights <= 1.2 * parameters
    assert 2**22 <= held.pool <= 2**22 + 2**20
    assert held.left < 2**16


def test_a_session_too_many_is_refused_and_none_is_lost() -> None:
    assert sessions_under_pressure(tiny_mlx(), tokens=128) == 3


def test_a_long_session_keeps_its_memory() -> None:
    ran = long_session(tiny_mlx(), seconds=0.4, kv_bytes=2**23)
    assert ran.turns >= 8
    assert ran.first_bytes > 0
    assert ran.last_bytes <= ran.first_bytes + 2**20


def test_speed_is_measured_beside_mlx_lm_over_the_same_weights_and_beside_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(saved(DENSE, tmp_path / "model"))
    bench = tmp_path / "llama-bench"
    bench.write_text("#!/bin/sh\necho '[{\"avg_ts\": 12.5}]'\n")
    bench.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = speeds(open_backend(config), Path(config.model), IDS, tokens=8, rounds=2, gguf=tmp_path / "model.gguf")
    assert len(found.ours) == len(found.theirs) == 2
    assert min(*found.ours, *found.theirs) > 0
    assert found.llama_cpp == [12.5, 12.5]
