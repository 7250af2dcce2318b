"""Any forward, with what the scripted one has: its steps are counted, and a script is told of each."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from inference_engine.backends.base import Forward, Result, Step
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.types import Mode, ModelFacts
from laboratory.scripted import Script


class CountedForward:
    """Of the script only `on_step` counts."""

    def __init__(self, forward: Forward, script: Script | None = None) -> None:
        self._forward = forward
        self.script = script or Script()
        self.steps = 0

    @property
    def facts(self) -> ModelFacts:
        return self._forward.facts

    @property
    def device(self) -> torch.device:
        return self._forward.device

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._forward.compute_dtype

    def geometry(self, *, mode: Mode, page_tokens: int, segment_tokens: int) -> Geometry:
        return self._forward.geometry(mode=mode, page_tokens=page_tokens, segment_tokens=segment_tokens)

    def free_bytes(self) -> int:
        return self._forward.free_bytes()

    @property
    def has_address_space(self) -> bool:
        return self._forward.has_address_space

    def open(
        self, geometry: Geometry, capacity_bytes: int, *, address_bytes: int = 0, tap_layers: tuple[int, ...] = ()
    ) -> KVContext:
        return self._forward.open(geometry, capacity_bytes, address_bytes=address_bytes, tap_layers=tap_layers)

    @property
    def torch_model(self) -> PreTrainedModel | None:
        return self._forward.torch_model

    @property
    def records_graphs(self) -> bool:
        return self._forward.records_graphs

    def run(self, step: Step) -> Result:
        self.steps += 1
        if self.script.on_step is not None:
            self.script.on_step(self.steps)
        return self._forward.run(step)
