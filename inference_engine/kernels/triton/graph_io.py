"""`kernels/graph_io.py` in Triton: kernels read and write the host's pinned memory themselves.

A copy engine begins some microseconds after the kernel before its copy, and so does the kernel behind it. Of many
numbers a copy is faster all the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference_engine.kernels.graph_io import Peaks, StepEnds

_MOST_BROUGHT = 2**15  # numbers; the copy engine brings more than that sooner
_BROUGHT = 512  # of a program
_PART = 4096  # logits of a program
_NO_ID: tl.constexpr = tl.constexpr(2**62)


class KernelStepEnds(StepEnds):
    """See `StepEnds`."""

    def bring(self, numbers: Tensor, target: Tensor, fed: Tensor | None) -> None:
        count = len(numbers)
        if count > _MOST_BROUGHT:
            super().bring(numbers, target, fed)
            return
        known = 0 if fed is None else len(fed)
        _bring[(triton.cdiv(count, _BROUGHT),)](
            numbers, target if fed is None else fed, target, count, known, BLOCK=_BROUGHT, num_warps=4
        )

    def peaks(self, logits: Tensor, allowed: Tensor | None = None) -> Peaks:
        rows, vocab = logits.shape
        parts = triton.cdiv(vocab, _PART)
        ids = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
        largest, smallest = torch.empty((2, rows, parts), dtype=torch.float32, device=logits.device)
        words = 0 if allowed is None else allowed.shape[1]
        _peaks[(parts, rows)](
            logits, allowed, ids, largest, smallest, vocab, logits.stride(0), words, BLOCK=_PART, num_warps=8
        )
        return Peaks(ids, largest, smallest)

    def publish(self, peaks: Peaks, count: int, host: Tensor) -> Tensor:
        ids = torch.empty(count, dtype=torch.int64, device=peaks.ids.device)
        parts = peaks.ids.shape[1]
        _publish[(count,)](*peaks, ids, host, parts, count, BLOCK=triton.next_power_of_2(parts), num_warps=1)
        return ids


@triton.jit(do_not_specialize=["count", "known"])
def _bring(p_numbers, p_fed, p_target, count, known, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(p_numbers + o, mask=(o >= known) & (o < count), other=0)
    b_fed = tl.load(p_fed + o, mask=o < known, other=0)
    tl.store(p_target + o, tl.where(o < known, b_fed, b), mask=o < count)


@triton.jit
def _peaks(p_logits, p_allowed, p_ids, p_largest, p_smallest, vocab, row_stride, words, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < vocab
    b = tl.load(p_logits + row * row_stride + o, mask=m, other=float("-inf"))
    is_nan = b != b  # noqa: PLR0124 -- of NaN alone
    b_known = tl.where(is_nan, float("-inf"), b)
    if p_allowed is not None:
        is_nan |= b == float("inf")
        o_word = tl.program_id(0) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
        b_words = tl.load(p_allowed + row * words + o_word, mask=o_word < words, other=0)
        b_bits = tl.reshape((b_words[:, None] >> tl.arange(0, 32)[None, :]) & 1, (BLOCK,))
        b_known = tl.where(b_bits == 1, b_known, float("-inf"))
    largest = tl.max(b_known, axis=0)
    smallest = tl.min(tl.where(m, tl.where(is_nan, float("inf"), b), float("inf")), axis=0)
    smallest = tl.where(tl.max(is_nan.to(tl.int32), axis=0) > 0, float("nan"), smallest)
    # Within the vocabulary, whatever the logits: a part of NaN alone has its first id.
    token = tl.min(tl.where((b_known == largest) & m, o.to(tl.int64), _NO_ID), axis=0)
    o_part = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(p_ids + o_part, token)
    tl.store(p_largest + o_part, largest)
    tl.store(p_smallest + o_part, smallest)


@triton.jit(do_not_specialize=["count"])
def _publish(p_parts, p_largest, p_smallest, p_ids, p_host, parts, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    m = o < parts
    b_largest = tl.load(p_largest + row * parts + o, mask=m, other=float("-inf"))
    b_smallest = tl.load(p_smallest + row * parts + o, mask=m, other=float("inf"))
    b_ids = tl.load(p_parts + row * parts + o, mask=m, other=0)
    largest = tl.max(b_largest, axis=0)
    is_nan = b_smallest != b_smallest  # noqa: PLR0124 -- of NaN alone
    smallest = tl.min(tl.where(is_nan, float("inf"), b_smallest), axis=0)
    smallest = tl.where(tl.max(is_nan.to(tl.int32), axis=0) > 0, float("nan"), smallest)
    token = tl.min(tl.where((b_largest == largest) & m, b_ids, _NO_ID), axis=0)
    tl.store(p_ids + row, token)
    tl.store(p_host.to(tl.pointer_type(tl.int64)) + row, token)
    tl.store(p_host + 2 * count + row, smallest)
    tl.store(p_host + 3 * count + row, largest)


step_ends = KernelStepEnds()
