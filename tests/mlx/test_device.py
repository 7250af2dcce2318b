"""What MLX is asked for on its device: how float32 is multiplied, how much memory is held, and until when."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from inference_engine.backends.mlx import device
from inference_engine.backends.mlx.device import MOST_CACHED_BYTES, Limits, multiplies_in_full
from inference_engine.backends.mlx.forward import MlxForward
from inference_engine.compose import open_backend
from inference_engine.config import child_environment
from inference_engine.errors import BackendError, ModelError
from tests.further import off_metal_test
from tests.mlx.test_loading import DENSE, config_of, saved

OPENED = """
import ctypes
import logging
from inference_engine.backends.mlx.loading import open_mlx
from inference_engine.config import ModelConfig
from inference_engine.errors import KakeyaError

logging.basicConfig(format="%(message)s")
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
try:
    open_mlx(ModelConfig(model="none", dtype="float32"), None)
except KakeyaError:  # there is no such model
    print(getenv(b"MLX_ENABLE_TF32").decode())
"""


@off_metal_test
@pytest.mark.parametrize("given", ["", "1"], ids=["by default", "whatever the environment says"])
def test_float32_is_multiplied_as_float32_before_a_model_is_loaded(given: str) -> None:
    """MLX looks at its variable when it multiplies first. What was there is named."""
    variables = child_environment(MLX_ENABLE_TF32=given)
    ran = subprocess.run([sys.executable, "-c", OPENED], capture_output=True, text=True, env=variables, check=True)
    assert ran.stdout.split() == ["0"], ran.stderr
    assert ("MLX_ENABLE_TF32 was 1 and is 0 from now on" in ran.stderr) == (given == "1")


def test_a_process_that_multiplied_in_tf32_before_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX looks at its variable once."""

    def rounded(*factors: mx.array) -> mx.array:
        """In TF32: ten bits of a fraction, of 23."""
        one, other = (mx.view(mx.view(factor, mx.uint32) & 0xFFFFE000, mx.float32) for factor in factors)
        return one @ other

    assert multiplies_in_full()
    monkeypatch.setattr(mx, "matmul", rounded)
    with pytest.raises(BackendError, match="set MLX_ENABLE_TF32=0 before the process starts"):
        open_backend(config_of(saved(DENSE, tmp_path / "model")))


class Asked:
    """What MLX was asked for last: how many freed buffers it keeps, how much memory stays resident."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cached, self.resident = 2**40, 7
        facts = {"max_recommended_working_set_size": 2**33}
        gc.collect()
        monkeypatch.setattr(Limits, "there", 0)  # models that other tests keep
        monkeypatch.setattr(Limits, "before", contextlib.ExitStack())
        monkeypatch.setattr(device, "kind", lambda: "gpu")
        monkeypatch.setattr(mx, "device_info", lambda: facts)
        monkeypatch.setattr(mx, "set_cache_limit", self.set_cached)
        monkeypatch.setattr(mx, "set_wired_limit", self.set_resident)

    def set_cached(self, limit: int) -> int:
        before, self.cached = self.cached, limit
        return before

    def set_resident(self, limit: int) -> int:
        before, self.resident = self.resident, limit
        return before

    def is_as_before(self) -> bool:
        gc.collect()
        return (self.cached, self.resident) == (2**40, 7)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def test_a_model_limits_memory_while_it_is_there(tmp_path: Path, asked: Asked) -> None:
    config = config_of(saved(DENSE, tmp_path / "model"))
    forward = open_backend(config)
    assert (asked.cached, asked.resident) == (MOST_CACHED_BYTES, 2**33)
    del forward
    assert asked.is_as_before()


@pytest.mark.parametrize("first_to_go", [0, 1])
def test_limits_stay_until_the_last_model_has_gone(first_to_go: int, asked: Asked) -> None:
    there = [Limits(), Limits()]
    del there[first_to_go]
    gc.collect()
    assert (asked.cached, asked.resident) == (MOST_CACHED_BYTES, 2**33)
    there.clear()
    assert asked.is_as_before()


def test_a_model_that_does_not_load_leaves_no_limits(tmp_path: Path, asked: Asked) -> None:
    folder = saved(DENSE, tmp_path / "model")
    other = saved(type(DENSE)(**{**DENSE.to_dict(), "intermediate_size": 64}), tmp_path / "other")
    (other / "model.safetensors").replace(folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"mlp\."):
        open_backend(config_of(folder))
    assert asked.is_as_before()


def test_the_weights_are_freed_before_the_limits_go(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else MLX keeps their buffers."""
    left = []

    def set_cached(limit: int) -> int:
        left.append(mx.get_active_memory())
        return asked.set_cached(limit)

    monkeypatch.setattr(mx, "set_cache_limit", set_cached)
    forward = open_backend(config_of(saved(DENSE, tmp_path / "model")))
    assert isinstance(forward, MlxForward)
    held, weights = mx.get_active_memory(), forward._program.weight_bytes
    del forward
    assert asked.is_as_before()
    assert left[-1] <= held - weights
