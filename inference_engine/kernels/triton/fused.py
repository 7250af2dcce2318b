"""`kernels/fused.py` in Triton: products at the speed at which a GPU reads the matrix.

A step of one token reads every matrix once and multiplies each number once, so a program sums a few rows of the matrix
on plain units, with enough reads under way to fill the memory's bandwidth; the norm costs nothing beside them. Of more
tokens the products are left to tensor cores, whose tiles have room for 16, 32 or 64; they get normed
states.

A token's sums are added in an order that follows from the shape of the matrix, and for 2 to 64 tokens it is the same.
Sums are float32; float32 inputs are multiplied as float32, not in TF32.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference_engine.kernels.fused import MOST_TOKENS, Fused, RowNorm

_NONE, _SILU, _GELU_TANH = 0, 1, 2
_ACTIVATIONS = {None: _NONE, "silu": _SILU, "gelu_tanh": _GELU_TANH}


def product(
    states: Tensor,
    matrix: Tensor,
    *,
    bias: Tensor | None = None,
    norm: RowNorm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """See `Product`."""
    count, inputs = states.shape
    assert count <= MOST_TOKENS, count
    outputs = len(matrix) if activation is None else len(matrix) // 2
    if norm is not None and count > 1:
        states, norm = _norm(states, norm), None
    out = torch.empty((count, outputs), dtype=states.dtype, device=states.device)
    tensors = (
        states,
        matrix,
        matrix if bias is None else bias,
        matrix if residual is None else residual,
        out,
    )
    constants = {
        "INPUTS": inputs,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "ACTIVATION": _ACTIVATIONS[activation],
    }
    if count == 1:
        tile = tile_of_one(outputs, inputs)
        _product_of_one[(triton.cdiv(outputs, tile.rows),)](
            *tensors,
            matrix if norm is None else norm.weights,
            outputs,
            0.0 if norm is None else norm.epsilon,
            **constants,
            HAS_NORM=norm is not None,
            ADDS_ONE=norm is not None and norm.adds_one,
            IS_EVEN=inputs % tile.width == 0 and outputs % tile.rows == 0,
            ROWS=tile.rows,
            WIDTH=tile.width,
            num_warps=tile.warps,
        )
    else:
        columns = max(16, triton.next_power_of_2(count))
        matrices = 1 if activation is None else 2
        tile = tile_of_some(states.element_size(), columns, matrices, _shared_bytes(states.device))
        _product_of_some[(triton.cdiv(outputs, tile.rows),)](
            *tensors,
            outputs,
            count,
            **constants,
            IS_EVEN=inputs % tile.width == 0 and outputs % tile.rows == 0,
            TOKENS=columns,
            ROWS=tile.rows,
            WIDTH=tile.width,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


class Tile(NamedTuple):
    """What a program reads at once: rows of the matrix, numbers of each. stages: tiles that are under way."""

    rows: int
    width: int
    warps: int
    stages: int = 1


def tile_of_one(outputs: int, inputs: int) -> Tile:
    """For a step of one token. Within 1 % of the best of 15, for each matrix of Qwen2.5-7B and SmolLM2-135M on an H200.

    Where there are few outputs, all programs should run at the same time; where there are many, they should be small.
    """
    if outputs > 8192:
        return Tile(4, 256, 2)
    if outputs < 4096 and inputs <= 4096:
        width = max(64, triton.next_power_of_2(inputs))
        return Tile(1 if outputs < inputs else 2, width, 4 if width <= 2048 else 8)
    return Tile(2, 512, 2) if outputs < 4096 else Tile(8, 512, 4)


def tile_of_some(itemsize: int, tokens: int, matrices: int, shared_bytes: int) -> Tile:
    """For steps of several tokens: best of those tried with each matrix of Qwen2.5-7B on an H200, 16 and 64 tokens.

    tokens: for which a tile has room. matrices: of which a program reads a tile at once. shared_bytes: what a program
    may have.
    """
    tile = Tile(64, 128, 4, 5) if itemsize == 2 else Tile(16, 64, 4, 4)
    while tile.stages > 1 and _shared(tile, itemsize, tokens, matrices) > shared_bytes:
        tile = tile._replace(stages=tile.stages - 1)
    while tile.rows > 16 and _shared(tile, itemsize, tokens, matrices) > shared_bytes:
        tile = tile._replace(rows=tile.rows // 2)
    return tile


def _shared(tile: Tile, itemsize: int, tokens: int, matrices: int) -> int:
    return (matrices * tile.rows + tokens) * tile.width * itemsize * tile.stages


@cache
def _shared_bytes(device: torch.device) -> int:
    """The shared memory that a program may have, as Triton counts it; the interpreter has as much as is wanted."""
    if device.type != "cuda":
        return 2**30
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def place_heads(
    heads: Tensor,
    keys: Tensor,
    values: Tensor,
    writes: Tensor,
    *,
    query_heads: int,
    kv_heads: int,
    norms: tuple[RowNorm, RowNorm] | None = None,
    turn: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See `PlaceHeads`."""
    count, head_dim = len(heads), keys.shape[-1]
    queries = torch.empty((count, query_heads, head_dim), dtype=heads.dtype, device=heads.device)
    cos, sin = (heads, heads) if turn is None else turn
    _place_heads[(count, query_heads + 2 * kv_heads)](
        heads,
        keys,
        values,
        writes,
        queries,
        cos,
        sin,
        heads if norms is None else norms[0].weights,
        heads if norms is None else norms[1].weights,
        0.0 if norms is None else norms[0].epsilon,
        0.0 if norms is None else norms[1].epsilon,
        QUERY_HEADS=query_heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        HAS_NORMS=norms is not None,
        ADDS_ONE=norms is not None and norms[0].adds_one,
        HAS_TURN=turn is not None,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=1,
    )
    return queries


