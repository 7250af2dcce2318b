"""`kernels/graph_io.py` in Triton: kernels read and write the host's pinned memory themselves.

A copy engine begins some microseconds after the kernel before its copy, and so does the kernel behind it. Of many
numbers a copy is faster all the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference_engine.kernels.graph_io import KeyedRows, Peaks, StepEnds
from inference_engine.kernels.triton.gumbel_noise import noise_of

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

    def draw(
        self, logits: Tensor, peaks: Peaks, rows: KeyedRows, allowed: Tensor | None = None
    ) -> tuple[Peaks, Tensor]:
        count, parts = len(rows.keys), peaks.ids.shape[1]
        ids = torch.empty((count, parts), dtype=torch.int64, device=logits.device)
        scores = torch.empty((count, parts), dtype=torch.float64, device=logits.device)
        words = 0 if allowed is None else allowed.shape[1]
        # Parts of other peaks may be other ones: those of a model on several GPUs.
        assert parts == triton.cdiv(logits.shape[1], _PART), parts
        given = logits, allowed, peaks.largest, rows.keys, rows.options, ids, scores, logits.shape[1], logits.stride(0)
        places = triton.next_power_of_2(parts)
        _draw[(parts, count)](*given, words, HAS_MIN_P=rows.has_min_p, PARTS=places, BLOCK=_PART, num_warps=8)
        if rows.has_top_p:
            block = min(_PART, triton.next_power_of_2(logits.shape[1]))
            _cut[(count,)](*given, words, parts, PARTS=places, BLOCK=max(block, 32), num_warps=16)
        return Peaks(ids, peaks.largest[:count], peaks.smallest[:count]), scores

    def publish(self, peaks: Peaks, count: int, host: Tensor, scores: Tensor | None = None) -> Tensor:
        ids = torch.empty(count, dtype=torch.int64, device=peaks.ids.device)
        parts = peaks.ids.shape[1]
        _publish[(count,)](*peaks, scores, ids, host, parts, count, BLOCK=triton.next_power_of_2(parts), num_warps=1)
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


@triton.jit
def _draw(
    p_logits,
    p_allowed,
    p_largest,
    p_keys,
    p_options,
    p_ids,
    p_scores,
    vocab,
    row_stride,
    words,
    HAS_MIN_P: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    o, b = _seen(p_logits, p_allowed, row, tl.program_id(0) * BLOCK, vocab, row_stride, words, BLOCK)
    m = o < vocab
    b_scores = b.to(tl.float64)
    temperature = tl.load(p_options + 3 * row)
    if temperature > 0:
        b_scores /= temperature
        if HAS_MIN_P:
            o_part = tl.arange(0, PARTS)
            m_part = o_part < tl.num_programs(0)
            b_largest = tl.load(p_largest + row * tl.num_programs(0) + o_part, mask=m_part, other=float("-inf"))
            least = tl.max(b_largest, axis=0).to(tl.float64) / temperature + tl.load(p_options + 3 * row + 1)
            b_scores = tl.where(b_scores < least, float("-inf"), b_scores)
        b_scores += noise_of(tl.load(p_keys + row).to(tl.uint64, bitcast=True), o.to(tl.int64))
    best = tl.max(b_scores, axis=0)
    token = tl.min(tl.where((b_scores == best) & m, o.to(tl.int64), _NO_ID), axis=0)
    o_out = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(p_ids + o_out, token)
    tl.store(p_scores + o_out, best)


@triton.jit
def _seen(p_logits, p_allowed, row, first, vocab, row_stride, words, BLOCK: tl.constexpr):
    """Ids from the first on, and their numbers, -inf where they are not allowed."""
    o = first + tl.arange(0, BLOCK)
    b = tl.load(p_logits + row * row_stride + o, mask=o < vocab, other=float("-inf"))
    b = tl.where(b != b, float("-inf"), b)  # noqa: PLR0124 -- of NaN alone
    if p_allowed is not None:
        o_word = first // 32 + tl.arange(0, BLOCK // 32)
        b_words = tl.load(p_allowed + row * words + o_word, mask=o_word < words, other=0)
        b_bits = tl.reshape((b_words[:, None] >> tl.arange(0, 32)[None, :]) & 1, (BLOCK,))
        b = tl.where(b_bits == 1, b, float("-inf"))
    return o, b


@triton.jit
def _cut(
    p_logits,
    p_allowed,
    p_largest,
    p_keys,
    p_options,
    p_ids,
    p_scores,
    vocab,
    row_stride,
    words,
    parts,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token of the highest score among those that top_p and min_p leave.

    The highest of all is tried first. If it is cut, then so are all behind it in the order of their numbers, and the
    highest of those before it is the next: no row is put in order.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(p_options + 3 * row)
    top_p = tl.load(p_options + 3 * row + 2)
    o_part = tl.arange(0, PARTS)
    m_part = o_part < parts
    b_largest = tl.load(p_largest + row * parts + o_part, mask=m_part, other=float("-inf"))
    largest = tl.max(b_largest, axis=0)
    is_finite = (largest > float("-inf")) & (largest < float("inf"))
    if (temperature > 0) & (top_p < 1.0) & is_finite:
        top = largest.to(tl.float64)
        least = top / temperature + tl.load(p_options + 3 * row + 1)
        noise_key = tl.load(p_keys + row).to(tl.uint64, bitcast=True)
        b_scores = tl.load(p_scores + row * parts + o_part, mask=m_part, other=float("-inf"))
        b_ids = tl.load(p_ids + row * parts + o_part, mask=m_part, other=0)
        token = tl.min(tl.where((b_scores == tl.max(b_scores, axis=0)) & m_part, b_ids, _NO_ID), axis=0)
        b_total = tl.zeros((BLOCK,), dtype=tl.float64)
        for first in range(0, vocab, BLOCK):
            o, b = _seen(p_logits, p_allowed, row, first, vocab, row_stride, words, BLOCK)
            b_total += tl.where(o < vocab, tl.exp((b.to(tl.float64) - top) / temperature), 0.0)
        enough = top_p * tl.sum(b_total, axis=0)
        is_cut = True
        while is_cut:
            own = tl.load(p_logits + row * row_stride + token).to(tl.float32)
            b_mass = tl.zeros((BLOCK,), dtype=tl.float64)
            b_before = tl.zeros((BLOCK,), dtype=tl.int32)
            for first in range(0, vocab, BLOCK):
                o, b = _seen(p_logits, p_allowed, row, first, vocab, row_stride, words, BLOCK)
                m = (o < vocab) & ((b > own) | ((b == own) & (o < token)))
                b_mass += tl.where(m, tl.exp((b.to(tl.float64) - top) / temperature), 0.0)
                b_before += m.to(tl.int32)
            before = tl.sum(b_before, axis=0)
            is_left = (tl.sum(b_mass, axis=0) < enough) & (own.to(tl.float64) / temperature >= least)
            is_cut = (is_left == 0) & (before > 0)
            if is_cut:
                best = tl.full((), float("-inf"), tl.float64)
                next_token = tl.full((), 0, tl.int64)
                for first in range(0, vocab, BLOCK):
                    o, b = _seen(p_logits, p_allowed, row, first, vocab, row_stride, words, BLOCK)
                    m = (o < vocab) & ((b > own) | ((b == own) & (o < token)))
                    b_own = b.to(tl.float64) / temperature + noise_of(noise_key, o.to(tl.int64))
                    b_own = tl.where(m, b_own, float("-inf"))
                    of_block = tl.max(b_own, axis=0)
                    first_of_block = tl.min(tl.where((b_own == of_block) & m, o.to(tl.int64), _NO_ID), axis=0)
                    next_token = tl.where(of_block > best, first_of_block, next_token)
                    best = tl.maximum(best, of_block)
                token = next_token
        tl.store(p_ids + row * parts + o_part, token + tl.zeros((PARTS,), dtype=tl.int64), mask=m_part)
        tl.store(p_scores + row * parts + o_part, tl.zeros((PARTS,), dtype=tl.float64), mask=m_part)


@triton.jit(do_not_specialize=["count"])
def _publish(p_parts, p_largest, p_smallest, p_scores, p_ids, p_host, parts, count, BLOCK: tl.constexpr):
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
    b_is_best = b_largest == largest
    if p_scores is not None:
        b_scores = tl.load(p_scores + row * parts + o, mask=m, other=float("-inf"))
        b_is_best = b_scores == tl.max(b_scores, axis=0)
    token = tl.min(tl.where(b_is_best & m, b_ids, _NO_ID), axis=0)
    tl.store(p_ids + row, token)
    tl.store(p_host.to(tl.pointer_type(tl.int64)) + row, token)
    tl.store(p_host + 2 * count + row, smallest)
    tl.store(p_host + 3 * count + row, largest)


step_ends = KernelStepEnds()
