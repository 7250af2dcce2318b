"""Attention of one session's queries over runs of entries in the pool and the step's own entries, under one softmax.

    queries [T, Hq, Dk] · a part: keys [Hkv, S, Dk], values [Hkv, S, Dv] · the last part is the step's own

    joined   all keys are copied behind one another, and MLX's fused operation reads them
    apart    each part is scored where it lies, and the scores share one softmax: nothing is copied

A decode step over a long history reads it apart; a prefill computes more than it copies. The reference of both is
`kernels/ragged_attention.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import mlx.core as mx

from inference_engine.backends.mlx.reading import EntryRun, Visible
from inference_engine.kv.geometry import LayerGeometry

Part = tuple[mx.array, mx.array]  # keys and values

_FEW_QUERIES = 8


def part_of(pool: mx.array, run: EntryRun, layer: LayerGeometry) -> Part:
    """Keys [Hkv, S, Dk] and values [Hkv, S, Dv] of a run: views of the pool's rows [R, width]."""
    # Two slices and a reshape: `as_strided` counts in 32 bits.
    heads, rows, shape = layer.kv_heads, slice(run.first, run.first + run.count), layer.entry
    found = pool[run.start : run.start + heads * run.head_slots].reshape(heads, run.head_slots, -1)[:, rows]
    keys = found[..., shape.key_at : shape.key_at + shape.key]
    return keys, found[..., shape.value_at : shape.value_at + shape.value]


def attend(
    queries: mx.array,
    parts: Sequence[Part],
    visible: Visible,
    *,
    scaling: float,
    softcap: float | None,
    most_copied_bytes: int = 2**20,
) -> mx.array:
    """[T, Hq, Dv], in the dtype of `queries`. A copy of a few bytes of keys costs less than three more operations."""
    count = queries.shape[0]
    copied = sum(keys.nbytes for keys, _ in parts)
    if softcap is None and (count > _FEW_QUERIES or copied <= most_copied_bytes):
        return _joined(queries, parts, visible, scaling)
    return _apart(queries, parts, visible, scaling, softcap)


def _joined(queries: mx.array, parts: Sequence[Part], visible: Visible, scaling: float) -> mx.array:
    keys, values = (
        mx.concatenate(list(states), axis=1) if len(states) > 1 else states[0] for states in zip(*parts, strict=True)
    )
    causal = None if visible.new is None else "causal"
    mask = causal if visible.is_causal else _over_all(visible, queries.shape[0], keys.shape[1])
    out = mx.fast.scaled_dot_product_attention(
        queries.swapaxes(0, 1)[None], keys[None], values[None], scale=scaling, mask=mask
    )
    return out[0].swapaxes(0, 1)


def _apart(
    queries: mx.array, parts: Sequence[Part], visible: Visible, scaling: float, softcap: float | None
) -> mx.array:
    count, query_heads, head_dim = queries.shape
    kv_heads = parts[0][0].shape[0]
    folded = (queries * scaling).swapaxes(0, 1).reshape(kv_heads, -1, head_dim)  # [Hkv, group · T, D]
    found = [(folded @ keys.swapaxes(-1, -2)).astype(mx.float32) for keys, _ in parts]
    scores = mx.concatenate(found, axis=-1) if len(found) > 1 else found[0]
    if softcap is not None:
        scores = mx.tanh(scores / softcap) * softcap
    mask = _over_all(visible, count, scores.shape[-1])
    if mask is not None:
        by_query = scores.reshape(kv_heads, -1, count, scores.shape[-1])
        scores = mx.where(mask, by_query, -mx.inf).reshape(scores.shape)
    weights = mx.softmax(scores, axis=-1).astype(queries.dtype)
    ends = list(itertools.accumulate(keys.shape[1] for keys, _ in parts))
    shares = mx.split(weights, ends[:-1], axis=-1)
    out = functools.reduce(mx.add, (share @ values for share, (_, values) in zip(shares, parts, strict=True)))
    return out.reshape(query_heads, count, -1).swapaxes(0, 1)


def _over_all(visible: Visible, queries: int, entries: int) -> mx.array | None:
    """[T, S], over all parts; None: everything is seen."""
    if visible.kept is None and visible.new is None:
        return None
    new = mx.ones((queries, queries), dtype=mx.bool_) if visible.new is None else visible.new
    kept = mx.ones((queries, entries - queries), dtype=mx.bool_) if visible.kept is None else visible.kept
    return mx.concatenate([kept, new], axis=1)
