"""Products in Triton, at the speed at which a GPU reads the matrix.

A step of one token reads every matrix once and multiplies each number once, so a program sums a few rows of the matrix
on plain units, with enough reads under way to fill the memory's bandwidth; the norm costs nothing beside them. Of more
tokens the products are left to tensor cores; they get normed states.

A token's sums are added in an order that follows from the shape of the matrix. It is the same for any number of tokens
but one, and, of a matrix in fewer bits, up to 32; `open_invariant` has one for all. Where a matrix has few rows, parts
of its sums are made side by side, and the last program of a tile adds them up in their order. Sums are float32; float32
inputs are multiplied as float32, not in TF32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.fused import SQUARES, RowNorm
from inference_engine.kernels.quantised import Matrix, QuantisedMatrix
from inference_engine.kernels.triton.dependent_launch import chained
from inference_engine.kernels.triton.quantised import (
    FP8,
    INT4,
    can_pack,
    format_of,
    group_products,
    numbers_of_floats,
    operands,
    scales_of,
    sums_of_codes,
    unpacked,
)
from inference_engine.kernels.triton.row_norm import constants_of, norm_of
from inference_engine.kernels.triton.tiles import (
    MOST_TILES,
    fitting,
    part_of,
    parts_of,
    parts_of_quantised,
    shared_bytes,
    tile_of_bytes,
    tile_of_groups,
    tile_of_many,
    tile_of_one,
    tile_of_quantised,
    tile_of_some,
)

FEW = 64  # tokens; more are multiplied by a matrix library
_FEW_UNPACKED = 32  # tokens, for which a matrix in fewer bits has smaller tiles
_LEAST = 16  # tokens of a tile
_TOGETHER = 8  # tiles of rows whose programs follow each other

# By their number in kernels.
ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2, SQUARES: 3}


def has_two(activation: str | None) -> bool:
    """Are the products of one half of a matrix multiplied with those of the other?"""
    return activation not in (None, SQUARES)


@triton.constexpr_function
def has_two_of(activation):
    """The same of its number."""
    return activation in (1, 2)


class Products:
    """The products of one user: programs that share a sum count in its memory which of them is the last.

    is_invariant: one token is multiplied as many are, so that its bits do not depend on their number.
    """

    def __init__(self, *, is_invariant: bool = False) -> None:
        self._is_invariant = is_invariant
        self._arrived: dict[torch.device, Tensor] = {}

    def __call__(
        self,
        states: Tensor,
        matrix: Matrix,
        *,
        bias: Tensor | None = None,
        norm: RowNorm | None = None,
        residual: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        """See `Product`."""
        count, inputs = states.shape
        is_alone = count == 1 and not self._is_invariant
        if count > FEW and not self._is_invariant:
            if isinstance(matrix, QuantisedMatrix):
                # Its numbers, for as long as they are multiplied: a matrix's worth of memory, which the next one gets.
                matrix = unpacked(matrix, states.dtype)
            return _product_of_library(states, matrix, bias=bias, norm=norm, residual=residual, activation=activation)
        is_gated = has_two(activation)
        outputs = len(matrix) // 2 if is_gated else len(matrix)
        if norm is not None and not is_alone:
            states, norm = norm_of(states, norm), None
        out = torch.empty((count, outputs), dtype=states.dtype, device=states.device)
        codes, scales, zeros = operands(matrix)
        read = (states, codes, scales)
        around = (
            codes if bias is None else bias,
            codes if residual is None else residual,
            out,
        )
        group, groups = (inputs, 1) if isinstance(matrix, Tensor) else (matrix.group, scales.shape[1])
        constants = {
            "INPUTS": inputs,
            "HAS_BIAS": bias is not None,
            "HAS_RESIDUAL": residual is not None,
            "ACTIVATION": ACTIVATIONS[activation],
            "FORMAT": format_of(matrix),
        }
        is_grouped = groups > 1 or constants["FORMAT"] == INT4
        groups_of = {"GROUP": group, "GROUPS": groups, "HAS_ZEROS": zeros is not codes}
        if is_alone and is_grouped:
            tile = tile_of_groups(outputs, inputs, is_fp8=constants["FORMAT"] == FP8, is_gated=is_gated)
            _product_of_groups[(triton.cdiv(outputs, tile.rows),)](
                *read,
                zeros,
                *around,
                codes if norm is None else norm.weights,
                outputs,
                0.0 if norm is None else norm.epsilon,
                **constants,
                **groups_of,
                **constants_of(norm),
                ROWS=tile.rows,
                TOGETHER=max(1, tile.width // group),
                num_warps=tile.warps,
                **chained(out.device),
            )
            return out
        if is_alone:
            rule = tile_of_one if isinstance(matrix, Tensor) else tile_of_bytes
            tile = rule(outputs, inputs, is_gated=is_gated)
            _product_of_one[(triton.cdiv(outputs, tile.rows),)](
                *read,
                *around,
                codes if norm is None else norm.weights,
                outputs,
                0.0 if norm is None else norm.epsilon,
                **constants,
                **constants_of(norm),
                IS_EVEN=inputs % tile.width == 0 and outputs % tile.rows == 0,
                ROWS=tile.rows,
                WIDTH=tile.width,
                num_warps=tile.warps,
                **chained(out.device),
            )
            return out
        matrices = 2 if is_gated else 1
        if count <= FEW:
            tokens = max(_LEAST, triton.next_power_of_2(count))
            tile = tile_of_some(outputs, inputs, states.element_size(), tokens, matrices)
        else:
            tokens, tile = tile_of_many(outputs, count, states.element_size())
        if isinstance(matrix, Tensor):
            parts = parts_of(outputs, inputs)
        else:
            parts = parts_of_quantised(outputs, inputs, matrices)
            tile = tile_of_quantised(
                outputs,
                states.element_size(),
                matrices,
                parts,
                group if is_grouped else None,
                is_fp8=matrix.is_fp8,
                is_few=tokens <= _FEW_UNPACKED and not self._is_invariant,
            )
        tile = fitting(tile, states.element_size(), tokens, matrices, shared_bytes(states.device))
        rows, columns = triton.cdiv(outputs, tile.rows), triton.cdiv(count, tokens)
        is_split = parts > 1 and columns == 1
        held, arrived = out, out
        if is_split:
            held = torch.empty(rows * parts * matrices * tile.rows * tokens, dtype=torch.float32, device=out.device)
            assert rows <= MOST_TILES, rows
            arrived = self._counters(out.device)
        _product_of_some[(rows * columns, parts if is_split else 1)](
            *read,
            zeros,
            *around,
            held,
            arrived,
            outputs,
            count,
            **constants,
            **groups_of,
            PACKED=constants["FORMAT"] > 0 and can_pack(out.device, states.dtype),
            IS_EVEN=inputs % tile.width == 0 and outputs % tile.rows == 0,
            TOKENS=tokens,
            ROWS=tile.rows,
            WIDTH=tile.width,
            PARTS=parts,
            PART=part_of(inputs, parts),
            IS_SPLIT=is_split,
            IS_ONE_COLUMN=columns == 1,
            TOGETHER=_TOGETHER,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **chained(out.device),
        )
        return out

    def _counters(self, device: torch.device) -> Tensor:
        """Zeros, which the last program of each leaves as zeros; always the same, for recorded steps know where."""
        if device not in self._arrived:
            with torch.inference_mode(False):
                self._arrived[device] = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
        return self._arrived[device]


def _product_of_library(
    states: Tensor,
    matrix: Tensor,
    *,
    bias: Tensor | None,
    norm: RowNorm | None,
    residual: Tensor | None,
    activation: str | None,
) -> Tensor:
    """A matrix library multiplies many tokens as fast as can be. It rounds the sums; the activation is of these."""
    if norm is not None:
        states = norm_of(states, norm)
    if residual is not None and bias is None:
        return torch.addmm(residual, states, matrix.T)
    out = torch.nn.functional.linear(states, matrix, bias)
    if activation is not None:
        out = gated_tokens(out, activation)
    return out if residual is None else out + residual


def gated_tokens(sums: Tensor, activation: str) -> Tensor:
    """The activation of the first half of sums [N, 2 I], times the second half; by SQUARES, of all of them."""
    count, outputs = sums.shape[0], sums.shape[1] // (2 if has_two(activation) else 1)
    out = torch.empty((count, outputs), dtype=sums.dtype, device=sums.device)
    block = min(2048, triton.next_power_of_2(outputs))
    _gate_tokens[(count, triton.cdiv(outputs, block))](
        sums,
        out,
        outputs,
        ACTIVATION=ACTIVATIONS[activation],
        BLOCK=block,
        num_warps=8 if block > 1024 else 4,
        **chained(out.device),
    )
    return out


@triton.jit
def gated_sums(b_gate, b_up, ACTIVATION: tl.constexpr):
    """Activation 1 is silu; 2 is gelu by its tanh formula, which is gate · sigmoid(2 · inner); 3 squares the gate."""
    b_inner = b_gate
    if ACTIVATION == 2:
        b_inner = 1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
    if ACTIVATION == 3:
        b_out = tl.maximum(b_gate, 0.0)
        b_out *= b_out
    else:
        b_out = b_gate / (1.0 + tl.exp(-b_inner)) * b_up
    return b_out


@triton.jit
def _gate_tokens(p_sums, p_out, outputs, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    o_out = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_out = o_out < outputs
    MATRICES: tl.constexpr = 2 if has_two_of(ACTIVATION) else 1
    p_row = p_sums + MATRICES * token * outputs + o_out
    b_gate = tl.load(p_row, mask=m_out, other=0.0).to(tl.float32)
    b_up = b_gate
    if has_two_of(ACTIVATION):
        b_up = tl.load(p_row + outputs, mask=m_out, other=0.0).to(tl.float32)
    b_out = gated_sums(b_gate, b_up, ACTIVATION)
    tl.store(p_out + token * outputs + o_out, b_out.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def rows_of(p_matrix, o_rows, o_in, m_rows, m_in, INPUTS: tl.constexpr, IS_EVEN: tl.constexpr, KEPT: tl.constexpr):
    """A tile of the matrix, [ROWS, WIDTH]. KEPT: the policy of the cache."""
    p_tile = p_matrix + o_rows[:, None].to(tl.int64) * INPUTS + o_in[None, :]
    if IS_EVEN:
        b_tile = tl.load(p_tile, eviction_policy=KEPT)
    else:
        b_tile = tl.load(p_tile, mask=m_rows[:, None] & m_in[None, :], other=0.0, eviction_policy=KEPT)
    return b_tile


@triton.jit
def _product_of_one(
    p_states,
    p_matrix,
    p_scales,
    p_bias,
    p_residual,
    p_out,
    p_norm,
    outputs,
    epsilon,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    # No kernel writes the matrix, so all of a small one is on its way while the kernel before ends. Of a larger one,
    # that would take registers, and with them programs that read at the same time.
    IS_EARLY: tl.constexpr = WIDTH >= INPUTS and WIDTH <= 2048
    if CHAINED and not IS_EARLY:
        gdc_wait()
        gdc_launch_dependents()
    o_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_rows = o_rows < outputs
    b_squares = tl.zeros((WIDTH,), dtype=tl.float32)
    if IS_EARLY:
        o_in = tl.arange(0, WIDTH)
        m_in = o_in < INPUTS
        b_tile = rows_of(p_matrix, o_rows, o_in, m_rows, m_in, INPUTS, IS_EVEN, "evict_first")
        b_up_tile = b_tile
        if has_two_of(ACTIVATION):
            b_up_tile = rows_of(p_matrix, o_rows + outputs, o_in, m_rows, m_in, INPUTS, IS_EVEN, "evict_first")
        if CHAINED:
            gdc_wait()
            gdc_launch_dependents()
        b_states, b_squares = normed_states(p_states, p_norm, b_squares, o_in, INPUTS, HAS_NORM, ADDS_ONE)
        b_sums = b_tile.to(tl.float32) * b_states[None, :]
        b_ups = b_up_tile.to(tl.float32) * b_states[None, :]
    else:
        b_sums, b_ups, b_squares = sums_of_one(
            p_states, p_matrix, p_norm, o_rows, m_rows, outputs, INPUTS, ACTIVATION, HAS_NORM, ADDS_ONE, IS_EVEN, ROWS,
            WIDTH,
        )  # fmt: skip
    b_out = tl.sum(b_sums, axis=1)
    b_up = tl.sum(b_ups, axis=1)
    if FORMAT > 0:
        b_out *= scales_of(p_scales, o_rows, m_rows, 0, 1)
        if has_two_of(ACTIVATION):
            b_up *= scales_of(p_scales, o_rows + outputs, m_rows, 0, 1)
    if HAS_NORM:
        b_scale = tl.rsqrt(tl.sum(b_squares, axis=0) / INPUTS + epsilon)
        b_out *= b_scale
        b_up *= b_scale
    _end_of_one(b_out, b_up, p_bias, p_residual, p_out, o_rows, m_rows, outputs, HAS_BIAS, HAS_RESIDUAL, ACTIVATION)


@triton.jit
def sums_of_one(
    p_states,
    p_matrix,
    p_norm,
    o_rows,
    m_rows,
    outputs,
    INPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Of one token: parts of its sums with these rows and with those `outputs` below, [ROWS, WIDTH]; and of squares."""
    b_squares = tl.zeros((WIDTH,), dtype=tl.float32)
    b_sums = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    b_ups = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for first in range(0, INPUTS, WIDTH):
        o_in = first + tl.arange(0, WIDTH)
        m_in = o_in < INPUTS
        b_states, b_squares = normed_states(p_states, p_norm, b_squares, o_in, INPUTS, HAS_NORM, ADDS_ONE)
        b_tile = rows_of(p_matrix, o_rows, o_in, m_rows, m_in, INPUTS, IS_EVEN, "evict_first")
        b_sums += b_tile.to(tl.float32) * b_states[None, :]
        if has_two_of(ACTIVATION):
            b_tile = rows_of(p_matrix, o_rows + outputs, o_in, m_rows, m_in, INPUTS, IS_EVEN, "evict_first")
            b_ups += b_tile.to(tl.float32) * b_states[None, :]
    return b_sums, b_ups, b_squares


