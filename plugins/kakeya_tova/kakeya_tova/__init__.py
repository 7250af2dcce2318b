"""TOVA for Kakeya: the old entries that the latest token attends to least are evicted.

    budget = 8, window = 0, segment = 8              ■ kept   · evicted
    position   0 … 7 | 8 … 15 | 16 … 23
    length 16  ■ · ■ | · ■ ·  |                      8 entries of 16, by the attention of token 15
    length 24  ■ · · | · ■ ·  | · ■ ■                8 of those and of the segment from 16, by that of token 23

The last `window` entries stay in any case. Of the older ones each KV head keeps those `budget` to which its query heads
pay most attention. Memory is constant, as with `sink_window`, but what stays is chosen by what was needed.

Source: Oren et al., Transformers are Multi-State RNNs, arXiv 2401.06104, section 3.2. It evicts one entry a token, by
the mean over all heads of a layer. Here a whole segment leaves at once, by its last token, and each KV head chooses for
itself, so that what is kept does not depend on how tokens arrive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerRule
from inference_engine.kv.parts.scored import Candidates, EntryScorer
from inference_engine.kv.strategy import KVStrategy, require


@dataclass(frozen=True, kw_only=True, slots=True)
class LastAttention(EntryScorer):
    """What the segment's last token pays to an entry, the mean over the query heads of its KV head."""

    def scores(self, candidates: Candidates) -> Tensor:
        return candidates.weights().mean(dim=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tova(KVStrategy):
    """budget: old entries that each KV head keeps. window: last positions that stay, beside the segment in progress."""

    name: ClassVar[str] = "tova"

    budget: int = 512
    window: int = 256

    def __post_init__(self) -> None:
        require(self.budget >= 1, "budget", f"must be ≥ 1, got {self.budget}", at_least=1)
        require(self.window >= 1, "window", f"must be ≥ 1, got {self.window}", at_least=1)

    def check(self, geometry: Geometry) -> None:
        room = geometry.trained_positions
        for option, value in (("budget", self.budget), ("window", self.window)):
            require(value <= room, option, f"must be at most {room}, the model's positions, got {value}", limit=room)

    def rule(self, layer: int, geometry: Geometry) -> LayerRule:
        return LayerRule(sink=self.budget, window=self.window, mechanisms=(LastAttention(),))

    @classmethod
    def trials(cls, geometry: Geometry) -> tuple[Tova, ...]:
        return (cls(budget=64, window=16),)  # nothing is lost of 80 positions


# What the laws run, small enough that entries leave within a hundred tokens.
VARIANTS = ({"budget": 20, "window": 9}, {"budget": 5, "window": 30})
