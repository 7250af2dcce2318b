"""Chosen tokens that have left the regions, restored from their codes for the queries that read them.

    codes ── unpack ──▶ numbers [restored, padded] ── restore ──▶ keys, rotated, and values [restored, D]

Each KV head of a query has tokens of its own, those that are before its region's oldest; as chosen tokens are listed
ascending, they come first. What is restored for a query is its own, for one layer of one step. The bits of an entry
follow from its code and the matrix alone; it is rotated by the tables of its index (`index_tiles.py`).

An archive is known by the address of these numbers, all 64 bits wide. See `CodeTables` and `Synthesis` of
`kernels/latents.py`; found is float32 [2] and becomes NaN where a key, or a value, is not finite:

    low, high, bytes of each half, first position, first_byte, count, padded, chains, begins, widths, tables, levels,
    scales, matrix, factors, means, found
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.triton.codes import blocks_of, codes_of, numbers_of_codes, places_of_codes, put_numbers
from inference_engine.kernels.triton.component_scores import choices_of
from inference_engine.kernels.triton.index_tiles import table_of
from inference_engine.kernels.triton.line import in_line


@triton.jit
def restored_before(p_line, SHAPE: tl.constexpr):
    """The archive of a line's index, and the position before which its tokens have to be restored; 0 if none has to."""
    archive = tl.full((), 0, tl.int64)
    _, _, kept = choices_of(p_line, SHAPE)
    if (kept > 0) & (tl.load(p_line + in_line("RING")) > 0):
        archive = tl.load(tl.load(p_line + in_line("INDEX")).to(tl.pointer_type(tl.int64)) + 10)
    return archive, tl.where(archive != 0, tl.load(p_line + in_line("FLOOR")), 0).to(tl.int32)


