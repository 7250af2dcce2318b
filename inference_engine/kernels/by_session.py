"""Attention over regions in plain torch, the queries of a session in one operation.

As `ragged_attention.py` has it, which takes query by query; queries that select blocks are left to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.attention import attend
from inference_engine.kernels.components import TokenChoice
from inference_engine.kernels.ragged_attention import (
    BASE,
    BLOCK,
    COUNT,
    FLOOR,
    HEAD_SLOTS,
    LAST,
    PREFIX_HEAD_SLOTS,
    PREFIX_START,
    RING,
    SINK,
    SINK_FLOOR,
    START,
    UPTO,
    attend_ragged,
)


def attend_by_session(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    regions: Tensor,
    *,
    kv_heads: int,
    scaling: float,
    softcap: float | None = None,
    blocks: int = 0,
    choices: Sequence[TokenChoice] = (),
    reads_offloaded: bool = False,
) -> Tensor:
    """Implements RaggedAttention, on a CPU."""
    assert not choices, "it knows no index of keys"
    assert not reads_offloaded, "it reads what is on the device"
    out = torch.zeros_like(queries)
    alike = regions[:, [START, HEAD_SLOTS, COUNT, BLOCK]]
    ends = torch.nonzero((alike[1:] != alike[:-1]).any(1)).flatten() + 1
    bounds = [0, *ends.tolist(), len(queries)]
    for first, end in itertools.pairwise(bounds):
        lines = regions[first:end]
        if not lines[0, COUNT]:
            continue
        if lines[0, BLOCK]:
            out[first:end] = attend_ragged(
                queries[first:end],
                keys,
                values,
                lines,
                kv_heads=kv_heads,
                scaling=scaling,
                softcap=softcap,
                blocks=blocks,
            )
            continue
        mask = torch.zeros(len(lines), int(lines[0, COUNT]), dtype=queries.dtype)
        mask.masked_fill_(~torch.from_numpy(seen_by(lines.numpy())), float("-inf"))
        index = _slots(lines[0].tolist(), kv_heads)
        out[first:end] = attend(queries[first:end], keys[index], values[index], mask, scaling=scaling, softcap=softcap)
    return out


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
