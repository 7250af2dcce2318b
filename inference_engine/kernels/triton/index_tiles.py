"""An index of keys by components on a GPU: what kernels need to know of it, and how its tiles are written.

An index is known by the address of these numbers on the device, all 64 bits wide:

    even, odd     tiles 0, 2, 4, … and 1, 3, 5, …, as `kv/parts/component_index.py` lays them out
    rows          [Hkv, 2, R + 1, H], what codes are multiplied with, then what is added to them all; by pairs of
                  channels that are rotated together, first and second of each pair; R and H are rounded up to powers
                  of two
    scales        [Hkv], what rows were divided by, so that no channel of a rebuilt key is larger than 1
    middles       [chunks, 2, H], cosines and sines of the rotation to the middle of so many tokens
    runs          [CHUNK, 2, H], those of each token of a chunk from there: the mean over the token's run
    offsets       [CHUNK, 2, H], those of each token from there
    projection    [Hkv, 2, R, H], components divided by their steps
    means         [Hkv, 2, H]
    turned        how many pairs of channels are rotated; a number, no address
    archive       of tokens that have left the regions (`restoring.py`); 0: there is none
    rounded       `runs` in float16
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference_engine.kernels.components import IndexShape, KeyComponents
from inference_engine.kernels.latents import CodeTables, Synthesis

CHUNK = 64  # tokens that share a rotation of the query; a multiple of every run
_LEAST = 16  # rows and columns that a matrix product of Triton has at least
_ARCHIVE = 10  # of an index's numbers


def pairs_of(head_dim: int, turned: int) -> tuple[Tensor, Tensor]:
    """[D / 2] each: channels that are rotated together. Those that are not rotated make pairs, too."""
    half, still = turned // 2, (head_dim - turned) // 2
    first = torch.cat([torch.arange(half), turned + torch.arange(still)])
    return first, torch.cat([half + torch.arange(half), turned + still + torch.arange(still)])


class KeyRotations(NamedTuple):
    """The rotations of one kind of key: see `middles`, `runs`, `offsets` and `rounded` of the module."""

    middles: Tensor
    runs: Tensor
    offsets: Tensor
    rounded: Tensor
    turned: int  # pairs


class Rows(NamedTuple):
    """What a layer's components are to the kernels: see `rows`, `scales`, `projection` and `means` of the module."""

    rows: Tensor
    scales: Tensor
    projection: Tensor
    means: Tensor


