"""`units`, `entries` and `analyse` of `kernels/latents.py` in Triton.

The numbers of a chunk are unpacked once for all layers of their group. A program of `_entries` makes the keys and the
values of one head for a tile of tokens on tensor cores: both halves of a head lie in its registers, so that it rotates,
rounds and writes them where attention reads them. `_analyse` does the same backwards. Sums run in one order, whatever
the tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference_engine.kernels.latents import AnalysedLayer, CodeTables, LatentOps, MadeLayer, Turn
from inference_engine.kernels.triton.codes import codes_of, numbers_of_codes, places_of_codes, put_numbers
from inference_engine.kernels.triton.tiles import shared_bytes

_TOKENS, _THREADS = 8, 128  # of a program that unpacks; each thread has four codes of every token
_STEP = 64  # numbers that a program of `_entries` takes at once
_MANY = 1024  # tokens from which on larger tiles keep the device busy
_NUMBERS = 128  # of a program of `_analyse`
_TWO_BLOCKS = 164_916  # bytes of shared memory for two blocks of its matrix, and of 128 tokens, under way
_KINDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def units(low: Tensor, high: Tensor, tables: CodeTables, dtype: torch.dtype) -> Tensor:
    """See `kernels.latents.Units`."""
    count, half = low.shape
    found = torch.empty((count, tables.padded), dtype=dtype, device=low.device)
    if count:
        threads = triton.cdiv(tables.padded, 4 * tables.chains) * tables.chains
        _units[(triton.cdiv(count, _TOKENS), triton.cdiv(threads, _THREADS))](
            low,
            high,
            tables.begins,
            tables.widths,
            tables.tables,
            tables.levels,
            tables.scales,
            found,
            count,
            half,
            tables.first_byte,
            tables.count,
            tables.padded,
            tables.chains,
            TOKENS=_TOKENS,
            BLOCK=_THREADS,
            num_warps=4,
        )
    return found


def entries(units: Tensor, layers: Sequence[MadeLayer], *, turn: Turn | None) -> None:
    """See `kernels.latents.Entries`."""
    (heads, count, dim), stride = layers[0].keys.shape, layers[0].keys.stride()
    for layer in layers:
        assert layer.keys.stride() == layer.values.stride() == stride == (*stride[:2], 1)
        assert units.dtype == layer.synthesis.matrix.dtype
    assert units.is_contiguous()
    if not count:
        return
    cos, sin = turn or (units, units)
    is_exact = units.dtype == torch.float32
    tile = 128 if count >= _MANY and dim <= 128 and not is_exact else 64
    _entries[(triton.cdiv(count, tile), heads, len(layers))](
        units,
        *_addresses(
            (made.synthesis.matrix, made.synthesis.factors, made.synthesis.means, made.keys, made.values, made.found)
            for made in layers
        ),
        cos,
        sin,
        count,
        stride[0],
        stride[1],
        KIND=_KINDS[layers[0].keys.dtype],
        LAYERS=len(layers),
        NUMBERS=units.shape[1],
        DIM=dim,
        TURNS=turn is not None,
        PRECISION="ieee" if is_exact else "tf32",
        TILE=tile,
        STEP=32 if is_exact else _STEP,
        num_warps=8 if tile > 64 or dim > 128 else 4,
        num_stages=2 if is_exact or dim > 128 else 3,
    )


def analyse(layers: Sequence[AnalysedLayer], *, turn: Turn | None) -> Tensor:
    """See `kernels.latents.Analyse`."""
    first, matrix = layers[0], layers[0].analysis.matrix
    (heads, count, dim), stride, padded = first.keys.shape, first.keys.stride(), matrix.shape[2]
    for layer in layers:
        assert layer.keys.stride() == layer.values.stride() == stride == (*stride[:2], 1)
        assert layer.analysis.matrix.is_contiguous() and layer.analysis.matrix.dtype == matrix.dtype
    units = torch.empty((count, padded), device=first.keys.device)
    if not count:
        return units
    cos, sin = turn or (units, units)
    is_exact = matrix.dtype == torch.float32
    has_two = not is_exact and (dim <= 64 or (dim <= 128 and shared_bytes(units.device) >= _TWO_BLOCKS))
    tile = 128 if count >= _MANY and has_two else 64
    _analyse[(triton.cdiv(count, tile), triton.cdiv(padded, _NUMBERS))](
        units,
        *_addresses((each.analysis.matrix, each.analysis.means, each.keys, each.values, each.found) for each in layers),
        layers[0].analysis.factors,
        cos,
        sin,
        count,
        stride[0],
        stride[1],
        padded,
        KIND=_KINDS[first.keys.dtype],
        OPERAND=_KINDS[matrix.dtype],
        LAYERS=len(layers),
        HEADS=heads,
        DIM=dim,
        TURNS=turn is not None,
        PRECISION="ieee" if is_exact else "tf32",
        TILE=tile,
        BLOCK=_NUMBERS,
        num_warps=8 if tile > 64 else 4,
        num_stages=2 if has_two else 1,
    )
    return units


def _addresses(places: Iterable[Sequence[Tensor]]) -> tuple[tuple[int, ...], ...]:
    """Where the tensors of each layer begin, by tensor: one launch is for all layers, and takes them as numbers."""
    return tuple(zip(*([tensor.data_ptr() for tensor in own] for own in places), strict=True))


@triton.jit
def _units(
    p_low,
    p_high,
    p_begins,
    p_widths,
    p_tables,
    p_levels,
    p_scales,
    p_found,
    tokens,
    half,
    first_byte,
    count,
    padded,
    chains,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    between = p_high.to(tl.int64) - p_low.to(tl.int64) - half
    o_code = codes_of(tl.program_id(1), chains, BLOCK)
    places = places_of_codes(p_begins, p_widths, p_tables, first_byte, half, between, o_code, count, chains)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    for token in range(first, tl.minimum(first + TOKENS, tokens), 2):
        # Two at once, so that the memory answers for both together.
        other = tl.minimum(token + 1, tokens - 1)
        b_first = numbers_of_codes(p_low + token * half, p_levels, p_scales, places)
        b_other = numbers_of_codes(p_low + other * half, p_levels, p_scales, places)
        put_numbers(p_found + token * padded, b_first, o_code, chains, count, padded, True)
        put_numbers(p_found + other * padded, b_other, o_code, chains, count, padded, other > token)


@triton.jit
def _entries(
    p_units,
    matrices,
    factors,
    means,
    keys,
    values,
    founds,
    p_cos,
    p_sin,
    count,
    stride,
    row,
    KIND: tl.constexpr,
    LAYERS: tl.constexpr,
    NUMBERS: tl.constexpr,
    DIM: tl.constexpr,
    TURNS: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    layer = tl.program_id(2)
    p_matrix = _at(matrices, layer, p_units.dtype.element_ty, LAYERS)
    p_factors = _at(factors, layer, tl.float32, LAYERS)
    p_means = _at(means, layer, tl.float32, LAYERS)
    p_keys = _at(keys, layer, KIND, LAYERS)
    p_values = _at(values, layer, KIND, LAYERS)
    p_found = _at(founds, layer, tl.float32, LAYERS)
    HALF: tl.constexpr = DIM // 2
    head = tl.program_id(1).to(tl.int64)
    o_token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = o_token < count
    o_number = tl.arange(0, STEP)
    o_dim = tl.arange(0, HALF)
    first = head * 2 * DIM
    p_unit = p_units + o_token.to(tl.int64)[:, None] * NUMBERS + o_number[None, :]
    p_part = p_matrix + first * NUMBERS + o_dim[:, None] * NUMBERS + o_number[None, :]
    k_lower = tl.zeros([TILE, HALF], dtype=tl.float32)
    k_upper = tl.zeros([TILE, HALF], dtype=tl.float32)
    v_lower = tl.zeros([TILE, HALF], dtype=tl.float32)
    v_upper = tl.zeros([TILE, HALF], dtype=tl.float32)
    for _ in range(NUMBERS // STEP):
        b_unit = tl.load(p_unit, mask=live[:, None], other=0.0)
        k_lower = tl.dot(b_unit, tl.trans(tl.load(p_part)), k_lower, input_precision=PRECISION)
        k_upper = tl.dot(b_unit, tl.trans(tl.load(p_part + HALF * NUMBERS)), k_upper, input_precision=PRECISION)
        v_lower = tl.dot(b_unit, tl.trans(tl.load(p_part + 2 * HALF * NUMBERS)), v_lower, input_precision=PRECISION)
        v_upper = tl.dot(b_unit, tl.trans(tl.load(p_part + 3 * HALF * NUMBERS)), v_upper, input_precision=PRECISION)
        p_unit += STEP
        p_part += STEP
    o_out = o_dim + first
    k_lower = k_lower * tl.load(p_factors + o_out)[None, :] + tl.load(p_means + o_out)[None, :]
    k_upper = k_upper * tl.load(p_factors + o_out + HALF)[None, :] + tl.load(p_means + o_out + HALF)[None, :]
    v_lower = v_lower * tl.load(p_factors + o_out + DIM)[None, :] + tl.load(p_means + o_out + DIM)[None, :]
    o_out += DIM + HALF
    v_upper = v_upper * tl.load(p_factors + o_out)[None, :] + tl.load(p_means + o_out)[None, :]
    if TURNS:
        at = o_token.to(tl.int64)[:, None] * HALF + o_dim[None, :]
        b_cos = tl.load(p_cos + at, mask=live[:, None], other=1.0)
        b_sin = tl.load(p_sin + at, mask=live[:, None], other=0.0)
        b_turned = k_lower * b_cos - k_upper * b_sin
        k_upper = k_upper * b_cos + k_lower * b_sin
        k_lower = b_turned
    out = head * stride + o_token.to(tl.int64)[:, None] * row + o_dim[None, :]
    _put(p_keys + out, p_keys + out + HALF, k_lower, k_upper, live, p_found)
    _put(p_values + out, p_values + out + HALF, v_lower, v_upper, live, p_found + 1)


@triton.jit
def _put(p_lower, p_upper, b_lower, b_upper, live, p_found):
    """Round and write both halves of a head, and say if a number is not finite."""
    b_low = b_lower.to(p_lower.dtype.element_ty)
    b_high = b_upper.to(p_upper.dtype.element_ty)
    tl.store(p_lower, b_low, mask=live[:, None])
    tl.store(p_upper, b_high, mask=live[:, None])
    _report(b_low.to(tl.float32), b_high.to(tl.float32), live, p_found, 0)


@triton.jit
def _report(b_lower, b_upper, live, p_found, turn):
    # A number minus itself is 0, or it is not finite. Of programs that see the same numbers, one says so.
    b_rest = tl.abs(b_lower - b_lower) + tl.abs(b_upper - b_upper)
    broken = tl.sum(tl.sum(tl.where(live[:, None] & (b_rest != 0.0), 1, 0), axis=1), axis=0)
    tl.store(p_found, float("nan"), mask=(broken > 0) & (turn == 0))


@triton.jit
def _analyse(
    p_units,
    matrices,
    means,
    keys,
    values,
    founds,
    p_factors,
    p_cos,
    p_sin,
    count,
    stride,
    row,
    padded,
    KIND: tl.constexpr,
    OPERAND: tl.constexpr,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNS: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    HALF: tl.constexpr = DIM // 2
    o_token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = o_token < count
    o_number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wanted = o_number < padded
    o_dim = tl.arange(0, HALF)
    place = o_token.to(tl.int64)[:, None]
    entry = place * row + o_dim[None, :]
    part = tl.where(wanted, o_number, 0).to(tl.int64)[:, None] * DIM + o_dim[None, :]
    b_cos = tl.full([TILE, HALF], 1.0, dtype=tl.float32)
    b_sin = tl.zeros([TILE, HALF], dtype=tl.float32)
    if TURNS:
        turned = place * HALF + o_dim[None, :]
        b_cos = tl.load(p_cos + turned, mask=live[:, None], other=1.0)
        b_sin = tl.load(p_sin + turned, mask=live[:, None], other=0.0)
    b_unit = tl.zeros([TILE, BLOCK], dtype=tl.float32)
    for layer in range(LAYERS):
        p_part = _at(matrices, layer, OPERAND, LAYERS) + part
        p_means = _at(means, layer, tl.float32, LAYERS)
        p_keys = _at(keys, layer, KIND, LAYERS)
        p_values = _at(values, layer, KIND, LAYERS)
        p_found = _at(founds, layer, tl.float32, LAYERS)
        for head in range(HEADS):
            own = entry + tl.cast(head, tl.int64) * stride
            b_lower = tl.load(p_keys + own, mask=live[:, None], other=0.0).to(tl.float32)
            b_upper = tl.load(p_keys + own + HALF, mask=live[:, None], other=0.0).to(tl.float32)
            b_back = b_lower * b_cos + b_upper * b_sin
            b_upper = b_upper * b_cos - b_lower * b_sin
            b_unit = _add(b_unit, b_back, b_upper, p_means, p_part, p_found, live, o_dim, HALF, PRECISION)
            p_means += DIM
            p_part += padded * DIM
            b_lower = tl.load(p_values + own, mask=live[:, None], other=0.0).to(tl.float32)
            b_upper = tl.load(p_values + own + HALF, mask=live[:, None], other=0.0).to(tl.float32)
            b_unit = _add(b_unit, b_lower, b_upper, p_means, p_part, p_found + 1, live, o_dim, HALF, PRECISION)
            p_means += DIM
            p_part += padded * DIM
    b_unit *= tl.load(p_factors + o_number, mask=wanted, other=0.0)[None, :]
    tl.store(p_units + place * padded + o_number[None, :], b_unit, mask=live[:, None] & wanted[None, :])


@triton.jit
def _at(addresses, layer, KIND: tl.constexpr, LAYERS: tl.constexpr):
    """Where the numbers of a layer's tensor begin: as of an argument, at a multiple of 16 bytes. What was found is
    written one by one."""
    address = tl.cast(addresses[0], tl.int64)
    for other in tl.static_range(1, LAYERS):
        address = tl.where(layer == other, tl.cast(addresses[other], tl.int64), address)
    return tl.multiple_of(address.to(tl.pointer_type(KIND)), 16)


@triton.jit
def _add(
    b_unit,
    b_lower,
    b_upper,
    p_means,
    p_part,
    p_found,
    live,
    o_dim,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    b_lower = (b_lower - tl.load(p_means + o_dim)[None, :]).to(p_part.dtype.element_ty)
    b_upper = (b_upper - tl.load(p_means + HALF + o_dim)[None, :]).to(p_part.dtype.element_ty)
    _report(b_lower.to(tl.float32), b_upper.to(tl.float32), live, p_found, tl.program_id(1))
    b_unit = tl.dot(b_lower, tl.trans(tl.load(p_part)), b_unit, input_precision=PRECISION)
    return tl.dot(b_upper, tl.trans(tl.load(p_part + HALF)), b_unit, input_precision=PRECISION)


latents = LatentOps(units, entries, analyse)
