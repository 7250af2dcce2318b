"""Eviction by score: the entries that leave the window compete for the places of those that stay (`kv/scorer.py`).

The places are the slots of the layout's sink. What they hold is decided on the device, for each KV head; that they are
held is all that the slot table says, so the host waits for nothing. The query that scores are computed from comes by a
view, in a step of its own: that of a segment's last token. It is kept until the commit. All others read by numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerSet, Layout, Positions
from inference_engine.kv.memory.pool import KVBuffer
from inference_engine.kv.part import Need
from inference_engine.kv.parts.layer_part import LayerMechanism, LayerPart
from inference_engine.kv.scorer import Candidates, EntryScorer
from inference_engine.kv.slots import LayerSlots
from inference_engine.kv.views import Scoring, StagedQueries, StepReads, View


@dataclass(frozen=True, kw_only=True, slots=True)
class ByScore(LayerMechanism):
    """Which entries stay is decided by `scorer`."""

    needs_every_entry: ClassVar[bool] = False
    is_selective: ClassVar[bool] = False

    scorer: EntryScorer

    def need(self, geometry: Geometry, layers: LayerSet, layout: Layout) -> Need:
        """Nothing: what stays is in the regions."""
        return Need()

    def open(self, slots: LayerSlots, starts: Sequence[int]) -> LayerPart:
        return ScoredEntries(slots, self.scorer)


class ScoredEntries(LayerPart):
    """Which entries of a set of layers hold the places of the sink."""

    def __init__(self, slots: LayerSlots, scorer: EntryScorer) -> None:
        self._slots = slots
        self._scorer = scorer
        self._asked: dict[int, tuple[Tensor, Scoring]] = {}  # by layer, the query of the segment's last token

    def has_numbers(self, queries: StagedQueries, step: StepReads) -> bool:
        return not self._asks(queries)

    def _asks(self, queries: StagedQueries) -> bool:
        """Is this the last query of a segment after which entries leave? It is a step of its own."""
        layout = self._slots.layout
        return queries.end % layout.segment == 0 and layout.horizon(queries.end) > layout.sink

    def view(self, queries: StagedQueries, step: StepReads, inner: Callable[[], View]) -> View:
        if not self._asks(queries):
            return inner()
        self._asked = {}
        return _AskedView(inner=inner(), last=int(queries.staged_queries[-1]), asked=self._asked)

    def leave(self, positions: Positions) -> None:
        """Give the places to those of their entries and of `positions` that have the highest scores."""
        slots, layout = self._slots, self._slots.layout
        if not len(positions):
            return
        places = np.arange(layout.sink, dtype=np.int64)
        among = np.concatenate([places, layout.slots(positions)])
        keys, values = (slots.gather(states, among) for states in (slots.buffer.keys, slots.buffer.values))
        asked = [self._asked[layer] for layer in slots.layer_set.layers]
        scoring = asked[0][1]
        scores = self._scorer.scores(
            Candidates(
                keys=keys.float(),
                values=values.float(),
                query=torch.stack([query for query, _ in asked]),
                scaling=scoring.scaling,
                softcap=scoring.softcap,
            )
        )
        ranked = scores.sort(dim=-1, descending=True, stable=True).indices[..., : layout.sink]
        kept = ranked.sort(dim=-1).values.transpose(1, 2)[..., None]  # [L, sink, Hkv, 1]
        for states, entries in ((slots.buffer.keys, keys), (slots.buffer.values, values)):
            slots.put(states, places, entries.take_along_dim(kept, dim=1))

    def evict(self, before: int, length: int) -> None:
        self._asked = {}

    def forget(self, floor: int, length: int) -> None:
        self._asked = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class _AskedView:
    """Reads as `inner` does, and keeps query number `last` of each layer in `asked`."""

    inner: View
    last: int
    asked: dict[int, tuple[Tensor, Scoring]]

    def read(self, layer: int, queries: Tensor, buffer: KVBuffer, scoring: Scoring) -> Tensor:
        self.asked[layer] = queries[self.last].float().clone(), scoring
        return self.inner.read(layer, queries, buffer, scoring)
