"""Integer compressors: equal steps from the smallest to the largest element of a group.

    bytes of a vector      scale × groups (2 each) | centre × groups (2 each) | levels, `bits` each

An element is (level − (levels − 1)/2 + centre/16) · scale. The centre, in whole sixteenths of the scale, lies
midway between the extremes. Of the variants tried (symmetric about zero or not), this one has the least error per byte
on real keys and values. 8 and 4 bits fit any head size: a last group may be shorter than the others.

Coding a decoded vector again may give other bytes: scale and centre are computed anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inference_engine.kv.compressor import Coding
from inference_engine.kv.compressors.bits import pack, packed_bytes, unpack
from inference_engine.kv.compressors.columns import ColumnCompressor
from inference_engine.kv.compressors.scales import SCALE_BYTES, load_scales, round_scales, store_scales

_CENTRE_BYTES = 2
_FRACTIONS = 16  # of a step, in which the centre is counted
_CENTRE_RANGE = 2000  # steps: a centre beyond its sixteen bits makes the step wider

# Half a step, half a sixteenth of the centre's, and the share of a step by which a scale, rounded down, leaves the
# extremes of 255 steps beyond the last level: (255 · 2^-9 − 1/2) < 0.
_WORST_STEPS = 0.5 + 0.5 / _FRACTIONS + 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Integer(ColumnCompressor):
    """group: elements of the head that share a scale and a centre; None: all of them."""

    bits: int
    group: int | None = None

    @property
    def name(self) -> str:
        return f"int{self.bits}" if self.group is None else f"int{self.bits}g{self.group}"

    @property
    def coding(self) -> Coding:
        return Coding(bits=self.bits, group=self.group, has_centres=True, middle=self._top / 2)

    def vector_bytes(self, head_dim: int) -> int:
        return self._groups(head_dim) * (SCALE_BYTES + _CENTRE_BYTES) + packed_bytes(head_dim, self.bits)

    def _encode(self, columns: Tensor, powers: Tensor) -> Tensor:
        head_dim, count = columns.shape
        grouped = self._grouped(columns)  # [G, group, N]
        scales, centres = self._frame(grouped)
        levels = grouped / scales + ((self._top / 2) - centres / _FRACTIONS)
        levels = levels.round_().clamp_(0, self._top).to(torch.uint8).view(-1, count)[:head_dim]
        return torch.cat(
            (
                store_scales(scales[:, 0] * powers),
                pack(centres[:, 0].to(torch.int32), 8 * _CENTRE_BYTES),
                pack(levels, self.bits),
            )
        )

    def _decode(self, codes: Tensor, head_dim: int) -> Tensor:
        groups = self._groups(head_dim)
        sizes = [groups * SCALE_BYTES, groups * _CENTRE_BYTES, packed_bytes(head_dim, self.bits)]
        stored_scales, stored_centres, stored_levels = torch.split(codes, sizes)
        scales = load_scales(stored_scales, groups)[:, None]
        centres = unpack(stored_centres, groups, 8 * _CENTRE_BYTES).to(torch.int16)[:, None]
        levels = self._grouped(unpack(stored_levels, head_dim, self.bits).float())
        entries: Tensor = (levels + (centres / _FRACTIONS - self._top / 2)) * scales
        return entries.view(-1, codes.shape[1])[:head_dim]

    def _bound(self, columns: Tensor) -> Tensor:
        scales, _ = self._frame(self._grouped(columns))
        per_entry = (_WORST_STEPS * scales).expand(-1, self._size(len(columns)), -1).flatten(0, 1)
        bound: Tensor = torch.linalg.vector_norm(per_entry[: len(columns)], dim=0)
        return bound

    @property
    def _top(self) -> int:
        return (1 << self.bits) - 1

    def _size(self, head_dim: int) -> int:
        return head_dim if self.group is None else min(self.group, head_dim)

    def _groups(self, head_dim: int) -> int:
        return -(-head_dim // self._size(head_dim))

    def _grouped(self, columns: Tensor) -> Tensor:
        """[D, N] -> [G, group, N]; a short last group is padded with its last element, which moves no extreme."""
        head_dim, count = columns.shape
        missing = -head_dim % self._size(head_dim)
        if missing:
            columns = torch.cat((columns, columns[-1:].expand(missing, count)))
        return columns.view(-1, self._size(head_dim), count)

    def _frame(self, grouped: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and centre of each group, [G, 1, N]."""
        low, high = grouped.amin(dim=1, keepdim=True), grouped.amax(dim=1, keepdim=True)
        widest = torch.maximum(high, -low) * (1 / _CENTRE_RANGE)
        scales = round_scales(torch.maximum((high - low) * (1 / self._top), widest).clamp(min=2.0**-40))
        return scales, ((low + high) * (_FRACTIONS / 2) / scales).round_()
