"""Scores of all tokens that queries may choose from, by their components, and attention to what is read anyway.

A chunk of tokens is rebuilt as far as its components go, on tensor cores; its keys are rotated to where they are from
the chunk's middle, all from one table; and they are multiplied with the query, which is rotated back to that middle. No
key leaves the registers.

    codes [T, R] · rows [R, D] ─▶ keys [T, D] ─ rotate ─▶ · query [D, G] ─▶ scores [T, G]

Where the model is float32 so are all products. Else factors are of float16, scaled to its range, and scores are kept in
float16, less the largest one of their group of tokens. Both are finer than the components' codes by far.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.triton.gather import attend_reads
from inference_engine.kernels.triton.index_tiles import table_of
from inference_engine.kernels.triton.line import in_line, number_of


@triton.jit
def chooses_by(p_line, SHAPE: tl.constexpr):
    """Whether a line chooses tokens by this shape of index."""
    return (tl.load(p_line + in_line("KIND")) == number_of("TokenRead")) & (tl.load(p_line + in_line("SHAPE")) == SHAPE)


@triton.jit
def choices_of(p_line, SHAPE: tl.constexpr):
    """A line's candidates are the positions [first, end), and how many of them it keeps; none if it does not choose
    tokens, or by another shape of index, which is another launch's.
    """
    sink = tl.load(p_line + in_line("SINK")).to(tl.int32)
    local = tl.load(p_line + in_line("LOCAL")).to(tl.int32)
    kept = tl.load(p_line + in_line("KEPT")).to(tl.int32)
    end = tl.where(chooses_by(p_line, SHAPE), tl.maximum(local, sink), sink)
    kept = tl.minimum(kept, end - sink)
    return sink, tl.where(kept > 0, end, sink), kept


@triton.jit
def parts_of(first, end, CHUNK: tl.constexpr, PARTS: tl.constexpr):
    """The first chunk of candidates, the one behind the last, and how many each of at most PARTS parts has."""
    first_chunk = first // CHUNK
    end_chunk = tl.where(end > first, tl.cdiv(end, CHUNK), first_chunk)
    return first_chunk, end_chunk, tl.maximum(tl.cdiv(end_chunk - first_chunk, PARTS), 1)


@triton.jit
def score(
    p_queries,
    p_keys,
    p_values,
    p_regions,
    p_scores,
    p_tops,
    p_states,
    p_counts,
    p_parts,
    p_sums,
    scaling,
    softcap,
    FIELDS: tl.constexpr,
    RUN: tl.constexpr,
    CHUNK: tl.constexpr,
    TIED: tl.constexpr,
    SHAPE: tl.constexpr,
    ROOM: tl.constexpr,
    RANK: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PARTS: tl.constexpr,
    NEAR: tl.constexpr,
    HELD: tl.constexpr,
    BUCKETS: tl.constexpr,
    SERVES_ALL: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_S: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    CHAINED: tl.constexpr,
):
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    query = tl.program_id(2).to(tl.int64)
    row = query * heads + head
    p_line = p_regions + query * FIELDS
    number = tl.program_id(0)
    if number < NEAR:
        if CHAINED:
            gdc_wait()
            gdc_launch_dependents()
        if number == 0:
            tl.store(p_counts + row * BUCKETS + tl.arange(0, BUCKETS), tl.zeros((BUCKETS,), tl.int32))
        attend_reads(
            p_queries,
            p_keys,
            p_values,
            p_regions,
            p_counts,  # a list, of which nothing is read
            p_parts,
            p_sums,
            scaling,
            softcap,
            number,
            FIELDS,
            0,
            NEAR,
            HELD,
            SERVES_ALL,
            GROUP,
            D,
            ROW,
            HAS_CAP,
            BLOCK_G,
            BLOCK_D,
            BLOCK_S,
            False,
            p_counts,  # nor of what is off the device
            False,
        )
    else:
        _score_part(
            p_queries + row * GROUP * D,
            p_line,
            p_scores + row * ROOM * G,
            p_tops + row * (ROOM // TIED) * G,
            p_states + (row * PARTS + number - NEAR) * 2 * G,
            head,
            heads,
            number - NEAR,
            scaling,
            softcap,
            RUN,
            CHUNK,
            TIED,
            SHAPE,
            RANK,
            BITS,
            WORDS,
            GROUP,
            D,
            PARTS,
            HAS_CAP,
            G,
            H,
            R,
            CHAINED,
        )


@triton.jit
def _words(
    p_even,
    p_odd,
    chunk,
    last_tile,
    head,
    heads,
    RUN: tl.constexpr,
    CHUNK: tl.constexpr,
    RANK: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    R: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """The two words that each window of AT_ONCE codes of a chunk's tokens is in, [CHUNK * R / AT_ONCE] each, and where
    it begins in the first; of tiles behind the last, any.
    """
    TILE: tl.constexpr = 32 * RUN
    WINDOWS: tl.constexpr = R // AT_ONCE
    o_i = tl.arange(0, CHUNK * WINDOWS)
    o_t = o_i // WINDOWS
    chunk = chunk.to(tl.uint32)
    if TILE >= CHUNK:
        tile = tl.minimum(chunk // (TILE // CHUNK), last_tile.to(tl.uint32))
        o_in = chunk % (TILE // CHUNK) * CHUNK + o_t.to(tl.uint32)
    else:
        tile = tl.minimum(chunk * (CHUNK // TILE) + (o_t // TILE).to(tl.uint32), last_tile.to(tl.uint32))
        o_in = (o_t % TILE).to(tl.uint32)
    # Of each two tiles one is in the half that lies with keys, the other in the one that lies with values.
    p_words = tl.where(tile % 2 == 1, p_odd, p_even) + ((tile // 2).to(tl.int64) * heads + head) * (WORDS * 16)
    o_run = o_in // RUN
    is_first = o_run < 16
    o_lane = tl.where(is_first, 15 - o_run, o_run - 16)
    o_vector = 2 * (o_in % RUN) + is_first.to(tl.uint32)
    o_bit = o_vector * (RANK * BITS) + (o_i % WINDOWS * (AT_ONCE * BITS)).to(tl.uint32)
    # Behind the last word there is no code, and none of the string goes on.
    o_word = tl.minimum(o_bit >> 5, WORDS - 1) * 16 + o_lane
    o_next = tl.minimum((o_bit >> 5) + 1, WORDS - 1) * 16 + o_lane
    return tl.load(p_words + o_word), tl.load(p_words + o_next), o_bit & 31


@triton.jit
def _codes(
    b_word,
    b_next,
    b_shift,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    R: tl.constexpr,
    AT_ONCE: tl.constexpr,
    IS_EXACT: tl.constexpr,
):
    """Codes [CHUNK, R] of a chunk's tokens; components behind the last are any."""
    b_codes = b_word.to(tl.uint32, bitcast=True) >> b_shift
    b_codes = b_codes | ((b_next.to(tl.uint32, bitcast=True) << (31 - b_shift)) << 1)
    # A window stays with its thread: its later half is joined to it, then of both halves theirs.
    if AT_ONCE == 8:
        b_codes = tl.join(b_codes, b_codes >> (4 * BITS))
    b_codes = tl.join(b_codes, b_codes >> (2 * BITS))
    b_codes = tl.join(b_codes, b_codes >> BITS)
    b_codes = tl.reshape(b_codes, (CHUNK, R)) & ((1 << BITS) - 1)
    if IS_EXACT:
        b_found = b_codes.to(tl.float32)
    else:
        # A small whole number is the end of the significand of 1024 and it: to convert it would take longer.
        b_found = (b_codes | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True) - 1024.0
    return b_found


