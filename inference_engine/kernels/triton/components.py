"""Attention over the tokens that components of keys choose: `kernels/components.py` in Triton.

    score, near ─▶ scores, parts ─ weigh, gather ─▶ lists ─ choose ─▶ tokens ─ read ─▶ parts ─ merge ─▶ out

    score   of all tokens (`component_scores.py`); programs beside these attend to the sink and the window, whose
            log-sum-exp is in every weight
    choose  exactly k tokens, ascending, in three steps (`token_choice.py`)
    read    the keys and values of these tokens, once. Those that have left their region, which is a ring buffer then,
            are restored before (`restoring.py`)

How a history is cut follows from how much of it a query may choose from, and nothing is added in an order that is left
to chance: what is beside a query changes none of its bits. Lengths, addresses and choices are read on the device, so a
launch depends on the number of queries alone and can be part of a CUDA graph. An index is known by the address of its
numbers (`index_tiles.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.latents import operand_dtype
from inference_engine.kernels.reads import FIELDS, AttentionCall, StagedRead, TokenRead
from inference_engine.kernels.triton import component_scores, index_tiles, restoring, token_choice
from inference_engine.kernels.triton.block_selection import reads_of
from inference_engine.kernels.triton.component_scores import choices_of, chooses_by
from inference_engine.kernels.triton.dependent_launch import chained
from inference_engine.kernels.triton.gather import with_tile
from inference_engine.kernels.triton.index_tiles import half_width, rank_width
from inference_engine.kernels.triton.line import in_line
from inference_engine.kernels.triton.restoring import restored_before

_PARTS = 128  # that a history is scored in
_NEAR = 32  # parts of what is read anyway
_CHOSEN = 32  # parts of what was chosen
_NEAR_SLOTS, _CHOSEN_SLOTS = 64, 16  # that a program reads at once
_TIED = 16  # neighbours whose largest weight is counted
_BUCKETS = 1024
_WEIGHED, _GATHERED = 512, 2048  # tokens of a program
_WEIGHING = 2048  # programs of all heads, which share the tokens of long histories
_GROUPS = 32  # of neighbours that a program gathers from at once
_MERGED, _MERGING_WARPS = 64, 4  # channels that a program merges
_FEW, _MANY = 1024, 4096  # tokens that a program chooses from without reading them again
_SCORE_WARPS = 4
_SCORE_REGISTERS: int | None = 128  # of a thread, at most
_UNPACKED, _THREADS = 8, 128  # tokens of a program that unpacks, and its threads
_RESTORED, _PAIRS, _STEP = 64, 32, 128  # tokens and pairs of channels of a program that restores, numbers at once
_RESTORING_WARPS, _RESTORING_STAGES = 4, 4
_MOST_SCRATCH = 2**29  # bytes; more queries take turns
_LEAST = 16  # rows and columns that a matrix product of Triton has at least


def attend_choosing(call: AttentionCall, out: Tensor, read: StagedRead, *, serves_all: bool) -> None:
    """Implements ReadKernel, for TokenRead."""
    record, queries, kv_heads = read.record, call.queries, call.kv_heads
    assert isinstance(record, TokenRead)
    count = len(queries) if serves_all else min(read.upto, len(queries))
    group = _width(call.group)
    each = kv_heads * _room(read.tokens) * (group * queries.element_size() + (4 * group + 8) // _TIED + 20)
    each += kv_heads * record.restored * (2 * call.head_dim + record.numbers) * queries.element_size()
    at_once = max(1, min(count, _MOST_SCRATCH // each))
    for first in range(0, count, at_once):
        some = slice(first, min(count, first + at_once))
        chooser = Choosing(call.of(some), record, read.tokens, serves_all)
        chooser.score()
        chooser.weigh()
        chooser.gather()
        chooser.choose()
        chooser.restore()
        chooser.read()
        chooser.merge(out[some])


def _room(tokens: int) -> int:
    """How many tokens of a query's scores are kept: of whole chunks."""
    return max(1, int(triton.cdiv(tokens, index_tiles.CHUNK))) * index_tiles.CHUNK


def _width(group: int) -> int:
    return max(8, int(triton.next_power_of_2(group)))


