"""Tiered strategy: every row stays, but the older ones off the device; what a generated token needs of them is fetched.

    position   0 … 127 | 128 … 8959                | 8960 … 9983 | 9984 …        sink 128, resident_tokens 1024
    lies on    device  | host memory, or in a file | device      | being filled

Generated tokens read as those of `gather` do: the sink, the window and, per KV head, the blocks whose bounds promise
most. The bounds of every block stay on the device, so that choosing fetches nothing, and a block that was fetched stays
until another needs its place. Appended tokens read everything, so that what is stored is exact; the old rows come by in
chunks, and attention to each is merged by its log-sum-exp. So the device holds a number of rows that does not depend on
the length of the history, and one row per block. A budget of the whole history equals `full`, `resident_tokens` of the
whole history moves nothing.

Source: as `gather`, for what is read; Sheng et al., FlexGen, arXiv 2303.06865 (rows on the host, read in pieces).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerRule
from inference_engine.kv.strategies.gather import Gather
from inference_engine.kv.strategy import KVStrategy, require


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiered(KVStrategy):
    """resident_tokens: the last rows that stay on the device, in whole blocks. The others are those of `gather`."""

    name: ClassVar[str] = "tiered"

    budget: int = 4864  # one block of sink, 640 local rows, 32 distant blocks
    block: int = 128
    sink: int = 128
    window: int = 512
    resident_tokens: int = 1024

    def __post_init__(self) -> None:
        self._reading()  # checks its options
        require(
            self.resident_tokens >= self.window,
            "resident_tokens",
            f"must hold the window of {self.window}, got {self.resident_tokens}",
            window=self.window,
        )

    def check(self, geometry: Geometry) -> None:
        self._reading().check(geometry)
        room = geometry.trained_positions
        require(
            self.resident_tokens <= room,
            "resident_tokens",
            f"must be at most {room}, the model's positions, got {self.resident_tokens}",
            limit=room,
        )

    @classmethod
    def trials(cls, geometry: Geometry) -> tuple[Tiered, ...]:
        return (cls(block=4, sink=4, window=16, budget=64, resident_tokens=16),)

    def rule(self, layer: int, geometry: Geometry) -> LayerRule:
        return replace(self._reading().rule(layer, geometry), resident=self.resident_tokens)

    def _reading(self) -> Gather:
        """What generated tokens read."""
        return Gather(budget=self.budget, block=self.block, sink=self.sink, window=self.window)