def _norm(states: Tensor, norm: RowNorm, *, residual: Tensor | None = None) -> Tensor:
    """See `Norm`."""
    count, inputs = states.shape
    out = torch.empty_like(states)
    block = triton.next_power_of_2(inputs)
    _norm_tokens[(count,)](
        states,
        norm.weights,
        states if residual is None else residual,
        out,
        norm.epsilon,
        INPUTS=inputs,
        ADDS_ONE=norm.adds_one,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=4 if block <= 4096 else 8,
    )
    return out


@triton.jit
def _gated(b_gate, b_up, ACTIVATION: tl.constexpr):
    """Activation 1 is silu; 2 is gelu by its tanh formula, which is gate · sigmoid(2 · inner)."""
    b_inner = b_gate
    if ACTIVATION == 2:
        b_inner = 1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
    return b_gate / (1.0 + tl.exp(-b_inner)) * b_up


@triton.jit
def _rows_of(p_matrix, o_rows, o_in, m_rows, m_in, INPUTS: tl.constexpr, IS_EVEN: tl.constexpr):
    """A tile of the matrix, [ROWS, WIDTH]. It is read once: other data stays in the cache."""
    p_tile = p_matrix + o_rows[:, None].to(tl.int64) * INPUTS + o_in[None, :]
    if IS_EVEN:
        b_tile = tl.load(p_tile, eviction_policy="evict_first")
    else:
        b_tile = tl.load(p_tile, mask=m_rows[:, None] & m_in[None, :], other=0.0, eviction_policy="evict_first")
    return b_tile


