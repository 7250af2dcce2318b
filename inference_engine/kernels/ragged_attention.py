"""Attention of single queries, each over a region of its own: one operation for all queries of a step.

    queries [N, Hq, D] · keys, values [R, D], the buffers · lines [N, FIELDS], integers, one line for each query

`kernels/reads.py` says what is in a line. This is the reference, query by query in plain torch;
`triton/ragged_attention.py` has the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inference_engine.kernels.attention import attend
from inference_engine.kernels.bounds import bounds_scores
from inference_engine.kernels.gather import masked_attend, select
from inference_engine.kernels.offloaded import entries_by_position
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
    BlockRead,
    OffloadedBlockRead,
    StagedRead,
)

_KEPT, _LOCAL, _BLOCK, _BOUNDS = (BlockRead.word(name) for name in BlockRead.WORDS)
_PLACES, _OFFLOADED_END = OffloadedBlockRead.word("PLACES"), OffloadedBlockRead.word("OFFLOADED_END")


def _attend_regions(call: AttentionCall, out: Tensor) -> None:
    """Implements RegionKernel."""
    queries = call.queries
    out.zero_()
    for query, numbers in enumerate(call.lines.tolist()):
        count = numbers[COUNT]
        if not count or numbers[KIND]:
            continue
        slots = torch.arange(count, device=queries.device)
        heads = torch.arange(call.kv_heads, device=queries.device)[:, None]
        mask = torch.zeros(1, count, dtype=queries.dtype, device=queries.device)
        mask.masked_fill_(~seen(slots, numbers)[None], float("-inf"))
        before = numbers[PREFIX_START] + heads * numbers[PREFIX_HEAD_SLOTS]
        own = numbers[START] + heads * numbers[HEAD_SLOTS]
        index = torch.where(slots < numbers[BASE], before + slots, own + slots - numbers[BASE])  # [Hkv, count]
        one, entries = queries[query : query + 1], (call.keys[index], call.values[index])
        out[query : query + 1] = attend(one, *entries, mask, scaling=call.scaling, softcap=call.softcap)


def attend_blocks(call: AttentionCall, out: Tensor, read: StagedRead, *, serves_all: bool = False) -> None:
    """Implements ReadKernel, for BlockRead and OffloadedBlockRead."""
    assert not serves_all, "it leaves other queries to their own kernels"
    queries, keys, values, scaling = call.queries, call.keys, call.values, call.scaling
    own = {BlockRead.NUMBER, read.record.NUMBER}
    for query, numbers in enumerate(call.lines.tolist()):
        if not numbers[COUNT] or numbers[KIND] not in own:
            continue
        is_offloaded = numbers[KIND] == OffloadedBlockRead.NUMBER
        count = numbers[COUNT] = numbers[UPTO] + 1 if is_offloaded else numbers[COUNT]
        one = queries[query : query + 1]
        heads = numbers[START] + torch.arange(call.kv_heads, device=queries.device)[:, None] * numbers[HEAD_SLOTS]
        is_read = kept(one, keys, values, heads, numbers, scaling=scaling)
        if is_offloaded:
            entries = entries_by_position(
                keys,
                values,
                numbers[_PLACES],
                heads=heads,
                sink=numbers[SINK],
                ring=numbers[RING],
                end=abs(numbers[_OFFLOADED_END]),
                count=count,
            )
        else:
            index = heads + torch.arange(count, device=queries.device)
            entries = keys[index], values[index]
        state, _ = masked_attend(one, *entries, is_read, scaling=scaling, softcap=call.softcap)
        out[query] = state[0].to(out.dtype)


attend_ragged = AttentionByRecord(name="reference", regions=_attend_regions)


def seen(slots: Tensor, numbers: list[int]) -> Tensor:
    """Which of `slots` a query with these `numbers` sees."""
    sink, ring, last, upto = numbers[SINK], numbers[RING], numbers[LAST], numbers[UPTO]
    in_sink = slots < sink
    positions = slots if not ring else torch.where(in_sink, slots, last - (last - slots) % ring)
    floor = torch.where(in_sink, numbers[SINK_FLOOR], max(numbers[FLOOR], 0 if not ring else sink))
    return (positions <= upto) & (positions >= floor)


def kept(query: Tensor, keys: Tensor, values: Tensor, heads: Tensor, numbers: list[int], *, scaling: float) -> Tensor:
    """[1, Hkv, count], which slots a query that selects blocks reads. heads: [Hkv, 1], where each head's slots begin.

    scaling must be positive.
    """
    block, sink, local = numbers[_BLOCK], numbers[SINK], numbers[_LOCAL]
    slots = torch.arange(numbers[COUNT], device=query.device)
    always = ((slots < sink) | (slots >= local)) & (slots <= numbers[UPTO])
    firsts = torch.arange(0, max(1, local), block, device=query.device)
    low, high = (states[heads + numbers[_BOUNDS] + firsts // block] for states in (keys, values))
    candidates = firsts.clamp(min=sink) < (firsts + block).clamp(max=local)
    scores = bounds_scores(query, low, high, scaling)  # [1, Hkv, B]
    chosen = select(scores, candidates[None], numbers[_KEPT])
    is_chosen = (chosen[..., None] == slots // block).any(2)
    return always | (is_chosen & (slots < local))
