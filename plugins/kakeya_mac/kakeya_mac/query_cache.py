"""The query cache: past queries of generated tokens, which later ones may match. A ring buffer for each layer.

    in K   queries [Hq, ring, D] float32 · lses [Hq, ring] float32
    in V   positions [ring] int64 · outs [Hq, ring, D] float32 · depths [Hq, ring] int32

It lies in the session's allocation. A step's queries are written when their tokens are committed, those of rejected
tokens never. Zeros mean an empty ring buffer: the query of position 0 has no prefix to reuse, and is never matched
(`kernel.py`). Queries are float32 whatever the model's dtype, so that K and V need equal room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerSet, Layout, Positions
from inference_engine.kv.memory.pool import Demand, KVBuffer
from inference_engine.kv.part import Held, Need, Saved
from inference_engine.kv.parts.layer_part import LayerMechanism, LayerPart
from inference_engine.kv.slots import LayerSlots
from inference_engine.kv.views import Region, Scoring, StagedQueries, StepReads, View
from kakeya_mac.kernel import MacEntry, MacState, MacStats, MatchTotals, mac_attend


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryMatcher(LayerMechanism):
    """How a generated token reuses the attention of an earlier one. `kernel.py` explains each number.

    chain_limit: None for no limit.
    """

    moves_keys: ClassVar[bool] = True
    by_view: ClassVar[bool] = True

    ring: int
    band: int
    threshold: float
    chain_limit: int | None

    def need(self, geometry: Geometry, layers: LayerSet, layout: Layout) -> Need:
        return Need(demands=tuple(query_cache_demand(geometry, layer, self) for layer in layers.layers))

    def open(self, slots: LayerSlots, starts: Sequence[int]) -> LayerPart:
        return QueryCache(
            slots, PastQueries(self, dict(zip(slots.layer_set.layers, starts, strict=True)), slots.context)
        )


def query_cache_demand(geometry: Geometry, layer: int, matcher: QueryMatcher) -> Demand:
    """The memory that the query cache of one layer needs."""
    shape = geometry.layers[layer]
    half = matcher.ring * (8 + shape.query_heads * (shape.head_dim + 1) * 4)  # the first one takes a little less
    return Demand.of_bytes(geometry, 2 * half)


class PastQueries:
    """The ring buffers of some layers."""

    def __init__(self, matcher: QueryMatcher, starts: Mapping[int, int], context: KVContext) -> None:
        """starts: the first buffer vector of each layer's ring buffer."""
        self.matcher = matcher
        self.totals: dict[int, MatchTotals] = {}
        shapes = context.geometry.layers
        self._kv_heads = {layer: shapes[layer].kv_heads for layer in starts}
        self.allocations = [_allocation(context, layer, start, matcher) for layer, start in starts.items()]
        self._states = {
            layer: _state(shapes[layer].query_heads, shapes[layer].head_dim, matcher.ring, allocation)
            for layer, allocation in zip(starts, self.allocations, strict=True)
        }
        self._pending: dict[int, list[tuple[MacEntry, MacStats]]] = {}
        self._is_staged = False
        self.is_used = False  # was a query ever committed?

    def stage(self) -> None:
        """Prepare for generated tokens. Before the first, wipe what an earlier session left in the allocation."""
        self._pending = {}
        self._is_staged = True
        if not self.is_used:
            self._wipe()

    def state(self, layer: int, count: int) -> MacState:
        """What `count` generated tokens of one step may match. For several it is a copy, to which theirs are added."""
        state = self._states[layer]
        return state if count == 1 else state.with_pending([])

    def leave(self, layer: int, left: Sequence[tuple[MacEntry, MacStats]]) -> None:
        """Hold the queries of the step's generated tokens until they are committed."""
        self._pending[layer] = list(left)

    def commit(self, length: int) -> None:
        """Write the queries of tokens below `length`; drop the others."""
        pending, self._pending, self._is_staged = self._pending, {}, False
        for layer, left in pending.items():
            accepted = [(entry, stats) for entry, stats in left if entry.position < length]
            self.is_used |= bool(accepted)
            self._states[layer].commit([entry for entry, _ in accepted])
            for entry, stats in accepted:
                totals = MatchTotals.of(entry.position, stats, self._kv_heads[layer])
                self.totals[layer] = self.totals[layer].plus(totals) if layer in self.totals else totals

    def load(self, allocations: Iterable[tuple[Tensor, ...]]) -> None:
        """Copy the query cache of another session, as bytes, without the totals of its matches."""
        for own, given in zip(self.allocations, allocations, strict=False):
            for half, source in zip(own, given, strict=True):
                half.copy_(source)
            self.is_used = True

    def forget(self) -> None:
        """Empty the cache. The totals of past matches stay."""
        if self.is_used:
            self._wipe()
        self._pending, self._is_staged, self.is_used = {}, False, False

    def _wipe(self) -> None:
        for allocation in self.allocations:
            for half in allocation:
                half.zero_()

    def held_bytes(self) -> int:
        """Whole ring buffers, from the first generated token on."""
        return sum(state.nbytes for state in self._states.values()) if self.is_used or self._is_staged else 0


