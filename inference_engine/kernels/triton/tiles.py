"""How much of a matrix a program of `products.py` reads at once, and in how many parts a sum is made (split-K).

The tiles were measured on an H200 with the matrices of real models; `kakeya bench gpu-products` measures whether others
are faster. What decides how a sum is made follows from the shape of the matrix and its format, and from whether there
is one token or, in fewer bits, up to 32.

Where rows begin at multiples of 2 KiB, fewer rows or wider tiles are read faster, most likely because such rows share
channels of the memory. Where there are few outputs, all programs should run at the same time; where there are many,
they should be small.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton

_PROGRAMS = 132  # that fill a large GPU
_LEAST_PART = 512  # inputs that are worth a program of their own
_MOST_PARTS = 4
_PROGRAMS_QUANTISED = 4 * _PROGRAMS
# The most tiles of a matrix whose sums have parts. There are two parts at least, and how many follows from tiles of 64
# rows; tiles have 16 at least.
MOST_TILES = _PROGRAMS_QUANTISED // 2 * (64 // 16)
_WIDEST = 128  # inputs of a tile


class Tile(NamedTuple):
    """What a program reads at once: rows of the matrix, numbers of each. stages: tiles that are under way."""

    rows: int
    width: int
    warps: int
    stages: int = 1


def tile_of_one(outputs: int, inputs: int, *, is_gated: bool = False) -> Tile:
    """For a step of one token. is_gated: two matrices of so many outputs are read, for an activation."""
    is_many = outputs > 8192
    rows = 4 if outputs >= 512 else 1  # a router has few outputs
    if inputs <= 1024:
        return Tile(8, 512, 4) if is_many else Tile(rows, max(64, triton.next_power_of_2(inputs)), 4)
    if inputs <= 2048:
        if outputs <= 2048:
            return Tile(rows, 2048, 8 if rows > 1 else 4)
        if is_gated:
            return Tile(2, 2048, 4) if outputs <= 4096 else Tile(4, 512, 2)
        return Tile(2, 1024, 4)
    is_aligned = inputs % 1024 == 0
    if outputs <= 2560:
        if is_gated:
            return Tile(2, 1024, 2)
        return Tile(1, 2048, 4) if is_aligned or outputs < 2048 else Tile(8, 1024, 8)
    if is_gated:
        return Tile(4, 1024, 4) if is_aligned else Tile(4, 512, 2)
    if is_many:
        return Tile(8, 512, 2)
    if is_aligned:
        return Tile(4, 2048, 8) if outputs <= 3072 else Tile(2, 1024, 4) if outputs <= 5120 else Tile(8, 1024, 4)
    if outputs <= 4096:
        return Tile(4, 512, 4) if inputs < 2560 else Tile(2, 1024, 2)
    return Tile(8, 512, 4) if inputs <= 4096 else Tile(4, 512, 4)


def tile_of_gates(inputs: int) -> Tile:
    """For one token and an expert that it chose: the best of those tried for DeepSeek-V2-Lite and Gemma 4, H200."""
    return Tile(4, min(256, triton.next_power_of_2(inputs)), 1 if inputs >= 1024 and inputs % 1024 == 0 else 2)


def tile_of_downs(inputs: int, experts: int) -> Tile:
    """For one token and all experts that it chose: rows of each, which are read together, 16 numbers by a thread."""
    rows = max(1, 16 // experts)
    width = max(64, min(256 if inputs <= 1024 else 512, triton.next_power_of_2(inputs)))
    return Tile(rows, width, max(1, min(16, rows * experts * width // (16 * 32))))


def tile_of_bytes(outputs: int, inputs: int, *, is_gated: bool = False) -> Tile:
    """For a step of one token, where a number is a byte and an output has one scale."""
    if inputs <= 1024:
        return Tile(4, max(64, triton.next_power_of_2(inputs)), 2)
    if is_gated:
        return Tile(4, 512, 2)
    if inputs <= 2048:
        return Tile(4, 2048, 2)
    if outputs <= 2560:
        return Tile(2, 2048, 8)
    is_aligned = inputs % 1024 == 0
    if outputs <= 4096 or (is_aligned and outputs <= 5120):
        return Tile(4, 1024, 2)
    return Tile(8, 512, 2) if is_aligned else Tile(4, 512, 2)


def tile_of_groups(outputs: int, inputs: int, *, is_fp8: bool, is_gated: bool = False) -> Tile:
    """For a step of one token, where groups have scales of their own: width counts inputs."""
    if inputs <= 1024:
        return Tile(4, max(64, triton.next_power_of_2(inputs)), 4)
    is_aligned = inputs % 1024 == 0
    if is_gated:
        return Tile(4 if is_aligned else 8, 256, 2) if is_fp8 else Tile(4, 512, 2)
    if inputs <= 2048 < outputs:
        return Tile(8, 2048, 8)
    if outputs <= 4096:
        return Tile(1, 2048, 4 if is_fp8 else 2)
    if outputs <= 5120:
        return Tile(4, 512, 2) if is_fp8 else Tile(4, 1024, 4)
    return Tile(4, 1024, 2) if is_aligned else Tile(4, 512, 2)


def parts_of(outputs: int, inputs: int, *, programs: int = _PROGRAMS) -> int:
    """Of a sum over the inputs, where there are few outputs: parts are summed by programs of their own.

    It follows from the shape of the matrix alone, so that equal shapes have equal bits on all devices. programs: that a
    GPU should have to run.
    """
    tiles = -(-outputs // 64)
    return max(1, min(programs // tiles, inputs // _LEAST_PART, _MOST_PARTS))


def parts_of_quantised(outputs: int, inputs: int, matrices: int) -> int:
    """As `parts_of`, of a matrix in fewer bits: a multiprocessor reads for some programs while others unpack."""
    return parts_of(outputs * matrices, inputs, programs=_PROGRAMS_QUANTISED)


def part_of(inputs: int, parts: int) -> int:
    """Inputs of each part but the last: a multiple of all tiles' widths."""
    return int(triton.cdiv(triton.cdiv(inputs, _WIDEST), parts)) * _WIDEST


