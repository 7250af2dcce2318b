"""`kernels/ragged_attention.py` in Metal, for few queries: over the pool where it lies and the step's own entries.

    queries [N, Hq, D] · entries [R, 2 · D], the pool's rows: key and value · new_keys, new_values [N, Hkv, D]
    lines [M, LINE]

A threadgroup serves one query, query heads that share a KV head, and one part of the slots that the query reads. Its
simdgroups take slot after slot by turns; their 32 lanes share the numbers of a head. Each keeps a softmax of its own,
and these are merged in threadgroup memory, those of several parts by MLX behind the kernel (Flash-Decoding: Dao et al.,
2023). Sums are float32.

A step does not write the pool while it runs. So what lies in a slot whose position is `BEFORE` or later is not read:
that entry is one of the step's own. Queries read all that they see: those of another record are not served here.

No Mac has compiled this yet. `kernels=metal` asks for it, and the tests run its text on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from inference_engine.kernels import reads as plain
from inference_engine.kernels.reads import COUNT, FLOOR, RING, SINK, SINK_FLOOR, UPTO

LINE = plain.FIELDS + 3
# Behind what the plan has: the position of the session's first new entry, that entry's place in new_keys, and the
# query's in queries.
BEFORE, FIRST, ROW = range(plain.FIELDS, LINE)

FEW_QUERIES = 8  # of a session; of more, each reads all entries anew here, and products of matrices are faster
_PART = 512  # slots that a threadgroup reads at most
_SIMDGROUPS = 8  # of a threadgroup
_LANES = 32  # of a simdgroup, on every GPU of Apple's
_MOST_NUMBERS = 32  # of queries that a lane keeps in registers, and as many sums

_NAMES = ("START", "HEAD_SLOTS", "COUNT", "SINK", "RING", "LAST", "UPTO", "FLOOR", "SINK_FLOOR", "BASE")
_PLACES = {name: getattr(plain, name) for name in (*_NAMES, "PREFIX_START", "PREFIX_HEAD_SLOTS")}
_CONSTANTS = {
    **_PLACES,
    "BEFORE": BEFORE,
    "FIRST": FIRST,
    "ROW": ROW,
    "LINE": LINE,
    "PART": _PART,
    "SIMDGROUPS": _SIMDGROUPS,
    "LANES": _LANES,
}

INPUTS = ("queries", "entries", "new_keys", "new_values", "lines", "factors")
OUTPUTS = ("out", "tops", "totals")

# O: the type of `out`. D, GROUP, KV_HEADS: as in a layer's geometry. HEADS: query heads of a threadgroup.
_SOURCE = """
    constexpr int EACH = (D + LANES - 1) / LANES;
    constexpr int QUERY_HEADS = GROUP * KV_HEADS;
    constexpr int BLOCKS = QUERY_HEADS / HEADS;
    constexpr float LOWEST = -3.402823e38f;
    const int lane = int(thread_index_in_simdgroup);
    const int simdgroup_number = int(simdgroup_index_in_threadgroup);
    const int asked = int(threadgroup_position_in_grid.y) / BLOCKS;
    const int first_head = (int(threadgroup_position_in_grid.y) % BLOCKS) * HEADS;
    const int kv_head = first_head / GROUP;
    const int part = int(threadgroup_position_in_grid.z);
    const int parts = int(threadgroups_per_grid.z);

    // Slots that are read: of the sink, then of the rest.
    const int64_t line = int64_t(asked) * LINE;
    const int count = int(lines[line + COUNT]);
    const int sink = int(lines[line + SINK]);
    const int ring = int(lines[line + RING]);
    const int last = int(lines[line + LAST]);
    const int upto = int(lines[line + UPTO]);
    const int lowest = metal::max(int(lines[line + FLOOR]), ring != 0 ? sink : 0);
    const int sink_end = metal::min(metal::min(sink, count), upto + 1);
    const int sink_first = metal::min(int(lines[line + SINK_FLOOR]), sink_end);
    const int rest_first = ring != 0 ? sink : metal::max(sink, lowest);
    const int rest_end = ring != 0 ? count : metal::min(count, upto + 1);
    const int in_sink = sink_end - sink_first;
    const int readable = in_sink + metal::max(rest_end - rest_first, 0);
    const int end = metal::min(readable, (part + 1) * PART);

    // Vectors of slot 0 of this head, were it there.
    const int base = int(lines[line + BASE]);
    const int64_t own = lines[line + START] + kv_head * lines[line + HEAD_SLOTS] - base;
    const int64_t prefix = lines[line + PREFIX_START] + kv_head * lines[line + PREFIX_HEAD_SLOTS];
    const int before = int(lines[line + BEFORE]);
    const int64_t first_new = lines[line + FIRST] - before;

    float q[HEADS][EACH];
    float sums[HEADS][EACH];
    float best[HEADS];
    float total[HEADS];
    for (int head = 0; head < HEADS; head++) {
        const int64_t query = (lines[line + ROW] * QUERY_HEADS + first_head + head) * D;
        for (int each = 0; each < EACH; each++) {
            const int dim = lane + each * LANES;
            q[head][each] = dim < D ? float(queries[query + dim]) * factors[0] : 0.0f;
            sums[head][each] = 0.0f;
        }
        best[head] = LOWEST;
        total[head] = 0.0f;
    }

    // All lanes of a simdgroup take the same way.
    for (int index = part * PART + simdgroup_number; index < end; index += SIMDGROUPS) {
        const int slot = index < in_sink ? sink_first + index : rest_first + index - in_sink;
        int position = slot;
        if (slot >= sink) {
            if (ring != 0) {
                const int behind = (last - slot) % ring;
                position = last - (behind < 0 ? behind + ring : behind);
            }
            if (position > upto || position < lowest) {
                continue;
            }
        }
        const bool is_new = position >= before;
        const int64_t new_at = ((first_new + position) * KV_HEADS + kv_head) * D;
        const int64_t entry_at = ((slot < base ? prefix : own) + slot) * 2 * D;
        float k[EACH];
        float v[EACH];
        for (int each = 0; each < EACH; each++) {
            const int dim = lane + each * LANES;
            k[each] = 0.0f;
            v[each] = 0.0f;
            if (dim < D) {
                k[each] = is_new ? float(new_keys[new_at + dim]) : float(entries[entry_at + dim]);
                v[each] = is_new ? float(new_values[new_at + dim]) : float(entries[entry_at + D + dim]);
            }
        }
        for (int head = 0; head < HEADS; head++) {
            float score = 0.0f;
            for (int each = 0; each < EACH; each++) {
                score += q[head][each] * k[each];
            }
            score = metal::simd_sum(score);
            if (SOFTCAP) {
                score = metal::tanh(score / factors[1]) * factors[1];
            }
            const float top = metal::max(best[head], score);
            const float kept = metal::exp(best[head] - top);
            const float share = metal::exp(score - top);
            best[head] = top;
            total[head] = total[head] * kept + share;
            for (int each = 0; each < EACH; each++) {
                sums[head][each] = sums[head][each] * kept + share * v[each];
            }
        }
    }

    // One softmax of the simdgroups', head after head.
    threadgroup float all_sums[SIMDGROUPS * D];
    threadgroup float all_tops[SIMDGROUPS];
    threadgroup float all_totals[SIMDGROUPS];
    for (int head = 0; head < HEADS; head++) {
        for (int each = 0; each < EACH; each++) {
            const int dim = lane + each * LANES;
            if (dim < D) {
                all_sums[simdgroup_number * D + dim] = sums[head][each];
            }
        }
        if (lane == 0) {
            all_tops[simdgroup_number] = best[head];
            all_totals[simdgroup_number] = total[head];
        }
        metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        float top = LOWEST;
        float found = 0.0f;
        for (int other = 0; other < SIMDGROUPS; other++) {
            top = metal::max(top, all_tops[other]);
        }
        for (int other = 0; other < SIMDGROUPS; other++) {
            found += all_totals[other] * metal::exp(all_tops[other] - top);
        }
        const int64_t place = (int64_t(asked) * QUERY_HEADS + first_head + head) * parts + part;
        for (int dim = simdgroup_number * LANES + lane; dim < D; dim += SIMDGROUPS * LANES) {
            float sum = 0.0f;
            for (int other = 0; other < SIMDGROUPS; other++) {
                sum += all_sums[other * D + dim] * metal::exp(all_tops[other] - top);
            }
            out[place * D + dim] = O(parts == 1 && found != 0.0f ? sum / found : sum);
        }
        if (simdgroup_number == 0 && lane == 0) {
            tops[place] = top;
            totals[place] = found;
        }
        // Before the next head's sums take their place.
        metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
"""


def lines_of(regions: NDArray[np.int64], sessions: Sequence[tuple[slice, int]]) -> NDArray[np.int64]:
    """[L, M, LINE] for the queries of some sessions of a step.

    regions: of its plan, [L, N, FIELDS]. sessions: which of the N are of each, and the position of the first of them.
    """
    own = [(before, rows.start, row) for rows, before in sessions for row in range(rows.start, rows.stop)]
    added = np.array(own, dtype=np.int64)
    return np.concatenate([regions[:, added[:, 2]], np.broadcast_to(added, (len(regions), *added.shape))], axis=2)


def parts_of(lines: NDArray[np.int64]) -> list[int]:
    """By layer, into how many parts its longest query is cut. lines: [L, M, LINE]."""
    count, sink, ring, upto = (lines[..., place] for place in (COUNT, SINK, RING, UPTO))
    sink_end = np.minimum(np.minimum(sink, count), upto + 1)
    in_sink = sink_end - np.minimum(lines[..., SINK_FLOOR], sink_end)
    first = np.where(ring != 0, sink, np.maximum(sink, lines[..., FLOOR]))
    end = np.where(ring != 0, count, np.minimum(count, upto + 1))
    longest = (in_sink + np.maximum(end - first, 0)).max(axis=1)
    parts: list[int] = np.maximum(1, -(-longest // _PART)).tolist()
    return parts


def attend_ragged(
    queries: mx.array,
    entries: mx.array,
    new_keys: mx.array,
    new_values: mx.array,
    lines: mx.array,
    *,
    parts: int,
    scaling: float,
    softcap: float | None = None,
) -> mx.array:
    """[M, Hq, D] in the dtype of `queries`; zeros for a query that reads nothing. parts: of `parts_of`."""
    asked, query_heads, dim = len(lines), *queries.shape[1:]
    kv_heads = new_keys.shape[1]
    group = query_heads // kv_heads
    most = max(1, _MOST_NUMBERS // -(-dim // _LANES))
    heads = max(count for count in range(1, min(group, most) + 1) if group % count == 0)
    dtype = queries.dtype if parts == 1 else mx.float32
    threads, shape = _SIMDGROUPS * _LANES, (asked, query_heads, parts)
    out, tops, totals = _kernel()(
        inputs=[queries, entries, new_keys, new_values, lines, mx.array([scaling, softcap or 0.0])],
        template=[
            ("O", dtype),
            ("D", dim),
            ("GROUP", group),
            ("KV_HEADS", kv_heads),
            ("HEADS", heads),
            ("SOFTCAP", softcap is not None),
        ],
        grid=(threads, asked * query_heads // heads, parts),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*shape, dim), shape, shape],
        output_dtypes=[dtype, mx.float32, mx.float32],
    )
    return out[:, :, 0] if parts == 1 else merged(out, tops, totals).astype(queries.dtype)


def merged(sums: mx.array, tops: mx.array, totals: mx.array) -> mx.array:
    """One softmax of several parts': sums [M, Hq, P, D], largest scores and totals [M, Hq, P] -> [M, Hq, D]."""
    weights = mx.where(totals == 0, 0, mx.exp(tops - tops.max(axis=-1, keepdims=True)))
    total = (weights * totals).sum(axis=-1, keepdims=True)
    return (weights[..., None] * sums).sum(axis=2) / mx.where(total == 0, 1, total)


@cache
def _kernel() -> Any:
    constants = "".join(f"    constexpr int {name} = {value};\n" for name, value in _CONSTANTS.items())
    return mx.fast.metal_kernel(
        name="ragged_attention",
        input_names=list(INPUTS),
        output_names=list(OUTPUTS),
        source=constants + _SOURCE,
    )
