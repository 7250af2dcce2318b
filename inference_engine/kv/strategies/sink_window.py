"""Sink-window strategy: the attention sink and a sliding window stay, other entries are evicted and never read again.

Entries are evicted a segment at a time: a query sees its own segment and the `window` positions before it, so between
`window` and `window + segment - 1` earlier entries. Memory is constant and sessions have no length limit: distances
never leave the trained range.

Source: Xiao et al., StreamingLLM, arXiv 2309.17453, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerRule
from inference_engine.kv.strategies.codec_options import CodecStrategy
from inference_engine.kv.strategy import require


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkWindow(CodecStrategy):
    """Keeps `sink` first and `window` last positions (and the segment being filled)."""

    name: ClassVar[str] = "sink_window"

    sink: int = 4
    window: int = 1024

    def __post_init__(self) -> None:
        CodecStrategy.__post_init__(self)
        require(self.sink >= 0, "sink", f"must be ≥ 0, got {self.sink}")
        require(self.window >= 1, "window", f"must be ≥ 1, got {self.window}")

    def check(self, geometry: Geometry) -> None:
        CodecStrategy.check(self, geometry)
        reach = self.sink + self.window + geometry.segment_tokens
        room = geometry.trained_positions
        require(
            reach <= room,
            "window",
            f"sink + window + one segment of {geometry.segment_tokens} is {reach} positions; "
            f"the model was trained for {room}",
            trained_positions=room,
            segment_tokens=geometry.segment_tokens,
        )

    def rule(self, layer: int, geometry: Geometry) -> LayerRule:
        return self.coded(LayerRule(sink=self.sink, window=self.window), layer, geometry)

    @classmethod
    def trials(cls, geometry: Geometry) -> tuple[SinkWindow, ...]:
        return cls(sink=2, window=8), cls(sink=2, window=20, codec="identity", exact_window=8)

    def length_limit(self, geometry: Geometry) -> int | None:
        return None if geometry.is_endless else geometry.trained_positions
