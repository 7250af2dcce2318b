"""The numbers of a step on the host: where they lie, and how layers are looked up."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inference_engine.kernels.reads import FIELDS, START
from inference_engine.kv.geometry import Geometry, LayerGeometry
from inference_engine.kv.memory.scratch import Scratch
from inference_engine.kv.numbers import StepNumbers, as_slice
from inference_engine.kv.plan import StepPlan
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies import parse_strategy
from tests.tiny import PAGES, tiny_forward

LAYERS = 5


def geometry() -> Geometry:
    """Layers of two numbers of KV heads, in turn."""
    layers = tuple(LayerGeometry(query_heads=4, kv_heads=1 + index % 2, head_dim=8) for index in range(LAYERS))
    return Geometry(layers=layers, itemsize=4, trained_positions=128)


@pytest.mark.parametrize("chosen", [[0, 2], [2, 0], [0, 1, 2]], ids=str)
def test_writes_and_regions_are_set_for_the_given_queries_and_layers_alone(chosen: list[int]) -> None:
    numbers = StepNumbers(geometry(), 6, has_regions=True)
    places, queries, starts = as_slice(np.array(chosen)), slice(2, 4), np.array([100, 200, 300][: len(chosen)])
    numbers.write(1, places, queries, starts, np.array([7, 8]))
    lines = np.arange(2 * FIELDS).reshape(2, FIELDS)
    numbers.attend(places, queries, starts, lines)
    for place in range(3):
        is_chosen = place in chosen
        start = int(starts[chosen.index(place)]) if is_chosen else 0
        said = [0, 0, start + 7, start + 8, 0, 0] if is_chosen else [0] * 6
        assert numbers.writes[1][place, :, 0].tolist() == said
        lines = numbers.regions[place]
        assert lines[:, START].tolist() == ([0, 0, start, start, 0, 0] if is_chosen else [0] * 6)
        said_lines = np.arange(2 * FIELDS).reshape(2, FIELDS) * is_chosen
        assert lines[2:4, START + 1 :].tolist() == said_lines[:, START + 1 :].tolist()
        assert not lines[[0, 1, 4, 5]].any()
    assert not numbers.writes[2].any()


def test_memory_is_used_again_clean_and_not_before_its_holder_is_gone() -> None:
    scratch = Scratch()
    first = StepNumbers(geometry(), 4, has_regions=True, scratch=scratch)
    first.all[:] = 9
    second = StepNumbers(geometry(), 4, has_regions=True, scratch=scratch)
    assert not np.shares_memory(first.all, second.all)
    place = first.all.ctypes.data
    del first
    third = StepNumbers(geometry(), 2, has_regions=True, scratch=scratch)
    assert third.all.ctypes.data == place
    assert not third.all.any()
    assert third.regions.shape == (LAYERS, 2, FIELDS)


@pytest.mark.parametrize("spec", ["full", "sink_window:sink=4,window=24", "layer_window:window=24,full_layers=1"])
def test_slots_are_opened_where_their_entries_go_and_nowhere_else(spec: str) -> None:
    forward = tiny_forward()
    context = forward.open(forward.geometry(**PAGES), 2**20)
    kvs = [SessionKV(parse_strategy(spec).resolved(context.geometry), context, 64) for _ in range(3)]
    kvs.pop(1).release()  # so that an allocation may lie in pieces
    kvs.append(SessionKV(parse_strategy(spec).resolved(context.geometry), context, 48))
    context.pool.memory.fill_(1)
    for group in kvs[-1].groups:
        expected = torch.ones_like(group.buffer.keys)
        expected[torch.from_numpy((group.starts[:, None] + group.region_offsets(np.arange(4, 12))).reshape(-1))] = 0
        group.buffer.keys.fill_(1)
        group.buffer.values.fill_(1)
        group.open(4, 12)
        assert torch.equal(group.buffer.keys, expected)
        assert torch.equal(group.buffer.values, expected)


def test_a_plan_says_the_same_though_its_memory_held_another_one() -> None:
    forward = tiny_forward(windowed=False)
    context = forward.open(forward.geometry(**PAGES), 2**20)
    kv = SessionKV(parse_strategy("full"), context, 64)

    def numbers(count: int) -> list[int]:
        kv.stage(count)
        plan = StepPlan([kv], context.geometry, context.pool, mask_dtype=torch.float32)
        said: list[int] = plan.numbers.all.tolist()
        kv.commit(0)
        return said

    alone = numbers(3)
    numbers(20)
    assert numbers(3) == alone
