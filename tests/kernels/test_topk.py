"""Top-K: the set that sorting gives, for every distribution and every hint; a hint changes the cost alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inference_engine.kernels.topk import TopK, topk, topk_by_sorting
from tests.kernels.own_process import run_with_triton
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


def found(result: TopK) -> list[list[int]]:
    indices = result.indices
    return [row.tolist() for row in indices.reshape(-1, indices.shape[-1])]


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
        expected = rows_by_definition(scores, k)
        assert found(topk(scores, k)) == expected, distribution
        assert topk_by_sorting(scores, k).tolist() == expected, distribution


def test_the_capacity_changes_nothing(subtests: pytest.Subtests) -> None:
    for capacity in (10, 11, 1000):
        with subtests.test(str(capacity)):
            for distribution in DISTRIBUTIONS:
                scores = draw(distribution, 4, 501)
                assert found(topk(scores, 10, capacity=capacity)) == rows_by_definition(scores, 10), distribution


def a_hint(kind: str, scores: Tensor, k: int) -> Tensor:
    rng = torch.Generator().manual_seed(1)
    count = scores.shape[-1]
    best = scores.argsort(dim=-1, descending=True)
    anywhere = torch.randint(-2 * count, 2 * count, (*scores.shape[:-1], k), generator=rng)
    return {
        "the answer": best[..., :k],
        "nearly": best[..., k // 2 : k // 2 + k],
        "the worst": best[..., -k:],
        "partly out of range": anywhere,
        "out of range": anywhere.abs() + count,
        "padding": torch.full_like(anywhere, -1),
        "one index again and again": best[..., :1].expand_as(anywhere),
        "shorter": best[..., : k // 3],
        "longer": best[..., : 2 * k],
        "empty": best[..., :0],
        "for one query only": torch.where(torch.arange(len(scores))[:, None] == 1, best[..., :k], -1),
    }[kind]


HINTS = [
    "the answer",
    "nearly",
    "the worst",
    "partly out of range",
    "out of range",
    "padding",
    "one index again and again",
    "shorter",
    "longer",
    "empty",
    "for one query only",
]


@pytest.mark.parametrize("kind", HINTS)
def test_no_hint_changes_the_answer(kind: str) -> None:
    for distribution in DISTRIBUTIONS:
        scores = draw(distribution, 4, 311)
        assert found(topk(scores, 12, a_hint(kind, scores, 12))) == rows_by_definition(scores, 12), distribution


numbers = st.one_of(
    st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, INF, -INF, NAN]), st.integers(-3, 3).map(float)
)


@settings(max_examples=300)
@given(st.data())
def test_any_scores_any_hint_any_candidates(data: st.DataObject) -> None:
    row = data.draw(st.lists(numbers, min_size=1, max_size=40))
    k = data.draw(st.integers(0, 12))
    capacity = data.draw(st.integers(k, 3 * k + 1))
    allowed = data.draw(st.none() | st.lists(st.booleans(), min_size=len(row), max_size=len(row)))
    hint = data.draw(st.none() | st.lists(st.integers(-5, 60), max_size=15))
    result = topk(
        torch.tensor(row),
        k,
        None if hint is None else torch.tensor(hint, dtype=torch.int64),
        candidates=None if allowed is None else torch.tensor(allowed),
        capacity=capacity,
    )
    expected = by_definition(row, k, allowed)
    assert result.indices.tolist() == expected
    by_sorting = topk_by_sorting(torch.tensor(row), k, candidates=None if allowed is None else torch.tensor(allowed))
    assert by_sorting.tolist() == expected


def test_the_values_are_those_of_torch() -> None:
    for distribution in DISTRIBUTIONS:
        scores = draw(distribution, 5, 700)
        values = scores.gather(-1, topk(scores, 33).indices).sort(descending=True).values
        assert torch.equal(values, scores.topk(33).values), distribution


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_float_type_is_ranked_exactly(dtype: torch.dtype) -> None:
    scores = draw("normal", 3, 401, dtype=torch.float64).to(dtype)
    if dtype == torch.float64:
        scores = 1 + scores * 1e-12  # all alike in float32
    assert found(topk(scores, 17)) == rows_by_definition(scores, 17)


def test_a_nan_is_chosen_like_torch_does_and_never_dropped() -> None:
    scores = draw("normal", 2, 300)
    scores[0, 250] = NAN
    scores[1, [7, 99]] = -scores.new_tensor(NAN)
    result = topk(scores, 5)
    assert 250 in result.indices[0]
    assert {7, 99} <= set(result.indices[1].tolist())


def test_fewer_candidates_than_k_give_all_of_them_then_padding() -> None:
    scores = draw("normal", 2, 100)
    candidates = torch.zeros(2, 100, dtype=torch.bool)
    candidates[0, [90, 3]] = True
    assert topk(scores, 4, candidates=candidates).indices.tolist() == [[3, 90, -1, -1], [-1] * 4]


def test_a_candidate_of_minus_infinity_is_still_a_candidate() -> None:
    scores = torch.tensor([1.0, -INF, 2.0, -INF])
    candidates = torch.tensor([False, True, False, True])
    assert topk(scores, 1, candidates=candidates).indices.tolist() == [1]


def test_a_selection_does_not_depend_on_its_neighbours() -> None:
    scores = torch.cat([draw(name, 1, 257, seed=5) for name in DISTRIBUTIONS])
    hint = topk(scores.roll(1, dims=0), 9).indices
    together = topk(scores, 9, hint)
    for index in range(len(scores)):
        alone = topk(scores[index], 9, hint[index])
        assert torch.equal(alone.indices, together.indices[index])
        assert alone.passes == together.passes[index]
        assert alone.iterations == together.iterations[index]


def test_shapes_follow_the_scores() -> None:
    result = topk(
        draw("normal", 2, 3, 50), 4, torch.zeros(3, 4, dtype=torch.int64), candidates=torch.ones(2, 1, 50) > 0
    )
    assert result.indices.shape == (2, 3, 4)
    assert result.passes.shape == result.iterations.shape == (2, 3)


@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0,)])
def test_nothing_to_choose_from_gives_nothing(shape: tuple[int, ...]) -> None:
    assert topk(torch.zeros(shape), 3).indices.shape == (*shape[:-1], min(3, shape[-1]))


def test_scores_within_the_capacity_are_read_once_and_not_searched() -> None:
    result = topk(draw("normal", 4, 30), 10)
    assert result.passes.tolist() == [1] * 4
    assert result.iterations.tolist() == [0] * 4


def test_a_perfect_hint_costs_one_count_and_the_collection() -> None:
    scores = draw("normal", 20, 4001)
    hinted = topk(scores, 32, scores.topk(32).indices)
    assert hinted.iterations.tolist() == [1] * 20
    assert hinted.passes.tolist() == [2] * 20
    unhinted = topk(scores, 32)
    assert (unhinted.passes == unhinted.iterations + 2).all(), "statistics of all scores are a pass more"


def test_the_search_is_short_even_when_the_hint_is_bad(subtests: pytest.Subtests) -> None:
    for kind in ("padding", "the worst", "partly out of range"):
        with subtests.test(kind):
            for distribution in DISTRIBUTIONS:
                scores = draw(distribution, 20, 3001)
                assert topk(scores, 25, a_hint(kind, scores, 25)).iterations.max() <= 12, distribution


def compare_kernel() -> None:
    """What a child process runs: the kernel against the definition, with rows longer than one program holds."""
    device = device_of_kernels()
    from inference_engine.kernels.triton import topk as kernel

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
