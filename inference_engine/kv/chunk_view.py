"""A view that reads rows which are not in the lanes: resident rows as `DenseView` does, the others chunk by chunk.

    lanes      ■ ■ ■ ■                       | ■ ■ ■ ■ ■      resident rows, one state
    elsewhere            | c c c | c c c | c |                a state for each chunk: fetched, attended to, let go

The states are merged by their log-sum-exps (`kernels/merge.py`), so that the result is attention over all rows, and no
more than one chunk of one layer is there at a time. Where chunks begin and end is a function of positions alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inference_engine.kernels.merge import Merging, attend_state, with_head_sinks
from inference_engine.kv.pool import Arena
from inference_engine.kv.views import Lane, Scoring


class RowSource(Protocol):
    """Where the rows of a session are that its lanes do not hold."""

    def chunk(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys, rotated at their own positions, and values of the positions [first, last): [Hkv, n, D] each.

        In any float dtype, and good until the next call. Raises RestorationFailed if they cannot be had.
        """


def chunks_between(first: int, last: int, size: int) -> tuple[range, ...]:
    """The positions [first, last) in chunks of `size`, counted from `first`; the last one may be shorter."""
    return tuple(range(start, min(start + size, last)) for start in range(first, last, size))


@dataclass(frozen=True, kw_only=True, slots=True)
class Portion:
    """Consecutive rows of the step that are read in one operation: the first `count` slots under a mask.

    mask: additive, [T, count]; None when each of the rows sees each key.
    """

    rows: slice
    count: int
    mask: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkView:
    """Reads lanes and chunks. Every row of the step sees every row of every chunk: they are in an earlier segment.

    portions: all rows of the step; one portion, or in fixed-shape mode one for each row quantum, so that the shape of
    each operation depends on a row's position alone.
    """

    lane: Lane
    portions: Sequence[Portion]
    source: RowSource
    chunks: Sequence[range]

    def read(self, layer: int, queries: Tensor, arena: Arena, scoring: Scoring) -> Tensor:
        states = [
            Merging(*self._read_lanes(layer, queries[portion.rows], portion, arena, scoring))
            for portion in self.portions
        ]
        for chunk in self.chunks:
            keys, values = self.source.chunk(layer, chunk.start, chunk.stop)
            for portion, state in zip(self.portions, states, strict=True):
                state.add(*_attend(queries[portion.rows], keys, values, None, scoring))
        out, lse = (torch.cat(parts) for parts in zip(*(state.state() for state in states), strict=True))
        if scoring.head_sinks is not None:
            out, _ = with_head_sinks(out, lse, scoring.head_sinks)
        return out.to(queries.dtype)

    def _read_lanes(
        self, layer: int, queries: Tensor, portion: Portion, arena: Arena, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        keys, values = (self.lane.slots(states, layer, 0, portion.count) for states in (arena.keys, arena.values))
        return _attend(queries, keys, values, portion.mask, scoring)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """The state of these rows. Head sinks are left out of it: they count once, in the end."""
    return attend_state(queries, keys, values, mask, scaling=scoring.scaling, softcap=scoring.softcap)
