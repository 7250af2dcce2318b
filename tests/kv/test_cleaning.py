"""Memory that is given back is zeroed, and memory that is taken is never touched."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference_engine.kv.geometry import Geometry, LayerGeometry
from inference_engine.kv.memory import pool as pool_module
from inference_engine.kv.memory.pool import TRASH_UNITS, Demand, Pool, RunAllocator

UNITS = 24


def small_pool() -> Pool:
    geometry = Geometry(
        layers=(LayerGeometry(query_heads=1, kv_heads=1, head_dim=4),),
        itemsize=4,
        trained_positions=64,
        page_tokens=2,
        segment_tokens=4,
    )
    return Pool(geometry, UNITS * geometry.alignment * 4, torch.zeros)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 9)),
        st.tuples(st.just("give"), st.integers(0, 5)),
        st.tuples(st.just("clean"), st.integers(1, UNITS)),
    ),
    max_size=60,
)


@given(steps=steps)
def test_what_is_free_and_cleaned_is_zero_and_what_is_taken_keeps_its_content(steps: list[tuple[str, int]]) -> None:
    pool = small_pool()
    taken: list[tuple[Demand, int, float]] = []
    for number, (step, argument) in enumerate(steps, start=1):
        if step == "take":
            demand = Demand(width=4, elements=argument * pool._unit)
            starts = pool.reserve([demand])
            if starts is not None:
                pool.run(demand, starts[0]).fill_(float(number))
                taken.append((demand, starts[0], float(number)))
        elif step == "give" and taken:
            demand, start, _ = taken.pop(argument % len(taken))
            pool.release([demand], [start])
        elif step == "clean":
            pool.clean(argument * pool._bytes(1))
        for demand, start, content in taken:
            assert bool((pool.run(demand, start) == content).all())
    while pool.clean(pool._bytes(1)):
        pass
    mine = sum(demand.elements for demand, _, _ in taken)
    assert int(pool.memory[TRASH_UNITS * pool._unit :].count_nonzero()) == mine


def test_a_little_is_cleaned_at_a_time() -> None:
    pool = small_pool()
    demand = Demand(width=4, elements=10 * pool._unit)
    (start,) = pool.reserve([demand]) or ()
    pool.run(demand, start).fill_(1.0)
    pool.release([demand], [start])
    left = []
    while pool.clean(4 * pool._bytes(1)):
        left.append(int(pool.memory.count_nonzero()))
    assert left == [6 * pool._unit, 2 * pool._unit]
    assert int(pool.memory.count_nonzero()) == 0


def test_what_is_discarded_at_a_time_is_bounded_in_layers_not_in_sessions() -> None:
    layers, layer = 8, Demand(width=4, elements=200 * small_pool()._unit)
    discarded: list[int] = []
    geometry = Geometry(
        layers=(LayerGeometry(query_heads=1, kv_heads=1, head_dim=4),) * layers,
        itemsize=4,
        trained_positions=64,
        page_tokens=2,
        segment_tokens=4,
    )
    units = 3 * layers * 200
    pool = Pool(
        geometry,
        units * geometry.alignment * 4,
        torch.zeros,
        discard=lambda states: discarded.append(states.numel()),
    )
    for starts in [pool.reserve([layer] * layers) for _ in range(3)]:
        assert starts is not None
        pool.release([layer] * layers, starts)

    assert pool.clean(pool_module._DISCARD_UNITS * pool._bytes(1))

    # Of a run of any length as many units count, so of layers of 200 units fewer than fill two sessions are discarded.
    assert sum(discarded) <= (pool_module._DISCARD_UNITS // 200 + 1) * layer.elements


def test_memory_that_was_never_written_is_not_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or address space would become memory."""
    pieces = pool_module._PIECE_BYTES // 4
    states = torch.zeros(4 * pieces)
    states[2 * pieces + 5] = -0.0
    states[2 * pieces + 7] = float("nan")
    written: list[int] = []
    zero = torch.Tensor.zero_

    def noting(tensor: torch.Tensor) -> torch.Tensor:
        written.append(tensor.storage_offset() // pool_module._PIECE_BYTES)
        return zero(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "zero_", noting)
        pool_module._zero(states)
    assert written == [2]
    assert not states.view(torch.uint8).any()


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 30), st.integers(0, 30))
def test_the_free_parts_of_a_range_are_its_free_units_in_order(counts: list[int], first: int, last: int) -> None:
    runs = RunAllocator(30)
    taken = [(start, count) for count in counts if (start := runs.take(count)) is not None]
    for start, count in taken[::2]:
        runs.give_back(start, count)
    busy = {unit for start, count in taken[1::2] for unit in range(start, start + count)}
    found = [unit for start, count in runs.free_within(first, last - first) for unit in range(start, start + count)]
    assert found == [unit for unit in range(first, last) if unit not in busy]
