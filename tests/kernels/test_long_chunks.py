"""A chunk over pieces of its history is a chunk over all of it; an operation that is missing or wrong is not used."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.kernels import prefill_attention as long_chunks
from inference_engine.kernels.attention import CausalAttention, attend_causal
from inference_engine.kernels.flash3 import FlashChunks
from inference_engine.kernels.merge import attend_causal_state, attend_state
from inference_engine.kernels.ops import open_ops
from inference_engine.kernels.prefill_attention import (
    Flash3,
    LongAttention,
    LongChunks,
    fault_of,
    fault_of_chunks,
    open_long_chunks,
)
from tests.kernels.own_process import run_with_triton
from tests.kernels.poisoned import poison
from tests.kernels.test_attention import TOLERANCES, causal_mask, states
from tests.kernels.test_ragged_attention import device_of_kernels

HEADS = [(9, 3, 64), (4, 4, 16), (4, 2, 128)]
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="its operations need a GPU")
CUDA = torch.device("cuda")


class Package:
    """`fwd` of the package fa3-fwd as far as we call it, in plain torch: its layouts, its alignment."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, bool]] = []  # queries, keys, causal
        self.fault: Exception | None = None
        self.lse_factor = 1.0

    def fwd(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, is_causal: bool, num_splits: int
    ) -> tuple[Tensor, ...]:
        if self.fault is not None:
            raise self.fault
        (_, tokens, heads, dim), (_, count, kv_heads, _) = q.shape, k.shape
        assert k.shape == v.shape == (1, count, kv_heads, dim) and heads % kv_heads == 0
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16, "it was built for this alone"
        assert num_splits in (0, 1), "0: as many as fill the device"
        assert all(each.stride(-1) == 1 for each in (q, k, v)), "else it makes a copy"
        self.asked.append((tokens, count, is_causal))
        keys, values = (each.float().repeat_interleave(heads // kv_heads, dim=2) for each in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q.float(), keys) * softmax_scale
        if is_causal:
            is_behind = torch.arange(count) > torch.arange(count - tokens, count)[:, None]
            scores = scores.masked_fill(is_behind, float("-inf"))
        out = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), values)
        return out.to(q.dtype), scores.logsumexp(-1) * self.lse_factor, torch.empty(0), torch.empty(0)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    """It is installed, and the device is a Hopper."""
    found, module = Package(), ModuleType("fa3_fwd_interface")
    module.__spec__ = ModuleSpec(module.__name__, None)
    monkeypatch.setattr(module, "fa3_fwd_cuda", found, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return found


def is_close(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: torch.dtype) -> bool:
    return all(
        (ours.float() - theirs.float()).abs().max() < TOLERANCES[dtype]
        for ours, theirs in zip(found, expected, strict=True)
    )


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
        assert is_close(found, expected, dtype)
    assert asked == [64, 16]


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_flash_attention_3_takes_chunks_and_pieces_of_any_length(heads: tuple[int, int, int], package: Package) -> None:
    attend, dtype = Flash3(least=3), torch.bfloat16
    lengths = [(3, 3), (4, 5), (7, 7), (16, 129), (33, 300), (130, 131)]
    for tokens, count in lengths:
        given = states(heads, tokens, count, dtype, "cpu")
        queries, keys, values = (one.float() for one in given)
        found, expected = attend(*given, scaling=0.2), attend_causal(queries, keys, values, scaling=0.2)
        assert (found.dtype, found.shape) == (dtype, expected.shape)
        assert (found.float() - expected).abs().max() < TOLERANCES[dtype]
        state = attend.attend_causal_state(*given, scaling=0.2)
        assert is_close(state, attend_causal_state(queries, keys, values, scaling=0.2), dtype)
        state = attend.attend_piece(*given, scaling=0.2)
        assert is_close(state, attend_state(queries, keys, values, None, scaling=0.2), dtype)
        assert state[1].dtype == torch.float32
    assert package.asked == [(*each, causal) for each in lengths for causal in (True, True, False)]


def test_what_flash_attention_3_does_not_take_is_left_to_the_other_operation(package: Package) -> None:
    attend, sinks = Flash3(least=3), torch.zeros(4)
    half, single = torch.bfloat16, torch.float32
    for tokens, dtype, cap in ((2, half, None), (4, single, None), (4, torch.float16, None), (4, half, 3.0)):
        given = states((4, 2, 16), tokens, 40, dtype, "cpu")
        assert torch.equal(attend(*given, scaling=0.3, softcap=cap), attend_causal(*given, scaling=0.3, softcap=cap))
        assert is_close(
            attend.attend_piece(*given, scaling=0.3, softcap=cap),
            attend_state(*given, None, scaling=0.3, softcap=cap),
            dtype,
        )
        assert is_close(
            attend.attend_causal_state(*given, scaling=0.3, softcap=cap),
            attend_causal_state(*given, scaling=0.3, softcap=cap),
            dtype,
        )
    queries, keys, values = states((4, 2, 16), 4, 40, half, "cpu")
    assert torch.equal(
        attend(queries, keys, values, scaling=0.3, head_sinks=sinks),
        attend_causal(queries, keys, values, scaling=0.3, head_sinks=sinks),
    )
    attend(queries.float(), keys, values, scaling=0.3)  # entries in another dtype than the queries
    assert attend.attend_piece(queries, keys[:, :0], values[:, :0], scaling=0.3)[1].isneginf().all()
    assert package.asked == []


@pytest.mark.parametrize("fault", ["missing", "wrong"])
def test_an_operation_that_is_missing_or_wrong_is_logged_and_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def right(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        return by_parts(queries, keys, values, scaling, None)

    def faulty(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        if fault == "missing":
            raise RuntimeError("no plan for it\nand more")
        out, lse = right(queries, keys, values, scaling)
        return out, lse / 0.69  # as a logarithm of two would be

    asked = torch.device("cpu"), torch.bfloat16, (4, 2, 16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    found = LongChunks(faulty, square, rest, pieces=(64,), chunk=4)
    wrong = fault_of(found, *asked, tried=((8, 0), (8, 80)))
    assert wrong == "RuntimeError: no plan for it" or "differs" in wrong
    works = LongChunks(right, square, rest, pieces=(64,), chunk=4)
    assert not fault_of(works, *asked, tried=((8, 0), (8, 80)))
    with caplog.at_level(logging.INFO):
        assert open_long_chunks(CUDA, torch.bfloat16, [(4, 2, 16)], trial=lambda *_: wrong) is None
    assert wrong in caplog.text
    assert open_long_chunks(torch.device("cpu"), torch.bfloat16, [(4, 2, 16)]) is None
    assert open_long_chunks(CUDA, torch.float32, [(4, 2, 16)]) is None


def test_the_fastest_operation_that_is_there_and_right_is_chosen(
    package: Package, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong: set[type[LongAttention]] = set()
    of_chunks, has_chunks = "", list[bool]()

    def trial(found: LongAttention, *_: object) -> str:
        return "it differs" if type(found) in wrong else ""

    def chosen(dtype: torch.dtype = torch.bfloat16) -> tuple[type | None, str, str]:
        """And what the log says to an operator, and to one who asks for more."""
        caplog.clear()
        with caplog.at_level(logging.DEBUG, long_chunks.__name__):
            found = open_long_chunks(CUDA, dtype, [(4, 2, 16)], trial=trial, trial_of_chunks=lambda *_: of_chunks)
        if found is not None:
            has_chunks.append(found.chunks is not None)
        info = [each.getMessage() for each in caplog.records if each.levelno >= logging.INFO]
        return None if found is None else type(found), " ".join(info), caplog.text

    found, info, debug = chosen()
    assert (found, info) == (Flash3, "") and "FlashAttention-3 attends to long chunks" in debug
    of_chunks = "chunks differ"
    found, info, _ = chosen()
    assert found is Flash3 and info.endswith("within recorded steps: chunks differ") and has_chunks == [True, False]
    wrong.add(Flash3)
    found, info, _ = chosen()
    assert found is LongChunks
    assert info == "cuDNN attends to long chunks; not FlashAttention-3, with heads (4, 2, 16): it differs"
    wrong.add(LongChunks)
    found, info, _ = chosen()
    assert found is None and "torch's flash attention" in info and info.count("it differs") == 2

    wrong.clear()
    found, info, debug = chosen(torch.float16)
    assert (found, info) == (LongChunks, "") and "it is for bfloat16" in debug
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    found, info, debug = chosen()
    assert (found, info) == (LongChunks, "") and "it is for Hopper" in debug
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)  # as where it is not installed
    found, info, debug = chosen()
    assert (found, info) == (LongChunks, "") and "fa3-fwd is not installed" in debug
    assert package.asked == []


def compare_merged() -> None:
    """Two states, laid out as the operations give them."""
    from inference_engine.kernels.triton import merging

    poison(merging)
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
        found = merging.merge_two(there[0], there[1], dtype)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert torch.allclose(ours.cpu().float(), theirs.float(), atol=TOLERANCES[dtype])


def test_the_kernel_merges_as_the_reference() -> None:
    run_with_triton(compare_merged)


@ON_GPU
@pytest.mark.parametrize("heads", [(9, 3, 64), (28, 4, 128), (4, 1, 256)], ids=str)
def test_a_gpu_gives_what_its_causal_operation_gives(heads: tuple[int, int, int]) -> None:
    """Whichever was chosen."""
    found = open_long_chunks(CUDA, torch.bfloat16, [heads], open_ops("auto", CUDA).merge_two)
    dtype, scaling = torch.bfloat16, heads[2] ** -0.5
    attend: CausalAttention = attend_causal
    if found is not None:
        attend = found
        for tokens, count in ((1024, 4096), (1024, 1024), (1000, 3333), (129, 130), (100, 400)):
            queries, *entries = states(heads, tokens, count, dtype, "cuda")
            keys, values = (each.contiguous() for each in entries)
            expected = attend_state(queries, keys, values, None, scaling=scaling)
            assert is_close(found.attend_piece(queries, keys, values, scaling=scaling), expected, dtype)
            expected = attend_causal_state(queries, keys, values, scaling=scaling)
            assert is_close(found.attend_causal_state(queries, keys, values, scaling=scaling), expected, dtype)
    for tokens, count in (
        (1024, 5120),
        (2048, 2048 + 12288 + 77),
        (1024, 5000),
        (4096, 4096),
        (1111, 1111),
        (777, 9001),
    ):
        given = states(heads, tokens, count, dtype, "cuda")
        out = attend(*given, scaling=scaling)
        assert (out.float() - attend_causal(*given, scaling=scaling).float()).abs().max() < TOLERANCES[dtype]


def fake_forward(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    max_seqlen_q: int,
    kv_batch_idx: Tensor,
    leftpad_k: Tensor,
    softmax_scale: float,
    is_causal: bool,
    num_splits: int,
) -> tuple[Tensor, ...]:
    """What the package's operation does with sequences in views of a pool; garbage where there are no entries."""
    numbers = (cu_seqlens_q, seqused_k, kv_batch_idx, leftpad_k)
    assert is_causal and all(each.dtype == torch.int32 and each.is_contiguous() for each in numbers)
    edges, uptos, views, befores = (each.tolist() for each in numbers)
    assert edges[0] == 0 and edges[-1] == len(queries) and max_seqlen_q >= max(np.diff(edges))
    out = torch.full_like(queries, torch.nan)
    for first, end, upto, view, before in zip(edges, edges[1:], uptos, views, befores, strict=False):
        assert first <= end and (upto == 0 or upto - before >= end - first)
        if upto:
            each = [part[view, before:upto].transpose(0, 1) for part in (keys, values)]
            out[first:end] = attend_causal(queries[first:end], *each, scaling=softmax_scale)
    return out, torch.empty(0)


def install(forward: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the package's operation."""
    module = ModuleType("fa3_fwd_interface")
    monkeypatch.setattr(module, "fa3_fwd_cuda", SimpleNamespace(fwd=forward), raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("vectors", [3000, 200_001])
def test_chunks_of_a_step_read_their_entries_wherever_these_lie(vectors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three layers: two chunks, one chunk, none; the last entries of the pool, and those of most views."""
    install(fake_forward, monkeypatch)
    rows, heads, kv_heads, dim, longest = 12, 4, 2, 8, 700
    pool, queries = torch.randn(vectors, 2 * dim), torch.randn(rows, heads, dim)
    keys, values = pool[:, :dim], pool[:, dim:]
    last = [7, 10, vectors - kv_heads * longest, longest, longest]
    none = [10, 10, 0, 0, 0]
    table = [[[1, 5, vectors // 2, 300, 41], last, none], [last, none, none], [none] * 3]
    chunks = FlashChunks(torch.tensor(table), rows, (kv_heads,) * 3, vectors, longest)
    for layer, own in enumerate(table):
        expected = torch.zeros_like(queries)
        for first, end, start, apart, used in own:
            if used:
                slots = [start + head * apart + torch.arange(used) for head in range(kv_heads)]
                each = [torch.stack([part[some] for some in slots]) for part in (keys, values)]
                expected[first:end] = attend_causal(queries[first:end], *each, scaling=0.3)
        found = chunks.attend(layer, queries, keys, values, 0.3)
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("leaks", [False, True])
def test_an_operation_that_lets_through_what_lies_behind_a_sessions_entries_is_found(
    leaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(queries: Tensor, keys: Tensor, values: Tensor, **numbers: Any) -> tuple[Tensor, ...]:
        out, rest = fake_forward(queries, keys, values, **numbers)
        edges, views, uptos = (numbers[name].tolist() for name in ("cu_seqlens_q", "kv_batch_idx", "seqused_k"))
        for first, end, view, upto in zip(edges, edges[1:], views, uptos, strict=False):
            if leaks and upto:  # a tile's rest by probabilities of zero
                out[first:end] += (0 * values[view, upto : upto + 16, 0]).sum(dim=0)
        return out, rest

    install(forward, monkeypatch)
    fault = fault_of_chunks(Flash3(), torch.device("cpu"), torch.float32, (4, 2, 8))
    assert ("nan" in fault) == leaks and bool(fault) == leaks, fault
