"""TinyModel on the native backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from inference_engine.backends.base import Forward
from inference_engine.backends.native.forward import NativeForward
from inference_engine.backends.native.program import Program
from inference_engine.backends.native.trial import LoadedTensors
from inference_engine.backends.read_model_spec import spec_of_seam
from inference_engine.engine import Engine
from inference_engine.models.families import step_list
from inference_engine.models.seam import ATTENTION, Seam
from inference_engine.native import library as native_library
from inference_engine.native.library import KVType, Library, ProductIdentity
from inference_engine.types import Mode, ModelFacts
from tests import tiny
from tests.tiny import DELTA, TRAINED_POSITIONS, VOCABULARY, tiny_engine, tiny_forward, tiny_model


def library() -> Library:
    found = native_library.load()
    if found is None:
        pytest.skip(f"no native library: {native_library.why_missing()}")
    return found


@lru_cache(maxsize=8)
def tiny_native(
    *,
    seed: int = 0,
    windowed: bool = True,
    identity: ProductIdentity = ProductIdentity.EXACT,
    weights: str = "auto",
    kv_type: KVType = KVType.FLOAT32,
    threads: int = 1,
    level: str = "auto",
    attends_together: bool = True,
    enlarged: str = "",
    hybrid: str = "",
) -> NativeForward:
    """attends_together: False makes every session's queries read by views. enlarged: a part of the
    last layer, "k_norm" or "v_proj", whose first output becomes a million times as large. hybrid: as `tiny_model`.
    """
    model = tiny_model(seed=seed, windowed=windowed, hybrid=hybrid, attention=ATTENTION)
    if enlarged:
        model.get_submodule(f"model.layers.2.self_attn.{enlarged}").weight.data[0] *= 1e6
    checkpoint = LoadedTensors.of_model(model.state_dict())
    spec = spec_of_seam(Seam(model))
    program = Program(
        library(),
        step_list(spec.config, spec.layers, checkpoint.names(), spec.reads),
        checkpoint,
        spec.rotaries,
        trained_positions=TRAINED_POSITIONS,
        identity=identity,
        weights=weights,
        kv_type=kv_type,
        threads=threads,
        level=level,
    )
    facts = ModelFacts(
        model_id="tiny",
        vocab_size=VOCABULARY,
        trained_positions=TRAINED_POSITIONS,
        device="cpu",
        dtype="float32",
        backend="native",
        numerics=f"{'exact' if identity is ProductIdentity.EXACT else 'int8'}, {kv_type.name.lower()} K/V",
    )
    forward = NativeForward(spec, facts, program)
    if not attends_together:
        forward._ops = replace(forward._ops, attends_together=False)
    return forward


def tiny_native_hybrid(*, seed: int = 0, windowed: bool = True) -> NativeForward:
    """windowed: without effect."""
    return tiny_native(seed=seed, hybrid=DELTA)


# What runs TinyModel in each mode: what serves on a CPU. Without a compiler it is torch, where a step costs five times
# as much; each law has a case there, too (`tests/laws/conftest.py`).
EXECUTORS: dict[Mode, Callable[..., Forward]] = dict.fromkeys(
    Mode, tiny_forward if native_library.load() is None else tiny_native
)


def run_on(make: Callable[..., Forward], monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on engines of tests run there, in every mode."""
    monkeypatch.setattr(tiny, "tiny_forward", make)
    for mode in Mode:
        monkeypatch.setitem(EXECUTORS, mode, make)


def served_engine(*, mode: Mode = Mode.BATCHED, **settings: Any) -> Engine:
    """As `tiny_engine`, on what a mode has in EXECUTORS."""
    return tiny_engine(mode=mode, make=EXECUTORS[mode], **settings)