@triton.jit
def unpack(
    p_regions,
    p_chosen,
    p_numbers,
    FIELDS: tl.constexpr,
    SHAPE: tl.constexpr,
    ROOM: tl.constexpr,
    RESTORED: tl.constexpr,
    NUMBERS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The numbers of TOKENS tokens, four a thread of each. As `units` of `latents.py`."""
    row = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    p_line = p_regions + tl.program_id(2).to(tl.int64) * FIELDS
    _, _, kept = choices_of(p_line, SHAPE)
    archive, before = restored_before(p_line, SHAPE)
    first_token = tl.program_id(0) // BLOCKS * TOKENS
    if (archive != 0) & (first_token < kept):
        p_own = archive.to(tl.pointer_type(tl.int64))
        low, high = tl.load(p_own), tl.load(p_own + 1)
        p_low = low.to(tl.pointer_type(tl.uint8))
        half = tl.load(p_own + 2)
        first = tl.load(p_own + 3).to(tl.int32)
        first_byte = tl.load(p_own + 4).to(tl.int32)
        count = tl.load(p_own + 5).to(tl.int32)
        padded = tl.load(p_own + 6).to(tl.int32)
        chains = tl.load(p_own + 7).to(tl.int32)
        p_begins = tl.load(p_own + 8).to(tl.pointer_type(tl.int32))
        p_widths = tl.load(p_own + 9).to(tl.pointer_type(tl.int32))
        p_tables = tl.load(p_own + 10).to(tl.pointer_type(tl.int32))
        p_levels = tl.load(p_own + 11).to(tl.pointer_type(tl.float32))
        p_scales = tl.load(p_own + 12).to(tl.pointer_type(tl.float32))
        between = high - low - half
        p_chosen += row * ROOM
        for block in range(tl.program_id(0) % BLOCKS, blocks_of(padded, chains, BLOCK), BLOCKS):
            o_code = codes_of(block, chains, BLOCK)
            places = places_of_codes(p_begins, p_widths, p_tables, first_byte, half, between, o_code, count, chains)
            # All so far is from before the step, and none of it waits for the kernel that chooses.
            if CHAINED:
                gdc_wait()
                gdc_launch_dependents()
            p_number = p_numbers + (row * RESTORED + first_token) * NUMBERS
            for token in range(first_token, tl.minimum(first_token + TOKENS, kept), 2):
                at = tl.load(p_chosen + token)
                if at < before:  # if it is not, then those behind it, of later positions, are neither
                    # Two at once, so that the memory answers for both together.
                    next_at = tl.load(p_chosen + token + 1, mask=token + 1 < kept, other=2147483647)
                    other_at = tl.where(next_at < before, next_at, at)
                    b_first = numbers_of_codes(p_low + (at - first) * half, p_levels, p_scales, places)
                    b_other = numbers_of_codes(p_low + (other_at - first) * half, p_levels, p_scales, places)
                    put_numbers(p_number, b_first, o_code, chains, count, padded, True)
                    put_numbers(p_number + NUMBERS, b_other, o_code, chains, count, padded, next_at < before)
                p_number += 2 * NUMBERS
    elif CHAINED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def restore(
    p_regions,
    p_chosen,
    p_numbers,
    p_keys,
    p_values,
    FIELDS: tl.constexpr,
    SHAPE: tl.constexpr,
    ROOM: tl.constexpr,
    RESTORED: tl.constexpr,
    NUMBERS: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Some pairs of channels of the keys, or of the values, of TILE tokens. As `entries` of `latents.py`."""
    IS_EXACT: tl.constexpr = p_numbers.dtype.element_ty == tl.float32
    PRECISION: tl.constexpr = "ieee" if IS_EXACT else "tf32"
    KINDS: tl.constexpr = 2 * (H // PAIRS)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + head
    p_line = p_regions + tl.program_id(2).to(tl.int64) * FIELDS
    _, _, kept = choices_of(p_line, SHAPE)
    archive, before = restored_before(p_line, SHAPE)
    first_token = tl.program_id(0) // KINDS * TILE
    kind = tl.program_id(0) % KINDS
    if (archive != 0) & (first_token < kept):
        p_own = archive.to(tl.pointer_type(tl.int64))
        padded = tl.multiple_of(tl.load(p_own + 6).to(tl.int32), 64)
        p_matrix = tl.multiple_of(tl.load(p_own + 13).to(tl.pointer_type(p_numbers.dtype.element_ty)), 16)
        p_factors = tl.load(p_own + 14).to(tl.pointer_type(tl.float32))
        p_means = tl.load(p_own + 15).to(tl.pointer_type(tl.float32))
        p_index = tl.load(p_line + in_line("INDEX")).to(tl.pointer_type(tl.int64))
        turned = tl.load(p_index + 9).to(tl.int32)
        is_value = kind % 2
        o_f = kind // 2 * PAIRS + tl.arange(0, PAIRS)
        m_f = o_f < D // 2
        # Values have no pairs; the halves of keys that are rotated as wholes lie as those of values do.
        is_whole = (is_value == 1) | (turned == D // 2)
        o_a = tl.where((o_f < turned) | is_whole, o_f, o_f + turned)
        o_b = tl.where((o_f < turned) & ~is_whole, o_f + turned, o_f + D // 2)
        first_row = head.to(tl.int64) * (2 * D) + is_value * D
        p_middles = table_of(p_index, 4)
        p_offsets = table_of(p_index, 6)
        o_n = tl.arange(0, STEP)
        p_a = p_matrix + (first_row + o_a)[:, None] * padded + o_n[None, :]
        p_b = p_matrix + (first_row + o_b)[:, None] * padded + o_n[None, :]
        if CHAINED:
            gdc_wait()
            gdc_launch_dependents()
        p_chosen += row * ROOM
        if tl.load(p_chosen + first_token) < before:
            o_token = first_token + tl.arange(0, TILE)
            b_token = tl.load(p_chosen + o_token, mask=o_token < kept, other=2147483647)
            live = b_token < before
            p_unit = p_numbers + (row * RESTORED + o_token)[:, None] * NUMBERS + o_n[None, :]
            b_at = tl.where(live, b_token, 0)
            o_middle = (b_at // CHUNK)[:, None] * (2 * H) + o_f[None, :]
            o_offset = (b_at % CHUNK)[:, None] * (2 * H) + o_f[None, :]
            b_cos = tl.load(p_middles + o_middle)
            b_sin = tl.load(p_middles + o_middle + H)
            b_cos_by = tl.load(p_offsets + o_offset)
            b_sin_by = tl.load(p_offsets + o_offset + H)
            b_a = tl.zeros((TILE, PAIRS), tl.float32)
            b_b = tl.zeros((TILE, PAIRS), tl.float32)
            for n in range(0, padded, STEP):
                m_n = tl.max_constancy(o_n < padded - n, [64])[None, :]  # numbers are padded to multiples of it
                b_unit = tl.load(p_unit + n, mask=live[:, None] & m_n, other=0.0)
                b_rows_a = tl.load(p_a + n, mask=m_f[:, None] & m_n, other=0.0)
                b_rows_b = tl.load(p_b + n, mask=m_f[:, None] & m_n, other=0.0)
                b_a = tl.dot(b_unit, tl.trans(b_rows_a), b_a, input_precision=PRECISION)
                b_b = tl.dot(b_unit, tl.trans(b_rows_b), b_b, input_precision=PRECISION)
            b_a *= tl.load(p_factors + first_row + o_a, mask=m_f, other=0.0)[None, :]
            b_b *= tl.load(p_factors + first_row + o_b, mask=m_f, other=0.0)[None, :]
            b_a += tl.load(p_means + first_row + o_a, mask=m_f, other=0.0)[None, :]
            b_b += tl.load(p_means + first_row + o_b, mask=m_f, other=0.0)[None, :]
            p_out = p_values
            if is_value == 0:
                p_out = p_keys
                b_c = b_cos * b_cos_by - b_sin * b_sin_by
                b_s = b_sin * b_cos_by + b_cos * b_sin_by
                b_turned = b_a * b_c - b_b * b_s
                b_b = b_b * b_c + b_a * b_s
                b_a = b_turned
            b_low = b_a.to(p_keys.dtype.element_ty)
            b_high = b_b.to(p_keys.dtype.element_ty)
            m_out = live[:, None] & m_f[None, :]
            p_out += (row * RESTORED + o_token)[:, None] * D
            if is_whole:  # neighbours are written together
                tl.store(p_out + o_f[None, :], b_low, mask=m_out)
                tl.store(p_out + D // 2 + o_f[None, :], b_high, mask=m_out)
            else:
                tl.store(p_out + o_a[None, :], b_low, mask=m_out)
                tl.store(p_out + o_b[None, :], b_high, mask=m_out)
            # A number minus itself is 0, or it is not finite.
            b_wide = tl.abs(b_low.to(tl.float32)) + tl.abs(b_high.to(tl.float32))
            broken = tl.sum(tl.sum(tl.where(m_out & (b_wide - b_wide != 0.0), 1, 0), axis=1), axis=0)
            p_found = tl.load(p_own + 16).to(tl.pointer_type(tl.float32))
            tl.store(p_found + is_value, float("nan"), mask=broken > 0)
    elif CHAINED:
        gdc_wait()
        gdc_launch_dependents()
