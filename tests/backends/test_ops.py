"""What a device is asked to run, and what is refused before anything is loaded for it."""

from __future__ import annotations

import sys

import pytest
import torch

from inference_engine.errors import BackendError
from inference_engine.kernels.ops import open_ops

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_kernel_that_is_not_available_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inference_engine.kernels.triton.ragged_attention", None)
    monkeypatch.delattr("inference_engine.kernels.triton.ragged_attention", raising=False)
    with pytest.raises(BackendError, match="kernels=plain"):
        open_ops("auto", GPU)
