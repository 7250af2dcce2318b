"""Top-K: the set that sorting in plain Python gives, for every distribution, and the kernel gives the same."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inference_engine.kernels.topk import topk_by_sorting
from tests.kernels.own_process import run_with_triton
from tests.kernels.poisoned import poison
from tests.kernels.test_ragged_attention import device_of_kernels

INF, NAN = math.inf, math.nan


def by_definition(row: list[float], k: int, allowed: list[bool] | None = None) -> list[int]:
    """Sorting in plain Python: NaN first, then by value, then by index."""
    candidates = [index for index in range(len(row)) if allowed is None or allowed[index]]
    ranked = sorted(candidates, key=lambda index: (not math.isnan(row[index]), -row[index], index))
    chosen = sorted(ranked[:k])
    return chosen + [-1] * (min(k, len(row)) - len(chosen))


def rows_by_definition(scores: Tensor, k: int) -> list[list[int]]:
    return [by_definition(row.tolist(), k) for row in scores.reshape(-1, scores.shape[-1])]


DISTRIBUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda noise: noise,
    "lognormal": torch.exp,
    "beta": lambda noise: torch.sigmoid(3 * noise + 1),
    "heavy": lambda noise: torch.sinh(3 * noise),
    "huge": lambda noise: noise * 1e38,
    "tiny": lambda noise: noise * 1e-42,
    "far from zero": lambda noise: 1e6 + noise,
    "constant": torch.zeros_like,
    "two values": lambda noise: (noise > 0.5).to(noise.dtype),
    "few values": torch.round,
    "infinities": lambda noise: torch.where(noise.abs() > 1.5, noise * INF, noise),
    "mostly -inf": lambda noise: torch.where(noise > 1.2, noise, -INF),
    "only infinities": lambda noise: noise.sign() * INF,
    "signed zeros": lambda noise: noise.sign() * 0.0,
}


def draw(distribution: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return DISTRIBUTIONS[distribution](noise)


@pytest.mark.parametrize(("count", "k"), [(1, 1), (7, 3), (97, 1), (211, 32), (1003, 20), (64, 64), (50, 60)])
def test_it_is_what_sorting_gives(count: int, k: int) -> None:
    for distribution in DISTRIBUTIONS:
        scores = draw(distribution, 3, count)
        assert topk_by_sorting(scores, k).tolist() == rows_by_definition(scores, k), distribution


numbers = st.one_of(
    st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, INF, -INF, NAN]), st.integers(-3, 3).map(float)
)


@settings(max_examples=300)
@given(st.data())
def test_any_scores_any_candidates(data: st.DataObject) -> None:
    row = data.draw(st.lists(numbers, min_size=1, max_size=40))
    k = data.draw(st.integers(0, 12))
    allowed = data.draw(st.none() | st.lists(st.booleans(), min_size=len(row), max_size=len(row)))
    found = topk_by_sorting(torch.tensor(row), k, candidates=None if allowed is None else torch.tensor(allowed))
    assert found.tolist() == by_definition(row, k, allowed)


def test_a_nan_is_chosen_like_torch_does_and_never_dropped() -> None:
    scores = draw("normal", 2, 300)
    scores[0, 250] = NAN
    scores[1, [7, 99]] = -scores.new_tensor(NAN)
    found = topk_by_sorting(scores, 5)
    assert 250 in found[0]
    assert {7, 99} <= set(found[1].tolist())


def test_fewer_candidates_than_k_give_all_of_them_then_padding() -> None:
    scores = draw("normal", 2, 100)
    candidates = torch.zeros(2, 100, dtype=torch.bool)
    candidates[0, [90, 3]] = True
    assert topk_by_sorting(scores, 4, candidates=candidates).tolist() == [[3, 90, -1, -1], [-1] * 4]


@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0,)])
def test_nothing_to_choose_from_gives_nothing(shape: tuple[int, ...]) -> None:
    assert topk_by_sorting(torch.zeros(shape), 3).shape == (*shape[:-1], min(3, shape[-1]))


def compare_kernel() -> None:
    """What a child process runs: the kernel against the definition, with rows longer than one program holds."""
    device = device_of_kernels()
    from inference_engine.kernels.triton import topk as kernel

    poison(kernel)
    counts: tuple[int, ...] = (257, 100_003, 2**20)
    if device.type != "cuda":  # it takes long for each program
        kernel._ONE, kernel._CHUNK, kernel._PROGRAMS, kernel._SAMPLE, kernel._LISTED = 64, (16, 64), 4, 128, 64
        counts = (50, 203)
    for count in counts:
        rows = torch.stack([draw(name, 1, count)[0] for name in DISTRIBUTIONS])
        rows = torch.cat([rows, rows.new_zeros(1, count), rows[:1]])
        rows[-1, ::7], rows[-1, ::11], rows[-1, ::13] = NAN, INF, -rows.new_tensor(NAN)
        rows[-2, ::5] = -0.0
        rows = (rows if device.type == "cuda" else rows[count % 3 :: 3]).to(device)
        for k in (1, 37, count):
            assert torch.equal(kernel.largest(rows, k), topk_by_sorting(rows, k)), (count, k)
        some = torch.rand(len(rows), count, device=device) < 0.3
        some[1], some[2, 3:] = False, False
        found = kernel.largest(rows, 29, candidates=some)
        assert torch.equal(found, topk_by_sorting(rows, 29, candidates=some)), count


def test_the_kernel_chooses_as_the_definition() -> None:
    run_with_triton(compare_kernel)