def tile_of_some(outputs: int, inputs: int, itemsize: int, tokens: int, matrices: int) -> Tile:
    """For up to 64 tokens: within 4 % of the best of those tried with each matrix of Qwen2.5-7B on an H200, 1, 16 and
    64 tokens, and within 5 % of SmolLM2-135M.

    tokens: for which a tile has room. matrices: of which a program reads a tile at once.
    """
    if itemsize > 2:
        return Tile(16, 64, 4, 4)
    if matrices > 1 and inputs >= 2048 and _PROGRAMS < triton.cdiv(outputs, 64) <= _PROGRAMS * 3 // 2:
        return Tile(64, 64, 4, 5 if tokens <= 32 else 4)  # two fit a multiprocessor, so none is left for a second round
    if matrices > 1 and inputs >= 2048 and tokens <= 32:
        return Tile(64, 128, 4, 4)
    if matrices > 1 or inputs < 2048 or outputs > 8192:
        return Tile(64, 64, 4, 8)
    return Tile(64, 128, 4, 5)


def tile_of_quantised(
    outputs: int, itemsize: int, matrices: int, parts: int, group: int | None, *, is_fp8: bool, is_few: bool
) -> Tile:
    """For more than one token, of a matrix in fewer bits: the best of those tried for Llama-3.1-8B and Qwen2.5-7B on an
    H200, 16 and 64 tokens, or nearly.

    is_few: up to 32 tokens, whose sums may differ in their last bits from those of more. Two warps unpack a small tile
    and multiply it by another instruction than the four warps of a large one, which adds otherwise on Hopper. Of large
    tiles rows and width do not depend on the number of tokens.

    group: inputs that a scale belongs to, whose sum is made by itself; None: all.
    """
    if itemsize > 2:
        tile = Tile(16, 64, 4, 4)
    elif is_few:
        tile = Tile(32, 128, 2, 3)
    else:
        # Few stages leave room for other programs, if there are any.
        is_wide = matrices > 1 or triton.cdiv(outputs, 64) * parts > 2 * _PROGRAMS
        tile = Tile(64, 128, 4, 3 if is_wide else 5)
    if group is None:
        return tile
    return tile._replace(width=min(group, tile.width) if is_fp8 else group)


def tile_of_many(outputs: int, count: int, itemsize: int) -> tuple[int, Tile]:
    """For more tokens: how many of them a tile has room for, and the tile."""
    if itemsize > 2:
        return 32, Tile(16, 64, 4, 4)
    if triton.cdiv(outputs, 128) * triton.cdiv(count, 128) < 64:
        return 128, Tile(64, 64, 4, 4)
    return 128, Tile(128, 64, 8, 3)


def fitting(tile: Tile, itemsize: int, tokens: int, matrices: int, most_bytes: int) -> Tile:
    """The tile, or a smaller one that fits the shared memory that a program may have."""
    while tile.stages > 1 and _shared(tile, itemsize, tokens, matrices) > most_bytes:
        tile = tile._replace(stages=tile.stages - 1)
    while tile.rows > 16 and _shared(tile, itemsize, tokens, matrices) > most_bytes:
        tile = tile._replace(rows=tile.rows // 2)
    return tile


def _shared(tile: Tile, itemsize: int, tokens: int, matrices: int) -> int:
    return (matrices * tile.rows + tokens) * tile.width * itemsize * tile.stages


@cache
def shared_bytes(device: torch.device) -> int:
    """The shared memory that a program may have, as Triton counts it; the interpreter has as much as is wanted."""
    if device.type != "cuda":
        return 2**30
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
