"""Layers with a recurrent state, in Triton: as `kernels/states.py` says.

    few tokens     a program has some columns of a head's matrix in registers, and the open entries beside it; it goes
                   from token to token, and folds a chunk where one ends
    many tokens    pieces of 64: what tokens of a piece add to the state follows from the inverse of a triangle, for all
                   pieces at once; then a program goes from piece to piece, all products on tensor cores. What is behind
                   the last whole chunk is left to the programs of few tokens

The second adds in another order than the first. Where no token may change the bits of another, the first does all.

Sources: Yang et al., Gated Delta Networks, arXiv 2412.06464, section 3.3 (WY form of a piece); Dao and Gu, Transformers
are SSMs, arXiv 2405.21060, section 6 (the same without a correction).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.states import (
    CHUNK,
    PIECE_TOKENS,
    ROOM,
    STATE_FIELDS,
    StateLayer,
)
from inference_engine.kernels.triton.dependent_launch import chained

_FEW = 32  # tokens of a step, below which no piece is worth its kernels
_EXACT = 4  # tokens: steps of so few are never padded
_SPANS = 64  # that programs begin with
_COLUMNS = 32  # of a matrix, by a program
_CHANNELS = 512
_ROWS = 16  # of a chunk, as a product takes them


class _Rule(NamedTuple):
    """Where the parts of a token lie in its registers."""

    queries_at: int
    keys_at: int
    values_at: int
    decays_at: int


class TritonStates:
    """Implements StateKernels. is_invariant: does no token change the bits of another?"""

    def __init__(self, *, is_invariant: bool) -> None:
        self._is_invariant = is_invariant

    def convolve(
        self, inputs: Tensor, table: Tensor, layer: StateLayer, *, weights: Tensor, bias: Tensor | None, activates: bool
    ) -> Tensor:
        out = torch.empty_like(inputs)
        _convolve[(len(inputs), triton.cdiv(layer.channels, _CHANNELS))](
            inputs,
            table,
            weights,
            weights if bias is None else bias,
            out,
            layer.offset,
            **_sizes(layer),
            HAS_BIAS=bias is not None,
            ACTIVATES=activates,
            num_warps=4,
            **chained(inputs.device),
        )
        return out

    def delta_rule(
        self, inputs: Tensor, gates: Tensor, table: Tensor, layer: StateLayer, *, rates: Tensor, bias: Tensor,
        doubles: bool,
    ) -> Tensor:  # fmt: skip
        width = layer.key_heads * layer.key_dim
        rule = _Rule(queries_at=0, keys_at=width, values_at=2 * width, decays_at=layer.value_heads)
        return self._run(inputs, gates, table, layer, rule, (rates, bias, rates), corrects=True, doubles=doubles)

    def scan(
        self, inputs: Tensor, gates: Tensor, table: Tensor, layer: StateLayer, *, rates: Tensor, bias: Tensor,
        skips: Tensor,
    ) -> Tensor:  # fmt: skip
        values, width = layer.value_heads * layer.value_dim, layer.key_heads * layer.key_dim
        rule = _Rule(queries_at=values + width, keys_at=values, values_at=0, decays_at=0)
        return self._run(inputs, gates, table, layer, rule, (rates, bias, skips), corrects=False, doubles=False)

    def _run(
        self,
        inputs: Tensor,
        gates: Tensor,
        table: Tensor,
        layer: StateLayer,
        rule: _Rule,
        numbers: tuple[Tensor, Tensor, Tensor],
        *,
        corrects: bool,
        doubles: bool,
    ) -> Tensor:
        count, width = len(inputs), layer.value_heads * layer.value_dim
        # Nothing is written for padding, and what is there may not be a number.
        out = (inputs.new_empty if count <= _EXACT else inputs.new_zeros)(count, width)
        has_pieces = not self._is_invariant and count >= _FEW
        columns = min(_COLUMNS, triton.next_power_of_2(layer.value_dim))
        given: dict[str, Any] = {
            **_sizes(layer),
            **{name.upper(): place for name, place in rule._asdict().items()},
            "INPUT_WIDTH": inputs.shape[1],
            "GATE_WIDTH": gates.shape[1],
            "CORRECTS": corrects,
            "DOUBLES": doubles,
            "SPLITS": has_pieces,
            "BLOCK_K": triton.next_power_of_2(layer.key_dim),
            "BLOCK_V": columns,
            "BLOCK_ALL": triton.next_power_of_2(layer.value_dim),
            "PIECE": PIECE_TOKENS,
            "IS_EXACT": inputs.dtype.itemsize > 2,
            **chained(inputs.device),
        }
        heads, blocks = layer.value_heads, triton.cdiv(layer.value_dim, columns)
        if has_pieces:
            # Two groups of warps would share 16 columns of a product; Triton 3.6 has them read beside the tile.
            warps = 8 if min(columns, given["BLOCK_K"], given["BLOCK_ALL"]) > 16 else 4
            readers = values = inputs
            if corrects:
                readers, values = inputs.new_empty(count, heads * layer.key_dim), torch.empty_like(out)
                # Of one session there are no more; programs go on to those of others.
                pieces = count // PIECE_TOKENS + 2
                _correct_pieces[(pieces, heads)](
                    inputs, gates, table, readers, values, *numbers[:2], count, **_of(_correct_pieces, given),
                    num_warps=warps, num_stages=1,
                )  # fmt: skip
            spans = min(_SPANS, count // (ROOM - CHUNK + 1))
            _run_pieces[(spans, heads, blocks)](
                inputs, gates, table, readers, values, out, *numbers, layer.offset, **_of(_run_pieces, given),
                num_warps=warps, num_stages=1,
            )  # fmt: skip
        _run_tokens[(min(_SPANS, count), heads, blocks)](
            inputs, gates, table, out, *numbers, layer.offset, **_of(_run_tokens, given), num_warps=4
        )
        return out

    def settle(self, memory: Tensor, layers: tuple[StateLayer, ...], held: int, kept: int, staged: int) -> None:
        numbers, folds = memory.view(torch.float32), (held + kept) // CHUNK
        for layer, offsets in _alike(layers, memory.device):
            columns = min(_COLUMNS, triton.next_power_of_2(max(1, layer.value_dim)))
            if folds and layer.value_heads:
                grid = len(offsets), layer.value_heads, triton.cdiv(layer.value_dim, columns)
                blocks = {"BLOCK_K": triton.next_power_of_2(layer.key_dim), "BLOCK_V": columns}
                _fold_chunks[grid](numbers, offsets, folds, **_of(_fold_chunks, _sizes(layer) | blocks), num_warps=4)
            parts = sum(triton.cdiv(width, _CHANNELS) for width in _widths(layer))
            rows = {"ROWS": triton.next_power_of_2(ROOM + layer.taps - 1)}
            _move_entries[(len(offsets), parts)](
                numbers, offsets, folds * CHUNK, held + kept, held + staged,
                **_of(_move_entries, _sizes(layer) | rows), num_warps=4,
            )  # fmt: skip


def _widths(layer: StateLayer) -> tuple[int, int, int, int]:
    heads = layer.value_heads
    return layer.key_heads * layer.key_dim, heads * layer.value_dim, heads, layer.channels


def _sizes(layer: StateLayer) -> dict[str, int]:
    return {
        "KEY_HEADS": layer.key_heads,
        "VALUE_HEADS": layer.value_heads,
        "KEY_DIM": layer.key_dim,
        "VALUE_DIM": layer.value_dim,
        "CHUNK": CHUNK,
        "ROOM": ROOM,
        "FIELDS": STATE_FIELDS,
        "CHANNELS": layer.channels,
        "TAPS": layer.taps,
        "BLOCK": _CHANNELS,
    }


def _of(kernel: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Those that the kernel has, and options of a launch."""
    return {name: value for name, value in given.items() if name in kernel.arg_names or name == "launch_pdl"}


