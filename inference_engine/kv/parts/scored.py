"""Eviction by score: of the entries that leave the window, those of the highest scores keep a place.

    position   0 1 2 3 4 5 6 7 | 8 … 15 | 16 … 21         sink = 8, window = 0, segment = 8: length 22
    before     ■ ■ ■ ■ ■ ■ ■ ■ | ■ … ■  |                  at length 16 the segment from 8 to 15 leaves the window;
    after      ■   ■ ■     ■   | ■ ■ ■  | ■ … ■            of 16 entries the 8 of the highest scores keep a place

Without a scorer the first `sink` entries of a layer stay. With one, their places are for the entries of the highest
scores: whenever a segment leaves the window, its entries compete with those that hold the places. Each KV head keeps
entries of its own. Keys stay rotated at their own positions.

What is kept is a function of the history alone: scores are computed at segment boundaries, of committed entries and the
query of the segment's last token (where several layers of the model read the entries, of the last of these layers),
never of how the tokens arrived. What a place holds is decided on the device; that it is held is all that the slot table
says, so the host waits for nothing. The query comes by a view, in a step of its own, and is kept until the commit. All
other queries read by numbers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerSet, Layout, Positions
from inference_engine.kv.memory.pool import KVBuffer
from inference_engine.kv.part import Need
from inference_engine.kv.parts.layer_part import LayerMechanism, LayerPart
from inference_engine.kv.slots import LayerSlots
from inference_engine.kv.views import Scoring, StagedQueries, StepReads, View


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """Entries of which some may stay, those that hold places first, and the query of the segment's last token.

    keys, values [L, n, Hkv, D] float32, of L alike layers; query [L, Hq, D] float32. Keys and query are rotated (RoPE)
    at their own positions. scaling, softcap: of the layers' attention, as `kernels/attention.py` has them.
    """

    keys: Tensor
    values: Tensor
    query: Tensor
    scaling: float
    softcap: float | None

    def weights(self) -> Tensor:
        """[L, Hkv, group, n]: the attention that each query head of each KV head pays to the candidates, 1 in sum."""
        layers, _, heads, head_dim = self.keys.shape
        query = self.query.view(layers, heads, -1, head_dim)
        scores = torch.einsum("lhgd,lnhd->lhgn", query, self.keys) * self.scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return scores.softmax(dim=-1)


class EntryScorer(LayerMechanism):
    """How entries are scored: a frozen dataclass. In a rule with a window, and with `sink` places.

    Layers with a native window keep what the model itself reads.
    """

    needs_every_entry: ClassVar[bool] = False
    is_selective: ClassVar[bool] = False
    ends_alone: ClassVar[bool] = True
    appended: bool = True

    @abstractmethod
    def scores(self, candidates: Candidates) -> Tensor:
        """[L, Hkv, n]: the entries of the highest scores stay, the earlier one of two equal ones. The host waits for
        nothing here."""

    def laid_out(self, layout: Layout, geometry: Geometry, limit_tokens: int | None) -> Layout:
        if layout.window is None or not layout.sink:
            raise ValueError("a rule with a scorer needs a window, and places: `sink`")
        if (native := layout.native_window) is None:
            return replace(layout, spare=0)
        entries = native + layout.segment if limit_tokens is None else min(native + layout.segment, limit_tokens)
        return replace(layout, sink=0, window=native, spare=0, capacity=geometry.round_up(entries), mechanisms=())

    def need(self, geometry: Geometry, layers: LayerSet, layout: Layout) -> Need:
        return Need()

    def open(self, slots: LayerSlots, starts: Sequence[int]) -> LayerPart:
        return ScoredEntries(slots, self)


class ScoredEntries(LayerPart):
    """Which entries of a set of layers hold the places of the sink."""

    def __init__(self, slots: LayerSlots, scorer: EntryScorer) -> None:
        self._slots, self._scorer = slots, scorer
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

    def commit(self, before: int, length: int, rejected: Positions) -> None:
        if len(leaving := self._slots.leaving(before, length)):
            self._choose(leaving)
        self._asked = {}

    def _choose(self, positions: Positions) -> None:
        """Give the places to those of their entries and of `positions` that have the highest scores."""
        slots, layout = self._slots, self._slots.layout
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

    def can_rewind(self, at: int, length: int) -> bool:
        """Places change hands when entries leave."""
        return True

    def forget(self, at: int, length: int) -> None:
        self._asked = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class _AskedView(View):
    """Reads as `inner` does, and keeps query number `last` of each layer in `asked`."""

    inner: View
    last: int
    asked: dict[int, tuple[Tensor, Scoring]]

    def read(self, layer: int, queries: Tensor, buffer: KVBuffer, scoring: Scoring) -> Tensor:
        self.asked[layer] = queries[self.last].float().clone(), scoring
        return self.inner.read(layer, queries, buffer, scoring)
