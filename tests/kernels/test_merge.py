"""Attention in parts: cut the entries anywhere, merge the parts, and it is one softmax again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from inference_engine.kernels.attention import attend
from inference_engine.kernels.merge import attend_state, merge_states, with_head_sinks
from tests.further import each_pair

# Two orders of adding up the same float32 numbers, of size 1.
ROUNDING = 5e-6
HEADS, KV_HEADS, DIM, SCALING = 6, 2, 5, 5**-0.5

State = tuple[Tensor, Tensor]


def problem(tokens: int, count: int, seed: int, *, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    queries = torch.randn(tokens, HEADS, DIM, generator=rng) * size
    keys, values = torch.randn(2, KV_HEADS, count, DIM, generator=rng)
    return queries, keys, values


def one_softmax(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> State:
    """Head by head, in float64."""
    group = HEADS // KV_HEADS
    keys, values = keys.double().repeat_interleave(group, 0), values.double().repeat_interleave(group, 0)
    scores = torch.einsum("thd,hsd->ths", queries.double(), keys) * SCALING
    if mask is not None:
        scores = scores + mask.double()
    out = torch.einsum("ths,hsd->thd", scores.softmax(-1), values)
    return out.float(), scores.logsumexp(-1).float()


def empty_like(out: Tensor, lse: Tensor) -> State:
    return torch.zeros_like(out), torch.full_like(lse, float("-inf"))


def assert_same(actual: State, expected: State) -> None:
    """To the bit."""
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def assert_close(actual: State, expected: State, *, size: float = 1.0) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=ROUNDING, atol=ROUNDING * size)


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 37), max_size=4), seed=st.integers(0, 99), tokens=st.integers(1, 3))
def test_entries_cut_anywhere_and_merged_are_one_softmax(cuts: list[int], seed: int, tokens: int) -> None:
    queries, keys, values = problem(tokens, 37, seed)
    edges = [0, *sorted(cuts), 37]  # equal cuts leave empty parts
    merged: State | None = None
    for start, end in itertools.pairwise(edges):
        part = attend_state(queries, keys[:, start:end], values[:, start:end], None, scaling=SCALING)
        merged = part if merged is None else merge_states(*merged, *part)
    assert merged is not None
    assert_close(merged, one_softmax(queries, keys, values))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="one operation is a GPU's")
@each_pair(dtype=[torch.float32, torch.bfloat16], head_dim=[8, 64, 256], tokens=[1, 3, 70])
def test_one_operation_of_a_gpu_gives_the_same_state(dtype: torch.dtype, head_dim: int, tokens: int) -> None:
    rng = torch.Generator().manual_seed(tokens)
    queries = torch.randn(tokens, HEADS, head_dim, generator=rng).to(dtype)
    keys, values = torch.randn(2, KV_HEADS, 1024, head_dim, generator=rng).to(dtype)
    expected = attend_state(queries.float(), keys.float(), values.float(), None, scaling=head_dim**-0.5)
    with watched() as operations:
        found = attend_state(queries.cuda(), keys.cuda(), values.cuda(), None, scaling=head_dim**-0.5)
    assert not {"aten::bmm", "aten::matmul"} & operations
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.cpu(), other, atol=tolerance, rtol=tolerance)


@contextmanager
def watched() -> Iterator[set[str]]:
    """The operations of torch that are called within."""
    names: set[str] = set()

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(func.name().rpartition(".")[0] or func.name())
            return func(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]
        yield names


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_it_is_the_attention_the_models_use(softcap: float | None) -> None:
    queries, keys, values = problem(4, 19, 1)
    mask = torch.zeros(4, 19).masked_fill(torch.ones(4, 19).triu(16).bool(), float("-inf"))
    out, _ = attend_state(queries, keys, values, mask, scaling=SCALING, softcap=softcap)
    expected = attend(queries, keys, values, mask, scaling=SCALING, softcap=softcap)
    torch.testing.assert_close(out, expected, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("count", [0, 7], ids=["no keys", "all masked"])
def test_a_query_that_sees_nothing_has_out_zero_and_lse_minus_infinity(count: int) -> None:
    queries, keys, values = problem(2, count, 3)
    out, lse = attend_state(queries, keys, values, torch.full((2, count), float("-inf")), scaling=SCALING)
    assert_same((out, lse), empty_like(out, lse))


def test_a_nan_in_the_entries_is_not_hidden() -> None:
    queries, keys, values = problem(1, 3, 6)
    keys[0, 1] = float("nan")
    out, lse = attend_state(queries, keys, values, None, scaling=SCALING)
    assert out[:, : HEADS // KV_HEADS].isnan().all()
    assert lse[:, : HEADS // KV_HEADS].isnan().all()


def test_sinks_folded_in_at_the_end_are_sinks_in_the_softmax() -> None:
    queries, keys, values = problem(3, 17, 7)
    sinks = torch.linspace(-4, 4, HEADS)
    parts = [attend_state(queries, keys[:, s], values[:, s], None, scaling=SCALING) for s in (slice(9), slice(9, 17))]
    out, lse = with_head_sinks(*merge_states(*parts[0], *parts[1]), sinks)
    expected = attend(queries, keys, values, None, scaling=SCALING, head_sinks=sinks)
    _, whole = one_softmax(queries, keys, values)
    assert_close((out, lse), (expected, torch.logaddexp(whole, sinks.expand_as(whole))))
