"""What MLX is told about its device: how float32 is multiplied."""

from __future__ import annotations

import subprocess
import sys

import pytest


from inference_engine.config import child_environment

PRODUCT = """
import ctypes
import inference_engine.backends.mlx
import mlx.core as mx
import numpy as np

getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
one, other = np.random.default_rng(0).standard_normal((2, 256, 256)).astype(np.float32)
expected = one.astype(np.float64) @ other.astype(np.float64)
found = np.array(mx.array(one) @ mx.array(other))
print(getenv(b"MLX_ENABLE_TF32").decode(), np.abs(found - expected).max())
"""


@pytest.mark.parametrize("given", ["", "1"], ids=["by default", "whatever the environment says"])
def test_float32_is_multiplied_as_float32(given: str) -> None:
    """MLX looks at its variable when it multiplies first. In TF32 the error is a thousand times this."""
    variables = child_environment(MLX_ENABLE_TF32=given)
    ran = subprocess.run([sys.executable, "-c", PRODUCT], capture_output=True, text=True, env=variables, check=True)
    told, error = ran.stdout.split()
    assert told == "0"
    assert float(error) < 1e-4