@triton.jit
def _capped(b_scores, softcap):
    b_power = tl.exp(-2.0 * tl.abs(b_scores / softcap))
    b_tanh = (1.0 - b_power) / (1.0 + b_power)
    return softcap * tl.where(b_scores < 0, -b_tanh, b_tanh)


@triton.jit
def _score_part(
    p_query,
    p_line,
    p_scores,
    p_tops,
    p_state,
    head,
    heads,
    part,
    scaling,
    softcap,
    RUN: tl.constexpr,
    CHUNK: tl.constexpr,
    TIED: tl.constexpr,
    SHAPE: tl.constexpr,
    RANK: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The scores of a part's chunks, and of the part their largest and the sum of what is above it."""
    IS_EXACT: tl.constexpr = p_scores.dtype.element_ty == tl.float32
    FACTOR: tl.constexpr = tl.float32 if IS_EXACT else tl.float16
    PRECISION: tl.constexpr = "ieee" if IS_EXACT else "tf32"
    # So many codes lie in a window of 32 bits, wherever it begins in a word.
    AT_ONCE: tl.constexpr = 8 if BITS <= 4 else 4
    first, end, _ = choices_of(p_line, SHAPE)
    first_chunk, end_chunk, each = parts_of(first, end, CHUNK, PARTS)
    chunk_begin = first_chunk + part * each
    chunk_end = tl.minimum(chunk_begin + each, end_chunk)
    if chunk_begin < chunk_end:
        p_index = tl.load(p_line + in_line("INDEX")).to(tl.pointer_type(tl.int64))
        p_even = tl.load(p_index).to(tl.pointer_type(tl.int32))
        p_odd = tl.load(p_index + 1).to(tl.pointer_type(tl.int32))
        p_rows = table_of(p_index, 2) + head * 2 * (R + 1) * H
        scale = tl.load(table_of(p_index, 3) + head)
        p_middles = table_of(p_index, 4)
        p_runs = table_of(p_index, 5)

        # The pairs of channels that are rotated together: those of a rotation come first.
        turned = tl.load(p_index + 9).to(tl.int32)
        o_f = tl.arange(0, H)
        o_g = tl.arange(0, G)
        o_t = tl.arange(0, CHUNK)
        o_j = tl.arange(0, R)
        # One product makes both channels of all pairs.
        o_h = tl.arange(0, 2 * H)
        b_rows = tl.load(p_rows + (o_h // H * ((R + 1) * H) + o_h % H)[None, :] + o_j[:, None] * H).to(FACTOR)
        b_least = tl.load(p_rows + o_h // H * ((R + 1) * H) + o_h % H + R * H).to(FACTOR)
        o_turn = o_t[:, None] * (2 * H) + o_f[None, :]
        p_turns = p_runs + o_turn
        if not IS_EXACT:
            p_turns = tl.load(p_index + 11).to(tl.pointer_type(tl.float16)) + o_turn
        b_cosines = (tl.load(p_turns).to(tl.float32) + 0.0).to(FACTOR)
        b_sines = (tl.load(p_turns + H).to(tl.float32) + 0.0).to(FACTOR)
        b_added = b_least[None, :]
        last_tile = end // (32 * RUN) - 1  # what is behind it is no candidate
        # Each place of a chunk has a sum of its own, so that chunks need no sums over places.
        b_top = tl.full((CHUNK // TIED, 1, G), float("-inf"), tl.float32)
        b_sum = tl.zeros((CHUNK // TIED, TIED, G), tl.float32)
        b_word, b_next, b_shift = _words(
            p_even, p_odd, chunk_begin, last_tile, head, heads, RUN, CHUNK, RANK, BITS, WORDS, R, AT_ONCE
        )
        # Every query head loads them for itself, so that a thread loads neighbours.
        o_cos = tl.zeros((G, 1), tl.int32) + o_f[None, :]
        b_cos = tl.load(p_middles + chunk_begin * (2 * H) + o_cos)
        b_sin = tl.load(p_middles + chunk_begin * (2 * H) + H + o_cos)
        # All so far is from before the step, and none of it waits for the kernel that makes the queries.
        if CHAINED:
            gdc_wait()
            gdc_launch_dependents()
        o_a = tl.where(o_f < turned, o_f, o_f + turned)
        o_b = tl.where(o_f < turned, o_f + turned, o_f + D // 2)
        m_q = (o_g < GROUP)[:, None] & (o_f < D // 2)[None, :]
        b_a = tl.load(p_query + o_g[:, None] * D + o_a[None, :], mask=m_q, other=0.0).to(tl.float32)
        b_b = tl.load(p_query + o_g[:, None] * D + o_b[None, :], mask=m_q, other=0.0).to(tl.float32)
        b_size = tl.maximum(tl.max(tl.abs(b_a), axis=1), tl.max(tl.abs(b_b), axis=1))
        b_size = tl.where(b_size > 0, b_size, 1.0)
        b_a = b_a / b_size[:, None]
        b_b = b_b / b_size[:, None]
        b_scale = b_size * scale * scaling
        if not HAS_CAP:
            b_scale *= 1.4426950408889634  # scores are powers of two
        for chunk in range(chunk_begin, chunk_end):
            b_codes = _codes(b_word, b_next, b_shift, CHUNK, BITS, R, AT_ONCE, IS_EXACT)
            b_first = (b_a * b_cos + b_b * b_sin).to(FACTOR)
            b_second = (b_b * b_cos - b_a * b_sin).to(FACTOR)
            # What the next chunk needs is under way while this one is computed.
            following = tl.minimum(chunk + 1, chunk_end - 1)
            b_word, b_next, b_shift = _words(
                p_even, p_odd, following, last_tile, head, heads, RUN, CHUNK, RANK, BITS, WORDS, R, AT_ONCE
            )
            b_cos = tl.load(p_middles + following * (2 * H) + o_cos)
            b_sin = tl.load(p_middles + following * (2 * H) + H + o_cos)
            b_keys = tl.dot(b_codes, b_rows, input_precision=PRECISION, out_dtype=FACTOR) + b_added
            b_keys_a, b_keys_b = tl.split(tl.permute(tl.reshape(b_keys, (CHUNK, 2, H)), (0, 2, 1)))
            b_turned_a = b_keys_a * b_cosines - b_keys_b * b_sines
            b_turned_b = b_keys_b * b_cosines + b_keys_a * b_sines
            b_scores = tl.dot(b_turned_a, tl.trans(b_first), input_precision=PRECISION)
            b_scores += tl.dot(b_turned_b, tl.trans(b_second), input_precision=PRECISION)
            b_scores *= b_scale[None, :]
            if HAS_CAP:
                b_scores = _capped(b_scores, softcap) * 1.4426950408889634
            o_s = chunk * CHUNK + o_t
            b_scores = tl.where(((o_s >= first) & (o_s < end))[:, None], b_scores, float("-inf"))
            b_tied = tl.reshape(b_scores, (CHUNK // TIED, TIED, G))
            b_tops = tl.max(b_tied, axis=1, keep_dims=True)
            b_safe = tl.where(b_tops == float("-inf"), 0.0, b_tops)
            b_less = b_tied - b_safe
            tl.store(
                p_scores + chunk * (CHUNK * G) + o_t[:, None] * G + o_g[None, :],
                tl.reshape(b_less, (CHUNK, G)).to(p_scores.dtype.element_ty),
            )
            # The first of each group stores its largest: so no thread waits for those of other warps.
            o_top = chunk * (CHUNK // TIED) + o_t // TIED
            b_first_of = tl.reshape(tl.broadcast_to(b_safe, (CHUNK // TIED, TIED, G)), (CHUNK, G))
            tl.store(p_tops + o_top[:, None] * G + o_g[None, :], b_first_of, mask=(o_t % TIED == 0)[:, None])
            b_new = tl.maximum(b_top, b_tops)
            b_new_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_sum = b_sum * tl.exp2(b_top - b_new_safe) + tl.exp2(b_tied - b_new_safe)
            b_top = b_new
        b_top = tl.reshape(b_top, (CHUNK // TIED, G))
        b_best = tl.max(b_top, axis=0)
        b_safe = tl.where(b_best == float("-inf"), 0.0, b_best)
        b_all = tl.sum(b_sum, axis=1) * tl.exp2(b_top - b_safe[None, :])
        tl.store(p_state + o_g, b_best)
        tl.store(p_state + G + o_g, tl.sum(b_all, axis=0))
    elif CHAINED:
        gdc_wait()
        gdc_launch_dependents()
