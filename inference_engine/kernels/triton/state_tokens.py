"""Recurrent states token by token, in Triton: `state_rules.py` says when."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.triton.state_entries import entries_of, fold_chunk, in_table, sigmoid, softplus


@triton.jit(do_not_specialize=["offset"])
def convolve_tokens(
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
            b_sum *= sigmoid(b_sum)
    tl.store(p_out + token * CHANNELS + o_c, b_sum.to(p_out.dtype.element_ty), mask=m_c)


@triton.jit(do_not_specialize=["offset"])
def run_tokens(
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
    LEAST: tl.constexpr,
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
            b_keys, b_values, b_decays = entries_of(
                p_before + keys_of, p_before + values_of, p_before + decays_of, held, head, o_k, m_k, o_v, m_v,
                KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
            )  # fmt: skip
            since = tl.sum(tl.where(o_row == held - 1, b_decays, 0.0), axis=0)
            for here in range(start, end):
                row = here % CHUNK
                if (row == 0) & (here > base):
                    b_state = fold_chunk(b_state, b_keys, b_values, b_decays, since, CHUNK, CHUNK)
                    since = 0.0
                token = first + here - position
                p_token = p_inputs + token * INPUT_WIDTH
                p_gate = p_gates + token * GATE_WIDTH + head
                b_key = tl.load(p_token + KEYS_AT + key_head * KEY_DIM + o_k, mask=m_k, other=0.0).to(tl.float32)
                b_query = tl.load(p_token + QUERIES_AT + key_head * KEY_DIM + o_k, mask=m_k, other=0.0)
                b_query = b_query.to(tl.float32)
                b_value = tl.load(p_token + VALUES_AT + head * VALUE_DIM + o_v, mask=m_v, other=0.0).to(tl.float32)
                step = tl.maximum(softplus(tl.load(p_gate + DECAYS_AT).to(tl.float32) + bias), LEAST)
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
                    beta = sigmoid(tl.load(p_gate).to(tl.float32))
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
                    b_state = fold_chunk(b_state, b_keys, b_values, b_decays, since, CHUNK, CHUNK)
                tl.store(p_after + o_matrix, b_state, mask=m_matrix)
