"""How one session's rows of a step read its keys, in one group of layers: every readable key, or some of them.

A view is made once a step, on the host, and then asked layer after layer. It holds no session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inference_engine.kernels.attention import attend, attend_causal
from inference_engine.kernels.bounds import bounds_scores, mean_scores
from inference_engine.kernels.gather import Always, gather_attend, select
from inference_engine.kernels.mac import mac_attend
from inference_engine.kv.context import OnChoice
from inference_engine.kv.layout import BlockSelector
from inference_engine.kv.pool import Arena
from inference_engine.kv.query_rings import QueryRings


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """How scores become weights in a layer; see `kernels/attention.py`."""

    scaling: float
    softcap: float | None
    head_sinks: Tensor | None


class View(Protocol):
    """`read(layer, queries [T, Hq, D], arena, scoring)` gives [T, Hq, D]; the step's own rows are written already."""

    def read(self, layer: int, queries: Tensor, arena: Arena, scoring: Scoring) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """Where the keys of one session lie in a group of layers: `lane` slots for each KV head, from a layer's start."""

    starts: Mapping[int, int]  # first arena row, by layer
    heads: int
    lane: int

    def slots(self, states: Tensor, layer: int, first: int, count: int) -> Tensor:
        """[Hkv, count, D], the slots from `first` on: a view."""
        dim = states.shape[-1]
        offset = (self.starts[layer] + first) * dim
        return states.as_strided((self.heads, count, dim), (self.lane * dim, dim, 1), offset)


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseView:
    """Reads the first `count` slots under a mask [T, count] (None: each query sees each key)."""

    lane: Lane
    count: int
    mask: Tensor | None

    def read(self, layer: int, queries: Tensor, arena: Arena, scoring: Scoring) -> Tensor:
        return attend(
            queries,
            self.lane.slots(arena.keys, layer, 0, self.count),
            self.lane.slots(arena.values, layer, 0, self.count),
            self.mask,
            scaling=scoring.scaling,
            softcap=scoring.softcap,
            head_sinks=scoring.head_sinks,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalView:
    """Reads the first `count` slots, where each holds its own position and the step's rows are the last of them."""

    lane: Lane
    count: int

    def read(self, layer: int, queries: Tensor, arena: Arena, scoring: Scoring) -> Tensor:
        return attend_causal(
            queries,
            self.lane.slots(arena.keys, layer, 0, self.count),
            self.lane.slots(arena.values, layer, 0, self.count),
            scaling=scoring.scaling,
            softcap=scoring.softcap,
            head_sinks=scoring.head_sinks,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherView:
    """Reads a keep-set for the rows `generated`, and as `dense` does for the others."""

    lane: Lane
    selector: BlockSelector
    capacity: int
    summaries_from: int  # first slot of the blocks' summaries
    generated: Tensor  # row numbers [G]
    always: Always  # of these rows
    candidates: Tensor  # [G, B]
    row_by_row: bool  # shapes that do not depend on which rows share a step
    dense: View | None  # None: every row is generated
    on_choice: OnChoice | None = None

    def read(self, layer: int, queries: Tensor, arena: Arena, scoring: Scoring) -> Tensor:
        out = torch.zeros_like(queries) if self.dense is None else self.dense.read(layer, queries, arena, scoring)
        rows = range(len(self.generated)) if self.row_by_row else (slice(None),)
        for row in rows:
            some = slice(row, row + 1) if isinstance(row, int) else row
            place = self.generated[some]
            out[place] = self._gather(layer, queries[place], some, arena, scoring).to(out.dtype)
        return out

    def _gather(self, layer: int, queries: Tensor, rows: slice, arena: Arena, scoring: Scoring) -> Tensor:
        out, _ = gather_attend(
            queries,
            self.lane.slots(arena.keys, layer, 0, self.capacity),
            self.lane.slots(arena.values, layer, 0, self.capacity),
            self._select(layer, queries, rows, arena, scoring),
            self.always.of(rows),
            block=self.selector.block,
            scaling=scoring.scaling,
            softcap=scoring.softcap,
            head_sinks=scoring.head_sinks,
        )
        return out

    def _select(self, layer: int, queries: Tensor, rows: slice, arena: Arena, scoring: Scoring) -> Tensor:
        """The distant blocks that these rows read: [T, Hkv, K], -1 for none."""
        blocks = self.candidates.shape[1]
        low = self.lane.slots(arena.keys, layer, self.summaries_from, blocks)
        if self.selector.scorer == "mean":
            scores = mean_scores(queries, low, scoring.scaling)
        else:
            high = self.lane.slots(arena.values, layer, self.summaries_from, blocks)
            scores = bounds_scores(queries, low, high, scoring.scaling)
        candidates = self.candidates[rows]
        chosen = select(scores, candidates, self.selector.count, searched=False).blocks
        if self.on_choice is not None:
            self.on_choice(layer, scores, candidates, chosen)
        return chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class MacView:
    """Lets the rows `generated` take over what earlier ones saw, one after another; reads as `dense` for the others.

    What a row leaves is found by the later rows of the step at once, and by later steps if the row is committed. Each
    row is an operation of its own, with shapes that depend on its position alone.
    """

    lane: Lane
    rings: QueryRings
    generated: Tensor  # row numbers [G]
    positions: Sequence[int]  # of these rows
    unrotations: Tensor  # [G, D, D]: what a rotated query of each row is multiplied by to be as it was before
    dense: DenseView | None  # None: every row is generated

    def read(self, layer: int, queries: Tensor, arena: Arena, scoring: Scoring) -> Tensor:
        out = torch.zeros_like(queries) if self.dense is None else self.dense.read(layer, queries, arena, scoring)
        matcher = self.rings.matcher
        keys, values = (
            self.lane.slots(states, layer, 0, self.positions[-1] + 1) for states in (arena.keys, arena.values)
        )
        state = self.rings.state(layer, len(self.positions))
        outs, left = [], []
        for query, unrotation, position in zip(queries[self.generated], self.unrotations, self.positions, strict=True):
            row, entry, stats = mac_attend(
                state,
                query.float() @ unrotation,
                query,
                keys,
                values,
                position,
                band=matcher.band,
                threshold=matcher.threshold,
                scaling=scoring.scaling,
                chain_limit=matcher.chain_limit,
                softcap=scoring.softcap,
                head_sinks=scoring.head_sinks,
            )
            if len(self.positions) > 1:
                state.commit([entry])
            outs.append(row)
            left.append((entry, stats))
        self.rings.leave(layer, left)
        out[self.generated] = torch.stack(outs).to(out.dtype)
        return out
