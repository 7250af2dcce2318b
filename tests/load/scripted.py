"""Engines on the scripted model, small enough that windows wrap and segments end, and the law for their strategies."""

from __future__ import annotations

from typing import Any

import torch

from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.kv.strategies.layer_window import LayerWindow
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Mode
from laboratory.scripted import Script, ScriptedForward, ScriptedModel
from tests.load.solo import Sight, Solo

LAYERS = 2
SEGMENT = 16
TRAINED_POSITIONS = 1024
SMALL: dict[str, Any] = {
    "page_tokens": 4,
    "segment_tokens": SEGMENT,
    "step_tokens": 64,
    "kv_bytes": 64 * 2**20,
    "tier_bytes": 2**24,
    "share_prefixes": "off",
}
EXTRAS = ("clock", "wall_clock", "journal", "metrics", "drafter")


def scripted_engine(
    *,
    script: Script | None = None,
    layers: int = LAYERS,
    dtype: torch.dtype = torch.float64,
    mode: Mode = Mode.BATCHED,
    **settings: Any,
) -> Engine:
    """`settings` change EngineConfig; those of EXTRAS go to the engine."""
    extras = {name: settings.pop(name) for name in EXTRAS if name in settings}
    forward = ScriptedForward(
        ScriptedModel(layers=layers), script, trained_positions=TRAINED_POSITIONS, dtype=dtype, mode=mode
    )
    return Engine(forward, EngineConfig(**{**SMALL, **settings}), **extras)


def solo_of(strategy: KVStrategy, model: ScriptedModel | None = None, *, segment: int = SEGMENT) -> Solo:
    """The law for a strategy that reads whole windows of exact entries."""
    model = model or ScriptedModel(layers=LAYERS)
    sights = [Sight()] * model.layers
    if isinstance(strategy, SinkWindow):
        sights = [Sight(strategy.sink, strategy.window)] * model.layers
    if isinstance(strategy, LayerWindow):
        sights = [
            Sight() if layer in strategy.full_layers else Sight(strategy.sink, strategy.window)
            for layer in range(model.layers)
        ]
    return Solo(model=model, sights=tuple(sights), segment=segment)