@cache
def _alike(layers: tuple[StateLayer, ...], device: torch.device) -> Sequence[tuple[StateLayer, Tensor]]:
    """Of layers of the same sizes, one and the offsets of all."""
    groups: dict[tuple[int, ...], list[StateLayer]] = {}
    for layer in layers:
        groups.setdefault(layer.sizes, []).append(layer)
    return [(group[0], torch.tensor([each.offset for each in group], device=device)) for group in groups.values()]


@triton.constexpr_function
def in_table(name):
    """Of a line of `kernels/states.py`."""
    return {
        "SPAN": 0,
        "SPANS": 1,
        "BEFORE": 2,
        "AFTER": 3,
        "POSITION": 4,
        "FIRST": 5,
        "COUNT": 6,
        "PIECE_SPAN": 7,
        "PIECE": 8,
    }[name]


@triton.jit
def _softplus(x):
    b_power = tl.exp(tl.minimum(x, 20.0))
    b_log = tl.where(b_power < 1e-3, b_power * (1.0 - 0.5 * b_power), tl.log(1.0 + b_power))
    return tl.where(x > 20.0, x, b_log)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _fold(b_state, b_keys, b_values, b_decays, last, count, CHUNK: tl.constexpr):
    """The state behind the first `count` entries of a chunk. last: the decay of the last of them.

    In one order of sums, in any kernel: a product of tiles would have its operands in other layouts, and what they are
    made of summed once for each.
    """
    o = tl.arange(0, b_keys.shape[0])
    b_weights = tl.where(o < count, tl.exp(tl.where(o < count, last - b_decays, 0.0)), 0.0)
    b_keys *= b_weights[:, None]
    b_state *= tl.exp(last)
    for row in tl.static_range(CHUNK):
        # Sums of one number and zeros.
        b_key = tl.sum(tl.where(o[:, None] == row, b_keys, 0.0), axis=0)
        b_value = tl.sum(tl.where(o[:, None] == row, b_values, 0.0), axis=0)
        b_state = tl.fma(b_key[:, None], b_value[None, :], b_state)
    return b_state


