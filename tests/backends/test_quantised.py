"""Models whose matrices have fewer bits: made when they are loaded, and read from checkpoints in each layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from inference_engine.backends.torch_forward import TorchForward
from inference_engine.backends.torch_loading import serve_loaded
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.kernels.ops import DeviceOps
from inference_engine.kernels.quantised import quantise
from inference_engine.models.quantised_linear import QuantisedLinear
from inference_engine.models.seam import ATTENTION
from tests.admissions import admitted_once
from tests.backends.small_families import loaded
from tests.further import further
from tests.laws.variants import generate, text
from tests.tiny import SMALL, tiny_config, tiny_model

LISTS = DeviceOps(attends_together=True)


def served(model: Any, **settings: Any) -> TorchForward:
    config = ModelConfig(device="cpu", linear="plain", **settings)
    return serve_loaded(loaded(model), config, admitted_once(tiny_config()), ops=LISTS)


def dequantised(format_name: str) -> Any:
    """The model as transformers runs it, with the numbers that its matrices have when they are quantised."""
    model = tiny_model()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.data = quantise(module.weight.data, format_name).unpacked(torch.float32)
    return model


def greedy(forward: TorchForward, history: list[int], count: int) -> list[int]:
    with Engine(forward, EngineConfig(**SMALL)) as engine:
        session = engine.create_session().session_id
        engine.append(session, history)
        return [token for token, _ in generate(engine, session, count)]


@pytest.mark.parametrize(
    ("determinism", "products", "weights", "format_name"),
    [
        ("off", "listed", "int4", "int4/128"),
        ("batch-invariant", "invariant", "fp8", "fp8"),
        further("off", "listed", "fp8", "fp8"),
        further("batch-invariant", "invariant", "int4", "int4/128"),
    ],
)
def test_weights_made_at_the_load_give_the_tokens_of_their_numbers(
    weights: str, format_name: str, determinism: str, products: str
) -> None:
    forward = served(tiny_model(attention=ATTENTION), weights=weights, determinism=determinism)
    history = text(60)
    expected = dequantised(weights).generate(torch.tensor([history]), max_new_tokens=16, do_sample=False)

    assert forward.facts.numerics == f"{products}, {format_name} weights"
    assert greedy(forward, history, 16) == expected[0, len(history) :].tolist()


def test_the_head_and_the_embedding_keep_their_numbers_and_the_rest_takes_fewer_bytes() -> None:
    plain = tiny_model(attention=ATTENTION)
    linears = {name for name, module in plain.named_modules() if type(module) is nn.Linear}
    forward = served(plain, weights="fp8")
    model = forward.seam.model
    found = {name: module for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}

    assert found.keys() == linears - {"lm_head"}
    for name, module in found.items():
        assert module.matrix.nbytes == module.out_features * (module.in_features + 4), name
    joined = forward.listed
    assert joined is not None
    together = found["model.layers.0.self_attn.q_proj"].codes.untyped_storage().data_ptr()
    assert found["model.layers.0.self_attn.v_proj"].codes.untyped_storage().data_ptr() == together
