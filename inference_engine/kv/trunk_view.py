"""A view that reads a trunk and the lanes behind it, under one softmax.

    trunk      ■ ■ ■ ■ | ■ ■            each piece where another session holds it
    lanes                    ■ ■ ■      the fork's own, under a mask

Every row of the step is behind the trunk and sees all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inference_engine.kernels.parts import Part, attend_parts
from inference_engine.kv.pool import Arena
from inference_engine.kv.trunk import Trunk
from inference_engine.kv.views import Lane, Scoring

# Of a long prefill so many rows are read at a time that there are no more scores at once.
_MOST_SCORES = 2**26


@dataclass(frozen=True, kw_only=True, slots=True)
class TrunkView:
    """Reads the trunk, and the first `count` slots under a mask [T, count] (None: each query sees each key)."""

    lane: Lane
    count: int
    mask: Tensor | None
    trunk: Trunk

    def read(self, layer: int, queries: Tensor, arena: Arena, scoring: Scoring) -> Tensor:
        held = [Part(*states) for states in self.trunk.parts(layer)]
        keys, values = (self.lane.slots(states, layer, 0, self.count) for states in (arena.keys, arena.values))
        rows, heads, _ = queries.shape
        step = max(1, _MOST_SCORES // (heads * (self.trunk.end + self.count)))
        outs = []
        for first in range(0, rows, step):
            some = slice(first, first + step)
            own = Part(keys, values, None if self.mask is None else self.mask[some])
            outs.append(
                attend_parts(
                    queries[some],
                    [*held, own],
                    scaling=scoring.scaling,
                    softcap=scoring.softcap,
                    head_sinks=scoring.head_sinks,
                )
            )
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.to(queries.dtype)
