"""Attention over the tokens that components of keys choose, and their index: `kernels/components.py` in Triton.

    score, near ─▶ scores, parts ─ weigh ─▶ weights, counts ─ list ─▶ tokens ─ read ─▶ parts ─ merge ─▶ out

    score   a chunk is some runs of tokens. Two runs at a distance d from its middle are the sum and the difference of
            an even and an odd function of d, so that a chunk is two products with a table of distances. The query,
            rotated back to the middle, is multiplied with the components first
    near    programs beside those that score attend to the sink and the window, whose log-sum-exp is in every weight
    weigh   weights are counted by their leading bits
    list    those above the bucket that the lowest weight to be chosen is in, and those in it, both ascending
    read    what is missing is chosen from that bucket; the keys and values of all are read once

How a history is cut follows from how much of it a query may choose from, and nothing is added in an order that is left
to chance: what is beside a query changes none of its bits. Lengths, addresses and choices are read on the device, so a
launch depends on the number of queries alone and can be part of a CUDA graph.

Where the model is float32 so are all products. Else those with cosines are of float16, scaled to its range, and scores
are kept in float16, less the largest one of their chunk. Both are finer than the components' codes by far.

An index is known by the address of these numbers on the device, all 64 bits wide:

    even, odd     tiles 0, 2, 4, … and 1, 3, 5, …, as `kv/parts/component_index.py` lays them out
    rows          [Hkv, 2, R + 1, H], what codes are multiplied with, then what is added to them all; by pairs of
                  channels that are rotated together, first and second of each pair; R and H are rounded up to powers
                  of two
    scales        [Hkv, 2], what rows, and the last row, were divided by
    middles       [chunks, 2, H], cosines and sines of the rotation to a chunk's middle
    distances     [2, DISTANCES, H], those of runs at these distances from there, mean over a run
    offsets       [chunk, 2, H], those of each token from there
    projection    [Hkv, 2, R, H], components divided by their steps
    means         [Hkv, 2, H]
    turned        how many pairs of channels are rotated; a number, no address
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.components import RUNS_OF_TILE, IndexShape, KeyComponents, TokenChoice
from inference_engine.kernels.ragged_attention import FIELDS
from inference_engine.kernels.triton.chained import chained
from inference_engine.kernels.triton.gather import attend_reads, reads_of, with_tile
from inference_engine.kernels.triton.topk import in_order, lowest_of, places_of

DISTANCES = 64  # of runs from the middle of what is scored at once; a multiple of 32
_PARTS = 128  # that a history is scored and listed in
_NEAR = 32  # parts of what is read anyway
_CHOSEN = 32  # parts of what was chosen
_NEAR_SLOTS, _CHOSEN_SLOTS = 64, 32  # that a program reads at once
_BUCKETS = 512
_EQUALS = 1024  # tokens of one bucket that a program holds
_SCORE_WARPS = 4
_SCORE_REGISTERS: int | None = None  # of a thread, at most
_MOST_SCRATCH = 2**29  # bytes; more queries take turns
_LEAST = 16  # rows and columns that a matrix product of Triton has at least


def chunk_tokens(shape: IndexShape) -> int:
    """Tokens that are scored by one program at a time, a few tiles."""
    return 2 * DISTANCES * shape.run


# -- tables -----------------------------------------------------------------------------------------------------------


def pairs_of(head_dim: int, turned: int) -> tuple[Tensor, Tensor]:
    """[D / 2] each: channels that are rotated together. Those that are not rotated make pairs, too."""
    half, still = turned // 2, (head_dim - turned) // 2
    first = torch.cat([torch.arange(half), turned + torch.arange(still)])
    return first, torch.cat([half + torch.arange(half), turned + still + torch.arange(still)])


class Turns(NamedTuple):
    """The rotations of one kind of key: see `middles`, `distances` and `offsets` of the module."""

    middles: Tensor
    distances: Tensor
    offsets: Tensor
    turned: int  # pairs


class Rows(NamedTuple):
    """What a layer's components are to the kernels: see `rows`, `scales`, `projection` and `means` of the module."""

    rows: Tensor
    scales: Tensor
    projection: Tensor
    means: Tensor


