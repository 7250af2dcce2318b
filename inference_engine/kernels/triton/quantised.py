"""Tiles of quantised matrices (`kernels/quantised.py`) in Triton, for the products of `fused.py`; and whole ones.

On plain units 8-bit floats are converted by the device's own instruction. A code of 4 bits is put into the last bits of
the float 2^23, whose neighbours are 1 apart; 2^23 and the zero are taken away from it, which is exact. On tensor cores
codes have the dtype of the states, exactly; a group's sums get its scale in float32.

For bfloat16 states four bytes become numbers at a time (`_floats_of_bytes`, `_numbers_of_nibbles`), because a tile that
is unpacked number by number takes longer than it takes to read. What the instructions give is what the plain way gives.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.quantised import QuantisedMatrix
from inference_engine.kernels.triton.dependent_launch import chained

PLAIN, FP8, INT4 = 0, 1, 2
_BLOCK = 2048


def format_of(matrix: Tensor | QuantisedMatrix) -> int:
    """Which of PLAIN, FP8 and INT4."""
    return PLAIN if isinstance(matrix, Tensor) else FP8 if matrix.is_fp8 else INT4


def operands(matrix: Tensor | QuantisedMatrix) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros; what a matrix has not got is given as its codes, and not read."""
    if isinstance(matrix, Tensor):
        return matrix, matrix, matrix
    return matrix.codes, matrix.scales, matrix.codes if matrix.zeros is None else matrix.zeros