@triton.jit
def _entries(
    p_keys,
    p_values,
    p_decays,
    count,
    head,
    o_k,
    m_k,
    o_v,
    m_v,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """The first `count` of a chunk: keys [16, K], values [16, V], decays [16]; zeros behind them."""
    o = tl.arange(0, 16)
    m = o < count
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    p_key = p_keys + (o[:, None] * KEY_HEADS + key_head) * KEY_DIM + o_k[None, :]
    p_value = p_values + (o[:, None] * VALUE_HEADS + head) * VALUE_DIM + o_v[None, :]
    b_keys = tl.load(p_key, mask=m[:, None] & m_k[None, :], other=0.0)
    b_values = tl.load(p_value, mask=m[:, None] & m_v[None, :], other=0.0)
    b_decays = tl.load(p_decays + o * VALUE_HEADS + head, mask=m, other=0.0)
    return b_keys, b_values, b_decays


@triton.jit(do_not_specialize=["offset"])
def _convolve(
    p_inputs,
    p_table,
    p_weights,
    p_bias,
    p_out,
    offset,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
    FIELDS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < CHANNELS
    span = tl.load(p_table + token * FIELDS + in_table("SPAN")) - 1
    b_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    if span >= 0:
        p_span = p_table + span * FIELDS
        position = tl.load(p_span + in_table("POSITION"))
        first = tl.load(p_span + in_table("FIRST"))
        after = tl.load(p_span + in_table("AFTER"))
        before = tl.load(p_span + in_table("BEFORE"))
        at = offset + VALUE_HEADS * KEY_DIM * VALUE_DIM
        at += ROOM * (KEY_HEADS * KEY_DIM + VALUE_HEADS * (VALUE_DIM + 1))
        p_before = before.to(tl.pointer_type(tl.float32)) + at
        base = position - position % CHUNK
        here = position + token - first
        if HAS_BIAS:
            b_sum = tl.load(p_bias + o_c, mask=m_c, other=0.0)
        b_input = b_sum
        for tap in tl.static_range(TAPS):
            other = here - (TAPS - 1) + tap
            is_kept = other < position
            p_kept = p_before + (other - base + TAPS - 1) * CHANNELS + o_c
            p_new = p_inputs + (first + other - position) * CHANNELS + o_c
            b_input = tl.load(p_kept, mask=m_c & is_kept, other=0.0)
            b_input += tl.load(p_new, mask=m_c & (other >= position), other=0.0).to(tl.float32)
            b_sum += b_input * tl.load(p_weights + tap * CHANNELS + o_c, mask=m_c, other=0.0)
        # The last of them is the token's own.
        if after == 0:
            tl.store(p_before + (here - base + TAPS - 1) * CHANNELS + o_c, b_input, mask=m_c)
        else:
            p_after = after.to(tl.pointer_type(tl.float32)) + at
            end = position + tl.load(p_span + in_table("COUNT"))
            begin = end - end % CHUNK - (TAPS - 1)
            tl.store(p_after + (here - begin) * CHANNELS + o_c, b_input, mask=m_c & (here >= begin))
            if token == first:
                for other in range(begin, position):
                    b_kept = tl.load(p_before + (other - base + TAPS - 1) * CHANNELS + o_c, mask=m_c, other=0.0)
                    tl.store(p_after + (other - begin) * CHANNELS + o_c, b_kept, mask=m_c)
        if ACTIVATES:
            b_sum *= _sigmoid(b_sum)
    tl.store(p_out + token * CHANNELS + o_c, b_sum.to(p_out.dtype.element_ty), mask=m_c)


@triton.jit(do_not_specialize=["offset"])
def _run_tokens(
    p_inputs,
    p_gates,
    p_table,
    p_out,
    p_rates,
    p_bias,
    p_skips,
    offset,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
    FIELDS: tl.constexpr,
    QUERIES_AT: tl.constexpr,
    KEYS_AT: tl.constexpr,
    VALUES_AT: tl.constexpr,
    DECAYS_AT: tl.constexpr,
    INPUT_WIDTH: tl.constexpr,
    GATE_WIDTH: tl.constexpr,
    CORRECTS: tl.constexpr,
    DOUBLES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Token by token. SPLITS: of spans with a run of their own, those behind the last whole chunk.

    Programs of some columns of a head; some spans each.
    """
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(1)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    o_k = tl.arange(0, BLOCK_K)
    m_k = o_k < KEY_DIM
    o_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_v = o_v < VALUE_DIM
    o_row = tl.arange(0, 16)
    o_matrix = offset + head * KEY_DIM * VALUE_DIM + o_k[:, None] * VALUE_DIM + o_v[None, :]
    m_matrix = m_k[:, None] & m_v[None, :]
    rate = tl.load(p_rates + head)
    bias = tl.load(p_bias + head)
    keys_of = offset + VALUE_HEADS * KEY_DIM * VALUE_DIM
    values_of = keys_of + ROOM * KEY_HEADS * KEY_DIM
    decays_of = values_of + ROOM * VALUE_HEADS * VALUE_DIM
    # One program of a head's writes its decay, and one of a key's the key.
    is_first = tl.program_id(2) == 0
    writes_key = is_first & (head % (VALUE_HEADS // KEY_HEADS) == 0)
    spans = tl.load(p_table + in_table("SPANS")).to(tl.int32)
    for span in range(tl.program_id(0), spans, tl.num_programs(0)):
        p_span = p_table + span * FIELDS
        before = tl.load(p_span + in_table("BEFORE"))
        after = tl.load(p_span + in_table("AFTER"))
        first = tl.load(p_span + in_table("FIRST"))
        position = tl.load(p_span + in_table("POSITION"))
        end = position + tl.load(p_span + in_table("COUNT"))
        start = position
        base_of_end = end - end % CHUNK
        own_of = base_of_end  # where what is written begins
        if after == 0:
            after = before
            own_of = position - position % CHUNK
        elif SPLITS:
            before = after
            start = base_of_end
        p_before = before.to(tl.pointer_type(tl.float32))
        p_after = after.to(tl.pointer_type(tl.float32))
        base = start - start % CHUNK
        held = start - base
        if start < end:
            b_state = tl.load(p_before + o_matrix, mask=m_matrix, other=0.0)
            b_keys, b_values, b_decays = _entries(
                p_before + keys_of, p_before + values_of, p_before + decays_of, held, head, o_k, m_k, o_v, m_v,
                KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
            )  # fmt: skip
            since = tl.sum(tl.where(o_row == held - 1, b_decays, 0.0), axis=0)
            for here in range(start, end):
                row = here % CHUNK
                if (row == 0) & (here > base):
                    b_state = _fold(b_state, b_keys, b_values, b_decays, since, CHUNK, CHUNK)
                    since = 0.0
                token = first + here - position
                p_token = p_inputs + token * INPUT_WIDTH
                p_gate = p_gates + token * GATE_WIDTH + head
                b_key = tl.load(p_token + KEYS_AT + key_head * KEY_DIM + o_k, mask=m_k, other=0.0).to(tl.float32)
                b_query = tl.load(p_token + QUERIES_AT + key_head * KEY_DIM + o_k, mask=m_k, other=0.0)
                b_query = b_query.to(tl.float32)
                b_value = tl.load(p_token + VALUES_AT + head * VALUE_DIM + o_v, mask=m_v, other=0.0).to(tl.float32)
                step = _softplus(tl.load(p_gate + DECAYS_AT).to(tl.float32) + bias)
                since += rate * step
                if CORRECTS:
                    b_key *= tl.rsqrt(tl.sum(b_key * b_key, axis=0) + 1e-6)
                    b_query *= tl.rsqrt(tl.sum(b_query * b_query, axis=0) + 1e-6) * (KEY_DIM**-0.5)
                decay = tl.exp(since)
                is_before = o_row < row
                b_weights = tl.where(is_before, tl.exp(tl.where(is_before, since - b_decays, 0.0)), 0.0)
                if CORRECTS:
                    b_known = decay * tl.sum(b_key[:, None] * b_state, axis=0)
                    b_alike = tl.sum(b_keys * b_key[None, :], axis=1) * b_weights
                    b_known += tl.sum(b_alike[:, None] * b_values, axis=0)
                    beta = _sigmoid(tl.load(p_gate).to(tl.float32))
                    if DOUBLES:
                        beta *= 2.0
                    b_added = beta * (b_value - b_known)
                else:
                    b_added = b_value * step
                b_found = decay * tl.sum(b_query[:, None] * b_state, axis=0)
                b_asked = tl.sum(b_keys * b_query[None, :], axis=1) * b_weights
                b_found += tl.sum(b_asked[:, None] * b_values, axis=0)
                b_found += tl.sum(b_query * b_key, axis=0) * b_added
                if not CORRECTS:
                    b_found += tl.load(p_skips + head) * b_value
                o_out = (token * VALUE_HEADS + head) * VALUE_DIM + o_v
                tl.store(p_out + o_out, b_found.to(p_out.dtype.element_ty), mask=m_v)
                is_own = o_row[:, None] == row
                b_keys = tl.where(is_own, b_key[None, :], b_keys)
                b_values = tl.where(is_own, b_added[None, :], b_values)
                b_decays = tl.where(o_row == row, since, b_decays)
                place = here - own_of
                m_kept = place >= 0
                p_value = p_after + values_of + (place * VALUE_HEADS + head) * VALUE_DIM + o_v
                tl.store(p_value, b_added, mask=m_v & m_kept)
                p_key = p_after + keys_of + (place * KEY_HEADS + key_head) * KEY_DIM + o_k
                tl.store(p_key, b_key, mask=m_k & m_kept & writes_key)
                tl.store(p_after + decays_of + place * VALUE_HEADS + head, since, mask=m_kept & is_first)
            if after != before:
                if end == base_of_end:
                    b_state = _fold(b_state, b_keys, b_values, b_decays, since, CHUNK, CHUNK)
                tl.store(p_after + o_matrix, b_state, mask=m_matrix)


@triton.jit
def _piece_gates(p_gates, head, bias, rate, o_token, m, GATE_WIDTH: tl.constexpr, DECAYS_AT: tl.constexpr):
    """Of the tokens of a piece their steps, and the logarithm of decay since it began."""
    b_gate = tl.load(p_gates + o_token * GATE_WIDTH + DECAYS_AT + head, mask=m, other=0.0).to(tl.float32)
    b_steps = tl.where(m, _softplus(b_gate + bias), 0.0)
    return b_steps, tl.cumsum(rate * b_steps, axis=0)


@triton.jit
def _normed(b, SCALE: tl.constexpr):
    return b * (tl.rsqrt(tl.sum(b * b, axis=1) + 1e-6) * SCALE)[:, None]


@triton.jit(do_not_specialize=["tokens"])
def _correct_pieces(
    p_inputs,
    p_gates,
    p_table,
    p_readers,
    p_values,
    p_rates,
    p_bias,
    tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    KEYS_AT: tl.constexpr,
    VALUES_AT: tl.constexpr,
    DECAYS_AT: tl.constexpr,
    INPUT_WIDTH: tl.constexpr,
    GATE_WIDTH: tl.constexpr,
    DOUBLES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
    PIECE: tl.constexpr,
    IS_EXACT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """With S the state before a piece, what its tokens add is values - readers · S: readers and values [N, Hv, ·] are
    the inverse of I + A, A[i, j] = beta_i k_i·k_j decay(i, j) below the diagonal, times beta k decay and beta v."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    PRECISION: tl.constexpr = "tf32x3" if IS_EXACT else "tf32"
    head = tl.program_id(1)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    bias = tl.load(p_bias + head)
    rate = tl.load(p_rates + head)
    o = tl.arange(0, PIECE)
    o_k = tl.arange(0, BLOCK_K)
    o_v = tl.arange(0, BLOCK_ALL)
    is_below = o[:, None] > o[None, :]
    is_block = o[:, None] // 16 == o[None, :] // 16
    piece = tl.program_id(0)
    span = tl.load(p_table + piece * FIELDS + in_table("PIECE_SPAN")) - 1
    while span >= 0:
        p_span = p_table + span * FIELDS
        position = tl.load(p_span + in_table("POSITION"))
        end = position + tl.load(p_span + in_table("COUNT"))
        o_here = tl.load(p_table + piece * FIELDS + in_table("PIECE")) + o
        m = (o_here >= position) & (o_here < end - end % CHUNK)
        o_token = tl.load(p_span + in_table("FIRST")) + o_here - position
        m_k = m[:, None] & (o_k < KEY_DIM)[None, :]
        m_v = m[:, None] & (o_v < VALUE_DIM)[None, :]
        p_key = p_inputs + o_token[:, None] * INPUT_WIDTH + KEYS_AT + key_head * KEY_DIM + o_k[None, :]
        b_keys = _normed(tl.load(p_key, mask=m_k, other=0.0).to(tl.float32), 1.0)
        _, b_decays = _piece_gates(p_gates, head, bias, rate, o_token, m, GATE_WIDTH, DECAYS_AT)
        b_betas = _sigmoid(tl.load(p_gates + o_token * GATE_WIDTH + head, mask=m, other=0.0).to(tl.float32))
        if DOUBLES:
            b_betas *= 2.0
        b_since = tl.exp(tl.where(is_below, b_decays[:, None] - b_decays[None, :], 0.0))
        b_alike = tl.dot(b_keys, tl.trans(b_keys), input_precision=PRECISION)
        b_alike = tl.where(is_below, b_alike * b_betas[:, None] * b_since, 0.0)
        # The inverses of blocks of 16 on the diagonal, a row of each at a time: no block has numbers beside it.
        b_blocks = tl.where(is_block, b_alike, 0.0)
        b_inverse = tl.where(o[:, None] == o[None, :], 1.0, 0.0)
        for row in range(1, 16):
            is_row = is_block & (o[:, None] % 16 == row)
            b_row = tl.sum(tl.where(is_row, b_blocks, 0.0), axis=0)
            b_known = tl.sum(b_row[:, None] * b_inverse, axis=0)
            b_inverse = tl.where(is_row, b_inverse - b_known[None, :], b_inverse)
        # With N the blocks below them: (I + A)⁻¹ = (I + M)⁻¹ D, M = D N, whose fourth power is 0.
        b_step = tl.dot(b_inverse, tl.where(is_block, 0.0, b_alike), input_precision=PRECISION)
        b_twice = tl.dot(b_step, b_step, input_precision=PRECISION)
        b_others = b_inverse - tl.dot(b_step, b_inverse, input_precision=PRECISION)
        b_inverse = b_others + tl.dot(b_twice, b_others, input_precision=PRECISION)
        b_readers = tl.dot(b_inverse, b_keys * (b_betas * tl.exp(b_decays))[:, None], input_precision=PRECISION)
        p_reader = p_readers + (o_token[:, None] * VALUE_HEADS + head) * KEY_DIM + o_k[None, :]
        tl.store(p_reader, b_readers.to(p_readers.dtype.element_ty), mask=m_k)
        p_value = p_inputs + o_token[:, None] * INPUT_WIDTH + VALUES_AT + head * VALUE_DIM + o_v[None, :]
        b_values = tl.load(p_value, mask=m_v, other=0.0).to(tl.float32)
        b_added = tl.dot(b_inverse, b_values * b_betas[:, None], input_precision=PRECISION)
        p_added = p_values + (o_token[:, None] * VALUE_HEADS + head) * VALUE_DIM + o_v[None, :]
        tl.store(p_added, b_added.to(p_values.dtype.element_ty), mask=m_v)
        piece += tl.num_programs(0)
        p_next = p_table + piece * FIELDS + in_table("PIECE_SPAN")
        span = tl.load(p_next, mask=piece < tokens, other=0) - 1


@triton.jit(do_not_specialize=["offset"])
def _run_pieces(
    p_inputs,
    p_gates,
    p_table,
    p_readers,
    p_values,
    p_out,
    p_rates,
    p_bias,
    p_skips,
    offset,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
    FIELDS: tl.constexpr,
    QUERIES_AT: tl.constexpr,
    KEYS_AT: tl.constexpr,
    VALUES_AT: tl.constexpr,
    DECAYS_AT: tl.constexpr,
    INPUT_WIDTH: tl.constexpr,
    GATE_WIDTH: tl.constexpr,
    CORRECTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PIECE: tl.constexpr,
    IS_EXACT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """From piece to piece of the spans with a run of their own, and the state behind their last whole chunk."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    PRECISION: tl.constexpr = "tf32x3" if IS_EXACT else "tf32"
    head = tl.program_id(1)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    o = tl.arange(0, PIECE)
    o_k = tl.arange(0, BLOCK_K)
    m_k = o_k < KEY_DIM
    o_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_v = o_v < VALUE_DIM
    o_matrix = offset + head * KEY_DIM * VALUE_DIM + o_k[:, None] * VALUE_DIM + o_v[None, :]
    m_matrix = m_k[:, None] & m_v[None, :]
    bias = tl.load(p_bias + head)
    rate = tl.load(p_rates + head)
    keys_of = offset + VALUE_HEADS * KEY_DIM * VALUE_DIM
    values_of = keys_of + ROOM * KEY_HEADS * KEY_DIM
    decays_of = values_of + ROOM * VALUE_HEADS * VALUE_DIM
    spans = tl.load(p_table + in_table("SPANS")).to(tl.int32)
    for span in range(tl.program_id(0), spans, tl.num_programs(0)):
        p_span = p_table + span * FIELDS
        after = tl.load(p_span + in_table("AFTER"))
        if after != 0:
            p_before = tl.load(p_span + in_table("BEFORE")).to(tl.pointer_type(tl.float32))
            first = tl.load(p_span + in_table("FIRST"))
            position = tl.load(p_span + in_table("POSITION"))
            end = position + tl.load(p_span + in_table("COUNT"))
            end -= end % CHUNK
            held = position % CHUNK
            b_state = tl.load(p_before + o_matrix, mask=m_matrix, other=0.0)
            b_old_keys, b_old_values, b_old = _entries(
                p_before + keys_of, p_before + values_of, p_before + decays_of, held, head, o_k, m_k, o_v, m_v,
                KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
            )  # fmt: skip
            last = tl.sum(tl.where(tl.arange(0, 16) == held - 1, b_old, 0.0), axis=0)
            b_state = _fold(b_state, b_old_keys, b_old_values, b_old, last, held, CHUNK)
            for begin in range(position - position % PIECE, end, PIECE):
                o_here = begin + o
                m = (o_here >= position) & (o_here < end)
                o_token = first + o_here - position
                m_tile = m[:, None] & m_k[None, :]
                p_token = p_inputs + o_token[:, None] * INPUT_WIDTH
                p_key = p_token + KEYS_AT + key_head * KEY_DIM + o_k[None, :]
                p_query = p_token + QUERIES_AT + key_head * KEY_DIM + o_k[None, :]
                b_keys = tl.load(p_key, mask=m_tile, other=0.0).to(tl.float32)
                b_queries = tl.load(p_query, mask=m_tile, other=0.0).to(tl.float32)
                b_steps, b_decays = _piece_gates(p_gates, head, bias, rate, o_token, m, GATE_WIDTH, DECAYS_AT)
                m_value = m[:, None] & m_v[None, :]
                if CORRECTS:
                    b_keys = _normed(b_keys, 1.0)
                    b_queries = _normed(b_queries, KEY_DIM**-0.5)
                    p_reader = p_readers + (o_token[:, None] * VALUE_HEADS + head) * KEY_DIM + o_k[None, :]
                    b_readers = tl.load(p_reader, mask=m_tile, other=0.0).to(tl.float32)
                    p_value = p_values + (o_token[:, None] * VALUE_HEADS + head) * VALUE_DIM + o_v[None, :]
                    b_values = tl.load(p_value, mask=m_value, other=0.0).to(tl.float32)
                    b_added = b_values - tl.dot(b_readers, b_state, input_precision=PRECISION)
                else:
                    p_value = p_token + VALUES_AT + head * VALUE_DIM + o_v[None, :]
                    b_values = tl.load(p_value, mask=m_value, other=0.0).to(tl.float32)
                    b_added = b_values * b_steps[:, None]
                is_seen = o[:, None] >= o[None, :]
                b_since = tl.exp(tl.where(is_seen, b_decays[:, None] - b_decays[None, :], 0.0))
                b_scores = tl.dot(b_queries, tl.trans(b_keys), input_precision=PRECISION)
                b_scores = tl.where(is_seen, b_scores * b_since, 0.0)
                b_found = tl.dot(b_queries * tl.exp(b_decays)[:, None], b_state, input_precision=PRECISION)
                b_found = tl.dot(b_scores, b_added, acc=b_found, input_precision=PRECISION)
                if not CORRECTS:
                    b_found += tl.load(p_skips + head) * b_values
                p_found = p_out + (o_token[:, None] * VALUE_HEADS + head) * VALUE_DIM + o_v[None, :]
                tl.store(p_found, b_found.to(p_out.dtype.element_ty), mask=m_value)
                # Behind the last token decays stay as they are.
                last = tl.sum(tl.where(o == PIECE - 1, b_decays, 0.0), axis=0)
                b_left = b_keys * tl.exp(last - b_decays)[:, None]
                b_state = tl.dot(tl.trans(b_left), b_added, acc=b_state * tl.exp(last), input_precision=PRECISION)
            tl.store(after.to(tl.pointer_type(tl.float32)) + o_matrix, b_state, mask=m_matrix)


@triton.jit
def _fold_chunks(
    p_memory,
    p_offsets,
    folds,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Of each layer: the first `folds` chunks of the open entries into the state."""
    offset = tl.load(p_offsets + tl.program_id(0))
    head = tl.program_id(1)
    o_k = tl.arange(0, BLOCK_K)
    m_k = o_k < KEY_DIM
    o_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_v = o_v < VALUE_DIM
    p_matrix = p_memory + offset + head * KEY_DIM * VALUE_DIM + o_k[:, None] * VALUE_DIM + o_v[None, :]
    p_keys = p_memory + offset + VALUE_HEADS * KEY_DIM * VALUE_DIM
    p_values = p_keys + ROOM * KEY_HEADS * KEY_DIM
    p_decays = p_values + ROOM * VALUE_HEADS * VALUE_DIM
    b_state = tl.load(p_matrix, mask=m_k[:, None] & m_v[None, :], other=0.0)
    for fold in range(folds):
        row = fold * CHUNK
        b_keys, b_values, b_decays = _entries(
            p_keys + row * KEY_HEADS * KEY_DIM, p_values + row * VALUE_HEADS * VALUE_DIM, p_decays + row * VALUE_HEADS,
            CHUNK, head, o_k, m_k, o_v, m_v, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
        )  # fmt: skip
        last = tl.sum(tl.where(tl.arange(0, 16) == CHUNK - 1, b_decays, 0.0), axis=0)
        b_state = _fold(b_state, b_keys, b_values, b_decays, last, CHUNK, CHUNK)
    tl.store(p_matrix, b_state, mask=m_k[:, None] & m_v[None, :])


@triton.jit
def _move_entries(
    p_memory,
    p_offsets,
    gone,
    entries,
    end,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROOM: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Of each layer: of `end` entries, those from `gone` to `entries` to the front, and zeros behind them."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    # Where programs of values, of decays and of inputs of the convolution begin.
    VALUE_PART: tl.constexpr = (KEYS + BLOCK - 1) // BLOCK
    DECAY_PART: tl.constexpr = VALUE_PART + (VALUES + BLOCK - 1) // BLOCK
    INPUT_PART: tl.constexpr = DECAY_PART + (VALUE_HEADS + BLOCK - 1) // BLOCK
    p_rows = p_memory + tl.load(p_offsets + tl.program_id(0)) + VALUE_HEADS * KEY_DIM * VALUE_DIM
    part = tl.program_id(1)
    is_value = part >= VALUE_PART
    is_decay = part >= DECAY_PART
    is_input = part >= INPUT_PART
    width = tl.where(is_input, CHANNELS, tl.where(is_decay, VALUE_HEADS, tl.where(is_value, VALUES, KEYS)))
    before = ROOM * tl.where(is_input, KEYS + VALUES + VALUE_HEADS, tl.where(is_decay, KEYS + VALUES, is_value * KEYS))
    own = part - tl.where(is_input, INPUT_PART, tl.where(is_decay, DECAY_PART, is_value * VALUE_PART))
    more = tl.where(is_input, TAPS - 1, 0)
    o_row = tl.arange(0, ROWS)[:, None]
    o_column = own * BLOCK + tl.arange(0, BLOCK)[None, :]
    m_column = o_column < width
    p_tile = p_rows + before + o_row * width + o_column
    b_rows = tl.load(p_tile + gone * width, mask=m_column & (o_row < entries - gone + more), other=0.0)
    tl.debug_barrier()  # other threads write where this one reads
    tl.store(p_tile, b_rows, mask=m_column & (o_row < end + more))
