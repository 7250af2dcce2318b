"""A slab goes back to the pool when the last who holds it lets go, once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference_engine.kv.geometry import Geometry, LayerGeometry
from inference_engine.kv.memory.pool import Demand, Pool
from inference_engine.kv.memory.slab import Slab

GEOMETRY = Geometry(
    layers=(LayerGeometry(query_heads=1, kv_heads=1, head_dim=8),) * 2, itemsize=4, trained_positions=100
)
DEMANDS = [Demand(head_dim=8, elements=64)] * 2
BYTES = 2 * 4 * 64 * 2


def _zeros(count: int) -> torch.Tensor:
    return torch.zeros(count)


def slab_in(pool: Pool) -> Slab:
    slab = Slab.reserve(pool, DEMANDS, itemsize=GEOMETRY.itemsize)
    assert slab is not None
    return slab


def pool_of(slabs: int) -> Pool:
    return Pool(GEOMETRY, slabs * BYTES, _zeros)


@given(st.permutations(["owner", "fork", "fork", "fork"]))
def test_whoever_lets_go_last_gives_it_back(order: list[str]) -> None:
    pool = pool_of(2)
    slab = slab_in(pool)
    for until in (10, 30, 20):
        slab.borrow(until)
    assert slab.lent_until == 30
    for who in order:
        assert pool.reserved_bytes == slab.nbytes == BYTES
        slab.release() if who == "owner" else slab.give_back()
    assert pool.reserved_bytes == 0
    assert not slab.is_lent


def test_it_is_given_back_once_and_not_had_where_there_is_no_room() -> None:
    pool = pool_of(1)
    slab = slab_in(pool)
    assert Slab.reserve(pool, DEMANDS, itemsize=GEOMETRY.itemsize) is None
    slab.release()
    with pytest.raises(AssertionError):
        slab.release()
    with pytest.raises(AssertionError):
        slab.give_back()
    assert slab_in(pool).nbytes == BYTES