@cache
def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether four bytes become numbers at a time: bfloat16 states, on a device that multiplies these in pairs."""
    return dtype == torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def unpacked(matrix: QuantisedMatrix, dtype: torch.dtype) -> Tensor:
    """See `QuantisedMatrix.unpacked`."""
    outputs, inputs = matrix.shape
    out = torch.empty((outputs, inputs), dtype=dtype, device=matrix.device)
    codes, scales, zeros = operands(matrix)
    block = min(_BLOCK, triton.next_power_of_2(codes.shape[1]))
    _unpack[(outputs, triton.cdiv(codes.shape[1], block))](
        codes,
        scales,
        zeros,
        out,
        INPUTS=inputs,
        BYTES=codes.shape[1],
        GROUP=matrix.group,
        GROUPS=scales.shape[1],
        FORMAT=format_of(matrix),
        HAS_ZEROS=matrix.zeros is not None,
        BLOCK=block,
        num_warps=4,
        **chained(out.device),
    )
    return out


@triton.jit
def code_of(b_bits, b_zero):
    """Codes less their zeros, float32, of the low four bits of b_bits, int32."""
    return ((b_bits & 15) | 0x4B000000).to(tl.float32, bitcast=True) - (b_zero + 8388608.0)


@triton.jit
def _floats_of_bytes(b_bits):
    """8-bit floats (e4m3), uint8, as bfloat16, exactly. NaN is no NaN here: no matrix has one.

    The bits of exponent and mantissa are put where bfloat16 has its lower ones, which makes all numbers, subnormal ones
    too, 2^120 times smaller.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, moved, scale, nothing;
        mov.b32 scale, 0x7b807b80;
        mov.b32 nothing, 0x80008000;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        shr.u32 moved, low, 4;
        and.b32 low, low, 0x80008000;
        lop3.b32 low, low, moved, 0x07f007f0, 0xf8;
        shr.u32 moved, high, 4;
        and.b32 high, high, 0x80008000;
        lop3.b32 high, high, moved, 0x07f007f0, 0xf8;
        fma.rn.bf16x2 $0, low, scale, nothing;
        fma.rn.bf16x2 $1, high, scale, nothing;
        }""",
        "=r,=r,r",
        [b_bits],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _numbers_of_nibbles(b_bits, b_below):
    """The codes in the low and in the high four bits of uint8, less their zeros, as bfloat16, exactly.

    b_below: bfloat16, -(128 + zero). A code in the last bits of the bfloat16 128, whose neighbours are 1 apart, is
    128 more than it should be.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, first, second, one;
        mov.b32 one, 0x3f803f80;
        and.b32 low, $4, 0x0f0f0f0f;
        shr.u32 high, $4, 4;
        and.b32 high, high, 0x0f0f0f0f;
        prmt.b32 first, low, 0x43434343, 0x4140;
        prmt.b32 second, low, 0x43434343, 0x4342;
        fma.rn.bf16x2 $0, first, one, $5;
        fma.rn.bf16x2 $1, second, one, $6;
        prmt.b32 first, high, 0x43434343, 0x4140;
        prmt.b32 second, high, 0x43434343, 0x4342;
        fma.rn.bf16x2 $2, first, one, $5;
        fma.rn.bf16x2 $3, second, one, $6;
        }""",
        "=r,=r,=r,=r,r,r,r",
        [b_bits, b_below],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def numbers_of_floats(b_codes, b_states, PACKED: tl.constexpr):
    """8-bit floats in the dtype of the states. PACKED: see `can_pack`."""
    if PACKED:
        b_numbers = _floats_of_bytes(b_codes.to(tl.uint8, bitcast=True))
    else:
        b_numbers = b_codes.to(b_states.dtype)
    return b_numbers


@triton.jit
def _unpack(
    p_codes,
    p_scales,
    p_zeros,
    p_out,
    INPUTS: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    o_byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_byte = o_byte < BYTES
    b_codes = tl.load(p_codes + row * BYTES + o_byte, mask=m_byte, other=0.0 if FORMAT == 1 else 0)
    if FORMAT == 1:
        b_scales = tl.load(p_scales + row * GROUPS + o_byte // GROUP, mask=m_byte, other=0.0).to(tl.float32)
        b_out = b_codes.to(tl.float32) * b_scales
        tl.store(p_out + row * INPUTS + o_byte, b_out.to(p_out.dtype.element_ty), mask=m_byte)
    else:
        o_group = o_byte // (GROUP // 2)
        b_scales = tl.load(p_scales + row * GROUPS + o_group, mask=m_byte, other=0.0).to(tl.float32)
        b_zero = b_scales * 0.0 + 8.0
        if HAS_ZEROS:
            b_zero = tl.load(p_zeros + row * GROUPS + o_group, mask=m_byte, other=0).to(tl.float32)
        b_bits = b_codes.to(tl.int32)
        o_low = o_group * GROUP + o_byte % (GROUP // 2)
        p_row = p_out + row * INPUTS
        b_low = code_of(b_bits, b_zero) * b_scales
        tl.store(p_row + o_low, b_low.to(p_out.dtype.element_ty), mask=m_byte & (o_low < INPUTS))
        o_high = o_low + GROUP // 2
        b_high = code_of(b_bits >> 4, b_zero) * b_scales
        tl.store(p_row + o_high, b_high.to(p_out.dtype.element_ty), mask=m_byte & (o_high < INPUTS))


@triton.jit
def scales_of(p_scales, o_rows, m_rows, group, GROUPS: tl.constexpr):
    """Of these outputs and one group, float32 [ROWS]."""
    return tl.load(p_scales + o_rows.to(tl.int64) * GROUPS + group, mask=m_rows, other=0.0).to(tl.float32)


@triton.jit
def zeros_of(p_zeros, o_rows, m_rows, group, GROUPS: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """Of these outputs and one group, float32 [ROWS]."""
    if HAS_ZEROS:
        b_zeros = tl.load(p_zeros + o_rows.to(tl.int64) * GROUPS + group, mask=m_rows, other=0).to(tl.float32)
    else:
        b_zeros = o_rows.to(tl.float32) * 0.0 + 8.0
    return b_zeros


@triton.jit
def sums_of_codes(
    b_sums,
    p_codes,
    p_scales,
    p_zeros,
    b_low,
    b_high,
    first,
    o_rows,
    m_rows,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """b_sums [ROWS, TOKENS] and the products of one group of 4-bit codes, which begins at input `first`.

    b_low, b_high: states [GROUP / 2, TOKENS] of the halves of the group.
    """
    HALF: tl.constexpr = GROUP // 2
    o_byte = first // 2 + tl.arange(0, HALF)
    p_tile = p_codes + o_rows[:, None].to(tl.int64) * (GROUPS * HALF) + o_byte[None, :]
    b_bytes = tl.load(p_tile, mask=m_rows[:, None], other=0)
    b_zero = zeros_of(p_zeros, o_rows, m_rows, first // GROUP, GROUPS, HAS_ZEROS)[:, None]
    if PACKED:
        b_firsts, b_seconds = _numbers_of_nibbles(b_bytes, (-128.0 - b_zero).to(tl.bfloat16))
    else:
        b_bits = b_bytes.to(tl.int32)
        b_firsts = code_of(b_bits, b_zero).to(b_low.dtype)
        b_seconds = code_of(b_bits >> 4, b_zero).to(b_high.dtype)
    b_part = tl.dot(b_firsts, b_low, input_precision="ieee")
    b_part = tl.dot(b_seconds, b_high, b_part, input_precision="ieee")
    return b_sums + b_part * scales_of(p_scales, o_rows, m_rows, first // GROUP, GROUPS)[:, None]


@triton.jit
def group_products(
    p_codes,
    p_scales,
    p_zeros,
    b_low,
    b_high,
    o_rows,
    o_group,
    m_rows,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Products of one token with some groups, not summed: float32 [ROWS, some groups, codes of a group as they lie].

    b_low, b_high: states float32 [1, some groups, as many], of 8-bit floats b_low alone. o_group: [some groups].
    """
    m_scale = m_rows[:, None] & (o_group < GROUPS)[None, :]
    o_scale = o_rows[:, None].to(tl.int64) * GROUPS + o_group[None, :]
    b_scales = tl.load(p_scales + o_scale, mask=m_scale, other=0.0).to(tl.float32)[:, :, None]
    if FORMAT == 1:
        o_in = o_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        p_tile = p_codes + o_rows[:, None, None].to(tl.int64) * INPUTS + o_in[None, :, :]
        m_tile = m_rows[:, None, None] & (o_in < INPUTS)[None, :, :]
        b_tile = tl.load(p_tile, mask=m_tile, other=0.0, eviction_policy="evict_first")
        b_products = b_tile.to(tl.float32) * b_low * b_scales
    else:
        HALF: tl.constexpr = GROUP // 2
        o_byte = o_group[:, None] * HALF + tl.arange(0, HALF)[None, :]
        p_tile = p_codes + o_rows[:, None, None].to(tl.int64) * (GROUPS * HALF) + o_byte[None, :, :]
        b_bits = tl.load(p_tile, mask=m_scale[:, :, None], other=0, eviction_policy="evict_first").to(tl.int32)
        b_zero = b_scales * 0.0 + 8.0
        if HAS_ZEROS:
            b_zero = tl.load(p_zeros + o_scale, mask=m_scale, other=0).to(tl.float32)[:, :, None]
        b_products = (code_of(b_bits, b_zero) * b_low + code_of(b_bits >> 4, b_zero) * b_high) * b_scales
    return b_products