class TritonIndexes:
    """Implements KeyIndexes."""

    def turns(
        self, frequencies: Tensor, head_dim: int, shape: IndexShape, tokens: int, device: torch.device
    ) -> KeyRotations:
        speeds = torch.zeros(half_width(head_dim), dtype=torch.float64)
        speeds[: len(frequencies)] = frequencies
        middles = (torch.arange(-(-tokens // CHUNK), dtype=torch.float64) + 0.5) * CHUNK - 0.5
        places = torch.arange(CHUNK, dtype=torch.float64)
        of_runs = (places // shape.run + 0.5) * shape.run - CHUNK / 2
        in_run = torch.arange(shape.run, dtype=torch.float64) - (shape.run - 1) / 2
        # A run has the mean rotation of its positions: that of its middle, shrunk by the mean cosine of its offsets.
        shrunk = (in_run[:, None] * speeds).cos().mean(0)
        runs = (_turns(of_runs, speeds) * shrunk).float()
        return KeyRotations(
            middles=_turns(middles, speeds).float().to(device),
            runs=runs.to(device),
            offsets=_turns(places - (CHUNK - 1) / 2, speeds).float().to(device),
            rounded=runs.half().to(device),
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
        largest = lowest.abs()[:, 0] + (shape.levels - 1) * rows.abs().sum(1)
        scales = largest.amax(1).clamp(min=1e-30)  # [Hkv]
        scaled = torch.cat([rows, lowest], dim=1) / scales[:, None, None]
        rank, width = rank_width(shape), half_width(head_dim)
        table = torch.zeros(heads, 2, rank + 1, width, dtype=torch.float64)
        projection = torch.zeros(heads, 2, rank, width, dtype=torch.float64)
        paired = torch.zeros(heads, 2, width, dtype=torch.float64)
        for place, channels in enumerate(pairs_of(head_dim, turned)):
            count = len(channels)
            table[:, place, : shape.rank, :count] = scaled[:, : shape.rank, channels]
            table[:, place, rank, :count] = scaled[:, shape.rank, channels]
            projection[:, place, : shape.rank, :count] = (basis / steps[:, None]).mT[..., channels]
            paired[:, place, :count] = means[:, 0, channels]
        return Rows(*(part.float().contiguous().to(device) for part in (table, scales, projection, paired)))

    def numbers(self, halves: Sequence[Tensor], rows: Rows, turns: KeyRotations) -> Tensor:
        tensors = (*halves, rows.rows, rows.scales, *turns[:3], rows.projection, rows.means)
        numbers = [*(tensor.data_ptr() for tensor in tensors), turns.turned, 0, turns.rounded.data_ptr()]
        return torch.tensor(numbers, dtype=torch.int64).to(halves[0].device)

    def archive(
        self, halves: tuple[Tensor, Tensor], first: int, tables: CodeTables, synthesis: Synthesis, found: Tensor
    ) -> Tensor:
        numbers = numbers_of_archive(halves, first, tables, synthesis, found)
        return torch.tensor(numbers, dtype=torch.int64).to(found.device)

    def name_archive(self, numbers: Tensor, archive: Tensor | None) -> None:
        numbers[_ARCHIVE] = 0 if archive is None else archive.data_ptr()

    def write_tiles(
        self,
        keys: Tensor,
        table: Tensor,
        *,
        kv_heads: int,
        region: int,
        first: int,
        end: int,
        shape: IndexShape,
        sink: int = 0,
        ring: int = 0,
    ) -> None:
        head_dim = keys.shape[-1]
        _write_tile[(end - first, kv_heads, len(table))](
            keys,
            table,
            first,
            region,
            sink,
            ring,
            RUN=shape.run,
            CHUNK=CHUNK,
            RANK=shape.rank,
            BITS=shape.bits,
            WORDS=shape.words,
            BLOCK_W=int(triton.next_power_of_2(shape.words)),
            LEVELS=shape.levels,
            D=head_dim,
            ROW=keys.stride(0),
            H=half_width(head_dim),
            R=rank_width(shape),
            num_warps=4,
        )


key_indexes = TritonIndexes()


def numbers_of_archive(
    halves: tuple[Tensor, Tensor], first: int, tables: CodeTables, synthesis: Synthesis, found: Tensor
) -> list[int]:
    """By which kernels know an archive: as `restoring.py` lists them."""
    low, high = halves
    assert low.stride() == high.stride() == (low.shape[1], 1)
    assert synthesis.matrix.is_contiguous() and found.is_contiguous()
    numbers = [low.data_ptr(), high.data_ptr(), low.shape[1], first]
    numbers += [tables.first_byte, tables.count, tables.padded, tables.chains]
    tensors = [tables.begins, tables.widths, tables.tables, tables.levels, tables.scales]
    tensors += [synthesis.matrix, synthesis.factors, synthesis.means, found]
    return [*numbers, *(tensor.data_ptr() for tensor in tensors)]


def _turns(positions: Tensor, speeds: Tensor) -> Tensor:
    """[n, 2, H], cosines and sines."""
    turns = positions[:, None] * speeds
    return torch.stack([turns.cos(), turns.sin()], dim=1)


def rank_width(shape: IndexShape) -> int:
    """R of the tables."""
    return max(_LEAST, int(triton.next_power_of_2(shape.rank)))


def half_width(head_dim: int) -> int:
    """H of the tables."""
    return max(_LEAST, int(triton.next_power_of_2(head_dim // 2)))


@triton.jit
def table_of(p_index, number: tl.constexpr):
    """The table of that number of an index."""
    return tl.multiple_of(tl.load(p_index + number).to(tl.pointer_type(tl.float32)), 16)


@triton.jit(do_not_specialize=["first", "sink", "ring"])
def _write_tile(
    p_keys,
    p_table,
    first,
    region,
    sink,
    ring,
    RUN: tl.constexpr,
    CHUNK: tl.constexpr,
    RANK: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    LEVELS: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
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
    p_middles = table_of(p_index, 4)
    p_offsets = table_of(p_index, 6)
    p_projection = table_of(p_index, 7) + head * 2 * R * H
    p_means = table_of(p_index, 8) + head * 2 * H
    turned = tl.load(p_index + 9).to(tl.int32)

    o_f = tl.arange(0, H)
    o_j = tl.arange(0, R)
    o_l = tl.arange(0, 16)
    o_w = tl.arange(0, BLOCK_W)
    m_f = o_f < D // 2
    o_a = tl.where(o_f < turned, o_f, o_f + turned)
    o_b = tl.where(o_f < turned, o_f + turned, o_f + D // 2)
    b_mean_a = tl.load(p_means + o_f)[None, :]
    b_mean_b = tl.load(p_means + H + o_f)[None, :]
    b_basis_a = tl.load(p_projection + o_j[None, :] * H + o_f[:, None])
    b_basis_b = tl.load(p_projection + R * H + o_j[None, :] * H + o_f[:, None])
    b_words = tl.zeros((16, BLOCK_W), tl.int32)
    for v in range(2 * RUN):
        o_run = tl.where(v % 2 == 0, 16 + o_l, 15 - o_l)
        o_t = o_run * RUN + v // 2
        o_position = tile * (32 * RUN) + o_t
        is_wrapped = (ring > 0) & (o_position >= sink)
        o_slot = tl.where(is_wrapped, sink + (o_position - sink) % tl.maximum(ring, 1), o_position)
        o_key = (own + o_slot)[:, None] * ROW
        b_a = tl.load(p_keys + o_key + o_a[None, :], mask=m_f[None, :], other=0.0).to(tl.float32)
        b_b = tl.load(p_keys + o_key + o_b[None, :], mask=m_f[None, :], other=0.0).to(tl.float32)
        p_middle = p_middles + (o_position // CHUNK)[:, None] * (2 * H) + o_f[None, :]
        b_cos = tl.load(p_middle)
        b_sin = tl.load(p_middle + H)
        o_offset = (o_position % CHUNK)[:, None] * (2 * H) + o_f[None, :]
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
