"""What kernels of recurrent states share: their table, the entries of an open chunk, and how a chunk is folded."""

from __future__ import annotations

import triton
import triton.language as tl


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
def softplus(x):
    b_power = tl.exp(tl.minimum(x, 20.0))
    b_log = tl.where(b_power < 1e-3, b_power * (1.0 - 0.5 * b_power), tl.log(1.0 + b_power))
    return tl.where(x > 20.0, x, b_log)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def fold_chunk(b_state, b_keys, b_values, b_decays, last, count, CHUNK: tl.constexpr):
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
def entries_of(
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
