"""An allocation goes back to the pool when its last holder releases it, once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from inference_engine.kv.geometry import Geometry, LayerGeometry
from inference_engine.kv.memory.allocation import Allocation
from inference_engine.kv.memory.pool import Demand, Pool

GEOMETRY = Geometry(
    layers=(LayerGeometry(query_heads=1, kv_heads=1, head_dim=8),) * 2, itemsize=4, trained_positions=100
)
DEMANDS = [Demand(width=16, elements=128)] * 2
BYTES = 2 * 4 * 128


def _zeros(count: int) -> torch.Tensor:
    return torch.zeros(count)


def allocation_in(pool: Pool) -> Allocation:
    allocation = Allocation.reserve(pool, DEMANDS, itemsize=GEOMETRY.itemsize)
    assert allocation is not None
    return allocation


def pool_of(allocations: int) -> Pool:
    return Pool(GEOMETRY, allocations * BYTES, _zeros)


@given(st.permutations(["owner", "fork", "fork", "fork"]))
def test_the_last_release_gives_it_back(order: list[str]) -> None:
    pool = pool_of(2)
    allocation = allocation_in(pool)
    for until in (10, 30, 20):
        allocation.borrow(until)
    assert allocation.lent_until == 30
    for holder in order:
        assert pool.reserved_bytes == allocation.nbytes == BYTES
        allocation.release() if holder == "owner" else allocation.give_back()
    assert pool.reserved_bytes == 0
    assert not allocation.is_lent
