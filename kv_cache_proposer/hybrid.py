"""A long copy first, else the network: prompt lookup where the history repeats itself, a trained drafter elsewhere.

    history ends like an earlier part of it, for `min_ngram` ids or more   → what followed there
    it does not                                                            → what the network drafts

A long copy is right more often than any network, costs nothing, and reaches further than a block; a short one is not.
The choice is made anew for each draft, so the network observes every committed token, as it would alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from inference_engine.decode.draft import CommittedTokens, Drafter, DraftMemory, DraftMethod, TokenIds, Tokens, Wanted
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.memory.pool import Demand
from kv_cache_proposer.ngram import NgramDrafter

# What follows three ids that came before is right more often than a network is; after two of a chat it is not.
LONG_COPY = NgramDrafter(min_ngram=3)


class HybridDrafter:
    """network: drafts wherever `copies` has no copy; a session's drafter memory is the network's."""

    def __init__(self, network: Drafter, copies: NgramDrafter = LONG_COPY) -> None:
        self._network = network
        self._copies = copies

    @property
    def name(self) -> str:
        return "hybrid"

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self._network.tap_layers

    @property
    def longest(self) -> int:
        return max(self._copies.longest, self._network.longest)

    def demands(self, geometry: Geometry) -> tuple[Demand, ...]:
        return self._network.demands(geometry)

    def open(self, context: KVContext) -> DraftMemory | None:
        return self._network.open(context)

    def prepare(self, context: KVContext) -> None:
        self._network.prepare(context)

    def method(self, history: Tokens) -> DraftMethod | None:
        return self._copies.method(history) or self._network.method(history)

    def observe(self, seen: Sequence[CommittedTokens]) -> None:
        self._network.observe(seen)

    def propose(self, wanted: Sequence[Wanted]) -> list[TokenIds]:
        drafts = self._copies.propose(wanted)
        without = [place for place, draft in enumerate(drafts) if not len(draft)]
        drafts_of_network = self._network.propose([wanted[place] for place in without])
        for place, draft in zip(without, drafts_of_network, strict=True):
            drafts[place] = draft
        return drafts
