"""Attention over selected blocks: the sink, the local entries, and the k distant blocks of highest scores.

    position   0 … 3 | 4 … 127 | 128 … 255 | 256 … 383 | 384 … 511 | 512 … 900        sink = 4, block = 128, k = 2
    block        0   |    0    |     1     |     2     |     3     |  4 … 7
    read       ■ ■ ■ |         |   ■ ■ ■   |           |   ■ ■ ■   | ■ ■ ■ ■ ■        a query at 900, local from 512

`select` chooses the blocks; `gather_attend` reads exactly their union with sink and local entries, in one
softmax; its work and memory depend on the entries read, not on those stored. `masked_attend` is the definition, over
all entries. Each entry counts once: of a chosen block only [sink, local start) is read, the rest is read anyway.

    queries [T, Hq, D] · keys, values [Hkv, S, D], entry s at position s · kept [T, Hkv, K] block ids, -1 for none

Results are states, (out [T, Hq, D], lse [T, Hq]), both float32 as all arithmetic is; lse is the logarithm of what the
softmax divides by, head sinks included. Source: the gather-decode of the Constant-Support reports (sink block, local
blocks and top-k distant blocks under bounds scores).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.topk import Largest, topk_by_sorting

MOST_BLOCKS = 2**14  # that an operation over regions selects from: as many as a program of a GPU holds
# Queries whose entries are gathered at a time, so temporary memory does not grow with the number of queries.
QUERIES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Always:
    """The entries that a query reads whatever was selected, computed on the host once for all layers alike.

    positions: [T, A] int64, first the sink's, then the local ones; -1 is padding. local_starts: [T] int64.
    """

    positions: Tensor
    local_starts: Tensor
    sink: int

    def of(self, queries: slice) -> Always:
        return Always(self.positions[queries], self.local_starts[queries], self.sink)


def always_read(
    positions: NDArray[np.int64],
    local_starts: NDArray[np.int64],
    *,
    sink: int,
    device: torch.device | str,
    width: int | None = None,
) -> Always:
    """Positions [0, sink) and [local start, position] of each query, each once.

    width: pad to so many, for shapes that do not depend on which queries share a step; None: the longest decides.
    """
    assert (local_starts <= positions).all(), "a query's own entry is local"
    assert sink >= 0, f"sink is {sink}"
    starts = np.maximum(local_starts, sink)
    local = starts[:, None] + np.arange(max(0, int((positions - starts).max()) + 1))
    read_positions = np.concatenate([np.broadcast_to(np.arange(sink), (len(positions), sink)), local], axis=1)
    read_positions = np.where(read_positions <= positions[:, None], read_positions, -1)
    if width is not None:
        assert width >= read_positions.shape[1], f"{read_positions.shape[1]} entries do not fit a width of {width}"
        read_positions = np.pad(read_positions, ((0, 0), (0, width - read_positions.shape[1])), constant_values=-1)
    return Always(torch.from_numpy(read_positions).to(device), torch.from_numpy(local_starts).to(device), sink)


def distant_blocks(always: Always, *, block: int, count: int) -> Tensor:
    """[T, count] bool, the candidates: blocks with an entry that is neither sink nor local, and before the query.

    When sink and local start are multiples of `block`, these are the blocks wholly outside both; otherwise the blocks
    they cut are candidates too, or the rest of such a block could never be read.
    """
    first = torch.arange(count, device=always.positions.device) * block
    return first.clamp(min=always.sink) < (first + block).minimum(always.local_starts[:, None])


def select(scores: Tensor, candidates: Tensor, k: int, *, largest: Largest = topk_by_sorting) -> Tensor:
    """The k candidate blocks [T, B] of highest scores [T, Hkv, B]; all of them where there are no more than k.

    Returns [T, Hkv, min(k, B)] int64, distinct, ascending, -1 where there are fewer candidates.
    """
    return largest(scores, k, candidates=candidates[:, None])


def gather_attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    kept: Tensor,
    always: Always,
    *,
    block: int,
    scaling: float,
    softcap: float | None = None,
    head_sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over sink, local entries and selected blocks only; softcap and head_sinks as in `attend`.

    The last block may be cut short by S. A block must not occur twice in a query's list.
    """
    outs, lses = [], []
    for first in range(0, len(queries), QUERIES_AT_ONCE):
        some = slice(first, first + QUERIES_AT_ONCE)
        entries, seen = entries_read(kept[some], always.of(some), block=block, count=keys.shape[1])
        some_keys, some_values = gather_vectors(keys, entries), gather_vectors(values, entries)
        out, lse = attend_entries(queries[some], some_keys, some_values, seen, scaling, softcap, head_sinks)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def entries_read(kept: Tensor, always: Always, *, block: int, count: int) -> tuple[Tensor, Tensor]:
    """Positions [T, Hkv, R] of the union, below `count`, and which of them are valid [T, Hkv, R]; others are 0."""
    in_blocks = kept[..., None] * block + torch.arange(block, device=kept.device)
    distant = (in_blocks >= always.sink) & (in_blocks < always.local_starts[:, None, None, None])
    besides = always.positions[:, None].expand(-1, kept.shape[1], -1)
    entries = torch.cat([besides, in_blocks.flatten(2)], dim=-1)
    seen = torch.cat([besides >= 0, (distant & (kept >= 0)[..., None]).flatten(2)], dim=-1) & (entries < count)
    return entries.where(seen, 0), seen


def gather_vectors(states: Tensor, indices: Tensor) -> Tensor:
    """Vectors `indices` [T, Hkv, R] of `states` [Hkv, S, D] -> [T, Hkv, R, D], a copy.

    Vectors must be contiguous.
    """
    heads, count, head_dim = states.shape
    by_head, by_entry, by_channel = states.stride()
    assert by_channel == 1, f"strides {states.stride()}"
    # Selecting whole vectors of one flat view is a memory copy; indexing by head and position copies element by
    # element.
    row, last = math.gcd(by_head, by_entry), (heads - 1) * by_head + (count - 1) * by_entry
    flat = states.as_strided((last // row + 1, head_dim), (row, 1))
    head_starts = torch.arange(heads, device=indices.device)[:, None] * (by_head // row)
    picked = flat.index_select(0, (head_starts + indices * (by_entry // row)).flatten())
    return picked.view(*indices.shape, head_dim)


def masked_attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    head_sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition: attention over all S entries, those outside `seen` [T, Hkv, S] masked."""
    return attend_entries(queries, keys[None], values[None], seen, scaling, softcap, head_sinks)


def attend_entries(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    scaling: float,
    softcap: float | None = None,
    head_sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query over entries of its own: keys, values [T or 1, Hkv, R, D], seen [T, Hkv, R].

    A query that sees no entry, and has no head sink, has out 0 and lse -inf.
    """
    count, query_heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    scores = queries.float().reshape(count, kv_heads, -1, head_dim) @ keys.float().mT * scaling  # [T, Hkv, group, R]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen[:, :, None], float("-inf"))
    if head_sinks is not None:
        column = head_sinks.float().view(1, kv_heads, -1, 1).expand(count, -1, -1, -1)
        scores = torch.cat([scores, column], dim=-1)
    lse = scores.logsumexp(dim=-1)
    # A softmax over nothing is 0/0. Only that is set to 0: a NaN from elsewhere stays visible.
    weights = scores.softmax(dim=-1).masked_fill(lse.isneginf()[..., None], 0)[..., : seen.shape[-1]]
    out = weights @ values.float()
    return out.view(count, query_heads, -1), lse.view(count, query_heads)
