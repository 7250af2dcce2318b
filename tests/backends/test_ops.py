"""What a device is asked to run, and what is refused before anything is loaded for it."""

from __future__ import annotations

import sys

import pytest
import torch

from inference_engine.backends.graphs import should_record_graphs
from inference_engine.errors import BackendError
from inference_engine.kernels.ops import REFERENCE, open_ops

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_cpu_attends_session_by_session_and_plain_does_so_everywhere() -> None:
    assert open_ops("auto", CPU) is REFERENCE
    assert open_ops("plain", GPU) is REFERENCE
    assert not REFERENCE.attends_together


def test_a_kernel_that_is_not_available_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inference_engine.kernels.triton.ragged_attention", None)
    monkeypatch.delattr("inference_engine.kernels.triton.ragged_attention", raising=False)
    with pytest.raises(BackendError, match="kernels=plain"):
        open_ops("auto", GPU)


def test_graphs_need_a_gpu_and_its_kernel_and_can_be_switched_off() -> None:
    assert should_record_graphs("auto", GPU, has_regions=True)
    assert not should_record_graphs("off", GPU, has_regions=True)
    assert not should_record_graphs("auto", GPU, has_regions=False)
    assert not should_record_graphs("auto", CPU, has_regions=False)
    with pytest.raises(BackendError, match="graphs=auto"):
        should_record_graphs("on", CPU, has_regions=False)
