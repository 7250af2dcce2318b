"""Codes of different widths, packed bit by bit into whole bytes.

widths   3 3 2 1 1 …      codes   5 2 3 0 1 …
bits     101 010 11 0 1 … the most significant bit of each code first; the last byte is filled up with zeros

All codes of all vectors are packed in a few operations, whatever their widths: more launches would take a GPU's host
longer than the device takes to run them. A table maps each bit to its code, and each code to the three bytes that
hold it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_engine.kernels.trellis import BitPlaces, pack

MAX_WIDTH = 16  # with what stands before it in its first byte, a code must not reach a fourth


@dataclass(frozen=True, slots=True)
class CodeRun:
    """Neighbouring codes of one width, not 0: `first` is the first of them."""

    width: int
    first: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """octet, right, mask [codes]: where a code begins, how many bits follow it in three bytes, and what it may be."""

    bits: BitPlaces
    octet: Tensor
    right: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Packing:
    """The widths of a token's codes, in order, 0 to MAX_WIDTH bits."""

    widths: tuple[int, ...]
    _places: dict[torch.device, _Places] = field(init=False, repr=False, compare=False, default_factory=dict)

    @property
    def packed_bytes(self) -> int:
        return -(-sum(self.widths) // 8)

    @cached_property
    def runs(self) -> tuple[CodeRun, ...]:
        found, first = [], 0
        for width, alike in groupby(self.widths):
            count = len(list(alike))
            if width:
                found.append(CodeRun(width, first, count))
            first += count
        return tuple(found)

    def pack(self, codes: Tensor) -> Tensor:
        """codes: integers [n, codes], each below 2**width. Returns uint8 [n, packed_bytes]."""
        packed = torch.empty((len(codes), self.packed_bytes), dtype=torch.uint8, device=codes.device)
        pack(codes, self.bits_on(codes.device), packed)
        return packed

    def bits_on(self, device: torch.device) -> BitPlaces:
        """For an operation that packs."""
        return self._places_on(device).bits

    def unpack(self, packed: Tensor) -> Tensor:
        """The inverse: int32 [n, codes]."""
        places = self._places_on(packed.device)
        octets = F.pad(packed, (0, 3)).int()
        threes = (octets[:, :-2] << 16) | (octets[:, 1:-1] << 8) | octets[:, 2:]
        return (threes[:, places.octet] >> places.right) & places.mask

    def _places_on(self, device: torch.device) -> _Places:
        found = self._places.get(device)
        if found is None:
            found = self._places[device] = self._work_out(device)
        return found

    def _work_out(self, device: torch.device) -> _Places:
        if not all(0 <= width <= MAX_WIDTH for width in self.widths):
            raise ValueError(f"codes have 0 to {MAX_WIDTH} bits, got {min(self.widths)} to {max(self.widths)}")
        widths = torch.tensor(self.widths)
        ends = torch.tensor(tuple(accumulate(self.widths)))
        starts = ends - widths
        code = torch.repeat_interleave(torch.arange(len(widths)), widths)
        left = ends[code] - 1 - torch.arange(len(code))
        fill = 8 * self.packed_bytes - len(code)
        return _Places(
            bits=BitPlaces(
                code=F.pad(code, (0, fill)).int().to(device),
                left=F.pad(left, (0, fill), value=MAX_WIDTH).int().to(device),
            ),
            octet=(starts // 8).to(device),
            right=(24 - starts % 8 - widths).int().to(device),
            mask=((1 << widths) - 1).int().to(device),
        )
