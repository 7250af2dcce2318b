"""Full strategy: every row stays. The reference all others are measured against, and the server's default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerRule
from inference_engine.kv.strategy import KVStrategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Full(KVStrategy):
    """Keeps all rows; the session ends at the model's trained positions."""

    name: ClassVar[str] = "full"

    def rule(self, layer: int, geometry: Geometry) -> LayerRule:
        return LayerRule()
