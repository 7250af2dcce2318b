"""Full strategy: every entry stays. Without a codec it is the default, and the reference for all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerRule
from inference_engine.kv.strategies.codec_options import CodecStrategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Full(CodecStrategy):
    """Keeps all entries; the session ends at the model's trained positions."""

    name: ClassVar[str] = "full"

    @classmethod
    def trials(cls, geometry: Geometry) -> tuple[Full, ...]:
        return cls(), cls(codec="identity", exact_window=8)

    def rule(self, layer: int, geometry: Geometry) -> LayerRule:
        return self.coded(LayerRule(), layer, geometry)
