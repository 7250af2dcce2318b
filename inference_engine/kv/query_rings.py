"""What generated rows leave for later ones where queries are matched: a ring for each layer, in the session's slab.

    in K   queries [Hq, ring, D] float32 · lses [Hq, ring] float32
    in V   positions [ring] int64 · outs [Hq, ring, D] float32 · depths [Hq, ring] int32

A step's entries wait here and are written when their rows are committed; those of rejected rows were never there. Zeros
are an empty ring: an entry of position 0 has no prefix to give, and is never matched (`kernels/mac.py`). Queries are
kept in float32 whatever the model computes in, for K and V have equal room.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from inference_engine.kernels.mac import MacEntry, MacState, MacStats
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import QueryMatcher
from inference_engine.kv.pool import Demand


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchTotals:
    """Sums over committed generated rows of one layer. Tensors are on the device, and none is changed later.

    rows_present: rows of K and V that full attention would have read, in each head.
    group_rows_read: heads that share K and V read them once, as far back as the one that reads most.
    The masses are those of MacStats.
    """

    rows: int
    rows_present: int
    hits: Tensor  # [Hq]
    rows_read: Tensor  # [Hq]
    group_rows_read: Tensor  # [Hkv]
    band_mass: Tensor  # [Hq]
    reused_mass: Tensor  # [Hq]

    @staticmethod
    def of(position: int, stats: MacStats, kv_heads: int) -> MatchTotals:
        """Those of one row."""
        return MatchTotals(
            rows=1,
            rows_present=position + 1,
            hits=stats.hits.long(),
            rows_read=stats.rows_read,
            group_rows_read=stats.rows_read.view(kv_heads, -1).amax(-1),
            band_mass=stats.band_mass,
            reused_mass=stats.reused_mass,
        )

    def plus(self, other: MatchTotals) -> MatchTotals:
        return MatchTotals(
            **{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        )


def ring_demand(geometry: Geometry, layer: int, matcher: QueryMatcher) -> Demand:
    """What the ring of one layer needs of the pool."""
    shape = geometry.layers[layer]
    unit = geometry.alignment * geometry.itemsize
    value_bytes = matcher.ring * (8 + shape.query_heads * (shape.head_dim + 1) * 4)  # K takes a little less
    return Demand(head_dim=shape.head_dim, elements=-(-value_bytes // unit) * geometry.alignment)


class QueryRings:
    """The rings of the layers of one group. Everything but construction runs on the engine's thread."""

    def __init__(self, matcher: QueryMatcher, starts: Mapping[int, int], context: KVContext) -> None:
        """starts: the first arena row of each layer's ring."""
        self.matcher = matcher
        self.starts = tuple(starts.values())
        self.totals: dict[int, MatchTotals] = {}
        shapes = context.geometry.layers
        self._kv_heads = {layer: shapes[layer].kv_heads for layer in starts}
        self._slabs = [_slab(context, layer, start, matcher) for layer, start in starts.items()]
        self._states = {
            layer: _state(shapes[layer].query_heads, shapes[layer].head_dim, matcher.ring, slab)
            for layer, slab in zip(starts, self._slabs, strict=True)
        }
        self._pending: dict[int, list[tuple[MacEntry, MacStats]]] = {}
        self._is_staged = False
        self._is_used = False  # was an entry ever committed?

    def stage(self) -> None:
        """Get ready for generated rows. What an earlier session left in the slab is wiped before the first."""
        self._pending = {}
        self._is_staged = True
        if not self._is_used:
            for slab in self._slabs:
                for half in slab:
                    half.zero_()

    def state(self, layer: int, rows: int) -> MacState:
        """What `rows` generated rows of one step may match. For several it is a copy, to which to add theirs."""
        state = self._states[layer]
        return state if rows == 1 else state.with_pending([])

    def leave(self, layer: int, left: Sequence[tuple[MacEntry, MacStats]]) -> None:
        """Remember what the step's generated rows leave, should they be committed."""
        self._pending[layer] = list(left)

    def commit(self, length: int) -> None:
        """Write what rows below `length` leave; forget the others."""
        pending, self._pending, self._is_staged = self._pending, {}, False
        for layer, left in pending.items():
            accepted = [(entry, stats) for entry, stats in left if entry.position < length]
            self._is_used |= bool(accepted)
            self._states[layer].commit([entry for entry, _ in accepted])
            for entry, stats in accepted:
                totals = MatchTotals.of(entry.position, stats, self._kv_heads[layer])
                self.totals[layer] = self.totals[layer].plus(totals) if layer in self.totals else totals

    def copy_from(self, other: QueryRings) -> None:
        """Hold what the committed rows of another session left. The totals of its matches stay its own."""
        if not other._is_used:
            return
        for own, given in zip(self._slabs, other._slabs, strict=True):
            for half, source in zip(own, given, strict=True):
                half.copy_(source)
        self._is_used = True

    def forget(self) -> None:
        """Remember nothing any more. The totals of past matches stay."""
        if self._is_used:
            for slab in self._slabs:
                for half in slab:
                    half.zero_()
        self._pending, self._is_staged, self._is_used = {}, False, False

    def held_bytes(self) -> int:
        """Rings are held whole from the first generated row on."""
        return sum(state.nbytes for state in self._states.values()) if self._is_used or self._is_staged else 0


def _slab(context: KVContext, layer: int, start: int, matcher: QueryMatcher) -> tuple[Tensor, Tensor]:
    """The bytes of a layer's ring, in K and in V."""
    demand = ring_demand(context.geometry, layer, matcher)
    arena = context.pool.arenas[demand.head_dim]
    first = start * demand.head_dim
    keys, values = (
        states.view(-1)[first : first + demand.elements].view(torch.uint8) for states in (arena.keys, arena.values)
    )
    return keys, values


def _state(query_heads: int, head_dim: int, ring: int, slab: tuple[Tensor, Tensor]) -> MacState:
    """The slab's bytes as numbers: views, in the order that the head of this file shows."""
    wide, narrow = (query_heads, ring, head_dim), (query_heads, ring)
    queries, lses = _pieces(slab[0], (torch.float32, wide), (torch.float32, narrow))
    positions, outs, depths = _pieces(slab[1], (torch.int64, (ring,)), (torch.float32, wide), (torch.int32, narrow))
    return MacState(queries=queries, outs=outs, lses=lses, depths=depths, positions=positions)


def _pieces(slab: Tensor, *parts: tuple[torch.dtype, tuple[int, ...]]) -> list[Tensor]:
    """Views of the bytes of `slab` as tensors of these types and shapes, one after another."""
    counts = [math.prod(shape) * dtype.itemsize for dtype, shape in parts]
    pieces = torch.split(slab[: sum(counts)], counts)
    return [piece.view(dtype).view(shape) for piece, (dtype, shape) in zip(pieces, parts, strict=True)]
