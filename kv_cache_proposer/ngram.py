"""Prompt lookup decoding: what followed the last time the history ended like this is proposed again.

    history   … the cat sat on the mat and then the cat sat on
                └───────┬────────┘              └────┬────┘
                the latest earlier copy of the end   ends here: propose "the mat and …"

It costs one comparison of the history with its last id, keeps no state and needs no training. It drafts well where
text is quoted, edited or called again, and drafts nothing elsewhere.
Source: Saxena, Prompt Lookup Decoding, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from inference_engine.decode.draft import CommittedTokens, DraftMemory, DraftMethod, TokenIds, Tokens, Wanted
from inference_engine.errors import ConfigError
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.memory.pool import Demand

_SHORT = 2  # ids of a copy that is likely chance


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramDrafter:
    """Looks for the longest copy of the history's end, of `max_ngram` down to `min_ngram` ids; the latest one wins.

    horizon: how many of the last ids are searched.
    """

    max_ngram: int = 8
    min_ngram: int = 2
    longest: int = 16
    horizon: int = 16_384

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram < self.horizon:
            raise ConfigError(
                "min_ngram, max_ngram and horizon must be at least 1 and ascend, "
                f"got {self.min_ngram}, {self.max_ngram}, {self.horizon}"
            )
        if self.longest < 1:
            raise ConfigError(f"longest must be at least 1, got {self.longest}")

    @property
    def name(self) -> str:
        return "ngram"

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return ()

    def demands(self, geometry: Geometry) -> tuple[Demand, ...]:
        return ()

    def open(self, context: KVContext) -> DraftMemory | None:
        return None

    def prepare(self, context: KVContext) -> None:
        pass

    def method(self, history: Tokens) -> DraftMethod | None:
        copy = self._copy(history[-self.horizon :])
        if copy is None:
            return None
        # A copy of two ids has another acceptance rate than one of eight.
        _, length = copy
        kind = "short" if length <= _SHORT else "longest" if length == self.max_ngram else "long"
        return _method(kind, self.longest)

    def observe(self, seen: Sequence[CommittedTokens]) -> None:
        pass

    def propose(self, wanted: Sequence[Wanted]) -> list[TokenIds]:
        return [self._continue(one.history[-self.horizon :], min(one.limit, self.longest)) for one in wanted]

    def _continue(self, ids: TokenIds, count: int) -> TokenIds:
        copy = self._copy(ids)
        if copy is None:
            return ids[:0]
        start, _ = copy
        # Where the copy runs into the end it repeats itself: "a b a b" goes on with "a b".
        found = ids[start : start + count]
        return np.resize(found, count) if start + count > len(ids) else found.copy()

    def _copy(self, ids: TokenIds) -> tuple[int, int] | None:
        """Where the continuation of the best copy begins, and how long the copy is; None if the end is new."""
        if len(ids) <= self.min_ngram:
            return None
        ends = (ids[:-1] == ids[-1]).nonzero()[0]  # last places of copies, ascending
        best, length = ends, 1
        while len(best) and length < self.max_ngram:
            longer = best[best >= length]
            longer = longer[ids[longer - length] == ids[-1 - length]]
            if not len(longer):
                break
            best, length = longer, length + 1
        return (int(best[-1]) + 1, length) if len(best) and length >= self.min_ngram else None


@cache
def _method(kind: str, longest: int) -> DraftMethod:
    return DraftMethod(f"{kind} copy", longest=longest, needs_entries=False)