class Choosing:
    """The stages for some queries [n, Hq, D], and what each leaves to the next.

    scores: [n, Hkv, tokens, group], less `tops` [n, Hkv, tokens / _TIED, group]; both as powers of two. orders:
    [n, Hkv, tokens], weights by position, and of neighbours the largest; both in order, as whole numbers. tokens and
    found: [n, Hkv, tokens], positions and weights in lists of _GATHERED; numbers: how many are in each. chosen:
    [n, Hkv, tokens], positions. Of the first of them, if they are restored: unpacked [n, Hkv, restored, numbers], and
    keys and values [n, Hkv, restored, D].
    """

    def __init__(self, call: AttentionCall, record: TokenRead, tokens: int, serves_all: bool) -> None:
        queries, kv_heads, group = call.queries, call.kv_heads, call.group
        count, head_dim = len(queries), call.head_dim
        self.given = (queries, call.keys, call.values, call.lines)
        self.factors = (call.scaling, call.cap)
        self.grid = (kv_heads, count)
        shape, device = record.shape, queries.device
        width = _width(group)
        room = _room(tokens)
        kept = torch.float32 if queries.dtype == torch.float32 else torch.float16

        def made(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty((count, kv_heads, *sizes), dtype=dtype, device=device)

        self.lists = triton.cdiv(room, _GATHERED)
        self.scores = made(room, width, dtype=kept)
        self.tops = made(room // _TIED, width, dtype=torch.float32)
        self.states = made(_PARTS, 2, width, dtype=torch.float32)
        self.orders, self.largest = made(room), made(room // _TIED)
        self.counts, self.most = made(_BUCKETS), made(1, dtype=torch.float32)
        self.groups = made(room // _TIED)
        self.tokens, self.found, self.numbers = made(room), made(room), made(self.lists)
        self.before = made(int(triton.next_power_of_2(self.lists)))
        self.copy, self.chosen = made(room), made(room)
        self.parts = made(group, _NEAR + _CHOSEN, head_dim, dtype=torch.float32)
        self.sums = made(group, _NEAR + _CHOSEN, dtype=torch.float32)
        self.restored = triton.cdiv(record.restored, _RESTORED) * _RESTORED
        self.unpacked = made(self.restored, record.numbers, dtype=operand_dtype(queries.dtype))
        self.keys, self.values = (made(self.restored, head_dim, dtype=call.keys.dtype) for _ in range(2))
        self.shape, self.serves_all = shape, serves_all
        self.group, self.width, self.head_dim = group, width, head_dim
        self.block_d = max(_LEAST, int(triton.next_power_of_2(head_dim)))
        self.near_slots = _NEAR_SLOTS if self.block_d <= 128 else _NEAR_SLOTS // 2
        self.has_cap = call.softcap is not None
        self.entries = {"D": head_dim, "ROW": call.row, "BLOCK_D": self.block_d}
        self.line = {"FIELDS": FIELDS, "SHAPE": shape.number, **chained(device)}
        self.near = {"NEAR": _NEAR, "HELD": _NEAR + _CHOSEN, "BLOCK_S": self.near_slots}
        self.scored = {"CHUNK": index_tiles.CHUNK, "PARTS": _PARTS, "G": width, "GROUP": group}
        self.counted = {"TIED": _TIED, "ROOM": room, "BUCKETS": _BUCKETS}

    def score(self) -> None:
        """Scores, and attention to what is read anyway."""
        component_scores.score[(_NEAR + _PARTS, *self.grid)](
            *self.given,
            self.scores,
            self.tops,
            self.states,
            self.counts,
            self.parts,
            self.sums,
            *self.factors,
            **self.line,
            **self.near,
            **self.scored,
            **self.counted,
            RUN=self.shape.run,
            RANK=self.shape.rank,
            BITS=self.shape.bits,
            WORDS=self.shape.words,
            **self.entries,
            BLOCK_G=max(_LEAST, int(triton.next_power_of_2(self.group))),
            SERVES_ALL=self.serves_all,
            HAS_CAP=self.has_cap,
            H=half_width(self.head_dim),
            R=rank_width(self.shape),
            num_warps=_SCORE_WARPS,
            num_stages=1,
            maxnreg=_SCORE_REGISTERS if self.block_d <= 128 else None,
        )

    def weigh(self) -> None:
        heads, count = self.grid
        programs = min(triton.cdiv(self.counted["ROOM"], _WEIGHED), max(1, _WEIGHING // (heads * count)))
        token_choice.weigh[(programs, *self.grid)](
            self.given[3],
            self.scores,
            self.tops,
            self.states,
            self.sums,
            self.orders,
            self.largest,
            self.counts,
            self.most,
            **self.line,
            **self.near,
            **self.scored,
            **self.counted,
            SPAN=_WEIGHED,
            num_warps=4,
        )

    def gather(self) -> None:
        token_choice.gather[(self.lists, *self.grid)](
            self.given[3],
            self.orders,
            self.largest,
            self.counts,
            self.most,
            self.groups,
            self.tokens,
            self.found,
            self.numbers,
            **self.line,
            **self.counted,
            SPAN=_GATHERED,
            AT_ONCE=_GROUPS,
            num_warps=4,
        )

    def choose(self) -> None:
        spans = self.before.shape[2]
        token_choice.choose[self.grid](
            self.given[3],
            self.tokens,
            self.found,
            self.numbers,
            self.before,
            self.copy,
            self.chosen,
            **self.line,
            ROOM=self.counted["ROOM"],
            LISTS=self.lists,
            SPANS=spans,
            STEPS=spans.bit_length() - 1,
            SPAN=_GATHERED,
            FEW=_FEW,
            MANY=_MANY,
            num_warps=8,
        )

    def restore(self) -> None:
        """Of the chosen tokens those that have left their regions."""
        if not self.restored:
            return
        numbers = self.unpacked.shape[-1]
        sizes = {"ROOM": self.counted["ROOM"], "RESTORED": self.restored, "NUMBERS": numbers}
        blocks = triton.cdiv(numbers, 4 * _THREADS)
        restoring.unpack[(self.restored // _UNPACKED * blocks, *self.grid)](
            self.given[3],
            self.chosen,
            self.unpacked,
            **self.line,
            **sizes,
            TOKENS=_UNPACKED,
            BLOCK=_THREADS,
            BLOCKS=blocks,
            num_warps=max(1, _THREADS // 32),
        )
        half, is_exact = half_width(self.head_dim), self.unpacked.dtype == torch.float32
        pairs = min(half, _PAIRS)
        restoring.restore[(self.restored // _RESTORED * 2 * (half // pairs), *self.grid)](
            self.given[3],
            self.chosen,
            self.unpacked,
            self.keys,
            self.values,
            **self.line,
            **sizes,
            CHUNK=index_tiles.CHUNK,
            D=self.head_dim,
            H=half,
            PAIRS=pairs,
            TILE=_RESTORED,
            STEP=_STEP,
            num_warps=_RESTORING_WARPS,
            num_stages=2 if is_exact else _RESTORING_STAGES,
        )

    def read(self) -> None:
        _read[(_CHOSEN, *self.grid)](
            *self.given,
            self.chosen,
            self.keys,
            self.values,
            self.parts,
            self.sums,
            *self.factors,
            **self.line,
            ROOM=self.counted["ROOM"],
            RESTORED=self.restored,
            GROUP=self.group,
            **self.entries,
            BLOCK_G=max(_LEAST, int(triton.next_power_of_2(self.group))),
            PARTS=_CHOSEN,
            FIRST=_NEAR,
            HELD=_NEAR + _CHOSEN,
            HAS_CAP=self.has_cap,
            BLOCK_S=_CHOSEN_SLOTS,
            num_warps=4,
            num_stages=1,
        )

    def merge(self, out: Tensor) -> None:
        heads, count = self.grid
        block = min(_MERGED, self.block_d)
        _merge[(triton.cdiv(self.head_dim, block), heads * self.group, count)](
            self.parts,
            self.sums,
            out,
            self.given[3],
            **self.line,
            NEAR=_NEAR,
            CHOSEN=_CHOSEN,
            NEAR_SLOTS=self.near_slots,
            CHOSEN_SLOTS=_CHOSEN_SLOTS,
            SERVES_ALL=self.serves_all,
            D=self.head_dim,
            BLOCK_D=block,
            num_warps=_MERGING_WARPS,
        )


@triton.jit
def _read(
    p_queries,
    p_keys,
    p_values,
    p_regions,
    p_chosen,
    p_restored_keys,
    p_restored_values,
    p_parts,
    p_sums,
    scaling,
    softcap,
    FIELDS: tl.constexpr,
    SHAPE: tl.constexpr,
    ROOM: tl.constexpr,
    RESTORED: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PARTS: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHAINED: tl.constexpr,
):
    part = tl.program_id(0)
    head = tl.program_id(1)
    query = tl.program_id(2).to(tl.int64)
    row = query * tl.num_programs(1) + head
    p_line = p_regions + query * FIELDS
    _, _, kept = choices_of(p_line, SHAPE)
    own = tl.load(p_line) + head * tl.load(p_line + in_line("HEAD_SLOTS"))
    sink = tl.load(p_line + in_line("SINK")).to(tl.int32)
    ring = tl.load(p_line + in_line("RING")).to(tl.int32)
    _, before = restored_before(p_line, SHAPE)
    o_g = tl.arange(0, BLOCK_G)
    o_d = tl.arange(0, BLOCK_D)
    m_g = o_g < GROUP
    m_d = o_d < D
    o_q = (row * GROUP + o_g)[:, None] * D + o_d[None, :]
    b_q = tl.load(p_queries + o_q, mask=m_g[:, None] & m_d[None, :], other=0.0)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if part * BLOCK_S < kept:
        b_top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        b_sum = tl.zeros((BLOCK_G,), tl.float32)
        b_out = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        for r in range(part * BLOCK_S, kept, PARTS * BLOCK_S):
            o_r = r + tl.arange(0, BLOCK_S)
            m_r = o_r < kept
            b_token = tl.load(p_chosen + row * ROOM + o_r, mask=m_r, other=0)
            if RESTORED > 0:
                m_gone = m_r & (b_token < before)
                m_there = m_r & (b_token >= before)
                is_wrapped = (ring > 0) & (b_token >= sink)
                b_token = tl.where(is_wrapped, sink + (b_token - sink) % tl.maximum(ring, 1), b_token)
                o_restored = (row * RESTORED + o_r)[:, None] * D + o_d[None, :]
                o_kv = (own + b_token.to(tl.int64))[:, None] * ROW + o_d[None, :]
                # Of two addresses for a load the device would load each number by itself.
                m_gone_kv = m_gone[:, None] & m_d[None, :]
                m_there_kv = m_there[:, None] & m_d[None, :]
                b_k = tl.load(p_restored_keys + o_restored, mask=m_gone_kv, other=0.0)
                b_k = tl.where(m_there_kv, tl.load(p_keys + o_kv, mask=m_there_kv, other=0.0), b_k)
                b_v = tl.load(p_restored_values + o_restored, mask=m_gone_kv, other=0.0)
                b_v = tl.where(m_there_kv, tl.load(p_values + o_kv, mask=m_there_kv, other=0.0), b_v)
            else:
                m_kv = m_r[:, None] & m_d[None, :]
                o_kv = (own + b_token.to(tl.int64))[:, None] * ROW + o_d[None, :]
                b_k = tl.load(p_keys + o_kv, mask=m_kv, other=0.0)
                b_v = tl.load(p_values + o_kv, mask=m_kv, other=0.0)
            b_top, b_sum, b_out = with_tile(b_top, b_sum, b_out, b_q, b_k, b_v, m_r, scaling, softcap, HAS_CAP)
        b_some = tl.where(b_sum > 0, b_sum, 1.0)
        o_part = (row * GROUP + o_g) * HELD + FIRST + part
        m_out = m_g[:, None] & m_d[None, :]
        tl.store(p_parts + o_part[:, None] * D + o_d[None, :], b_out / b_some[:, None], mask=m_out)
        tl.store(p_sums + o_part, tl.where(b_sum > 0, b_top + tl.log(b_some), float("-inf")), mask=m_g)


@triton.jit
def _merge(
    p_parts,
    p_sums,
    p_out,
    p_regions,
    FIELDS: tl.constexpr,
    SHAPE: tl.constexpr,
    NEAR: tl.constexpr,
    CHOSEN: tl.constexpr,
    NEAR_SLOTS: tl.constexpr,
    CHOSEN_SLOTS: tl.constexpr,
    SERVES_ALL: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHAINED: tl.constexpr,
):
    query = tl.program_id(2).to(tl.int64)
    o_head = query * tl.num_programs(1) + tl.program_id(1)
    p_line = p_regions + query * FIELDS
    _, _, kept = choices_of(p_line, SHAPE)
    _, _, near = reads_of(p_line, SERVES_ALL)
    o_p = tl.arange(0, NEAR + CHOSEN)
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_p = tl.where(o_p < NEAR, o_p * NEAR_SLOTS < near, (o_p - NEAR) * CHOSEN_SLOTS < kept)
    m_d = o_d < D
    if not SERVES_ALL:
        m_d = m_d & chooses_by(p_line, SHAPE)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    b_lse = tl.load(p_sums + o_head * (NEAR + CHOSEN) + o_p, mask=m_p, other=float("-inf"))
    o_parts = (o_head * (NEAR + CHOSEN) + o_p)[:, None] * D + o_d[None, :]
    b_parts = tl.load(p_parts + o_parts, mask=m_p[:, None] & m_d[None, :], other=0.0)
    b_top = tl.max(b_lse, axis=0)
    b_weights = tl.exp(b_lse - tl.where(b_top == float("-inf"), 0.0, b_top))
    b_all = tl.sum(b_weights, axis=0)
    b_out = tl.sum(b_parts * b_weights[:, None], axis=0) / tl.where(b_all > 0, b_all, 1.0)
    tl.store(p_out + o_head * D + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)
