"""Recurrent states by pieces of many tokens, all products on tensor cores: `state_rules.py` says when."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.triton.state_entries import entries_of, fold_chunk, in_table, sigmoid, softplus


@triton.jit
def _piece_gates(
    p_gates, head, bias, rate, o_token, m, GATE_WIDTH: tl.constexpr, DECAYS_AT: tl.constexpr, LEAST: tl.constexpr
):
    """Of the tokens of a piece their steps, and the logarithm of decay since it began."""
    b_gate = tl.load(p_gates + o_token * GATE_WIDTH + DECAYS_AT + head, mask=m, other=0.0).to(tl.float32)
    b_steps = tl.where(m, tl.maximum(softplus(b_gate + bias), LEAST), 0.0)
    return b_steps, tl.cumsum(rate * b_steps, axis=0)


@triton.jit
def _normed(b, SCALE: tl.constexpr):
    return b * (tl.rsqrt(tl.sum(b * b, axis=1) + 1e-6) * SCALE)[:, None]


@triton.jit(do_not_specialize=["tokens"])
def correct_pieces(
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
    LEAST: tl.constexpr,
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
        _, b_decays = _piece_gates(p_gates, head, bias, rate, o_token, m, GATE_WIDTH, DECAYS_AT, LEAST)
        b_betas = sigmoid(tl.load(p_gates + o_token * GATE_WIDTH + head, mask=m, other=0.0).to(tl.float32))
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
def run_pieces(
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
    LEAST: tl.constexpr,
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
            b_old_keys, b_old_values, b_old = entries_of(
                p_before + keys_of, p_before + values_of, p_before + decays_of, held, head, o_k, m_k, o_v, m_v,
                KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
            )  # fmt: skip
            last = tl.sum(tl.where(tl.arange(0, 16) == held - 1, b_old, 0.0), axis=0)
            b_state = fold_chunk(b_state, b_old_keys, b_old_values, b_old, last, held, CHUNK)
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
                b_steps, b_decays = _piece_gates(p_gates, head, bias, rate, o_token, m, GATE_WIDTH, DECAYS_AT, LEAST)
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