@triton.jit
def _product_of_one(
    p_states,
    p_matrix,
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
    HAS_NORM: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    o_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_rows = o_rows < outputs
    b_sums = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    b_ups = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    b_squares = tl.zeros((WIDTH,), dtype=tl.float32)
    for first in range(0, INPUTS, WIDTH):
        o_in = first + tl.arange(0, WIDTH)
        m_in = o_in < INPUTS
        b_states = tl.load(p_states + o_in, mask=m_in, other=0.0).to(tl.float32)
        if HAS_NORM:
            b_squares += b_states * b_states
            b_factor = tl.load(p_norm + o_in, mask=m_in, other=0.0).to(tl.float32)
            if ADDS_ONE:
                b_factor += 1.0
            b_states *= b_factor
        b_sums += _rows_of(p_matrix, o_rows, o_in, m_rows, m_in, INPUTS, IS_EVEN).to(tl.float32) * b_states[None, :]
        if ACTIVATION > 0:
            b_tile = _rows_of(p_matrix, o_rows + outputs, o_in, m_rows, m_in, INPUTS, IS_EVEN)
            b_ups += b_tile.to(tl.float32) * b_states[None, :]
    b_out = tl.sum(b_sums, axis=1)
    b_up = tl.sum(b_ups, axis=1)
    if HAS_NORM:
        b_scale = tl.rsqrt(tl.sum(b_squares, axis=0) / INPUTS + epsilon)
        b_out *= b_scale
        b_up *= b_scale
    if HAS_BIAS:
        b_out += tl.load(p_bias + o_rows, mask=m_rows, other=0.0).to(tl.float32)
    if ACTIVATION > 0:
        if HAS_BIAS:
            b_up += tl.load(p_bias + outputs + o_rows, mask=m_rows, other=0.0).to(tl.float32)
        b_out = _gated(b_out, b_up, ACTIVATION)
    if HAS_RESIDUAL:
        b_out += tl.load(p_residual + o_rows, mask=m_rows, other=0.0).to(tl.float32)
    tl.store(p_out + o_rows, b_out.to(p_out.dtype.element_ty), mask=m_rows)


@triton.jit(do_not_specialize=["tokens"])
def _product_of_some(
    p_states,
    p_matrix,
    p_bias,
    p_residual,
    p_out,
    outputs,
    tokens,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The rows of the matrix are those of the tensor cores' tiles, the tokens their columns."""
    o_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_rows = o_rows < outputs
    o_tokens = tl.arange(0, TOKENS)
    m_tokens = o_tokens < tokens
    b_sums = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    b_ups = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    for first in range(0, INPUTS, WIDTH):
        o_in = first + tl.arange(0, WIDTH)
        m_in = o_in < INPUTS
        b_states = tl.load(
            p_states + o_tokens[None, :] * INPUTS + o_in[:, None], mask=m_tokens[None, :] & m_in[:, None], other=0.0
        )
        b_tile = _rows_of(p_matrix, o_rows, o_in, m_rows, m_in, INPUTS, IS_EVEN)
        b_sums = tl.dot(b_tile, b_states, b_sums, input_precision="ieee")
        if ACTIVATION > 0:
            b_tile = _rows_of(p_matrix, o_rows + outputs, o_in, m_rows, m_in, INPUTS, IS_EVEN)
            b_ups = tl.dot(b_tile, b_states, b_ups, input_precision="ieee")
    if HAS_BIAS:
        b_sums += tl.load(p_bias + o_rows, mask=m_rows, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION > 0:
        if HAS_BIAS:
            b_ups += tl.load(p_bias + outputs + o_rows, mask=m_rows, other=0.0).to(tl.float32)[:, None]
        b_sums = _gated(b_sums, b_ups, ACTIVATION)
    o_out = o_tokens[None, :].to(tl.int64) * outputs + o_rows[:, None]
    m_out = m_rows[:, None] & m_tokens[None, :]
    if HAS_RESIDUAL:
        b_sums += tl.load(p_residual + o_out, mask=m_out, other=0.0).to(tl.float32)
    tl.store(p_out + o_out, b_sums.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def _place_heads(
    p_heads,
    p_keys,
    p_values,
    p_writes,
    p_queries,
    p_cos,
    p_sin,
    p_query_norm,
    p_key_norm,
    query_epsilon,
    key_epsilon,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    HAS_TURN: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    p_head = p_heads + (token * (QUERY_HEADS + 2 * KV_HEADS) + head) * D
    b_head = tl.load(p_head + o_d, mask=m_d, other=0.0).to(tl.float32)
    if head < QUERY_HEADS + KV_HEADS:
        o_other = tl.where(o_d < D // 2, o_d + D // 2, o_d - D // 2)
        b_other = tl.load(p_head + o_other, mask=m_d, other=0.0).to(tl.float32)
        if HAS_NORMS:
            epsilon = tl.where(head < QUERY_HEADS, query_epsilon, key_epsilon)
            b_scale = tl.rsqrt(tl.sum(b_head * b_head, axis=0) / D + epsilon)
            m_query = m_d & (head < QUERY_HEADS)
            m_key = m_d & (head >= QUERY_HEADS)
            b_factor = tl.load(p_query_norm + o_d, mask=m_query, other=0.0).to(tl.float32)
            b_factor += tl.load(p_key_norm + o_d, mask=m_key, other=0.0).to(tl.float32)
            b_other_factor = tl.load(p_query_norm + o_other, mask=m_query, other=0.0).to(tl.float32)
            b_other_factor += tl.load(p_key_norm + o_other, mask=m_key, other=0.0).to(tl.float32)
            if ADDS_ONE:
                b_factor += 1.0
                b_other_factor += 1.0
            b_head *= b_scale * b_factor
            b_other *= b_scale * b_other_factor
        if HAS_TURN:
            b_cos = tl.load(p_cos + token * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_sin = tl.load(p_sin + token * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_head = b_head * b_cos + tl.where(o_d < D // 2, -b_other, b_other) * b_sin
    if head < QUERY_HEADS:
        p_out = p_queries + (token * QUERY_HEADS + head) * D
        tl.store(p_out + o_d, b_head.to(p_queries.dtype.element_ty), mask=m_d)
    elif head < QUERY_HEADS + KV_HEADS:
        entry = tl.load(p_writes + token * KV_HEADS + head - QUERY_HEADS)
        tl.store(p_keys + entry * D + o_d, b_head.to(p_keys.dtype.element_ty), mask=m_d)
    else:
        entry = tl.load(p_writes + token * KV_HEADS + head - QUERY_HEADS - KV_HEADS)
        tl.store(p_values + entry * D + o_d, b_head.to(p_values.dtype.element_ty), mask=m_d)


@triton.jit
def _norm_tokens(
    p_states,
    p_norm,
    p_residual,
    p_out,
    epsilon,
    INPUTS: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o_token = tl.program_id(0).to(tl.int64) * INPUTS
    o_in = tl.arange(0, BLOCK)
    m_in = o_in < INPUTS
    b_states = tl.load(p_states + o_token + o_in, mask=m_in, other=0.0).to(tl.float32)
    b_factor = tl.load(p_norm + o_in, mask=m_in, other=0.0).to(tl.float32)
    if ADDS_ONE:
        b_factor += 1.0
    b_out = b_states * tl.rsqrt(tl.sum(b_states * b_states, axis=0) / INPUTS + epsilon) * b_factor
    if HAS_RESIDUAL:
        b_out += tl.load(p_residual + o_token + o_in, mask=m_in, other=0.0).to(tl.float32)
    tl.store(p_out + o_token + o_in, b_out.to(p_out.dtype.element_ty), mask=m_in)


fused = Fused(product=product, place_heads=place_heads, norm=_norm)
