"""Attention to entries that are restored as they are read: `kernels/archived.py` in Triton.

    numbers of 64 tokens [64, C] · matrix of a head [C, 2 · D] ─▶ rotated, rounded ─▶ · queries of the group ─▶ a state

A program restores the keys and the values of one KV head for a tile of tokens in its registers, as `_entries` of
`latents.py` does, and attends to them there: no restored entry lies in memory. Other programs attend to the region, and
all states of a query are merged by their log-sum-exps. Which tiles a program has follows from the line's own lengths:
what is beside a query changes none of its bits.

The numbers are unpacked in a launch of their own, in the first layer of a group. Lengths and addresses are read on the
device, so a launch depends on the number of queries and the room's size alone and can be part of a CUDA graph. The size
is an argument: a room that has become too small does not compile kernels while sessions are served.

An archive is known by the address of these numbers, all 64 bits wide; the first are those of `restoring.py`:

    low, high, bytes of each half, first position, first_byte, count, padded, chains, begins, widths, tables, levels,
    scales, matrix, factors, means, found, cosines, sines                         the last two are 0 without a rotation
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.archived import KnownArchives, LayerArchive, Unpacked
from inference_engine.kernels.ragged_attention import FIELDS
from inference_engine.kernels.triton.block_selection import LEAST, width_of
from inference_engine.kernels.triton.chained import chained
from inference_engine.kernels.triton.codes import codes_of, numbers_of_codes, places_of_codes, put_numbers
from inference_engine.kernels.triton.component_index import numbers_of_archive
from inference_engine.kernels.triton.gather import attend_reads, with_scores
from inference_engine.kernels.triton.line import in_line
from inference_engine.kernels.triton.tiles import shared_bytes

_NUMBERS = 24  # of an archive, rounded up
_UNPACKED, _THREADS = 8, 128  # tokens of a program that unpacks, and its threads; each has four codes of every token
_FAR, _NEAR = 64, 32  # parts of what is in the archive, and of the region
_TILE, _STEP = 128, 64  # tokens that a program restores at once, and numbers of each, where heads are narrow
_WARPS, _STAGES = 8, 4
_SHARED_BYTES = 156 * 2**10  # of a program, at most: the widest heads take so many
_NEAR_SLOTS = 64  # that a program reads at once
_MERGED, _MERGING_WARPS = 32, 4  # channels that a program merges


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """Implements KnownArchives. A number is the address of an archive's numbers on the device."""

    archives: tuple[LayerArchive, ...]  # what the numbers point to
    table: Tensor

    @property
    def numbers(self) -> Sequence[int]:
        first, each = self.table.data_ptr(), self.table.stride(0) * self.table.itemsize
        return [first + index * each for index in range(len(self.archives))]


