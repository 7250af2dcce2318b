"""Latents of a session, wherever they lie: what was put comes back, and the pool never holds more than it may."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inference_engine.kv.archives.latent_codes import LatentCodes, LatentPlaces
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry, LayerGeometry
from inference_engine.kv.memory.pool import Pool
from inference_engine.kv.memory.tier import Tier

SEGMENT, COUNT = 16, 150
GEOMETRY = Geometry(
    layers=(LayerGeometry(query_heads=4, kv_heads=2, head_dim=16),),
    itemsize=4,
    trained_positions=1000,
    page_tokens=4,
    segment_tokens=SEGMENT,
)
ALL_CODES = torch.randint(0, 256, (COUNT, 33), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def _zeros(count: int) -> Tensor:
    return torch.zeros(count)


def room() -> KVContext:
    return KVContext(
        geometry=GEOMETRY,
        pool=Pool(GEOMETRY, 2**17, _zeros),
        rotate=lambda keys, _shifts, _rotary: keys,
        device=torch.device("cpu"),
        tier=Tier(2**20),
    )


def places(resident_bytes: int | None, width: int = 33) -> LatentPlaces:
    return LatentPlaces(count=COUNT, width=width, resident_bytes=resident_bytes, segment=SEGMENT)


@given(
    resident_bytes=st.one_of(st.none(), st.integers(0, 7000)),
    width=st.sampled_from([1, 2, 33]),
    steps=st.lists(st.integers(1, SEGMENT), min_size=1, max_size=12),
    asked=st.tuples(st.integers(0, COUNT), st.integers(0, COUNT)),
)
def test_what_was_put_comes_back_wherever_it_lies(
    resident_bytes: int | None, width: int, steps: list[int], asked: tuple[int, int]
) -> None:
    codes = LatentCodes.reserve(room(), places(resident_bytes, width))
    assert codes is not None
    end = 0
    for step in steps:
        count = min(step, COUNT - end)
        codes.put(end, ALL_CODES[end : end + count, :width])
        end += count
    first, last = (min(place, end) for place in sorted(asked))
    assert torch.equal(codes.get(first, last), ALL_CODES[first:last, :width])
    assert torch.equal(codes.get(0, end), ALL_CODES[:end, :width])


def test_the_pool_is_asked_for_no_more_than_may_be_resident(subtests: pytest.Subtests) -> None:
    for resident_bytes in (0, 100, 1023, 1024, 3000, 4999, 10**9):
        with subtests.test(str(resident_bytes)):
            context = room()
            codes = LatentCodes.reserve(context, places(resident_bytes))
            assert codes is not None
            assert codes.held_bytes(COUNT) <= context.pool.reserved_bytes <= resident_bytes
            # Nothing is gained by leaving places empty: no more than the rounding of an allocation is.
            unit = GEOMETRY.alignment * GEOMETRY.itemsize
            wanted = COUNT * 2 * places(None).half
            assert context.pool.reserved_bytes > min(resident_bytes, wanted) - unit
            assert not codes.tier_bytes(COUNT) or codes.held_bytes(COUNT) < wanted


def test_cleared_and_released_nothing_is_held() -> None:
    context = room()
    codes = LatentCodes.reserve(context, places(2000))
    assert codes is not None
    codes.put(0, ALL_CODES)
    codes.clear()
    assert codes.tier_bytes(0) == 0
    codes.put(0, ALL_CODES.flip(0))
    assert torch.equal(codes.get(0, COUNT), ALL_CODES.flip(0))
    codes.release()
    assert context.pool.reserved_bytes == 0