@triton.jit
def _end_of_one(
    b_out,
    b_up,
    p_bias,
    p_residual,
    p_out,
    o_rows,
    m_rows,
    outputs,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """What is done to the sums of one token before they are stored."""
    if HAS_BIAS:
        b_out += tl.load(p_bias + o_rows, mask=m_rows, other=0.0).to(tl.float32)
    if ACTIVATION > 0:
        if HAS_BIAS and has_two_of(ACTIVATION):
            b_up += tl.load(p_bias + outputs + o_rows, mask=m_rows, other=0.0).to(tl.float32)
        b_out = gated_sums(b_out, b_up, ACTIVATION)
    if HAS_RESIDUAL:
        b_out += tl.load(p_residual + o_rows, mask=m_rows, other=0.0).to(tl.float32)
    tl.store(p_out + o_rows, b_out.to(p_out.dtype.element_ty), mask=m_rows)


@triton.jit
def normed_states(
    p_states, p_norm, b_squares, o_in, INPUTS: tl.constexpr, HAS_NORM: tl.constexpr, ADDS_ONE: tl.constexpr
):
    """States of one token, times the weights of the norm, and the squares that the norm divides by, float32."""
    m_in = o_in < INPUTS
    b_states = tl.load(p_states + o_in, mask=m_in, other=0.0).to(tl.float32)
    if HAS_NORM:
        b_squares += b_states * b_states
        b_factor = tl.load(p_norm + o_in, mask=m_in, other=0.0).to(tl.float32)
        if ADDS_ONE:
            b_factor += 1.0
        b_states *= b_factor
    return b_states, b_squares


@triton.jit
def _product_of_groups(
    p_states,
    p_matrix,
    p_scales,
    p_zeros,
    p_bias,
    p_residual,
    p_out,
    p_norm,
    outputs,
    epsilon,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """As `_product_of_one`, with a scale for each group; so many groups are read at once."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    o_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_rows = o_rows < outputs
    # Codes of 4 bits lie in bytes of two, whose inputs are half a group apart.
    WIDTH: tl.constexpr = GROUP if FORMAT == 1 else GROUP // 2
    b_sums = tl.zeros((ROWS, TOGETHER, WIDTH), dtype=tl.float32)
    b_ups = tl.zeros((ROWS, TOGETHER, WIDTH), dtype=tl.float32)
    b_squares = tl.zeros((1, TOGETHER, WIDTH), dtype=tl.float32)
    for first in range(0, GROUPS, TOGETHER):
        o_group = first + tl.arange(0, TOGETHER)
        o_in = (o_group[:, None] * GROUP + tl.arange(0, WIDTH)[None, :])[None, :, :]
        b_low, b_squares = normed_states(p_states, p_norm, b_squares, o_in, INPUTS, HAS_NORM, ADDS_ONE)
        b_high = b_low
        if FORMAT == 2:
            b_high, b_squares = normed_states(p_states, p_norm, b_squares, o_in + WIDTH, INPUTS, HAS_NORM, ADDS_ONE)
        b_sums += group_products(
            p_matrix, p_scales, p_zeros, b_low, b_high, o_rows, o_group, m_rows, GROUP, GROUPS, FORMAT, HAS_ZEROS,
            INPUTS,
        )  # fmt: skip
        if has_two_of(ACTIVATION):
            b_ups += group_products(
                p_matrix, p_scales, p_zeros, b_low, b_high, o_rows + outputs, o_group, m_rows, GROUP, GROUPS, FORMAT,
                HAS_ZEROS, INPUTS,
            )  # fmt: skip
    b_out = tl.sum(tl.sum(b_sums, axis=2), axis=1)
    b_up = tl.sum(tl.sum(b_ups, axis=2), axis=1)
    if HAS_NORM:
        b_scale = tl.rsqrt(tl.sum(tl.sum(tl.sum(b_squares, axis=2), axis=1), axis=0) / INPUTS + epsilon)
        b_out *= b_scale
        b_up *= b_scale
    _end_of_one(b_out, b_up, p_bias, p_residual, p_out, o_rows, m_rows, outputs, HAS_BIAS, HAS_RESIDUAL, ACTIVATION)


@triton.jit
def _sums_of_part(
    p_states,
    p_matrix,
    p_scales,
    p_zeros,
    o_rows,
    o_tokens,
    m_rows,
    m_tokens,
    outputs,
    begin,
    end,
    INPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    PACKED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    KEPT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """[ROWS, TOKENS] of the first half of the matrix, or all of it, and of the second, over inputs begin … end - 1.

    The rows of the matrix are those of the tensor cores' tiles, the tokens their columns: the order of a sum is the
    same for any number of them.
    """
    b_sums = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    b_ups = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    for first in range(begin, end, WIDTH):
        if FORMAT == 2:
            o_low = first + tl.arange(0, WIDTH // 2)
            b_low = _states_of(p_states, o_tokens, m_tokens, o_low, INPUTS)
            b_high = _states_of(p_states, o_tokens, m_tokens, o_low + WIDTH // 2, INPUTS)
            b_sums = sums_of_codes(
                b_sums, p_matrix, p_scales, p_zeros, b_low, b_high, first, o_rows, m_rows, GROUP, GROUPS, HAS_ZEROS,
                PACKED,
            )  # fmt: skip
            if has_two_of(ACTIVATION):
                b_ups = sums_of_codes(
                    b_ups, p_matrix, p_scales, p_zeros, b_low, b_high, first, o_rows + outputs, m_rows, GROUP, GROUPS,
                    HAS_ZEROS, PACKED,
                )  # fmt: skip
        else:
            o_in = first + tl.arange(0, WIDTH)
            m_in = o_in < INPUTS
            b_states = _states_of(p_states, o_tokens, m_tokens, o_in, INPUTS)
            b_tile = rows_of(p_matrix, o_rows, o_in, m_rows, m_in, INPUTS, IS_EVEN, KEPT)
            b_tile = numbers_of_floats(b_tile, b_states, PACKED)
            if GROUPS == 1:
                b_sums = tl.dot(b_tile, b_states, b_sums, input_precision="ieee")
            else:
                b_part = tl.dot(b_tile, b_states, input_precision="ieee")
                b_sums += b_part * scales_of(p_scales, o_rows, m_rows, first // GROUP, GROUPS)[:, None]
            if has_two_of(ACTIVATION):
                b_tile = rows_of(p_matrix, o_rows + outputs, o_in, m_rows, m_in, INPUTS, IS_EVEN, KEPT)
                b_tile = numbers_of_floats(b_tile, b_states, PACKED)
                if GROUPS == 1:
                    b_ups = tl.dot(b_tile, b_states, b_ups, input_precision="ieee")
                else:
                    b_part = tl.dot(b_tile, b_states, input_precision="ieee")
                    b_ups += b_part * scales_of(p_scales, o_rows + outputs, m_rows, first // GROUP, GROUPS)[:, None]
    return b_sums, b_ups


@triton.jit
def _states_of(p_states, o_tokens, m_tokens, o_in, INPUTS: tl.constexpr):
    """A tile of the states, [WIDTH, TOKENS]."""
    o_states = o_tokens[None, :].to(tl.int64) * INPUTS + o_in[:, None]
    return tl.load(p_states + o_states, mask=m_tokens[None, :] & (o_in < INPUTS)[:, None], other=0.0)


@triton.jit(do_not_specialize=["tokens"])
def _product_of_some(
    p_states,
    p_matrix,
    p_scales,
    p_zeros,
    p_bias,
    p_residual,
    p_out,
    p_held,
    p_arrived,
    outputs,
    tokens,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    PACKED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_ONE_COLUMN: tl.constexpr,
    TOGETHER: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    row_tile = tl.program_id(0)
    column = 0
    if not IS_ONE_COLUMN:
        # Programs that run at the same time read few rows and few tokens between them.
        columns = tl.cdiv(tokens, TOKENS)
        first_row = row_tile // (TOGETHER * columns) * TOGETHER
        together = tl.minimum(tl.cdiv(outputs, ROWS) - first_row, TOGETHER)
        place = row_tile % (TOGETHER * columns)
        row_tile = first_row + place % together
        column = place // together
    o_rows = row_tile * ROWS + tl.arange(0, ROWS)
    m_rows = o_rows < outputs
    o_tokens = column * TOKENS + tl.arange(0, TOKENS)
    m_tokens = o_tokens < tokens
    inputs = outputs * 0 + INPUTS
    # A matrix that is read once leaves other data in the cache.
    KEPT: tl.constexpr = "evict_first" if IS_ONE_COLUMN else ""
    if IS_SPLIT:
        part = tl.program_id(1)
        b_sums, b_ups = _sums_of_part(
            p_states, p_matrix, p_scales, p_zeros, o_rows, o_tokens, m_rows, m_tokens, outputs, part * PART,
            tl.minimum(part * PART + PART, inputs), INPUTS, ACTIVATION, FORMAT, GROUP, GROUPS, HAS_ZEROS, PACKED,
            IS_EVEN, KEPT, TOKENS, ROWS, WIDTH,
        )  # fmt: skip
        o_tile = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        p_mine = p_held + row_tile * (PARTS * ROWS * TOKENS * (2 if has_two_of(ACTIVATION) else 1))
        tl.store(p_mine + part * (ROWS * TOKENS) + o_tile, b_sums)
        if has_two_of(ACTIVATION):
            tl.store(p_mine + (PARTS + part) * (ROWS * TOKENS) + o_tile, b_ups)
        # All threads have stored before the count rises; the last program adds up all parts, in their order.
        tl.debug_barrier()
        before = tl.atomic_add(p_arrived + row_tile, 1, sem="acq_rel")
        if before < PARTS - 1:
            return
        tl.store(p_arrived + row_tile, 0)
        b_sums = tl.load(p_mine + o_tile, cache_modifier=".cg")
        b_ups = b_sums
        if has_two_of(ACTIVATION):
            b_ups = tl.load(p_mine + PARTS * (ROWS * TOKENS) + o_tile, cache_modifier=".cg")
        for other in tl.static_range(1, PARTS):
            b_sums += tl.load(p_mine + other * (ROWS * TOKENS) + o_tile, cache_modifier=".cg")
            if has_two_of(ACTIVATION):
                b_ups += tl.load(p_mine + (PARTS + other) * (ROWS * TOKENS) + o_tile, cache_modifier=".cg")
    else:
        b_sums, b_ups = _sums_of_part(
            p_states, p_matrix, p_scales, p_zeros, o_rows, o_tokens, m_rows, m_tokens, outputs, 0,
            tl.minimum(inputs, PART), INPUTS, ACTIVATION, FORMAT, GROUP, GROUPS, HAS_ZEROS, PACKED, IS_EVEN, KEPT,
            TOKENS, ROWS, WIDTH,
        )  # fmt: skip
        for part in tl.static_range(1, PARTS):
            b_next, b_next_up = _sums_of_part(
                p_states, p_matrix, p_scales, p_zeros, o_rows, o_tokens, m_rows, m_tokens, outputs, part * PART,
                tl.minimum(inputs, part * PART + PART), INPUTS, ACTIVATION, FORMAT, GROUP, GROUPS, HAS_ZEROS, PACKED,
                IS_EVEN, KEPT, TOKENS, ROWS, WIDTH,
            )  # fmt: skip
            b_sums += b_next
            b_ups += b_next_up
    if FORMAT == 1 and GROUPS == 1:
        b_sums *= scales_of(p_scales, o_rows, m_rows, 0, 1)[:, None]
        if has_two_of(ACTIVATION):
            b_ups *= scales_of(p_scales, o_rows + outputs, m_rows, 0, 1)[:, None]
    if HAS_BIAS:
        b_sums += tl.load(p_bias + o_rows, mask=m_rows, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION > 0:
        if HAS_BIAS and has_two_of(ACTIVATION):
            b_ups += tl.load(p_bias + outputs + o_rows, mask=m_rows, other=0.0).to(tl.float32)[:, None]
        b_sums = gated_sums(b_sums, b_ups, ACTIVATION)
    o_out = o_tokens[None, :].to(tl.int64) * outputs + o_rows[:, None]
    m_out = m_rows[:, None] & m_tokens[None, :]
    if HAS_RESIDUAL:
        b_sums += tl.load(p_residual + o_out, mask=m_out, other=0.0).to(tl.float32)
    tl.store(p_out + o_out, b_sums.to(p_out.dtype.element_ty), mask=m_out)
