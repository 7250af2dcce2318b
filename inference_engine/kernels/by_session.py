"""Attention over regions in plain torch, the queries of a session in one operation.

As `ragged_attention.py` has it, which takes query by query.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.attention import attend
from inference_engine.kernels.reads import (
    BASE,
    COUNT,
    FLOOR,
    HEAD_SLOTS,
    KIND,
    LAST,
    PREFIX_HEAD_SLOTS,
    PREFIX_START,
    RING,
    SINK,
    SINK_FLOOR,
    START,
    UPTO,
    AttentionByRecord,
    AttentionCall,
)


def _attend_regions(call: AttentionCall, out: Tensor) -> None:
    """Implements RegionKernel, on a CPU."""
    queries, lines = call.queries, call.lines
    out.zero_()
    alike = lines[:, [START, HEAD_SLOTS, COUNT, KIND]]
    ends = torch.nonzero((alike[1:] != alike[:-1]).any(1)).flatten() + 1
    bounds = [0, *ends.tolist(), len(queries)]
    for first, end in itertools.pairwise(bounds):
        own = lines[first:end]
        if not own[0, COUNT] or own[0, KIND]:
            continue
        mask = torch.zeros(len(own), int(own[0, COUNT]), dtype=queries.dtype)
        mask.masked_fill_(~torch.from_numpy(seen_by(own.numpy())), float("-inf"))
        index = _slots(own[0].tolist(), call.kv_heads)
        entries = call.keys[index], call.values[index]
        out[first:end] = attend(queries[first:end], *entries, mask, scaling=call.scaling, softcap=call.softcap)


attend_by_session = AttentionByRecord(name="by session", regions=_attend_regions)


def seen_by(lines: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[T, count]: what queries of one session see, as `kernels.ragged_attention.seen` has it. lines: [T, FIELDS]."""
    sink, ring, last = (int(lines[0, field]) for field in (SINK, RING, LAST))
    slots = np.arange(int(lines[0, COUNT]))
    in_sink = slots < sink
    positions = slots if not ring else np.where(in_sink, slots, last - (last - slots) % ring)
    floors = lines[:, FLOOR] if not ring else np.maximum(lines[:, FLOOR], sink)
    floor = np.where(in_sink, lines[:, SINK_FLOOR, None], floors[:, None])
    seen: NDArray[np.bool_] = (positions <= lines[:, UPTO, None]) & (positions >= floor)
    return seen


def _slots(numbers: list[int], kv_heads: int) -> Tensor:
    """[Hkv, count]: the buffer vector of each slot, of a line."""
    slots, heads = torch.arange(numbers[COUNT]), torch.arange(kv_heads)[:, None]
    own = numbers[START] + heads * numbers[HEAD_SLOTS] + slots - numbers[BASE]
    prefix = numbers[PREFIX_START] + heads * numbers[PREFIX_HEAD_SLOTS] + slots
    return torch.where(slots < numbers[BASE], prefix, own)
