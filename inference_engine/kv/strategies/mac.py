"""Mac strategy: every row stays; a generated token takes over what a similar recent query saw of the old ones.

    position   0 … 739 | 740 … 803 | 804 … 900           the token at 900 asks much as the one at 804 did; band = 64
    reads      reused  | ■ ■ ■ ■ ■ | ■ ■ ■ ■ ■ ■

Match, amend, complete (`kernels/mac.py`): each query head compares its query, as it is before rotation, with those of
the generated tokens among the last `ring` positions. If the nearest is near enough, that token's attention to the rows
older than `band` before it is taken over, and only what came later is read. Otherwise the token reads everything, like
an appended one. What is stored is exact; what is read is approximate wherever a match was taken. A threshold of 0 takes
none and equals `full`. Layers with a sliding window of the model's own read all of it.

Memory is that of `full`, and in each layer a ring: `ring` queries and as many summaries per query head. What is saved
is reading, and it shows where reading is the cost and queries repeat, late in a long answer: the tokens of an append
leave nothing to match, and neither does a match within `band` of the start.

A token that took over a summary could leave one too, but it would hold its match's, unchanged: along such chains the
error grows without end. `chain_limit` says how many takings-over a summary may lie away from one that was read in full;
with 0 only tokens that read everything leave theirs.

Source: MAC-Attention, section 3. It counts its threshold the other way round and does not limit chains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerRule, QueryMatcher
from inference_engine.kv.strategy import KVStrategy, require

_UNLIMITED = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Mac(KVStrategy):
    """ring: positions that are searched for a match. band: rows before a match that are read again.

    threshold: how near a match has to be, as a share of the distance between two queries that have nothing in common.
    chain_limit: links from a summary back to one read in full; -1: without limit, as in the source.
    """

    name: ClassVar[str] = "mac"

    ring: int = 256
    band: int = 64
    threshold: float = 0.3
    chain_limit: int = 0

    def __post_init__(self) -> None:
        require(self.ring >= 1, "ring", f"must be ≥ 1, got {self.ring}", at_least=1)
        require(self.band >= 0, "band", f"must be ≥ 0, got {self.band}", at_least=0)
        require(
            math.isfinite(self.threshold) and self.threshold >= 0,
            "threshold",
            f"must be a finite number ≥ 0, got {self.threshold}",
            at_least=0,
        )
        require(
            self.chain_limit >= _UNLIMITED,
            "chain_limit",
            f"must be ≥ 0, or {_UNLIMITED} for no limit, got {self.chain_limit}",
            at_least=_UNLIMITED,
        )

    def check(self, geometry: Geometry) -> None:
        room = geometry.trained_positions
        for name, value in (("ring", self.ring), ("band", self.band)):
            require(value <= room, name, f"must be at most {room}, the model's positions, got {value}", limit=room)

    @classmethod
    def trials(cls, geometry: Geometry) -> tuple[Mac, ...]:
        return (cls(ring=8, band=2, threshold=0.0),)

    def rule(self, layer: int, geometry: Geometry) -> LayerRule:
        chain_limit = None if self.chain_limit == _UNLIMITED else self.chain_limit
        return LayerRule(
            matcher=QueryMatcher(ring=self.ring, band=self.band, threshold=self.threshold, chain_limit=chain_limit)
        )
