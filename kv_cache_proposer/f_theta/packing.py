"""Codes of different widths, packed bit by bit into whole bytes.

widths   3 3 2 1 1 …      codes   5 2 3 0 1 …
bits     101 010 11 0 1 … the most significant bit of each code first; the last byte is filled up with zeros
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring codes of one width: `first` is the first of them, `bit` where it begins."""

    width: int
    first: int
    count: int
    bit: int


@dataclass(frozen=True, slots=True)
class Packing:
    """The widths of a token's codes, in order, 0 bits allowed. Few changes of width make it fast."""

    widths: tuple[int, ...]

    @property
    def packed_bytes(self) -> int:
        return -(-sum(self.widths) // 8)

    def runs(self) -> Iterator[Run]:
        first = bit = 0
        while first < len(self.widths):
            width, count = self.widths[first], 1
            while first + count < len(self.widths) and self.widths[first + count] == width:
                count += 1
            if width:
                yield Run(width, first, count, bit)
            first += count
            bit += width * count

    def pack(self, codes: Sequence[Tensor], n: int, device: torch.device) -> Tensor:
        """codes: for each run, integers [n, count] below 2**width. Returns uint8 [n, packed_bytes]."""
        bits = torch.zeros((n, 8 * self.packed_bytes), dtype=torch.uint8, device=device)
        for run, part in zip(self.runs(), codes, strict=True):
            target = bits[:, run.bit : run.bit + run.width * run.count].view(n, run.count, run.width)
            for place in range(run.width):
                target[:, :, place] = (part >> (run.width - 1 - place)) & 1
        octets = bits.view(n, self.packed_bytes, 8)
        packed = torch.zeros((n, self.packed_bytes), dtype=torch.uint8, device=device)
        for place in range(8):
            packed |= octets[:, :, place] << (7 - place)
        return packed

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """The inverse: for each run, int32 [n, count]."""
        shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
        bits = ((packed[:, :, None] >> shifts) & 1).flatten(1)
        parts: list[Tensor] = []
        for run in self.runs():
            source = bits[:, run.bit : run.bit + run.width * run.count].reshape(-1, run.count, run.width)
            part = torch.zeros(source.shape[:2], dtype=torch.int32, device=packed.device)
            for place in range(run.width):
                part = (part << 1) | source[:, :, place]
            parts.append(part)
        return parts
