"""Trellis codes: the cheapest path there is, codes of the given bits, and back, a vector at a time or many."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inference_engine.kernels.trellis import STEPS, Levels, choose, levels_of, make_levels, scale, scales
from kv_cache_proposer.f_theta.packing import Packing
from tests.kernels.own_process import run_with_triton
from tests.kernels.poisoned import poison


@lru_cache
def even_table(bits: int) -> Tensor:
    """Levels that lie evenly, as far out as three deviations."""
    return torch.linspace(-3.0, 3.0, 2 ** (bits + 1))


def spent(numbers: Tensor, codes: Tensor, levels: Levels) -> Tensor:
    return ((numbers - levels_of(codes, levels)).square() * levels.weights).sum(1)


def falling_widths(count: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return sorted(torch.randint(1, 8, (count,), generator=draw).tolist(), reverse=True)


@given(widths=st.lists(st.integers(1, 3), min_size=1, max_size=6), seed=st.integers(0, 2**31))
def test_no_other_codes_cost_less(widths: list[int], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    levels = make_levels([even_table(width) for width in widths], torch.rand(len(widths), generator=draw) + 0.1)
    numbers = 1.5 * torch.randn(3, len(widths), generator=draw)
    every = torch.tensor(list(itertools.product(*(range(2**width) for width in widths))), dtype=torch.int32)
    cheapest = torch.stack([spent(vector[None], every, levels).min() for vector in numbers])
    torch.testing.assert_close(spent(numbers, choose(numbers, levels), levels), cheapest)


@given(count=st.integers(1, 3 * STEPS), vectors=st.integers(0, 4), seed=st.integers(0, 2**31))
def test_a_code_has_the_bits_it_was_given_and_what_it_stands_for_is_coded_alike(
    count: int, vectors: int, seed: int
) -> None:
    widths = falling_widths(count, seed)
    levels = make_levels([even_table(width) for width in widths], torch.ones(count))
    numbers = torch.randn(vectors, count, generator=torch.Generator().manual_seed(seed))
    codes = choose(numbers, levels)
    assert codes.shape == (vectors, count) and codes.dtype == torch.int32
    assert bool((codes >= 0).all()) and bool((codes < 2 ** torch.tensor(widths)).all())
    found = levels_of(codes, levels)
    assert torch.equal(levels_of(choose(found, levels), levels), found)


def test_a_vector_is_coded_the_same_whatever_it_is_coded_with(subtests: pytest.Subtests) -> None:
    for count in (1, 5, STEPS, STEPS + 1, 700):
        with subtests.test(str(count)):
            levels = make_levels([even_table(width) for width in falling_widths(count, 3)], torch.rand(count) + 0.1)
            numbers = torch.randn(300, count, generator=torch.Generator().manual_seed(1))
            codes, found = choose(numbers, levels), levels_of(choose(numbers, levels), levels)
            for first, last in ((0, 1), (1, 66), (66, 300)):
                assert torch.equal(choose(numbers[first:last], levels), codes[first:last])
                assert torch.equal(levels_of(codes[first:last], levels), found[first:last])


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_a_gaussian_variable_loses_less_than_with_the_best_levels_for_each_number_alone(bits: int) -> None:
    """Max's quantisers lose 0.3634, 0.1175, 0.03454 (IRE Trans. Inf. Theory 6(1), 1960, Table I)."""
    alone = {1: 0.3634, 2: 0.1175, 3: 0.03454}[bits]
    numbers = torch.randn(200, 1000, generator=torch.Generator().manual_seed(0))
    count = 2 ** (bits + 1)
    quantiles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    table = math.sqrt(3.0) * torch.special.ndtri(quantiles).float() * {1: 0.6, 2: 0.7, 3: 0.75}[bits]
    levels = make_levels([table] * 1000, torch.ones(1000))
    assert float(spent(numbers, choose(numbers, levels), levels).mean()) / 1000 < 0.86 * alone