class TritonIndexes:
    """Implements KeyIndexes."""

    def turns(self, frequencies: Tensor, head_dim: int, shape: IndexShape, tokens: int, device: torch.device) -> Turns:
        speeds = torch.zeros(_half(head_dim), dtype=torch.float64)
        speeds[: len(frequencies)] = frequencies
        chunk = chunk_tokens(shape)
        middles = (torch.arange(-(-tokens // chunk), dtype=torch.float64) + 0.5) * chunk - 0.5
        distances = (torch.arange(DISTANCES, dtype=torch.float64) + 0.5) * shape.run
        offsets = torch.arange(chunk, dtype=torch.float64) - (chunk - 1) / 2
        in_run = torch.arange(shape.run, dtype=torch.float64) - (shape.run - 1) / 2
        # A run has the mean rotation of its positions: that of its middle, shrunk by the mean cosine of its offsets.
        shrunk = (in_run[:, None] * speeds).cos().mean(0)
        return Turns(
            middles=_turns(middles, speeds).float().to(device),
            distances=(_turns(distances, speeds) * shrunk).transpose(0, 1).contiguous().float().to(device),
            offsets=_turns(offsets, speeds).float().to(device),
            turned=len(frequencies),
        )

    def rows(self, components: KeyComponents, shape: IndexShape, turned: int, device: torch.device) -> Rows:
        heads, head_dim = components.mean.shape
        basis = components.basis[..., : shape.rank].double().cpu()
        steps = components.steps(shape).double().cpu()
        means = components.mean.double().cpu()[:, None]
        rows = (basis * steps[:, None]).mT  # [Hkv, r, D]
        # What a key of zeros as codes is: codes are counted from the middle of all levels.
        lowest = means + (0.5 - shape.levels / 2) * rows.sum(1, keepdim=True)
        scales = [part.abs().amax((1, 2)).clamp(min=1e-30) for part in (rows, lowest)]
        scaled = [part / scale[:, None, None] for part, scale in zip((rows, lowest), scales, strict=True)]
        rank, width = rank_width(shape), _half(head_dim)
        table = torch.zeros(heads, 2, rank + 1, width, dtype=torch.float64)
        projection = torch.zeros(heads, 2, rank, width, dtype=torch.float64)
        paired = torch.zeros(heads, 2, width, dtype=torch.float64)
        for place, channels in enumerate(pairs_of(head_dim, turned)):
            count = len(channels)
            table[:, place, : shape.rank, :count] = scaled[0][..., channels]
            table[:, place, rank, :count] = scaled[1][:, 0, channels]
            projection[:, place, : shape.rank, :count] = (basis / steps[:, None]).mT[..., channels]
            paired[:, place, :count] = means[:, 0, channels]
        ours = (table, torch.stack(scales, dim=1), projection, paired)
        return Rows(*(part.float().contiguous().to(device) for part in ours))

    def numbers(self, halves: Sequence[Tensor], rows: Rows, turns: Turns) -> Tensor:
        tensors = (*halves, rows.rows, rows.scales, *turns[:3], rows.projection, rows.means)
        numbers = [*(tensor.data_ptr() for tensor in tensors), turns.turned]
        return torch.tensor(numbers, dtype=torch.int64).to(halves[0].device)

    def write_tiles(
        self, keys: Tensor, table: Tensor, *, kv_heads: int, region: int, first: int, end: int, shape: IndexShape
    ) -> None:
        head_dim = keys.shape[-1]
        _write_tile[(end - first, kv_heads, len(table))](
            keys,
            table,
            first,
            region,
            RUN=shape.run,
            TILES=2 * DISTANCES // RUNS_OF_TILE,
            RANK=shape.rank,
            BITS=shape.bits,
            WORDS=shape.words,
            BLOCK_W=int(triton.next_power_of_2(shape.words)),
            LEVELS=shape.levels,
            D=head_dim,
            H=_half(head_dim),
            R=rank_width(shape),
            num_warps=4,
        )


key_indexes = TritonIndexes()


def _turns(positions: Tensor, speeds: Tensor) -> Tensor:
    """[n, 2, H], cosines and sines."""
    turns = positions[:, None] * speeds
    return torch.stack([turns.cos(), turns.sin()], dim=1)


def rank_width(shape: IndexShape) -> int:
    return max(_LEAST, int(triton.next_power_of_2(shape.rank)))


def _half(head_dim: int) -> int:
    return max(_LEAST, int(triton.next_power_of_2(head_dim // 2)))


# -- attention ---------------------------------------------------------------------------------------------------------


def attend_choosing(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    regions: Tensor,
    out: Tensor,
    *,
    kv_heads: int,
    scaling: float,
    softcap: float | None = None,
    choice: TokenChoice,
    serves_all: bool,
) -> None:
    """Fill `out` for the queries among the first `choice.rows` that choose by this shape; see `RaggedAttention`.

    serves_all: also for the other queries, all of which read all they see. Otherwise theirs stay.
    """
    rows = len(queries) if serves_all else min(choice.rows, len(queries))
    chunks = -(-choice.tokens // chunk_tokens(choice.shape))
    group = max(8, int(triton.next_power_of_2(queries.shape[1] // kv_heads)))
    each = kv_heads * chunks * chunk_tokens(choice.shape) * (group * queries.element_size() + 12)
    at_once = max(1, min(rows, _MOST_SCRATCH // each))
    for first in range(0, rows, at_once):
        some = slice(first, min(rows, first + at_once))
        chooser = Choosing(queries[some], keys, values, regions[some], kv_heads, scaling, softcap, choice, serves_all)
        chooser.score()
        chooser.weigh()
        chooser.list()
        chooser.read()
        chooser.merge(out[some])


class Choosing:
    """The stages for some queries [n, Hq, D], and what each leaves to the next.

    scores: [n, Hkv, chunks, 2 · run, DISTANCES, group], less `tops` [n, Hkv, chunks, group]; both as powers of two.
    weights: [n, Hkv, tokens], by position. above, equal: [n, Hkv, tokens], positions. found: [n, Hkv, 4], how many are
    listed above, how many of those in the bucket are chosen, how many it has, and whether these are all alike.
    """

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        regions: Tensor,
        kv_heads: int,
        scaling: float,
        softcap: float | None,
        choice: TokenChoice,
        serves_all: bool,
    ) -> None:
        count, query_heads, head_dim = queries.shape
        self.given = (queries, keys, values, regions)
        self.numbers = (scaling, 0.0 if softcap is None else softcap)
        self.grid = (kv_heads, count)
        shape, device = choice.shape, queries.device
        group = query_heads // kv_heads
        width = max(8, int(triton.next_power_of_2(group)))
        chunks = max(1, -(-choice.tokens // chunk_tokens(shape)))
        kept = torch.float32 if queries.dtype == torch.float32 else torch.float16

        def made(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((count, kv_heads, *sizes), dtype=dtype, device=device)

        tokens = chunks * chunk_tokens(shape)
        self.scores = made(chunks, 2 * shape.run, DISTANCES, width, dtype=kept)
        self.tops = made(chunks, width)
        self.states = made(_PARTS, 2, width)
        self.weights = made(tokens)
        self.counts = made(_BUCKETS, dtype=torch.int32)
        self.reached = made(_PARTS, _BUCKETS, dtype=torch.int32)
        self.above, self.equal = made(tokens, dtype=torch.int32), made(tokens, dtype=torch.int32)
        self.found = made(4, dtype=torch.int32)
        self.parts = made(group, _NEAR + _CHOSEN, head_dim)
        self.sums = made(group, _NEAR + _CHOSEN)
        self.shape, self.serves_all = shape, serves_all
        self.has_cap = softcap is not None
        self.constants = {
            "FIELDS": FIELDS,
            "RUN": shape.run,
            "M": DISTANCES,
            "SHAPE": shape.number,
            "CHUNKS": chunks,
            **chained(device),
        }
        self.rows = {
            "RANK": shape.rank,
            "BITS": shape.bits,
            "WORDS": shape.words,
            "GROUP": group,
            "D": head_dim,
            "BLOCK_D": max(_LEAST, int(triton.next_power_of_2(head_dim))),
            "BLOCK_G": max(_LEAST, int(triton.next_power_of_2(group))),
        }
        self.width, self.half = width, _half(head_dim)
        self.rank_width = rank_width(shape)

    def score(self) -> None:
        """Scores, and attention to what is read anyway."""
        rows = self.rows
        _score[(_NEAR + _PARTS, *self.grid)](
            *self.given,
            self.scores,
            self.tops,
            self.states,
            self.counts,
            self.parts,
            self.sums,
            *self.numbers,
            **rows,
            **self.constants,
            PARTS=_PARTS,
            NEAR=_NEAR,
            HELD=_NEAR + _CHOSEN,
            BUCKETS=_BUCKETS,
            SERVES_ALL=self.serves_all,
            HAS_CAP=self.has_cap,
            BLOCK_S=_NEAR_SLOTS if rows["BLOCK_D"] <= 128 else _NEAR_SLOTS // 2,
            G=self.width,
            H=self.half,
            R=self.rank_width,
            num_warps=_SCORE_WARPS * max(1, DISTANCES // 64) if self.width <= 16 else 2 * _SCORE_WARPS,
            num_stages=1,
            maxnreg=_SCORE_REGISTERS,
        )

    def weigh(self) -> None:
        _weigh[(_PARTS, *self.grid)](
            self.given[3],
            self.scores,
            self.tops,
            self.states,
            self.sums,
            self.weights,
            self.counts,
            self.reached,
            **self.constants,
            GROUP=self.rows["GROUP"],
            PARTS=_PARTS,
            NEAR=_NEAR,
            HELD=_NEAR + _CHOSEN,
            BUCKETS=_BUCKETS,
            BLOCK_S=_NEAR_SLOTS if self.rows["BLOCK_D"] <= 128 else _NEAR_SLOTS // 2,
            G=self.width,
            num_warps=4,
        )

    def list(self) -> None:
        _list[(_PARTS, *self.grid)](
            self.given[3],
            self.weights,
            self.counts,
            self.reached,
            self.above,
            self.equal,
            self.found,
            **self.constants,
            PARTS=_PARTS,
            BUCKETS=_BUCKETS,
            BLOCK=min(1024, chunk_tokens(self.shape)),
            num_warps=4,
        )

    def read(self) -> None:
        rows = self.rows
        _read[(_CHOSEN, *self.grid)](
            *self.given,
            self.weights,
            self.above,
            self.equal,
            self.found,
            self.parts,
            self.sums,
            *self.numbers,
            **self.constants,
            GROUP=rows["GROUP"],
            D=rows["D"],
            BLOCK_D=rows["BLOCK_D"],
            BLOCK_G=rows["BLOCK_G"],
            PARTS=_CHOSEN,
            FIRST=_NEAR,
            HELD=_NEAR + _CHOSEN,
            HAS_CAP=self.has_cap,
            BLOCK_S=_CHOSEN_SLOTS,
            EQUALS=_EQUALS,
            num_warps=4,
            num_stages=1,
        )

    def merge(self, out: Tensor) -> None:
        heads, count = self.grid
        group, head_dim = self.rows["GROUP"], self.rows["D"]
        block = min(64, self.rows["BLOCK_D"])
        _merge[(triton.cdiv(head_dim, block), heads * group, count)](
            self.parts,
            self.sums,
            out,
            self.given[3],
            **{name: number for name, number in self.constants.items() if name != "CHUNKS"},
            NEAR=_NEAR,
            CHOSEN=_CHOSEN,
            NEAR_SLOTS=_NEAR_SLOTS if self.rows["BLOCK_D"] <= 128 else _NEAR_SLOTS // 2,
            CHOSEN_SLOTS=_CHOSEN_SLOTS,
            SERVES_ALL=self.serves_all,
            D=head_dim,
            BLOCK_D=block,
            num_warps=4,
        )


@triton.jit
def _chooses(p_line, SHAPE: tl.constexpr):
    return (tl.load(p_line + 9) > 0) & (tl.load(p_line + 13) != 0) & (tl.load(p_line + 12) == SHAPE)


@triton.jit
def _choices(p_line, RUN: tl.constexpr, M: tl.constexpr, SHAPE: tl.constexpr):
    """A line's candidates are the positions [first, end), and how many of them it keeps; none if it does not choose
    tokens, or by another shape of index, which is another launch's.

    They lie in the chunks [first_chunk, end_chunk).
    """
    CHUNK: tl.constexpr = 2 * M * RUN
    sink = tl.load(p_line + 3).to(tl.int32)
    local = tl.load(p_line + 11).to(tl.int32)
    chooses = _chooses(p_line, SHAPE)
    kept = tl.load(p_line + 10).to(tl.int32)
    end = tl.where(chooses, tl.maximum(local, sink), sink)
    kept = tl.minimum(kept, end - sink)
    first_chunk = sink // CHUNK
    end_chunk = tl.where(kept > 0, tl.cdiv(end, CHUNK), first_chunk)
    return sink, end, kept, first_chunk, end_chunk


@triton.jit
def _chunks_of(part, first_chunk, end_chunk, PARTS: tl.constexpr):
    each = tl.cdiv(end_chunk - first_chunk, PARTS)
    first = first_chunk + part * each
    return first, tl.minimum(first + each, end_chunk), tl.cdiv(end_chunk - first_chunk, tl.maximum(each, 1))


@triton.jit
def _table(p_index, number: tl.constexpr):
    return tl.multiple_of(tl.load(p_index + number).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def _codes(
    p_tile,
    o_run,
    offset,
    group,
    RANK: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Codes [rows, AT_ONCE], the group of that number, of the token at `offset` of each run o_run of a tile.

    As the smallest numbers that there are: to convert them would take longer. Their bits stay where half a window of 32
    bits has them, so code j is worth 2 ** (−149 + bits · (j modulo so many)).
    """
    IN_WINDOW: tl.constexpr = AT_ONCE if BITS * AT_ONCE <= 32 else AT_ONCE // 2  # codes in 32 bits in a row
    p_words = p_tile + tl.where(o_run < 16, 15 - o_run, o_run - 16)
    o_v = 2 * offset + (o_run < 16).to(tl.int32)
    o_j = tl.arange(0, AT_ONCE)
    b_codes = tl.zeros((o_run.shape[0], AT_ONCE), tl.int32)
    for window in tl.static_range(AT_ONCE // IN_WINDOW):
        o_bit = (o_v * RANK + group * AT_ONCE + window * IN_WINDOW) * BITS
        o_word = o_bit >> 5
        b_shift = o_bit & 31
        # Behind the last word no code goes on.
        b_low = tl.load(p_words + tl.minimum(o_word, WORDS - 1) * 16)
        b_high = tl.load(p_words + tl.minimum(o_word + 1, WORDS - 1) * 16)
        b_low = (b_low.to(tl.uint32, bitcast=True) >> b_shift.to(tl.uint32)).to(tl.int32, bitcast=True)
        b_window = b_low | ((b_high << (31 - b_shift)) << 1)
        b_rest = b_window >> (IN_WINDOW // 2 * BITS)
        b_codes = tl.where((o_j // (IN_WINDOW // 2) == 2 * window)[None, :], b_window[:, None], b_codes)
        b_codes = tl.where((o_j // (IN_WINDOW // 2) == 2 * window + 1)[None, :], b_rest[:, None], b_codes)
    o_mask = ((1 << BITS) - 1) << ((o_j % (IN_WINDOW // 2)) * BITS)
    return (b_codes & o_mask[None, :]).to(tl.float32, bitcast=True)


@triton.jit
def _capped(b_scores, softcap):
    b_power = tl.exp(-2.0 * tl.abs(b_scores / softcap))
    b_tanh = (1.0 - b_power) / (1.0 + b_power)
    return softcap * tl.where(b_scores < 0, -b_tanh, b_tanh)


@triton.jit
def _score(
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
    M: tl.constexpr,
    SHAPE: tl.constexpr,
    CHUNKS: tl.constexpr,
    RANK: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
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
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    query = tl.program_id(2).to(tl.int64)
    row = query * heads + head
    p_line = p_regions + query * FIELDS
    number = tl.program_id(0)
    if number < NEAR:
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
            HAS_CAP,
            BLOCK_G,
            BLOCK_D,
            BLOCK_S,
            False,
        )
    else:
        _score_part(
            p_queries + row * GROUP * D,
            p_line,
            p_scores + row * CHUNKS * (2 * M * RUN) * G,
            p_tops + row * CHUNKS * G,
            p_states + (row * PARTS + number - NEAR) * 2 * G,
            head,
            heads,
            number - NEAR,
            scaling,
            softcap,
            RUN,
            M,
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
        )


@triton.jit
def _spectra(b_first, b_second, b_rows_a, b_rows_b, FACTOR: tl.constexpr):
    """What cosines and sines of distances are multiplied with, [H, n · G] each.

    b_first, b_second: of the queries [1, H, G]. b_rows_a, b_rows_b: of n components [n, H].
    """
    b_even = b_first * b_rows_a[:, :, None] + b_second * b_rows_b[:, :, None]
    b_odd = b_second * b_rows_a[:, :, None] - b_first * b_rows_b[:, :, None]
    COLUMNS: tl.constexpr = b_even.shape[0] * b_even.shape[2]
    b_even = tl.reshape(tl.permute(b_even.to(FACTOR), (1, 0, 2)), (b_even.shape[1], COLUMNS))
    b_odd = tl.reshape(tl.permute(b_odd.to(FACTOR), (1, 0, 2)), (b_odd.shape[1], COLUMNS))
    return b_even, b_odd


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
    M: tl.constexpr,
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
):
    """The scores of a part's chunks, and of the part their largest and the sum of what is above it."""
    IS_EXACT: tl.constexpr = p_scores.dtype.element_ty == tl.float32
    FACTOR: tl.constexpr = tl.float32 if IS_EXACT else tl.float16
    PRECISION: tl.constexpr = "ieee" if IS_EXACT else "tf32"
    AT_ONCE: tl.constexpr = 8  # components
    IN_HALF: tl.constexpr = 4 if BITS * AT_ONCE <= 32 else 2
    MEANS: tl.constexpr = 16 // G if G < 16 else 1  # columns that a product needs at least
    first, end, _, first_chunk, end_chunk = _choices(p_line, RUN, M, SHAPE)
    chunk_begin, chunk_end, _ = _chunks_of(part, first_chunk, end_chunk, PARTS)
    if chunk_begin < chunk_end:
        p_index = tl.load(p_line + 13).to(tl.pointer_type(tl.int64))
        p_even = tl.load(p_index).to(tl.pointer_type(tl.int32))
        p_odd = tl.load(p_index + 1).to(tl.pointer_type(tl.int32))
        p_rows = _table(p_index, 2) + head * 2 * (R + 1) * H
        p_scales = _table(p_index, 3) + head * 2
        p_middles = _table(p_index, 4)
        p_distances = _table(p_index, 5)

        # The pairs of channels that are rotated together: those of a rotation come first.
        turned = tl.load(p_index + 9).to(tl.int32)
        o_f = tl.arange(0, H)
        o_g = tl.arange(0, G)
        o_d = tl.arange(0, M)
        o_a = tl.where(o_f < turned, o_f, o_f + turned)
        o_b = tl.where(o_f < turned, o_f + turned, o_f + D // 2)
        m_q = (o_f < D // 2)[:, None] & (o_g < GROUP)[None, :]
        b_a = tl.load(p_query + o_g[None, :] * D + o_a[:, None], mask=m_q, other=0.0).to(tl.float32)
        b_b = tl.load(p_query + o_g[None, :] * D + o_b[:, None], mask=m_q, other=0.0).to(tl.float32)
        b_size = tl.maximum(tl.max(tl.abs(b_a), axis=0), tl.max(tl.abs(b_b), axis=0))
        b_size = tl.where(b_size > 0, b_size, 1.0)
        b_a = b_a / b_size[None, :]
        b_b = b_b / b_size[None, :]
        to_power = scaling * 1.4426950408889634
        b_scale = b_size * tl.load(p_scales)
        b_mean_scale = b_size * tl.load(p_scales + 1)
        # See `_codes` for what codes are worth.
        b_code_scale = b_scale * 549755813888.0  # 2 ** 39, of the 149
        o_power = 110 - BITS * (tl.arange(0, AT_ONCE) % IN_HALF)
        b_worth = ((127 + o_power) << 23).to(tl.float32, bitcast=True)

        b_cosines = tl.load(p_distances + o_d[:, None] * H + o_f[None, :]).to(FACTOR)
        b_sines = tl.load(p_distances + M * H + o_d[:, None] * H + o_f[None, :]).to(FACTOR)
        last_tile = end // (32 * RUN) - 1  # what is behind it is no candidate
        o_rows = tl.arange(0, AT_ONCE)[:, None] * H + o_f[None, :]
        b_top = tl.full((G,), float("-inf"), tl.float32)
        b_sum = tl.zeros((G,), tl.float32)
        for chunk in range(chunk_begin, chunk_end):
            b_cos = tl.load(p_middles + chunk * 2 * H + o_f)[:, None]
            b_sin = tl.load(p_middles + chunk * 2 * H + H + o_f)[:, None]
            b_first = (b_a * b_cos + b_b * b_sin)[None, :, :]
            b_second = (b_b * b_cos - b_a * b_sin)[None, :, :]
            # The mean is the first of as many components as a product needs at least; the others are nothing.
            m_mean = (tl.arange(0, MEANS) == 0)[:, None] & (o_f < D // 2)[None, :]
            p_means = p_rows + R * H + tl.zeros((MEANS, 1), tl.int32) + o_f[None, :]
            b_even, b_odd = _spectra(
                b_first,
                b_second,
                tl.load(p_means, mask=m_mean, other=0.0),
                tl.load(p_means + (R + 1) * H, mask=m_mean, other=0.0),
                FACTOR,
            )
            b_even = tl.dot(b_cosines, b_even, input_precision=PRECISION)
            b_odd = tl.dot(b_sines, b_odd, input_precision=PRECISION)
            b_means_behind = b_even + b_odd
            b_means_before = b_even - b_odd
            b_means_behind = tl.sum(tl.reshape(b_means_behind, (M, MEANS, G)), axis=1)
            b_means_before = tl.sum(tl.reshape(b_means_before, (M, MEANS, G)), axis=1)
            b_means_behind *= b_mean_scale[None, :]
            b_means_before *= b_mean_scale[None, :]

            slices = ()
            for number in tl.static_range(2 * RUN):
                slices += (b_means_behind if number % 2 == 0 else b_means_before,)  # type: ignore[assignment]
            for group in tl.static_range((RANK + AT_ONCE - 1) // AT_ONCE):
                p_some = p_rows + group * AT_ONCE * H + o_rows
                b_even, b_odd = _spectra(b_first, b_second, tl.load(p_some), tl.load(p_some + (R + 1) * H), FACTOR)
                b_even = tl.dot(b_cosines, b_even, input_precision=PRECISION)
                b_odd = tl.dot(b_sines, b_odd, input_precision=PRECISION)
                b_even = tl.reshape(b_even, (M, AT_ONCE, G))
                b_odd = tl.reshape(b_odd, (M, AT_ONCE, G))
                b_behind = (b_even + b_odd) * b_worth[None, :, None]
                b_before = (b_even - b_odd) * b_worth[None, :, None]
                added = ()
                for number in tl.static_range(2 * RUN):
                    o_run = M + o_d if number % 2 == 0 else M - 1 - o_d
                    o_tile = tl.minimum(chunk * (M // 16) + o_run // 32, last_tile)
                    p_tile = tl.where(o_tile % 2 == 0, p_even, p_odd)
                    p_tile += ((o_tile // 2).to(tl.int64) * heads + head) * (WORDS * 16)
                    b_codes = _codes(p_tile, o_run % 32, number // 2, group, RANK, BITS, WORDS, AT_ONCE)
                    b_some = tl.sum((b_behind if number % 2 == 0 else b_before) * b_codes[:, :, None], axis=1)
                    added += (slices[number] + b_some * b_code_scale[None, :],)  # type: ignore[assignment]
                slices = added
            b_chunk_top = tl.full((M, G), float("-inf"), tl.float32)
            powers = ()
            for number in tl.static_range(2 * RUN):
                o_run = M + o_d if number % 2 == 0 else M - 1 - o_d
                o_s = (chunk * 2 * M + o_run) * RUN + number // 2
                if HAS_CAP:
                    b_scores = _capped(slices[number] * scaling, softcap) * 1.4426950408889634
                else:
                    b_scores = slices[number] * to_power
                b_scores = tl.where(((o_s >= first) & (o_s < end))[:, None], b_scores, float("-inf"))
                b_chunk_top = tl.maximum(b_chunk_top, b_scores)
                powers += (b_scores,)  # type: ignore[assignment]
            b_chunk = tl.max(b_chunk_top, axis=0)
            b_safe = tl.where(b_chunk == float("-inf"), 0.0, b_chunk)
            b_sums = tl.zeros((M, G), tl.float32)
            o_chunk = chunk * (2 * M * RUN * G)
            for number in tl.static_range(2 * RUN):
                b_less = powers[number] - b_safe[None, :]
                b_sums += tl.exp2(b_less)
                o_scores = o_chunk + (number * M + o_d)[:, None] * G + o_g[None, :]
                tl.store(p_scores + o_scores, b_less.to(p_scores.dtype.element_ty))
            tl.store(p_tops + chunk * G + o_g, b_safe)
            b_new = tl.maximum(b_top, b_chunk)
            b_new_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_sum = b_sum * tl.exp2(b_top - b_new_safe) + tl.sum(b_sums, axis=0) * tl.exp2(b_safe - b_new_safe)
            b_top = b_new
        tl.store(p_state + o_g, b_top)
        tl.store(p_state + G + o_g, b_sum)


@triton.jit
def _bucket(b_order, BUCKETS: tl.constexpr):
    """The bucket of a weight, given in order: four for each power of two up to 16, from 2⁻¹²³ on; 0 has its own."""
    b_bucket = (b_order >> 21) - (524 - BUCKETS)
    b_bucket = tl.minimum(tl.maximum(b_bucket, 1), BUCKETS - 1)
    return tl.where(b_order > 0, b_bucket, 0)


@triton.jit
def _weigh(
    p_regions,
    p_scores,
    p_tops,
    p_states,
    p_sums,
    p_weights,
    p_counts,
    p_reached,
    FIELDS: tl.constexpr,
    RUN: tl.constexpr,
    M: tl.constexpr,
    SHAPE: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    NEAR: tl.constexpr,
    HELD: tl.constexpr,
    BUCKETS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    G: tl.constexpr,
    CHAINED: tl.constexpr,
):
    CHUNK: tl.constexpr = 2 * M * RUN
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    p_line = p_regions + tl.program_id(2).to(tl.int64) * FIELDS
    first, end, _, first_chunk, end_chunk = _choices(p_line, RUN, M, SHAPE)
    chunk_begin, chunk_end, parts = _chunks_of(part, first_chunk, end_chunk, PARTS)
    if chunk_begin < chunk_end:
        o_g = tl.arange(0, G)
        o_p = tl.arange(0, PARTS)
        o_n = tl.arange(0, NEAR)
        p_state = p_states + (row * PARTS + o_p)[:, None] * (2 * G) + o_g[None, :]
        m_p = (o_p < parts)[:, None]
        b_tops = tl.load(p_state, mask=m_p, other=float("-inf"))
        b_sums = tl.load(p_state + G, mask=m_p, other=0.0)
        _, _, near = reads_of(p_line, False)
        m_n = (o_n * BLOCK_S < near)[:, None] & (o_g < GROUP)[None, :]
        p_near = p_sums + (row * GROUP + o_g)[None, :] * HELD + o_n[:, None]
        b_near = tl.load(p_near, mask=m_n, other=float("-inf")) * 1.4426950408889634
        b_top = tl.maximum(tl.max(b_tops, axis=0), tl.max(b_near, axis=0))
        b_safe = tl.where(b_top == float("-inf"), 0.0, b_top)[None, :]
        b_all = tl.sum(b_sums * tl.exp2(b_tops - b_safe), axis=0) + tl.sum(tl.exp2(b_near - b_safe), axis=0)
        b_all = tl.reshape(b_safe, (G,)) + tl.log2(b_all)

        o_i = tl.arange(0, CHUNK)
        o_slice = o_i // M
        o_run = tl.where(o_slice % 2 == 0, M + o_i % M, M - 1 - o_i % M)
        o_in = o_run * RUN + o_slice // 2
        b_counts = tl.zeros((BUCKETS,), tl.int32)
        p_row = p_weights + row * (CHUNKS * CHUNK)
        for chunk in range(chunk_begin, chunk_end):
            o_chunk = row * CHUNKS + chunk
            b_less = tl.load(p_tops + o_chunk * G + o_g) - b_all
            b_scores = tl.load(p_scores + o_chunk * (CHUNK * G) + o_i[:, None] * G + o_g[None, :]).to(tl.float32)
            b_shares = tl.where((o_g < GROUP)[None, :], tl.exp2(b_scores + b_less[None, :]), 0.0)
            b_weights = tl.sum(b_shares, axis=1)
            o_s = chunk * CHUNK + o_in
            m_s = (o_s >= first) & (o_s < end)
            tl.store(p_row + o_s, b_weights, mask=m_s)
            b_counts += tl.histogram(_bucket(in_order(b_weights), BUCKETS), BUCKETS, mask=m_s)
        tl.atomic_add(
            p_counts + row * BUCKETS + tl.arange(0, BUCKETS), b_counts, mask=b_counts > 0, sem="relaxed", scope="gpu"
        )
        b_reached = tl.cumsum(b_counts, axis=0, reverse=True)
        tl.store(p_reached + (row * PARTS + part) * BUCKETS + tl.arange(0, BUCKETS), b_reached)


@triton.jit
def _list(
    p_regions,
    p_weights,
    p_counts,
    p_reached,
    p_above,
    p_equal,
    p_found,
    FIELDS: tl.constexpr,
    RUN: tl.constexpr,
    M: tl.constexpr,
    SHAPE: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    CHUNK: tl.constexpr = 2 * M * RUN
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    p_line = p_regions + tl.program_id(2).to(tl.int64) * FIELDS
    first, end, kept, first_chunk, end_chunk = _choices(p_line, RUN, M, SHAPE)
    chunk_begin, chunk_end, parts = _chunks_of(part, first_chunk, end_chunk, PARTS)
    if chunk_begin < chunk_end:
        o_b = tl.arange(0, BUCKETS)
        b_reached = tl.cumsum(tl.load(p_counts + row * BUCKETS + o_b), axis=0, reverse=True)
        bucket = tl.sum((b_reached >= kept).to(tl.int32), axis=0) - 1
        above = tl.sum(tl.where(o_b == bucket + 1, b_reached, 0), axis=0)
        count = tl.sum(tl.where(o_b == bucket, b_reached, 0), axis=0) - above
        if part == 0:
            p_own = p_found + row * 4
            tl.store(p_own, above)
            tl.store(p_own + 1, kept - above)
            tl.store(p_own + 2, count)
            tl.store(p_own + 3, ((bucket == 0) | (count == kept - above)).to(tl.int32))
        o_p = tl.arange(0, PARTS)
        p_own = p_reached + (row * PARTS + o_p) * BUCKETS + bucket
        b_from = tl.load(p_own, mask=o_p < parts, other=0)
        b_above = tl.load(p_own + 1, mask=(o_p < parts) & (bucket + 1 < BUCKETS), other=0)
        if tl.sum(tl.where(o_p == part, b_from, 0), axis=0) > 0:
            above_before = tl.sum(tl.where(o_p < part, b_above, 0), axis=0)
            equal_before = tl.sum(tl.where(o_p < part, b_from - b_above, 0), axis=0)
            p_row = row * (CHUNKS * CHUNK)
            for start in range(chunk_begin * CHUNK, chunk_end * CHUNK, BLOCK):
                o_s = start + tl.arange(0, BLOCK)
                m_s = (o_s >= first) & (o_s < end)
                b_bucket = _bucket(in_order(tl.load(p_weights + p_row + o_s, mask=m_s, other=0.0)), BUCKETS)
                m_above = m_s & (b_bucket > bucket)
                m_equal = m_s & (b_bucket == bucket)
                b_both = (m_above.to(tl.int32) << 16) | m_equal.to(tl.int32)
                b_places = tl.cumsum(b_both, axis=0) - b_both
                tl.store(p_above + p_row + above_before + (b_places >> 16), o_s, mask=m_above)
                tl.store(p_equal + p_row + equal_before + (b_places & 0xFFFF), o_s, mask=m_equal)
                both = tl.sum(b_both, axis=0)
                above_before += both >> 16
                equal_before += both & 0xFFFF


@triton.jit
def _lowest_chosen(p_equal, p_weights, count, wanted, EQUALS: tl.constexpr):
    """Of `count` listed tokens: the lowest weight, in order, of the `wanted` largest; how many are above it.

    For more than a program holds: they are read again in each round of the search.
    """
    low = tl.full((), -1, tl.int32)
    high = tl.full((), 0x7F800002, tl.int32)
    above = tl.full((), 0, tl.int32)
    while low + 1 < high:
        middle = low + (high - low) // 2
        reached = tl.full((), 0, tl.int32)
        for o in range(0, count, EQUALS):
            o_e = o + tl.arange(0, EQUALS)
            m_e = o_e < count
            b_token = tl.load(p_equal + o_e, mask=m_e, other=0)
            b_order = tl.where(m_e, in_order(tl.load(p_weights + b_token, mask=m_e, other=0.0)), -2147483648)
            reached += tl.sum((b_order >= middle).to(tl.int32), axis=0)
        is_enough = reached >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
        above = tl.where(is_enough, above, reached)
    return low, above


@triton.jit
def _read(
    p_queries,
    p_keys,
    p_values,
    p_regions,
    p_weights,
    p_above,
    p_equal,
    p_found,
    p_parts,
    p_sums,
    scaling,
    softcap,
    FIELDS: tl.constexpr,
    RUN: tl.constexpr,
    M: tl.constexpr,
    SHAPE: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PARTS: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EQUALS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    CHUNK: tl.constexpr = 2 * M * RUN
    part = tl.program_id(0)
    head = tl.program_id(1)
    query = tl.program_id(2).to(tl.int64)
    row = query * tl.num_programs(1) + head
    p_line = p_regions + query * FIELDS
    _, _, kept, _, _ = _choices(p_line, RUN, M, SHAPE)
    own = tl.load(p_line) + head * tl.load(p_line + 1)
    o_g = tl.arange(0, BLOCK_G)
    o_d = tl.arange(0, BLOCK_D)
    m_g = o_g < GROUP
    m_d = o_d < D
    o_i = tl.arange(0, BLOCK_S)
    o_q = (row * GROUP + o_g)[:, None] * D + o_d[None, :]
    b_q = tl.load(p_queries + o_q, mask=m_g[:, None] & m_d[None, :], other=0.0)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if part * BLOCK_S < kept:
        p_weights += row * (CHUNKS * CHUNK)
        p_above += row * (CHUNKS * CHUNK)
        p_equal += row * (CHUNKS * CHUNK)
        above = tl.load(p_found + row * 4)
        wanted = tl.load(p_found + row * 4 + 1)
        count = tl.load(p_found + row * 4 + 2)
        is_plain = tl.load(p_found + row * 4 + 3) != 0
        o_e = tl.arange(0, EQUALS)
        b_equal = tl.zeros((EQUALS,), tl.int32)
        b_order = tl.full((EQUALS,), -2147483648, tl.int32)
        low = tl.full((), 0, tl.int32)
        above_low = tl.full((), 0, tl.int32)
        last = tl.minimum(
            kept, (kept - 1 - part * BLOCK_S) // (PARTS * BLOCK_S) * (PARTS * BLOCK_S) + (part + 1) * BLOCK_S
        )
        if (last > above) & ~is_plain:
            if count <= EQUALS:
                b_equal = tl.load(p_equal + o_e, mask=o_e < count, other=0)
                b_found = in_order(tl.load(p_weights + b_equal, mask=o_e < count, other=0.0))
                b_order = tl.where(o_e < count, b_found, -2147483648)
                low = tl.min(tl.where(o_e < count, b_found, 2147483647), axis=0)
                high = tl.max(b_order, axis=0) + 1
                low, _ = lowest_of(b_order, wanted, low, high, count, tl.full((), 0, tl.int32))
                above_low = tl.sum((b_order > low).to(tl.int32), axis=0)
            else:
                low, above_low = _lowest_chosen(p_equal, p_weights, count, wanted, EQUALS)
        b_top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        b_sum = tl.zeros((BLOCK_G,), tl.float32)
        b_out = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        for r in range(part * BLOCK_S, kept, PARTS * BLOCK_S):
            o_r = r + o_i
            m_r = o_r < kept
            b_token = tl.load(p_above + o_r, mask=m_r & (o_r < above), other=0)
            if r + BLOCK_S > above:
                if is_plain:
                    b_token += tl.load(p_equal + o_r - above, mask=m_r & (o_r >= above), other=0)
                else:
                    room = wanted - above_low
                    before = tl.full((), 0, tl.int32)
                    equals = tl.full((), 0, tl.int32)
                    for o in range(0, count, EQUALS):
                        if count > EQUALS:
                            m_e = o + o_e < count
                            b_equal = tl.load(p_equal + o + o_e, mask=m_e, other=0)
                            b_found = in_order(tl.load(p_weights + b_equal, mask=m_e, other=0.0))
                            b_order = tl.where(m_e, b_found, -2147483648)
                        left = tl.maximum(room - equals, 0)
                        b_place, m_chosen = places_of(b_order, low, left)
                        b_place += before
                        m_this = (b_place[None, :] == (o_r - above)[:, None]) & m_chosen[None, :]
                        b_token += tl.sum(tl.where(m_this, b_equal[None, :], 0), axis=1)
                        equals_here = tl.sum((b_order == low).to(tl.int32), axis=0)
                        before += tl.sum((b_order > low).to(tl.int32), axis=0) + tl.minimum(equals_here, left)
                        equals += equals_here
            o_kv = (own + b_token.to(tl.int64))[:, None] * D + o_d[None, :]
            m_kv = m_r[:, None] & m_d[None, :]
            b_k = tl.load(p_keys + o_kv, mask=m_kv, other=0.0)
            b_v = tl.load(p_values + o_kv, mask=m_kv, other=0.0)
            b_top, b_sum, b_out = with_tile(b_top, b_sum, b_out, b_q, b_k, b_v, m_r, scaling, softcap, HAS_CAP)
        b_some = tl.where(b_sum > 0, b_sum, 1.0)
        o_part = (row * GROUP + o_g) * HELD + FIRST + part
        m_out = m_g[:, None] & m_d[None, :]
        tl.store(p_parts + o_part[:, None] * D + o_d[None, :], b_out / b_some[:, None], mask=m_out)
        tl.store(p_sums + o_part, tl.where(b_sum > 0, b_top + tl.log(b_some), float("-inf")), mask=m_g)


@triton.jit
def _merge(
    p_parts,
    p_sums,
    p_out,
    p_regions,
    FIELDS: tl.constexpr,
    RUN: tl.constexpr,
    M: tl.constexpr,
    SHAPE: tl.constexpr,
    NEAR: tl.constexpr,
    CHOSEN: tl.constexpr,
    NEAR_SLOTS: tl.constexpr,
    CHOSEN_SLOTS: tl.constexpr,
    SERVES_ALL: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHAINED: tl.constexpr,
):
    query = tl.program_id(2).to(tl.int64)
    o_head = query * tl.num_programs(1) + tl.program_id(1)
    p_line = p_regions + query * FIELDS
    _, _, kept, _, _ = _choices(p_line, RUN, M, SHAPE)
    _, _, near = reads_of(p_line, SERVES_ALL)
    o_p = tl.arange(0, NEAR + CHOSEN)
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_p = tl.where(o_p < NEAR, o_p * NEAR_SLOTS < near, (o_p - NEAR) * CHOSEN_SLOTS < kept)
    m_d = o_d < D
    if not SERVES_ALL:
        m_d = m_d & _chooses(p_line, SHAPE)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    b_lse = tl.load(p_sums + o_head * (NEAR + CHOSEN) + o_p, mask=m_p, other=float("-inf"))
    o_parts = (o_head * (NEAR + CHOSEN) + o_p)[:, None] * D + o_d[None, :]
    b_parts = tl.load(p_parts + o_parts, mask=m_p[:, None] & m_d[None, :], other=0.0)
    b_top = tl.max(b_lse, axis=0)
    b_weights = tl.exp(b_lse - tl.where(b_top == float("-inf"), 0.0, b_top))
    b_all = tl.sum(b_weights, axis=0)
    b_out = tl.sum(b_parts * b_weights[:, None], axis=0) / tl.where(b_all > 0, b_all, 1.0)
    tl.store(p_out + o_head * D + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)


# -- the index ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first"])
def _write_tile(
    p_keys,
    p_table,
    first,
    region,
    RUN: tl.constexpr,
    TILES: tl.constexpr,
    RANK: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    LEVELS: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
):
    """A tile of one KV head and layer: keys are rotated back, projected, rounded and packed, vector by vector."""
    tile = first + tl.program_id(0)
    head = tl.program_id(1)
    p_own = p_table + tl.program_id(2) * 2
    p_index = tl.load(p_own).to(tl.pointer_type(tl.int64))
    own = tl.load(p_own + 1) + head.to(tl.int64) * region
    p_half = tl.load(p_index + tile % 2).to(tl.pointer_type(tl.int32))
    p_middle = _table(p_index, 4) + (tile // TILES) * 2 * H
    p_offsets = _table(p_index, 6)
    p_projection = _table(p_index, 7) + head * 2 * R * H
    p_means = _table(p_index, 8) + head * 2 * H
    turned = tl.load(p_index + 9).to(tl.int32)

    o_f = tl.arange(0, H)
    o_j = tl.arange(0, R)
    o_l = tl.arange(0, 16)
    o_w = tl.arange(0, BLOCK_W)
    m_f = o_f < D // 2
    o_a = tl.where(o_f < turned, o_f, o_f + turned)
    o_b = tl.where(o_f < turned, o_f + turned, o_f + D // 2)
    b_cos = tl.load(p_middle + o_f)[None, :]
    b_sin = tl.load(p_middle + H + o_f)[None, :]
    b_mean_a = tl.load(p_means + o_f)[None, :]
    b_mean_b = tl.load(p_means + H + o_f)[None, :]
    b_basis_a = tl.load(p_projection + o_j[None, :] * H + o_f[:, None])
    b_basis_b = tl.load(p_projection + R * H + o_j[None, :] * H + o_f[:, None])
    b_words = tl.zeros((16, BLOCK_W), tl.int32)
    for v in range(2 * RUN):
        o_run = tl.where(v % 2 == 0, 16 + o_l, 15 - o_l)
        o_t = o_run * RUN + v // 2
        o_key = (own + tile * (32 * RUN) + o_t)[:, None] * D
        b_a = tl.load(p_keys + o_key + o_a[None, :], mask=m_f[None, :], other=0.0).to(tl.float32)
        b_b = tl.load(p_keys + o_key + o_b[None, :], mask=m_f[None, :], other=0.0).to(tl.float32)
        o_offset = ((tile % TILES) * (32 * RUN) + o_t)[:, None] * (2 * H) + o_f[None, :]
        b_cos_by = tl.load(p_offsets + o_offset)
        b_sin_by = tl.load(p_offsets + o_offset + H)
        b_c = b_cos * b_cos_by - b_sin * b_sin_by
        b_s = b_sin * b_cos_by + b_cos * b_sin_by
        b_first = b_a * b_c + b_b * b_s - b_mean_a
        b_second = b_b * b_c - b_a * b_s - b_mean_b
        b_steps = tl.dot(b_first, b_basis_a, input_precision="ieee")
        b_steps = tl.dot(b_second, b_basis_b, b_steps, input_precision="ieee")
        b_steps = tl.floor(b_steps) + LEVELS // 2
        is_nan = b_steps != b_steps  # noqa: PLR0124
        b_steps = tl.minimum(tl.maximum(tl.where(is_nan, 0.0, b_steps), 0.0), LEVELS - 1.0)
        b_codes = tl.where((o_j < RANK)[None, :], b_steps.to(tl.int32), 0)
        # Where each code begins, from the first bit of each word: it may be in two of them.
        o_bit = ((v * RANK + o_j) * BITS)[:, None] - 32 * o_w[None, :]
        b_left = b_codes[:, :, None] << tl.minimum(tl.maximum(o_bit, 0), 31)[None, :, :]
        b_right = b_codes[:, :, None] >> tl.minimum(tl.maximum(-o_bit, 0), 31)[None, :, :]
        m_left = (o_bit >= 0) & (o_bit < 32)
        m_right = (o_bit < 0) & (o_bit > -BITS)
        b_bits = tl.where(m_left[None, :, :], b_left, tl.where(m_right[None, :, :], b_right, 0))
        b_words += tl.sum(b_bits, axis=1)
    o_tile = ((tile // 2).to(tl.int64) * tl.num_programs(1) + head) * (WORDS * 16)
    p_out = p_half + o_tile + o_w[None, :] * 16 + o_l[:, None]
    tl.store(p_out, b_words, mask=(o_w < WORDS)[None, :])
