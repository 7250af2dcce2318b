"""Tiered strategy: every entry stays, older ones off the device; generated tokens fetch the blocks they need.

    position   0 … 127 | 128 … 8959                | 8960 … 9983 | 9984 …        sink 128, resident_tokens 1024
    lies on    device  | host memory               | device      | being filled

Generated tokens read as under `gather`: the sink, the window and, per KV head, the blocks of the highest bounds. The
bounds of every block stay on the device, so choosing fetches nothing. A fetched block stays until another needs its
place. Appended tokens read everything, so stored entries are exact: old entries are read in chunks, and attention to
each chunk is merged by its log-sum-exp. The device holds a number of entries that does not depend on the length of the
history, and one summary per block. A budget of the whole history equals `full`; `resident_tokens` of the whole history
moves nothing.

Source: as `gather`, for what is read; Sheng et al., FlexGen, arXiv 2303.06865 (entries on the host, read in pieces).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerRule
from inference_engine.kv.parts.offload import OffloadingSelector
from inference_engine.kv.strategies.gather import Gather
from inference_engine.kv.strategy import KVStrategy, require


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiered(KVStrategy):
    """resident_tokens: the last entries that stay on the device, in whole blocks.

    The other options are those of `gather`.
    """

    name: ClassVar[str] = "tiered"

    budget: int = 4864  # one block of sink, 640 local entries, 32 distant blocks
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
        return (cls(block=4, sink=4, window=16, budget=96, resident_tokens=16),)

    def rule(self, layer: int, geometry: Geometry) -> LayerRule:
        reading = self._reading()
        selector = OffloadingSelector(
            block=self.block,
            sink=self.sink,
            window=self.window,
            count=reading.distant_blocks,
            resident=self.resident_tokens,
        )
        return LayerRule(mechanisms=(selector,))

    def _reading(self) -> Gather:
        """The strategy by which generated tokens read."""
        return Gather(budget=self.budget, block=self.block, sink=self.sink, window=self.window)