def compare_kernel() -> None:
    """Triton's against plain torch: levels to the bit; codes that cost the same, for two paths may cost alike."""
    from inference_engine.kernels import trellis as plainly
    from inference_engine.kernels.triton import trellis as in_triton

    poison(in_triton)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    many = ((300, 3), (2 * STEPS + 7, 70))
    if device.type == "cpu":  # interpreted, a step takes milliseconds: chains are short
        setattr(plainly, "STEPS", 24)  # noqa: B010 - neither module says that it may change
        setattr(in_triton, "STEPS", 24)  # noqa: B010
        many = ((2 * 24 + 7, 2), (3, 1))
    for count, vectors in ((1, 1), (1, 3), (5, 2), *many):
        draw = torch.Generator().manual_seed(count)
        weights = (torch.rand(count, generator=draw) + 0.1).to(device)
        levels = make_levels([even_table(width) for width in falling_widths(count, count)], weights)
        numbers = (1.5 * torch.randn(vectors, count, generator=draw)).to(device)
        codes = in_triton.choose(numbers, levels)
        assert codes.dtype == torch.int32
        plain = choose(numbers, levels)
        torch.testing.assert_close(spent(numbers, codes, levels), spent(numbers, plain, levels))
        assert float((codes == plain).float().mean()) > 0.99
        assert torch.equal(in_triton.levels_of(codes, levels), levels_of(codes, levels))
        # A view whose vectors do not lie side by side, and one vector alone.
        assert torch.equal(in_triton.levels_of(codes[:1], levels)[0], levels_of(codes, levels)[0])
        assert torch.equal(in_triton.choose(numbers.T.contiguous().T[:1], levels)[0], codes[0])
        assert in_triton.choose(numbers[:0], levels).shape == (0, count)
        assert in_triton.levels_of(codes[:0], levels).shape == (0, count)
        _compare_scaled(numbers)
        _compare_packed(codes, falling_widths(count, count))


def _compare_scaled(numbers: Tensor) -> None:
    """Of vectors of all sizes, in memory that is wider; the codes of scales are written beside other bytes."""
    from inference_engine.kernels.triton import trellis as in_triton

    vectors, count = numbers.shape
    sizes = torch.logspace(-30, 30, vectors, base=2, device=numbers.device)[:, None]
    wide = torch.full((vectors, count + 5), torch.nan, device=numbers.device)
    wide[:, :count] = numbers * sizes
    if vectors > 2:
        wide[1, :count] = 0.0
    found, expected = (torch.full((vectors, 3), 7, dtype=torch.uint8, device=numbers.device) for _ in range(2))
    scaled = in_triton.scale(wide[:, :count], found[:, 1:2])
    scale(wide[:, :count], expected[:, 1:2])
    # A scale between two codes may get either.
    assert (found.int() - expected.int()).abs().max() <= 1
    assert float((found == expected).float().mean()) > 0.98
    torch.testing.assert_close(scaled * scales(found[:, 1:2]), wide[:, :count])
    assert in_triton.scale(wide[:0, :count], found[:0, 1:2]).shape == (0, count)


def _compare_packed(codes: Tensor, widths: Sequence[int]) -> None:
    from inference_engine.kernels.triton import trellis as in_triton

    packing = Packing(tuple(widths))
    places = packing.bits_on(codes.device)
    found = torch.full((len(codes), packing.packed_bytes + 2), 7, dtype=torch.uint8, device=codes.device)
    in_triton.pack(codes, places, found[:, 1:-1])
    assert torch.equal(found[:, 1:-1], packing.pack(codes))
    assert (found[:, [0, -1]] == 7).all(), "bytes beside the packed ones are written"
    assert torch.equal(packing.unpack(found[:, 1:-1]), codes)
    in_triton.pack(codes[:0], places, found[:0, 1:-1])


def test_the_kernels_give_what_the_reference_gives() -> None:
    run_with_triton(compare_kernel)
