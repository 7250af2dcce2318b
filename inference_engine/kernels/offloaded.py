"""How an operation over regions finds blocks of entries that are not on the device.

    record    a line of numbers for each layer, on the device: see the constants below
    table     the address of each chunk in the host's memory, which the device can read; 0 until it is written
    places    [Hkv, P] int32 for each layer: which block each place of the regions holds, -1 for none
    counts    [Hkv, 2] int64 for each layer: how many chosen blocks were found in a place, and how many were not

    chunk     [layers, K and V, Hkv, chunk_tokens, D], `chunk_tokens` consecutive entries behind the sink

A chosen block that is neither on the device nor in a place is read from the host's memory and put into a place of a
block that was not chosen, if the line says that it may. Which of them are at hand changes how long it takes, never what
is read.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

TABLE, CHUNK_TOKENS, LAYER_BYTES, PLACES, PLACE_COUNT, FETCHED_FROM, COUNTS = range(7)
NUMBERS = 8  # of a line: a power of two


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OffloadedRecord:
    """The record of the layers of one session that have their entries in the same chunks."""

    lines: Tensor  # [layers, NUMBERS] int64
    table: Tensor  # [chunks] int64
    places: Tensor  # [layers, Hkv, P] int32
    counts: Tensor  # [layers, Hkv, 2] int64
    addresses: tuple[int, ...]  # of the lines

    @classmethod
    def of(
        cls,
        *,
        layers: int,
        kv_heads: int,
        places: int,
        fetched_from: int,
        chunks: int,
        chunk_tokens: int,
        layer_bytes: int,
        device: torch.device,
    ) -> Self:
        """fetched_from: the first slot of the places. layer_bytes: of a layer in a chunk."""
        table = torch.zeros(chunks, dtype=torch.int64, device=device)
        held = torch.full((layers, kv_heads, places), -1, dtype=torch.int32, device=device)
        counts = torch.zeros(layers, kv_heads, 2, dtype=torch.int64, device=device)
        lines = torch.zeros(layers, NUMBERS, dtype=torch.int64)
        for layer in range(layers):
            lines[layer, TABLE], lines[layer, CHUNK_TOKENS] = table.data_ptr(), chunk_tokens
            lines[layer, LAYER_BYTES] = layer * layer_bytes
            lines[layer, PLACES], lines[layer, PLACE_COUNT] = held[layer].data_ptr(), places
            lines[layer, FETCHED_FROM], lines[layer, COUNTS] = fetched_from, counts[layer].data_ptr()
        lines = lines.to(device)
        addresses = tuple(line.data_ptr() for line in lines)
        return cls(lines=lines, table=table, places=held, counts=counts, addresses=addresses)


def entries_by_position(
    keys: Tensor, values: Tensor, record: int, *, heads: Tensor, sink: int, ring: int, end: int, count: int
) -> tuple[Tensor, Tensor]:
    """Keys and values [Hkv, count, D] of the positions below `count`, of which those from `sink` to `end` are away.

    record: the address of a line of it. heads: [Hkv, 1], where each head's slots begin; the others lie there.
    Places and counts are left alone. The reference, for buffers in the host's memory.
    """
    line = _at(record, NUMBERS, torch.int64).tolist()
    positions = torch.arange(count)
    slots = heads + torch.where(positions < sink, positions, sink + (positions - sink) % max(1, ring))
    found = keys[slots], values[slots]
    kv_heads, width = len(heads), keys.shape[-1]
    sizes = (2, kv_heads, line[CHUNK_TOKENS], width)
    for number, first in enumerate(range(sink, min(end, count), line[CHUNK_TOKENS])):
        address = int(_at(line[TABLE] + 8 * number, 1, torch.int64)[0]) + line[LAYER_BYTES]
        chunk = _at(address, 2 * kv_heads * line[CHUNK_TOKENS] * width, keys.dtype).view(sizes)
        here = slice(first, min(first + line[CHUNK_TOKENS], end, count))
        for states, source in zip(found, chunk, strict=True):
            states[:, here] = source[:, : here.stop - here.start]
    return found


def _at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """Numbers in the host's memory: a view."""
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)
