"""Attention of single queries, each over a region of its own: one operation for all queries of a step.

    queries [N, Hq, D] · keys, values [R, D], the buffers · regions [N, FIELDS], integers, one line for each query

A region is `region` consecutive buffer vectors for each KV head, from `start` on. Numbers say what a query sees there,
so nothing as long as a history is built on the host or copied, and a step's shapes do not depend on lengths:

    slot       0 … sink-1 | sink … count-1
    position   its number | the last one up to `last` that falls there, `ring` apart (ring 0: its number)
    seen       from sink_floor on | from max(floor, sink) on, and both up to `upto`

A query may read selected blocks (`kernels/gather.py`): its line then has a block size. Of what it sees it reads the
sink, everything from `local` on, and the `kept` blocks of the highest bounds between them; the bounds are in the
region, from slot `bounds` on. Slots are positions there. A line whose block size is 0 reads all it sees.

A line with a block size and a `chooser` reads selected tokens (`kernels/components.py`): of what it sees the sink,
everything from `local` on, and the `kept` tokens of largest weight between them. The chooser is the number by which a
device's operation knows the index of the layer's keys (`KVContext.open_index`); an operation that knows none gets no
such lines. Its `bounds` is the number of the index's shape.

A line that selects blocks may have some of them off the device: its `record` then is the address of numbers that say
where (`kernels/offloaded.py`), and its slots are a ring as `ring` has it. It sees all up to `upto`, whatever `count`
is. Blocks before `offloaded_end` that are behind the sink are not in their slots. Where that number is negative, its
absolute value is meant, and the query must not change which blocks are at hand. An operation that reads no offloaded
blocks gets no such lines.

The first entries of a fork lie in another session's region: slots before `base` are in a region of `prefix_region`
vectors for each KV head from `prefix_start` on, and the fork's own region begins with slot `base`.

This is the reference, query by query in plain torch, and the contract; `triton/ragged_attention.py` has the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from inference_engine.kernels.attention import attend
from inference_engine.kernels.bounds import bounds_scores
from inference_engine.kernels.components import TokenChoice
from inference_engine.kernels.gather import masked_attend, select
from inference_engine.kernels.offloaded import entries_by_position

START, HEAD_SLOTS, COUNT, SINK, RING, LAST, UPTO, FLOOR, SINK_FLOOR, BLOCK, KEPT, LOCAL, BOUNDS = range(13)
PREFIX_START, PREFIX_HEAD_SLOTS, BASE = range(13, 16)
CHOOSER = PREFIX_START  # of a line with a block size
RECORD, OFFLOADED_END = PREFIX_HEAD_SLOTS, BASE  # of one that selects blocks
FIELDS = 16


class RaggedAttention(Protocol):
    """`kv_heads`: Hkv. A query whose count is 0 gets zeros. Returns [N, Hq, D] in the dtype of `queries`.

    reads_offloaded: may a query that selects blocks read some that are not on the device?

    blocks: the most blocks that a query selects from; 0 if none selects any. choices: by which indexes queries select
    tokens, a shape of index each; () if none selects any, or the operation need not know before.
    """

    def __call__(
        self,
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
    ) -> Tensor: ...


def attend_ragged(
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
    """The reference of RaggedAttention."""
    assert not choices, "it knows no index of keys"
    out = torch.zeros_like(queries)
    for query, numbers in enumerate(regions.tolist()):
        start, region, count = numbers[START], numbers[HEAD_SLOTS], numbers[COUNT]
        if not count:
            continue
        if numbers[BLOCK] and numbers[RECORD]:
            count = numbers[COUNT] = numbers[UPTO] + 1
        slots = torch.arange(count, device=queries.device)
        heads = start + torch.arange(kv_heads, device=queries.device)[:, None] * region
        if numbers[BLOCK]:
            assert blocks, "a query selects blocks, but blocks is 0"
            one, index = queries[query : query + 1], heads + slots
            read = kept(one, keys, values, heads, numbers, scaling=scaling)
            if numbers[RECORD]:
                assert reads_offloaded, "a query reads blocks that are off the device, and reads_offloaded is False"
                entries = entries_by_position(
                    keys,
                    values,
                    numbers[RECORD],
                    heads=heads,
                    sink=numbers[SINK],
                    ring=numbers[RING],
                    end=abs(numbers[OFFLOADED_END]),
                    count=count,
                )
            else:
                entries = keys[index], values[index]
            state, _ = masked_attend(one, *entries, read, scaling=scaling, softcap=softcap)
            out[query] = state[0].to(out.dtype)
            continue
        mask = torch.zeros(1, count, dtype=queries.dtype, device=queries.device)
        mask.masked_fill_(~seen(slots, numbers)[None], float("-inf"))
        base = numbers[BASE]
        before = (
            numbers[PREFIX_START] + torch.arange(kv_heads, device=queries.device)[:, None] * numbers[PREFIX_HEAD_SLOTS]
        )
        index = torch.where(slots < base, before + slots, heads + slots - base)  # [Hkv, count]
        out[query : query + 1] = attend(
            queries[query : query + 1], keys[index], values[index], mask, scaling=scaling, softcap=softcap
        )
    return out


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
    block, sink, local = numbers[BLOCK], numbers[SINK], numbers[LOCAL]
    slots = torch.arange(numbers[COUNT], device=query.device)
    always = ((slots < sink) | (slots >= local)) & (slots <= numbers[UPTO])
    firsts = torch.arange(0, max(1, local), block, device=query.device)
    low, high = (states[heads + numbers[BOUNDS] + firsts // block] for states in (keys, values))
    candidates = firsts.clamp(min=sink) < (firsts + block).clamp(max=local)
    scores = bounds_scores(query, low, high, scaling)  # [1, Hkv, B]
    chosen = select(scores, candidates[None], numbers[KEPT])
    is_chosen = (chosen[..., None] == slots // block).any(2)
    return always | (is_chosen & (slots < local))
