"""Rows kept through a compressor: each K and V vector coded by itself, layer by layer, truly packed.

    arena of K, per layer   [capacity, Hkv, row bytes] codes of keys      | arena of V: the same of values

What is coded is the unrotated key minus a per-channel mean, and the value minus its mean: keys have a large constant
part per channel that a code would otherwise spend its bits on (record `codec_error`, lloyd4: 3.9 times less error at
equal bytes). The means are those of the session's own first rows: they need no calibration, are a function of the
history, and take one row. Decoding gives unrotated rows; the model's own rotation puts keys back at their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from inference_engine.kv.compressor import KVCompressor
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import Positions
from inference_engine.kv.pool import Demand
from inference_engine.kv.restorer import Archive, KeptLayers, Restorer, RowBlock


@dataclass(frozen=True, slots=True)
class Coded(Restorer):
    """Keeps rows as the codes of `compressor`."""

    compressor: KVCompressor

    def check(self, geometry: Geometry, layers: Sequence[int]) -> None:
        for index in layers:
            self.compressor.check(geometry.layers[index].head_dim)

    def demands(self, geometry: Geometry, kept: Sequence[KeptLayers]) -> tuple[Demand, ...]:
        return tuple(demand for group in kept for demand in [self._demand(geometry, group)] * len(group.layers.layers))

    def open(self, context: KVContext, kept: Sequence[KeptLayers]) -> Archive | None:
        demands = self.demands(context.geometry, kept)
        starts = context.pool.reserve(demands)
        return None if starts is None else _CodedArchive(self.compressor, context, kept, demands, starts)

    def _demand(self, geometry: Geometry, group: KeptLayers) -> Demand:
        """One layer's codes, and its means in a row of their own."""
        head_dim = group.layers.head_dim
        code_bytes = group.capacity * group.layers.kv_heads * self.compressor.row_bytes(head_dim)
        elements = group.layers.kv_heads * head_dim + -(-code_bytes // geometry.itemsize)
        unit = geometry.alignment
        return Demand(head_dim=head_dim, elements=-(-elements // unit) * unit if group.capacity else 0)


class _CodedArchive(Archive):
    def __init__(
        self,
        compressor: KVCompressor,
        context: KVContext,
        kept: Sequence[KeptLayers],
        demands: Sequence[Demand],
        starts: Sequence[int],
    ) -> None:
        self._compressor = compressor
        self._context = context
        self._demands = demands
        self._starts = starts
        ends = np.cumsum([len(group.layers.layers) for group in kept])
        self._groups = [
            _CodedGroup(compressor, context, group, starts[end - len(group.layers.layers) : end])
            for group, end in zip(kept, ends.tolist(), strict=True)
        ]

    def begin(self, blocks: Sequence[RowBlock]) -> None:
        for group, block in zip(self._groups, blocks, strict=True):
            group.begin(block)

    def keep(self, blocks: Sequence[RowBlock]) -> None:
        for group, block in zip(self._groups, blocks, strict=True):
            group.keep(block)

    def restore(self, positions: Sequence[Positions]) -> Sequence[RowBlock]:
        return [group.restore(asked) for group, asked in zip(self._groups, positions, strict=True)]

    def copy_from(self, other: Self, positions: Sequence[Positions]) -> None:
        for group, theirs, kept in zip(self._groups, other._groups, positions, strict=True):
            group.copy_from(theirs, kept)

    def held_bytes(self, counts: Sequence[int]) -> int:
        return sum(group.held_bytes(count) for group, count in zip(self._groups, counts, strict=True))

    def forget(self) -> None:
        """What was kept is never asked for again, and the next rows are put over it."""

    def release(self) -> None:
        self._context.pool.release(self._demands, self._starts)


class _CodedGroup:
    """The codes of one set of layers."""

    def __init__(self, compressor: KVCompressor, context: KVContext, kept: KeptLayers, starts: Sequence[int]) -> None:
        self._compressor = compressor
        self._kept = kept
        self._page = context.geometry.page_tokens
        heads, dim = kept.layers.kv_heads, kept.layers.head_dim
        self._row_bytes = compressor.row_bytes(dim)
        self._mean_bytes = 2 * heads * dim * context.geometry.itemsize * len(starts)
        arena = context.pool.arenas[dim]
        self._means = [
            [states[start : start + heads] for start in starts] if kept.capacity else []
            for states in (arena.keys, arena.values)
        ]
        self._codes = [
            [self._bytes_from(states, start + heads) for start in starts] if kept.capacity else []
            for states in (arena.keys, arena.values)
        ]

    def _bytes_from(self, states: Tensor, row: int) -> Tensor:
        """[capacity, Hkv, row bytes] of memory from arena row `row` on."""
        heads = self._kept.layers.kv_heads
        flat = states.view(torch.uint8).view(-1)
        first = row * states.shape[-1] * states.itemsize
        count = self._kept.capacity * heads * self._row_bytes
        return flat[first : first + count].view(self._kept.capacity, heads, self._row_bytes)

    def begin(self, block: RowBlock) -> None:
        if not len(block.positions):
            return
        for means, rows in zip(self._means, (block.keys, block.values), strict=True):
            for place, mean in zip(means, rows.mean(dim=1), strict=bool(means)):
                place.copy_(mean)

    def keep(self, block: RowBlock) -> None:
        if not len(block.positions):
            return
        slots = self._slots(block.positions, block.keys.device)
        for index, rows in enumerate((block.keys, block.values)):
            codes = self._compressor.encode(rows - self._mean(index))
            for place, code in zip(self._codes[index], codes, strict=True):
                place.index_copy_(0, slots, code)

    def restore(self, positions: Positions) -> RowBlock:
        device = self._codes[0][0].device if self._kept.capacity else torch.device("cpu")
        if not len(positions):
            shape = (len(self._kept.layers.layers), 0, self._kept.layers.kv_heads, self._kept.layers.head_dim)
            return RowBlock(positions, torch.zeros(shape, device=device), torch.zeros(shape, device=device))
        slots = self._slots(positions, device)
        keys, values = (
            self._compressor.decode(torch.stack([place[slots] for place in places]), self._kept.layers.head_dim)
            + self._mean(index)
            for index, places in enumerate(self._codes)
        )
        return RowBlock(positions, keys, values)

    def copy_from(self, other: _CodedGroup, positions: Positions) -> None:
        if not len(positions):
            return
        device = self._codes[0][0].device
        mine, theirs = self._slots(positions, device), other._slots(positions, device)
        for means, given in zip(self._means, other._means, strict=True):
            for place, source in zip(means, given, strict=True):
                place.copy_(source)
        for codes, given in zip(self._codes, other._codes, strict=True):
            for place, source in zip(codes, given, strict=True):
                place.index_copy_(0, mine, source[theirs])

    def held_bytes(self, count: int) -> int:
        if not count:
            return 0
        rows = min(self._kept.capacity, -(-count // self._page) * self._page)
        heads, layers = self._kept.layers.kv_heads, len(self._kept.layers.layers)
        return self._mean_bytes + 2 * rows * heads * self._row_bytes * layers

    def _mean(self, index: int) -> Tensor:
        """[layers, 1, Hkv, D] float32."""
        return torch.stack(self._means[index]).float()[:, None]

    def _slots(self, positions: Positions, device: torch.device) -> Tensor:
        return torch.from_numpy(self._kept.slots(positions)).to(device)