class QueryCache(LayerPart):
    """The query cache of a set of layers, as a part of a session."""

    def __init__(self, slots: LayerSlots, past: PastQueries) -> None:
        self._slots = slots
        self._past = past

    def stage(self, positions: Positions, generated: NDArray[np.bool_]) -> int:
        if generated.any():
            self._past.stage()
        return super().stage(positions, generated)

    def has_numbers(self, queries: StagedQueries, step: StepReads) -> bool:
        return not queries.has_generated

    def view(self, queries: StagedQueries, step: StepReads, inner: Callable[[], View]) -> View:
        if not queries.has_generated:
            return inner()
        generated = queries.generated_queries
        return MacView(
            region=self._slots.region,
            past=self._past,
            generated=torch.from_numpy(generated).to(step.device),
            positions=queries.positions[generated].tolist(),
            unrotations=_unrotations(self._slots, queries.positions[generated]),
            dense=inner() if queries.has_appended else None,
        )

    def commit(self, before: int, length: int, rejected: Positions) -> None:
        self._past.commit(length)

    def save(self, length: int) -> Saved:
        """The cache as bytes, layer by layer."""
        return {"query_cache": self._past.allocations if self._past.is_used else ()}

    def load(self, length: int, saved: Saved) -> None:
        self._past.load(saved["query_cache"])

    def forget(self, at: int, length: int) -> None:
        self._past.forget()

    def report(self, held: Held, length: int, end: int) -> None:
        held.add(mac=self._past.held_bytes())
        held.counted |= self._past.totals


@dataclass(frozen=True, kw_only=True, slots=True)
class MacView(View):
    """Lets the queries `generated` reuse the attention of earlier ones, one by one; reads as `dense` for the others.

    A later query of the same step can match an earlier one at once; later steps can, if its token is committed. Each
    query is an operation of its own, with shapes that depend on its position alone.
    """

    region: Region
    past: PastQueries
    generated: Tensor  # indexes of queries [G]
    positions: Sequence[int]  # of these queries
    unrotations: Tensor  # [G, D, D]: by query, the matrix that undoes its rotation
    dense: View | None  # None: every query is generated

    def read(self, layer: int, queries: Tensor, buffer: KVBuffer, scoring: Scoring) -> Tensor:
        out = torch.zeros_like(queries) if self.dense is None else self.dense.read(layer, queries, buffer, scoring)
        matcher = self.past.matcher
        keys, values = (
            self.region.slots(states, layer, 0, self.positions[-1] + 1) for states in (buffer.keys, buffer.values)
        )
        state = self.past.state(layer, len(self.positions))
        outs, left = [], []
        for query, unrotation, position in zip(queries[self.generated], self.unrotations, self.positions, strict=True):
            attended, entry, stats = mac_attend(
                state,
                query.float() @ unrotation,
                query,
                keys,
                values,
                position,
                band=matcher.band,
                threshold=matcher.threshold,
                scaling=scoring.scaling,
                chain_limit=matcher.chain_limit,
                softcap=scoring.softcap,
                head_sinks=scoring.head_sinks,
            )
            if len(self.positions) > 1:
                state.commit([entry])
            outs.append(attended)
            left.append((entry, stats))
        self.past.leave(layer, left)
        out[self.generated] = torch.stack(outs).to(out.dtype)
        return out


def _unrotations(slots: LayerSlots, positions: Positions) -> Tensor:
    """[n, D, D], the matrices that undo the rotations of `positions`, made once for all layers."""
    context, rotary = slots.context, slots.layer_set.rotary
    units = torch.eye(slots.head_dim, device=context.device)[:, None]  # [D, 1, D], each as a head
    shifts = torch.from_numpy(-positions)
    if context.geometry.token_quantum == 1:
        return context.rotate(units.expand(-1, len(shifts), -1), shifts, rotary).transpose(0, 1)
    # One at a time: the last digit of a cosine may depend on the batch that it is computed in.
    return torch.stack([context.rotate(units, shift, rotary)[:, 0] for shift in shifts[:, None]])


def _allocation(context: KVContext, layer: int, start: int, matcher: QueryMatcher) -> tuple[Tensor, Tensor]:
    """The bytes of a layer's ring buffer, in two halves."""
    demand = query_cache_demand(context.geometry, layer, matcher)
    first, second = context.pool.run(demand, start).view(torch.uint8).chunk(2)
    return first, second


def _state(query_heads: int, head_dim: int, ring: int, allocation: tuple[Tensor, Tensor]) -> MacState:
    """Views of the allocation's bytes, in the order that the head of this file shows."""
    wide, narrow = (query_heads, ring, head_dim), (query_heads, ring)
    queries, lses = _pieces(allocation[0], (torch.float32, wide), (torch.float32, narrow))
    positions, outs, depths = _pieces(
        allocation[1], (torch.int64, (ring,)), (torch.float32, wide), (torch.int32, narrow)
    )
    return MacState(queries=queries, outs=outs, lses=lses, depths=depths, positions=positions)


def _pieces(allocation: Tensor, *parts: tuple[torch.dtype, tuple[int, ...]]) -> list[Tensor]:
    """Views of the bytes of `allocation` as tensors of these types and shapes, one after another."""
    counts = [math.prod(shape) * dtype.itemsize for dtype, shape in parts]
    pieces = torch.split(allocation[: sum(counts)], counts)
    return [piece.view(dtype).view(shape) for piece, (dtype, shape) in zip(pieces, parts, strict=True)]
