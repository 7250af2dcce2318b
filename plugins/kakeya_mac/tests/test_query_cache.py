"""The query cache: where it is, and that a session reads with it what the kernel alone would."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry, LayerGeometry
from inference_engine.kv.memory.pool import Pool
from kakeya_mac import Mac
from kakeya_mac.kernel import MacEntry, MacState, MacStats, mac_attend
from kakeya_mac.query_cache import PastQueries, QueryMatcher, query_cache_demand
from tests.laws.test_session_kv_laws import LAYERS, Entries, active, context, feed, step, turn

MAC = Mac(ring=24, band=6, threshold=0.6, chain_limit=1)
MATCHER = QueryMatcher(ring=5, band=1, threshold=0.5, chain_limit=0)
SCALING = 0.35  # that of `step`


def by_kernel(entries: Entries, layer: int, given: int, length: int) -> tuple[list[Tensor], list[MacStats]]:
    """What the tokens from `given` to `length` read if the model generated them: outputs [Hq, D] and statistics."""
    shape = LAYERS[layer]
    state = MacState.allocate(shape.query_heads, shape.head_dim, MAC.ring)
    positions = torch.arange(length)
    queries, keys = (turn(states[layer][:, :length], positions) for states in (entries.q, entries.k))
    outs, reported = [], []
    for position in range(given, length):
        out, entry, stats = mac_attend(
            state,
            entries.q[layer][:, position],
            queries[:, position],
            keys,
            entries.v[layer],
            position,
            band=MAC.band,
            threshold=MAC.threshold,
            scaling=SCALING,
            chain_limit=MAC.chain_limit,
        )
        state.commit([entry])
        outs.append(out)
        reported.append(stats)
    return outs, reported


@pytest.mark.parametrize("layer", [0, 2])
def test_generated_queries_read_what_the_kernel_gives_and_are_counted(layer: int) -> None:
    entries = Entries(120)
    kv = active(MAC, context())
    feed(kv, entries, 60)
    assert kv.statistics() == {}
    ours = feed(kv, entries, 120, chunk=7, generated=True)[layer]
    outs, reported = by_kernel(entries, layer, 60, 120)
    torch.testing.assert_close(ours, torch.stack(outs), atol=2e-5, rtol=0)

    totals = kv.statistics()[layer]
    hits = torch.stack([stats.hits for stats in reported])
    read = torch.stack([stats.entries_read for stats in reported])
    assert 0 < int(hits.sum()) < hits.numel()
    assert torch.equal(totals.hits, hits.sum(0))
    assert torch.equal(totals.entries_read, read.sum(0))
    assert torch.equal(totals.group_entries_read, read.view(60, LAYERS[layer].kv_heads, -1).amax(-1).sum(0))
    assert (totals.queries, totals.entries_present) == (60, sum(range(61, 121)))
    for ours_sum, name in ((totals.band_mass, "band_mass"), (totals.reused_mass, "reused_mass")):
        torch.testing.assert_close(ours_sum, torch.stack([getattr(stats, name) for stats in reported]).sum(0))


def test_rejected_tokens_are_not_counted() -> None:
    entries = Entries(60)
    kv = active(MAC, context())
    feed(kv, entries, 40)
    step(kv, entries, 4, commit=40, generated=True)
    assert kv.statistics() == {}
    assert "mac" in kv.footprint().by_kind
    assert kv.footprint().by_kind["mac"] == 0
    step(kv, entries, 4, commit=42, generated=True)
    assert {totals.queries for totals in kv.statistics().values()} == {2}
    assert kv.footprint().by_kind["mac"] > 0


@pytest.mark.parametrize("head_dim", [2, 6, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_query_cache_is_exact_in_a_pool_of_any_dtype_and_stays_within_its_allocation(
    dtype: torch.dtype, head_dim: int
) -> None:
    heads = 4
    layer = LayerGeometry(query_heads=heads, kv_heads=2, head_dim=head_dim)
    geometry = Geometry(layers=(layer,) * 2, itemsize=dtype.itemsize, trained_positions=64)
    pool = Pool(geometry, 2**16, lambda count: torch.zeros(count, dtype=dtype))
    device = torch.device("cpu")
    kv_context = KVContext(geometry=geometry, pool=pool, rotate=lambda keys, *_: keys, device=device)
    demand = query_cache_demand(geometry, 0, MATCHER)
    taken = pool.reserve([demand] * 3)
    assert taken is not None
    pool.memory.fill_(1)  # what an earlier session left

    cache = PastQueries(MATCHER, {0: taken[0], 1: taken[2]}, kv_context)
    alone = MacState.allocate(heads, head_dim, MATCHER.ring)
    cache.stage()
    random = torch.Generator().manual_seed(0)
    entries = [
        MacEntry(
            position=position,
            query=torch.randn(heads, head_dim, generator=random),
            out=torch.randn(heads, head_dim, generator=random),
            lse=torch.randn(heads, generator=random),
            depth=torch.full((heads,), position % 3, dtype=torch.int32),
        )
        for position in range(3, 3 + MATCHER.ring)
    ]
    stats = MacStats(**{name: torch.zeros(heads) for name in MacStats.__slots__})
    cache.leave(1, [(entry, stats) for entry in entries])
    cache.commit(100)
    alone.commit(entries)
    for name in MacState.__slots__:
        assert torch.equal(getattr(cache.state(1, 1), name), getattr(alone, name)), name
        assert not getattr(cache.state(0, 1), name).any(), "the other layer's is empty"
    assert (pool.run(demand, taken[1]) == 1).all()
    assert cache.held_bytes() <= 2 * demand.elements * dtype.itemsize
