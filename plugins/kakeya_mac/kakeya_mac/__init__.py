"""MAC for Kakeya: every entry stays; a generated token reuses the attention of a similar recent query to old entries.

    position   0 … 739 | 740 … 803 | 804 … 900           the query at 900 resembles the one at 804; band = 64
    reads      reused  | ■ ■ ■ ■ ■ | ■ ■ ■ ■ ■ ■

Match, amend, complete (`kernel.py`): each query head compares its unrotated query with those of the generated
tokens among the last `ring` positions. If the nearest is near enough, that token's attention to entries more than
`band` positions before it is reused, and only later entries are read. Otherwise the token reads everything, like an
appended one. Stored entries are exact; attention is approximate where a match was used. With a threshold of 0 nothing
matches, which equals `full`. Layers with a native sliding window read all of it.

Memory is that of `full`, and a query cache in each layer: `ring` queries and as many summaries per query head. Reads
are saved. That helps where reads dominate and queries repeat, late in a long answer: appended tokens cannot be matched,
and neither can positions within `band` of the start.

A token that reused a summary could leave one too, but it would contain its match's summary, unchanged: along such
chains the error grows without bound. `chain_limit` caps the reuses between a summary and one that was read in full;
with 0 only tokens that read everything leave a summary.

Source: MAC-Attention, section 3. It counts its threshold in the other direction and does not limit chains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerRule
from inference_engine.kv.strategy import KVStrategy, require
from kakeya_mac.query_cache import QueryMatcher

_UNLIMITED = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Mac(KVStrategy):
    """ring: positions that are searched for a match. band: entries before a match that are read again.

    threshold: how near a match has to be, as a share of the distance between two unrelated queries.
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
        matcher = QueryMatcher(ring=self.ring, band=self.band, threshold=self.threshold, chain_limit=chain_limit)
        return LayerRule(mechanisms=(matcher,))


# What the laws run: matches at about every other query, chains among them; and none ever.
VARIANTS = ({"ring": 24, "band": 6, "threshold": 0.6, "chain_limit": 2}, {"ring": 9, "band": 0, "threshold": 0.0})