def open_archives(archives: Sequence[LayerArchive]) -> KnownArchives | None:
    """See `Archives`."""
    if shared_bytes(archives[0].found.device) < _SHARED_BYTES:
        return None
    table = torch.zeros((len(archives), _NUMBERS), dtype=torch.int64)
    for row, archive in zip(table, archives, strict=True):
        numbers = numbers_of_archive(archive.halves, archive.first, archive.tables, archive.synthesis, archive.found)
        if archive.turn is not None:
            cos, sin = archive.turn
            assert cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype == torch.float32
            numbers += [cos.data_ptr(), sin.data_ptr()]
        row[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    return _Known(tuple(archives), table.to(archives[0].found.device))


def attend_archived(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    regions: Tensor,
    out: Tensor,
    *,
    kv_heads: int,
    scaling: float,
    softcap: float | None = None,
    unpacked: Unpacked,
    serves_all: bool,
) -> None:
    """Fill `out` for the queries that read archives; see `RaggedAttention`.

    serves_all: also for the other queries, all of which read all they see. Otherwise theirs stay.
    """
    rooms = len(unpacked.units)
    for first in range(0, len(queries), rooms):
        some = slice(first, first + rooms)
        _attend(
            queries[some],
            keys,
            values,
            regions[some],
            out[some],
            kv_heads,
            scaling,
            softcap,
            unpacked.units,
            is_first=unpacked.is_first or len(queries) > rooms,
            serves_all=serves_all,
        )


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    regions: Tensor,
    out: Tensor,
    kv_heads: int,
    scaling: float,
    softcap: float | None,
    units: Tensor,
    *,
    is_first: bool,
    serves_all: bool,
) -> None:
    count, query_heads, head_dim = queries.shape
    _, tokens, numbers = units.shape
    line = {"FIELDS": FIELDS, **chained(queries.device)}
    if is_first:
        blocks = triton.cdiv(numbers, 4 * _THREADS)
        _unpack[(triton.cdiv(tokens, _UNPACKED) * blocks, count)](
            regions,
            units,
            tokens,
            numbers,
            AT_ONCE=_UNPACKED,
            BLOCK=_THREADS,
            num_warps=max(1, _THREADS // 32),
            **line,
        )
    held, is_exact = _FAR + _NEAR, units.dtype == torch.float32
    # What is read for a tile, its tokens' numbers and the head's matrix, limits it: so tiles are as large as registers
    # hold.
    is_narrow = head_dim <= 64 and not is_exact
    tile = _TILE if is_narrow else max(LEAST, _TILE // 2)
    group = query_heads // kv_heads
    parts = torch.empty((count, query_heads, held, head_dim), dtype=torch.float32, device=queries.device)
    sums = torch.empty((count, query_heads, held), dtype=torch.float32, device=queries.device)
    slots = _NEAR_SLOTS if head_dim <= 128 else _NEAR_SLOTS // 2
    shared = {"FAR": _FAR, "NEAR": _NEAR, "TILE": tile, "BLOCK_S": slots, "SERVES_ALL": serves_all, "D": head_dim}
    _read[(held, kv_heads, count)](
        queries,
        keys,
        values,
        regions,
        units,
        parts,
        sums,
        scaling,
        0.0 if softcap is None else softcap,
        tokens,
        numbers,
        GROUP=group,
        HAS_CAP=softcap is not None,
        BLOCK_G=max(LEAST, triton.next_power_of_2(group)),
        BLOCK_D=width_of(head_dim),
        HALF=head_dim // 2,
        STEP=_STEP // 2 if is_exact else _STEP,
        PRECISION="ieee" if is_exact else "tf32",
        num_warps=_WARPS,
        num_stages=_STAGES if is_narrow else 2 if is_exact or head_dim > 128 else 3,
        **shared,
        **line,
    )
    merged = min(_MERGED, width_of(head_dim))
    _merge[(triton.cdiv(head_dim, merged), query_heads, count)](
        parts,
        sums,
        out,
        regions,
        BLOCK_P=triton.next_power_of_2(held),
        BLOCK_D=merged,
        num_warps=_MERGING_WARPS,
        **shared,
        **line,
    )


@triton.jit
def _archive_of(p_line):
    """The archive of a line, or 0, and how many tokens it reads there."""
    reads_slots = (tl.load(p_line + in_line("BLOCK")) == 0) & (tl.load(p_line + in_line("COUNT")) > 0)
    archive = tl.where(reads_slots, tl.load(p_line + in_line("ARCHIVE")), 0)
    first = tl.load(archive.to(tl.pointer_type(tl.int64)) + 3, mask=archive != 0, other=0)
    count = tl.where(archive != 0, tl.load(p_line + in_line("FLOOR")) - first, 0)
    return archive, tl.maximum(count, 0).to(tl.int32)


@triton.jit
def _unpack(
    p_regions,
    p_units,
    tokens,
    numbers,
    FIELDS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The numbers of AT_ONCE tokens, four a thread of each. As `_units` of `latents.py`."""
    query = tl.program_id(1).to(tl.int64)
    archive, count = _archive_of(p_regions + query * FIELDS)
    blocks = tl.cdiv(numbers, 4 * BLOCK)
    first = tl.program_id(0) // blocks * AT_ONCE
    if CHAINED:
        gdc_wait()  # the layer before may still read what is written here
        gdc_launch_dependents()
    if first < count:
        p_own = archive.to(tl.pointer_type(tl.int64))
        low, high = tl.load(p_own), tl.load(p_own + 1)
        p_low = low.to(tl.pointer_type(tl.uint8))
        half = tl.load(p_own + 2)
        first_byte = tl.load(p_own + 4).to(tl.int32)
        codes = tl.load(p_own + 5).to(tl.int32)
        padded = tl.load(p_own + 6).to(tl.int32)
        chains = tl.load(p_own + 7).to(tl.int32)
        p_begins = tl.load(p_own + 8).to(tl.pointer_type(tl.int32))
        p_widths = tl.load(p_own + 9).to(tl.pointer_type(tl.int32))
        p_tables = tl.load(p_own + 10).to(tl.pointer_type(tl.int32))
        p_levels = tl.load(p_own + 11).to(tl.pointer_type(tl.float32))
        p_scales = tl.load(p_own + 12).to(tl.pointer_type(tl.float32))
        threads = tl.cdiv(padded, 4 * chains) * chains
        # There are as many blocks as the room has numbers; more threads than that are few, where chains are long.
        for block in range(tl.program_id(0) % blocks, tl.cdiv(threads, BLOCK), blocks):
            o_code = codes_of(block, chains, BLOCK)
            places = places_of_codes(
                p_begins, p_widths, p_tables, first_byte, half, high - low - half, o_code, codes, chains
            )
            p_unit = p_units + (query * tokens + first) * numbers
            for token in range(first, tl.minimum(first + AT_ONCE, count), 2):
                # Two at once, so that the memory answers for both together.
                other = tl.minimum(token + 1, count - 1)
                b_first = numbers_of_codes(p_low + token * half, p_levels, p_scales, places)
                b_other = numbers_of_codes(p_low + other * half, p_levels, p_scales, places)
                put_numbers(p_unit, b_first, o_code, chains, codes, padded, True)
                put_numbers(p_unit + numbers, b_other, o_code, chains, codes, padded, other > token)
                p_unit += 2 * numbers


@triton.jit
def _read(
    p_queries,
    p_keys,
    p_values,
    p_regions,
    p_units,
    p_parts,
    p_sums,
    scaling,
    softcap,
    tokens,
    numbers,
    FIELDS: tl.constexpr,
    FAR: tl.constexpr,
    NEAR: tl.constexpr,
    SERVES_ALL: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The first FAR programs of a query and head restore and read its archive; they take longest. The others read its
    region.
    """
    part = tl.program_id(0)
    head = tl.program_id(1)
    query = tl.program_id(2).to(tl.int64)
    row = query * tl.num_programs(1) + head
    p_line = p_regions + query * FIELDS
    archive, count = _archive_of(p_line)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if part >= FAR:
        if (archive != 0) | SERVES_ALL:
            p_list = p_regions.to(tl.pointer_type(tl.int32))
            attend_reads(
                p_queries,
                p_keys,
                p_values,
                p_regions,
                p_list,  # of which nothing is read
                p_parts + FAR * D,
                p_sums + FAR,
                scaling,
                softcap,
                part - FAR,
                FIELDS,
                0,
                NEAR,
                FAR + NEAR,
                True,
                GROUP,
                D,
                HAS_CAP,
                BLOCK_G,
                BLOCK_D,
                BLOCK_S,
                False,
                p_list,  # nor of what is off the device
                False,
            )
    elif part * TILE < count:
        p_own = archive.to(tl.pointer_type(tl.int64))
        first = tl.load(p_own + 3)
        padded = tl.multiple_of(tl.load(p_own + 6).to(tl.int32), 64)
        p_matrix = tl.multiple_of(tl.load(p_own + 13).to(tl.pointer_type(p_units.dtype.element_ty)), 16)
        p_factors = tl.load(p_own + 14).to(tl.pointer_type(tl.float32))
        p_means = tl.load(p_own + 15).to(tl.pointer_type(tl.float32))
        p_found = tl.load(p_own + 16).to(tl.pointer_type(tl.float32))
        cosines = tl.load(p_own + 17)
        p_cos = tl.multiple_of(cosines.to(tl.pointer_type(tl.float32)), 16)
        p_sin = tl.multiple_of(tl.load(p_own + 18).to(tl.pointer_type(tl.float32)), 16)
        o_g = tl.arange(0, BLOCK_G)
        o_f = tl.arange(0, HALF)
        o_d = tl.arange(0, D)
        o_n = tl.arange(0, STEP)
        o_r = tl.arange(0, 2 * D)
        m_g = o_g < GROUP
        o_q = (row * GROUP + o_g)[:, None] * D + o_f[None, :]
        b_q_lower = tl.load(p_queries + o_q, mask=m_g[:, None], other=0.0)
        b_q_upper = tl.load(p_queries + o_q + HALF, mask=m_g[:, None], other=0.0)
        own = head.to(tl.int64) * (2 * D)
        b_factor = tl.load(p_factors + own + o_r)[None, :]
        b_mean = tl.load(p_means + own + o_r)[None, :]
        b_top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        b_sum = tl.zeros((BLOCK_G,), tl.float32)
        b_out = tl.zeros((BLOCK_G, D), tl.float32)
        for begin in range(part * TILE, count, FAR * TILE):
            o_token = begin + tl.arange(0, TILE)
            live = o_token < count
            p_unit = p_units + (query * tokens + o_token)[:, None] * numbers + o_n[None, :]
            p_row = p_matrix + (own + o_r)[:, None] * padded + o_n[None, :]
            # Keys and values in one product, so that the numbers are read once for both.
            b_both = tl.zeros((TILE, 2 * D), tl.float32)
            for n in range(0, padded, STEP):
                b_unit = tl.load(p_unit + n, mask=live[:, None], other=0.0)
                b_both = tl.dot(b_unit, tl.trans(tl.load(p_row + n)), b_both, input_precision=PRECISION)
            b_both = b_both * b_factor + b_mean
            b_key, b_value = tl.split(tl.permute(tl.reshape(b_both, (TILE, 2, D)), (0, 2, 1)))
            b_lower, b_upper = tl.split(tl.permute(tl.reshape(b_key, (TILE, 2, HALF)), (0, 2, 1)))
            m_turn = live[:, None] & (cosines != 0)
            o_turn = (first + o_token)[:, None] * HALF + o_f[None, :]
            b_cos = tl.load(p_cos + o_turn, mask=m_turn, other=1.0)
            b_sin = tl.load(p_sin + o_turn, mask=m_turn, other=0.0)
            b_turned = b_lower * b_cos - b_upper * b_sin
            b_upper = b_upper * b_cos + b_lower * b_sin
            k_lower = b_turned.to(p_keys.dtype.element_ty)
            k_upper = b_upper.to(p_keys.dtype.element_ty)
            b_v = b_value.to(p_values.dtype.element_ty)
            # A number minus itself is 0, or it is not finite.
            b_wide = tl.abs(k_lower.to(tl.float32)) + tl.abs(k_upper.to(tl.float32))
            broken = tl.sum(tl.sum(tl.where(live[:, None] & (b_wide - b_wide != 0.0), 1, 0), axis=1), axis=0)
            tl.store(p_found, float("nan"), mask=broken > 0)
            b_wide = b_v.to(tl.float32)
            broken = tl.sum(tl.sum(tl.where(live[:, None] & (b_wide - b_wide != 0.0), 1, 0), axis=1), axis=0)
            tl.store(p_found + 1, float("nan"), mask=broken > 0)
            b_scores = tl.dot(b_q_lower, tl.trans(k_lower), input_precision="ieee")
            b_scores = tl.dot(b_q_upper, tl.trans(k_upper), b_scores, input_precision="ieee") * scaling
            b_top, b_sum, b_out = with_scores(b_top, b_sum, b_out, b_scores, b_v, live, softcap, HAS_CAP)
        b_some = tl.where(b_sum > 0, b_sum, 1.0)
        o_part = (row * GROUP + o_g) * (FAR + NEAR) + part
        tl.store(p_parts + o_part[:, None] * D + o_d[None, :], b_out / b_some[:, None], mask=m_g[:, None])
        tl.store(p_sums + o_part, tl.where(b_sum > 0, b_top + tl.log(b_some), float("-inf")), mask=m_g)


@triton.jit
def _merge(
    p_parts,
    p_sums,
    p_out,
    p_regions,
    FIELDS: tl.constexpr,
    FAR: tl.constexpr,
    NEAR: tl.constexpr,
    TILE: tl.constexpr,
    SERVES_ALL: tl.constexpr,
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHAINED: tl.constexpr,
):
    query = tl.program_id(2).to(tl.int64)
    o_head = query * tl.num_programs(1) + tl.program_id(1)
    p_line = p_regions + query * FIELDS
    archive, count = _archive_of(p_line)
    near = tl.load(p_line + in_line("COUNT")).to(tl.int32)
    o_p = tl.arange(0, BLOCK_P)
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_p = tl.where(o_p < FAR, o_p * TILE < count, (o_p < FAR + NEAR) & ((o_p - FAR) * BLOCK_S < near))
    m_d = o_d < D
    if not SERVES_ALL:
        m_d = m_d & (archive != 0)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    b_lse = tl.load(p_sums + o_head * (FAR + NEAR) + o_p, mask=m_p, other=float("-inf"))
    o_parts = (o_head * (FAR + NEAR) + o_p)[:, None] * D + o_d[None, :]
    b_parts = tl.load(p_parts + o_parts, mask=m_p[:, None] & m_d[None, :], other=0.0)
    b_top = tl.max(b_lse, axis=0)
    b_weights = tl.exp(b_lse - tl.where(b_top == float("-inf"), 0.0, b_top))
    b_all = tl.sum(b_weights, axis=0)
    b_out = tl.sum(b_parts * b_weights[:, None], axis=0) / tl.where(b_all > 0, b_all, 1.0)
    tl.store(p_out + o_head * D + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)
