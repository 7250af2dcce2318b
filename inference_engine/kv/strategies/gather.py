"""Gather strategy: every entry stays; a generated token reads the sink, the window and the top-k blocks.

    position  0 … 127 | 128 … 255 | 256 … 383 | 384 … 511 | 512 … 900      block = 128, two distant blocks
    reads     ■ ■ ■ ■ |           | ■ ■ ■ ■ ■ | ■ ■ ■ ■ ■ | ■ ■ ■ ■ ■

The smallest and largest value of each key channel in a block bound the score of any of its keys from above. Per KV
head, the blocks of the highest bounds are read. Appended tokens read everything, so stored entries are exact. Tokens
that the model generated read selected blocks, whether they were sampled one by one or verified together. A budget of
the whole history equals `full`. Memory is that of `full` and one entry per block; reads are saved.

Source: the Constant-Support reports (block-aligned gather-decode); Tang et al., Quest, arXiv 2406.10774 (bounds).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import BlockSelector, LayerRule
from inference_engine.kv.strategy import KVStrategy, require

_SCORERS = ("bounds", "mean")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather(KVStrategy):
    """budget: entries a generated token may read, in whole blocks: the sink, the window and (budget − both) / block
    distant blocks."""

    name: ClassVar[str] = "gather"

    budget: int = 4864  # one block of sink, 640 local entries, 32 distant blocks
    block: int = 128
    sink: int = 128
    window: int = 512
    scorer: str = "bounds"

    def __post_init__(self) -> None:
        require(self.block >= 1, "block", f"must be ≥ 1, got {self.block}")
        require(self.sink >= 0, "sink", f"must be ≥ 0, got {self.sink}")
        require(self.window >= 1, "window", f"must be ≥ 1, got {self.window}")
        require(
            self.scorer in _SCORERS, "scorer", f"there is no scorer {self.scorer!r}; there are {', '.join(_SCORERS)}"
        )
        least = self._selector(0).most_entries
        require(
            self.budget >= least,
            "budget",
            f"must hold the sink, the window and the block of the query, {least} entries; got {self.budget}",
            least=least,
        )

    def _selector(self, count: int) -> BlockSelector:
        return BlockSelector(block=self.block, sink=self.sink, window=self.window, count=count, scorer=self.scorer)

    @property
    def distant_blocks(self) -> int:
        return (self.budget - self._selector(0).most_entries) // self.block

    def check(self, geometry: Geometry) -> None:
        page, segment, room = geometry.page_tokens, geometry.segment_tokens, geometry.trained_positions
        for name, value in (("block", self.block), ("sink", self.sink), ("window", self.window)):
            require(value <= room, name, f"must be at most {room}, the model's positions, got {value}", limit=room)
        require(
            self.block % page == 0,
            "block",
            f"must be a multiple of the page size {page}, got {self.block}",
            page_tokens=page,
        )
        # Tokens staged together lie within a segment; with a shorter window, one of them could be distant to another.
        require(
            self.window >= segment,
            "window",
            f"must hold a segment of {segment} tokens, got {self.window}",
            segment_tokens=segment,
        )

    @classmethod
    def trials(cls, geometry: Geometry) -> tuple[Gather, ...]:
        return (cls(block=4, sink=4, window=16, budget=64),)

    def rule(self, layer: int, geometry: Geometry) -> LayerRule:
        return LayerRule(selector=self._selector(self.distant_blocks))
