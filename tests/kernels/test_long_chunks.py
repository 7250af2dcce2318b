"""A chunk over pieces of its history is a chunk over all of it; an operation that is missing or wrong is not used."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from inference_engine.kernels import long_chunks
from inference_engine.kernels.attention import attend_causal
from inference_engine.kernels.long_chunks import LongChunks, open_long_chunks
from inference_engine.kernels.merge import attend_state
from inference_engine.kernels.ops import open_ops
from tests.kernels.own_process import run_with_triton
from tests.kernels.test_attention import TOLERANCES, causal_mask, states
from tests.kernels.test_ragged_attention import device_of_kernels

HEADS = [(9, 3, 64), (4, 4, 16), (4, 2, 128)]
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN's attention needs a GPU")


def by_parts(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, lse = attend_state(queries[0].transpose(0, 1), keys[0], values[0], mask, scaling=scaling)
    return out.to(queries.dtype), lse


def whole(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    assert keys.is_contiguous() and values.is_contiguous(), "a plan is made for strides, too"
    assert keys.shape[2] in (8, 16, 64), "a plan is made for each size"
    return by_parts(queries, keys, values, scaling, None)


def square(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    assert keys.is_contiguous() and values.is_contiguous(), "a plan is made for strides, too"
    count = queries.shape[2]
    assert keys.shape[2] == count, "a chunk sees itself"
    return by_parts(queries, keys, values, scaling, causal_mask(count, count, torch.float32, "cpu"))


def rest(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    return by_parts(queries, keys, values, scaling, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_pieces_of_a_history_give_what_the_whole_of_it_gives(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    attend = LongChunks(whole, square, rest, pieces=(64, 16, 8), chunk=4)
    for tokens, count in ((4, 12), (8, 40), (12, 155), (4, 260), (4, 4), (12, 12)):
        given = states(heads, tokens, count, dtype, "cpu")
        queries, keys, values = (one.float() for one in given)
        expected = attend_causal(queries, keys, values, scaling=0.2)
        found = attend(*given, scaling=0.2)
        assert (found.dtype, found.shape) == (dtype, expected.shape)
        worst = (found.float() - expected).abs().max().item()
        assert worst < TOLERANCES[dtype], (tokens, count, worst)


def test_other_chunks_are_left_to_the_other_operation() -> None:
    def refuse(*_: object) -> tuple[Tensor, Tensor]:
        raise AssertionError("it was asked")

    attend = LongChunks(refuse, refuse, refuse, pieces=(64, 8), chunk=4)
    sinks = torch.zeros(4)
    for tokens, count, more in ((5, 100, {}), (4, 11, {}), (4, 100, {"softcap": 3.0}), (4, 100, {"head_sinks": sinks})):
        given = states((4, 2, 16), tokens, count, torch.float32, "cpu")
        assert torch.equal(attend(*given, scaling=0.3, **more), attend_causal(*given, scaling=0.3, **more))
    queries, keys, values = states((4, 2, 16), 4, 100, torch.bfloat16, "cpu")
    attend(queries.float(), keys, values, scaling=0.3)  # entries in another dtype than the queries


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_piece_that_all_queries_see_is_attended_to_as_a_whole(dtype: torch.dtype) -> None:
    asked: list[int] = []

    def watched(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        asked.append(keys.shape[2])
        return whole(queries, keys, values, scaling)

    attend = LongChunks(watched, square, rest, pieces=(64, 16), chunk=4).attend_piece
    for tokens, count, more in ((4, 64, {}), (8, 16, {}), (5, 64, {}), (4, 63, {}), (4, 64, {"softcap": 3.0})):
        queries, *given = states((4, 2, 16), tokens, count, dtype, "cpu")
        keys, values = (each.contiguous() for each in given)
        expected = attend_state(queries.float(), keys.float(), values.float(), None, scaling=0.3, **more)
        found = attend(queries, keys, values, scaling=0.3, **more)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.float() - theirs).abs().max() < TOLERANCES[dtype]
    assert asked == [64, 16]


@pytest.mark.parametrize("fault", ["missing", "wrong"])
def test_an_operation_that_is_missing_or_wrong_is_told_and_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def right(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        return by_parts(queries, keys, values, scaling, None)

    def faulty(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        if fault == "missing":
            raise RuntimeError("no plan for it\nand more")
        out, lse = right(queries, keys, values, scaling)
        return out, lse / 0.69  # as a logarithm of two would be

    monkeypatch.setattr(long_chunks, "_TRIED", (8, 80))
    found = LongChunks(faulty, square, rest, pieces=(64,), chunk=4)
    wrong = long_chunks._fault(found, torch.device("cpu"), torch.bfloat16, 4, 2, 16)
    assert wrong == "no plan for it" or "differs" in wrong
    works = LongChunks(right, square, rest, pieces=(64,), chunk=4)
    assert not long_chunks._fault(works, torch.device("cpu"), torch.bfloat16, 4, 2, 16)
    monkeypatch.setattr(long_chunks, "_fault", lambda *_: wrong)
    with caplog.at_level(logging.INFO):
        assert open_long_chunks(torch.device("cuda"), torch.bfloat16, [(4, 2, 16)]) is attend_causal
    assert wrong in caplog.text
    assert open_long_chunks(torch.device("cpu"), torch.bfloat16, [(4, 2, 16)]) is attend_causal
    assert open_long_chunks(torch.device("cuda"), torch.float32, [(4, 2, 16)]) is attend_causal


def test_an_operation_that_fails_later_is_told_and_not_used_again(caplog: pytest.LogCaptureFixture) -> None:
    asked = 0

    def failing(*_: object) -> tuple[Tensor, Tensor]:
        nonlocal asked
        asked += 1
        raise RuntimeError("no plan for it")

    attend = LongChunks(failing, square, rest, pieces=(64, 8), chunk=4)
    given = states((4, 2, 16), 4, 100, torch.float32, "cpu")
    for _ in range(2):
        assert torch.equal(attend(*given, scaling=0.3), attend_causal(*given, scaling=0.3))
    assert asked == 1 and "no plan for it" in caplog.text
    queries, keys, values = states((4, 2, 16), 4, 64, torch.float32, "cpu")
    expected = attend_state(queries, keys, values, None, scaling=0.3)
    attend = LongChunks(failing, square, rest, pieces=(64, 8), chunk=4)
    for _ in range(2):
        assert torch.equal(attend.attend_piece(queries, keys, values, scaling=0.3)[0], expected[0])
    assert asked == 2


def compare_merged() -> None:
    """Two states, laid out as the operations give them."""
    from inference_engine.kernels.triton.merging import merge_two

    device = device_of_kernels()
    half = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter has no bfloat16
    for tokens, heads, dim, dtype in ((37, 3, 24, torch.float32), (64, 2, 64, half)):
        generator = torch.Generator().manual_seed(0)
        out_a = torch.randn(heads, tokens, dim, generator=generator).to(half).transpose(0, 1)
        out_b = torch.randn(tokens, heads, dim, generator=generator)
        lse_a, lse_b = 3 * torch.randn(2, heads, tokens, generator=generator)
        first, second = (out_a, lse_a.T), (out_b, lse_b.T)
        expected = long_chunks.merge_two(first, second, dtype)
        there = [(out.to(device), lse.to(device)) for out, lse in (first, second)]
        found = merge_two(there[0], there[1], dtype)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert torch.allclose(ours.cpu().float(), theirs.float(), atol=TOLERANCES[dtype])


def test_the_kernel_merges_as_the_reference() -> None:
    run_with_triton(compare_merged)


@ON_GPU
@pytest.mark.parametrize("heads", [(9, 3, 64), (28, 4, 128), (4, 1, 256)], ids=str)
def test_a_gpu_gives_what_its_causal_operation_gives(heads: tuple[int, int, int]) -> None:
    """Whichever was chosen."""
    device = torch.device("cuda")
    attend = open_long_chunks(device, torch.bfloat16, [heads], open_ops("auto", device).merge_two)
    queries, keys, values = states(heads, 1024, 4096, torch.bfloat16, "cuda")
    if isinstance(attend, LongChunks):
        pairs = zip(
            attend.attend_piece(queries, keys.contiguous(), values.contiguous(), scaling=heads[2] ** -0.5),
            attend_state(queries, keys, values, None, scaling=heads[2] ** -0.5),
            strict=True,
        )
        assert all((ours.float() - theirs).abs().max() < TOLERANCES[torch.bfloat16] for ours, theirs in pairs)
    for tokens, count in ((1024, 1024 + 4096), (2048, 2048 + 12288 + 77), (1024, 5000), (4096, 4096)):
        given = states(heads, tokens, count, torch.bfloat16, "cuda")
        expected = attend_causal(*given, scaling=heads[2] ** -0.5)
        found = attend(*given, scaling=heads[2] ** -0.5)
        assert (found.float() - expected.float()).abs().max() < TOLERANCES[torch.bfloat16]
