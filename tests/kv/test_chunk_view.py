"""A view that merges chunks gives attention over all entries, whatever joins the softmax."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from inference_engine.kernels.attention import attend
from inference_engine.kernels.ops import open_ops
from inference_engine.kv.geometry import EntryShape
from inference_engine.kv.memory.pool import KVBuffer
from inference_engine.kv.views import ChunkView, Portion, Region, Scoring, chunks_between
from tests.further import each_pair

HQ, HKV, D, LAYER = 6, 2, 8, 1
ELSEWHERE, RESIDENT, QUERIES = 37, 21, 7
# Sums of some sixty numbers of size 1 in float32, taken in another order.
ROUNDING = 2e-6
DEVICES = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]


class Elsewhere:
    """Entries in a tensor, and which were asked for."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._entries = keys, values
        self.asked: list[tuple[int, int, int]] = []
        self.expected: list[tuple[int, int, int]] = []

    def expect(self, layer: int, chunks: Sequence[range]) -> None:
        self.expected += [(layer, chunk.start, chunk.stop) for chunk in chunks]

    def chunk(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        self.asked.append((layer, first, last))
        keys, values = (entries[:, first:last] for entries in self._entries)
        return keys, values


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def portion_of(mask: Tensor, first: int, last: int) -> Portion:
    """The queries [first, last), without the slots that none of them sees."""
    count = RESIDENT - QUERIES + last
    return Portion(queries=slice(first, last), count=count, mask=mask[first:last, :count])


@each_pair(dtype=[torch.float32, torch.bfloat16], portion=[QUERIES, 2], softcap=[None, 1.5], sinks=[False, True])
def test_chunks_and_regions_together_are_attention_over_all_entries(
    dtype: torch.dtype, portion: int, softcap: float | None, sinks: bool
) -> None:
    keys, values = (random(HKV, ELSEWHERE + RESIDENT, D, seed=seed).to(dtype) for seed in (0, 1))
    queries = random(QUERIES, HQ, D, seed=2).to(dtype)
    head_sinks = random(HQ, seed=3) + 1 if sinks else None
    # The queries are of the last positions, and each sees those up to itself.
    last = torch.arange(RESIDENT - QUERIES, RESIDENT)
    mask = torch.zeros(QUERIES, RESIDENT).masked_fill(torch.arange(RESIDENT) > last[:, None], -torch.inf)

    region = Region(starts={LAYER: 3}, heads=HKV, region=RESIDENT + 2)
    buffer = KVBuffer.over(torch.full((2 * D * (3 + HKV * region.region),), torch.nan, dtype=dtype), EntryShape(D, D))
    for states, entries in ((buffer.keys, keys), (buffer.values, values)):
        region.slots(states, LAYER, 0, RESIDENT).copy_(entries[:, ELSEWHERE:])
    source = Elsewhere(keys, values)
    view = ChunkView(
        region=region,
        portions=[portion_of(mask, first, min(first + portion, QUERIES)) for first in range(0, QUERIES, portion)],
        source=source,
        chunks=chunks_between(0, ELSEWHERE, 16),
    )
    ours = view.read(LAYER, queries, buffer, Scoring(scaling=0.35, softcap=softcap, head_sinks=head_sinks))

    everything = torch.cat([torch.zeros(QUERIES, ELSEWHERE), mask], dim=1)
    expected = attend(
        queries.float(),
        keys.float(),
        values.float(),
        everything,
        scaling=0.35,
        softcap=softcap,
        head_sinks=head_sinks,
    )
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.float(), expected.to(dtype).float(), atol=ROUNDING, rtol=torch.finfo(dtype).eps)
    assert source.asked == source.expected == [(LAYER, 0, 16), (LAYER, 16, 32), (LAYER, 32, 37)]


@pytest.mark.parametrize("sink", [0, 3])
@pytest.mark.parametrize("softcap", [None, 1.5], ids=["no softcap", "softcap"])
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_ring_is_read_in_the_order_of_its_positions(device: torch.device, softcap: float | None, sink: int) -> None:
    """As by a mask: the sink lies first, the others from any slot of the ring on."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    keys, values = (random(HKV, ELSEWHERE + RESIDENT, D, seed=seed).to(device, dtype) for seed in (0, 1))
    queries = random(QUERIES, HQ, D, seed=2).to(device, dtype)
    ring = torch.arange(sink, RESIDENT).roll(5)
    region = Region(starts={LAYER: 3}, heads=HKV, region=RESIDENT + 2)
    size = 3 + HKV * region.region
    buffer = KVBuffer.over(torch.full((2 * D * size,), torch.nan, dtype=dtype, device=device), EntryShape(D, D))
    for states, entries in ((buffer.keys, keys), (buffer.values, values)):
        slots = region.slots(states, LAYER, 0, RESIDENT)
        slots[:, :sink] = entries[:, :sink]
        slots[:, ring.to(device)] = entries[:, ELSEWHERE + sink :]
    merging = open_ops("auto", device).merging
    view = ChunkView(
        region=region,
        portions=[Portion(queries=slice(None), count=sink, mask=None, recent=ring.to(device))],
        source=Elsewhere(keys, values),
        chunks=chunks_between(sink, ELSEWHERE + sink, 16),
        merging=merging,
    )
    ours = view.read(LAYER, queries, buffer, Scoring(scaling=0.35, softcap=softcap, head_sinks=None))

    last = torch.arange(ELSEWHERE + RESIDENT - QUERIES, ELSEWHERE + RESIDENT)
    is_behind = torch.arange(ELSEWHERE + RESIDENT) > last[:, None]
    mask = torch.zeros(is_behind.shape).masked_fill(is_behind, -torch.inf)
    expected = attend(
        queries.float().cpu(), keys.float().cpu(), values.float().cpu(), mask, scaling=0.35, softcap=softcap
    )
    rounding = ROUNDING if device.type == "cpu" else 1e-2
    torch.testing.assert_close(ours.float().cpu(), expected, atol=rounding, rtol=rounding)
