"""What becomes of the open entries of a session behind a step, in all of its layers at once, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from inference_engine.kernels.triton.state_entries import entries_of, fold_chunk


@triton.jit
def fold_chunks(
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
        b_keys, b_values, b_decays = entries_of(
            p_keys + row * KEY_HEADS * KEY_DIM, p_values + row * VALUE_HEADS * VALUE_DIM, p_decays + row * VALUE_HEADS,
            CHUNK, head, o_k, m_k, o_v, m_v, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
        )  # fmt: skip
        last = tl.sum(tl.where(tl.arange(0, 16) == CHUNK - 1, b_decays, 0.0), axis=0)
        b_state = fold_chunk(b_state, b_keys, b_values, b_decays, last, CHUNK, CHUNK)
    tl.store(p_matrix, b_state, mask=m_k[:, None] & m_v[None, :])


@triton.jit
def move_entries(
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
