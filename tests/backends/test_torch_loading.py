"""A model is run with the operations that were chosen for its device."""

from __future__ import annotations

from typing import Any

import pytest

from inference_engine.backends import torch_loading
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.backends.torch_loading import serve_loaded
from inference_engine.config import ModelConfig
from inference_engine.kernels.ops import REFERENCE, DeviceOps
from inference_engine.kernels.prefill_attention import Flash3
from tests.admissions import admitted_once
from tests.backends.small_families import loaded
from tests.tiny import tiny_config, tiny_model


@pytest.mark.parametrize(
    ("settings", "is_used"),
    [({}, True), ({"kernels": "plain"}, False), ({"determinism": "batch-invariant"}, False)],
    ids=["by default", "plain", "invariant"],
)
def test_the_operation_for_long_chunks_is_used_in_its_three_forms(
    settings: dict[str, Any], is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where sums have one order, nor where references are asked for."""
    used: list[DeviceOps] = []

    def opened(*given: Any, ops: DeviceOps, **options: Any) -> TorchForward:
        used.append(ops)
        return TorchForward(*given, ops=ops, **options)

    chosen = Flash3()
    monkeypatch.setattr(torch_loading, "open_long_chunks", lambda *_: chosen)
    monkeypatch.setattr(torch_loading, "TorchForward", opened)
    config = ModelConfig(device="cpu", linear="plain", **settings)
    serve_loaded(loaded(tiny_model()), config, admitted_once(tiny_config()), ops=DeviceOps(attends_together=True))

    ops, other = used[-1], chosen if is_used else REFERENCE
    assert ops.attend_causal is (chosen if is_used else REFERENCE.attend_causal)
    assert (ops.long_reads is not None) == is_used
    assert (ops.attend_piece, ops.attend_causal_state) == (other.attend_piece, other.attend_causal_state)
