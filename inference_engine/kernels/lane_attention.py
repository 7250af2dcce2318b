"""Attention of single rows, each over a lane of its own: one operation for all rows of a step.

    queries [N, Hq, D] · keys, values [R, D], the arenas · lanes [N, FIELDS], one line a row, whole numbers

A lane is `lane` consecutive arena rows for each KV head, from `start` on. What a row sees there follows from numbers,
so that nothing as long as a history is built on the host or copied, and a step's shapes do not change with lengths:

    slot       0 … sink-1 | sink … count-1
    position   its number | the last one up to `last` that falls there, `ring` apart (ring 0: its number)
    seen       from sink_floor on | from max(floor, sink) on, and both up to `upto`

This is the reference, row by row in plain torch, and the contract; `triton/lane_attention.py` has the kernel.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from inference_engine.kernels.attention import attend

START, LANE, COUNT, SINK, RING, LAST, UPTO, FLOOR, SINK_FLOOR = range(9)
FIELDS = 9


class LaneAttention(Protocol):
    """`kv_heads`: Hkv. A row whose count is 0 gets zeros. Returns [N, Hq, D] in the dtype of `queries`."""

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        lanes: Tensor,
        *,
        kv_heads: int,
        scaling: float,
        softcap: float | None = None,
    ) -> Tensor: ...


def attend_lanes(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lanes: Tensor,
    *,
    kv_heads: int,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """The reference of LaneAttention."""
    out = torch.zeros_like(queries)
    for row, numbers in enumerate(lanes.tolist()):
        start, lane, count = numbers[START], numbers[LANE], numbers[COUNT]
        if not count:
            continue
        slots = torch.arange(count, device=queries.device)
        mask = torch.zeros(1, count, dtype=queries.dtype, device=queries.device)
        mask.masked_fill_(~seen(slots, numbers)[None], float("-inf"))
        index = start + torch.arange(kv_heads, device=queries.device)[:, None] * lane + slots  # [Hkv, count]
        out[row : row + 1] = attend(
            queries[row : row + 1], keys[index], values[index], mask, scaling=scaling, softcap=softcap
        )
    return out


def seen(slots: Tensor, numbers: list[int]) -> Tensor:
    """Which of `slots` a row with these `numbers` sees."""
    sink, ring, last, upto = numbers[SINK], numbers[RING], numbers[LAST], numbers[UPTO]
    in_sink = slots < sink
    positions = slots if not ring else torch.where(in_sink, slots, last - (last - slots) % ring)
    floor = torch.where(in_sink, numbers[SINK_FLOOR], max(numbers[FLOOR], 0 if not ring else sink))
    return (positions <= upto) & (positions >= floor)
