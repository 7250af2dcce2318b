"""An index of a layer's keys by their leading components, and queries that read the tokens of largest weight.

    tile    0 2 4 …     then 1 3 5 …          [ceil(tiles / 2), Hkv, tile_bytes] each

It lies in the session's allocation, a run of bytes for each layer, and grows with the history. A tile is
written when its last token is committed, from the entries as they lie in the regions, each tile by itself: its bits do
not depend on how the tokens came. Generated tokens read the sink, the window and the chosen tokens
(`kernels/components.py`). Appended tokens read everything, or choose as generated ones do, each for itself
(`TokenSelector.appended`). Chosen tokens that have left the regions are read from where they went (`FarEntries`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.components import (
    LANES,
    IndexShape,
    RotateBy,
    component_scores,
    encode,
    pack,
    token_weights,
    unpack,
)
from inference_engine.kernels.gather import (
    QUERIES_AT_ONCE,
    Always,
    always_read,
    attend_entries,
    gather_attend,
    gather_vectors,
    select,
)
from inference_engine.kernels.reads import SINK, START, AttentionCall, RaggedAttention, StagedRead, TokenRead
from inference_engine.kv.context import ArchivedCodes, LayerIndex, OpenIndex, RestoreCache, TiledLayers, TileWriter
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerSet, Layout, Positions
from inference_engine.kv.memory.pool import Demand, KVBuffer
from inference_engine.kv.numbers import Numbers, RegionLines
from inference_engine.kv.part import Held, Need, Saved
from inference_engine.kv.parts.layer_part import LayerMechanism, LayerPart
from inference_engine.kv.slots import LayerSlots
from inference_engine.kv.views import Region, Scoring, StagedQueries, StepReads, View


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSelector(LayerMechanism):
    """What a generated token reads in a layer: sink, window, and the tokens of largest weight between them.

    shape: of the index by which weights are estimated (`kernels/components.py`). The start of the window is rounded to
    whole tiles of it. count: distant tokens per KV head. They lie in the layer's regions, or in an archive, if entries
    leave the regions (`kv/parts/selected.py`). appended: do appended tokens choose as generated ones do? Otherwise they
    read everything.
    """

    needs_every_entry: ClassVar[bool] = False
    moves_keys: ClassVar[bool] = True

    shape: IndexShape
    sink: int
    window: int
    count: int
    appended: bool = False

    def local_starts(self, positions: Positions) -> Positions:
        """The first position of each query's window. Earlier tiles are full, and committed before the query's step."""
        tile = self.shape.tile
        return np.maximum(0, (positions - self.window) // tile * tile)

    @property
    def most_entries(self) -> int:
        """The most entries that a query reads, its own included."""
        return self.sink + self.window + self.shape.tile + self.count

    @property
    def kept_longer(self) -> int:
        """A tile of the index leaves as a whole."""
        return self.shape.tile

    def restored(self, archived: int) -> int:
        return min(archived, self.count)

    def need(self, geometry: Geometry, layers: LayerSet, layout: Layout) -> Need:
        return Need(demands=(_demand(geometry, layers, layout, self.shape),) * len(layers.layers))

    def open(self, slots: LayerSlots, starts: Sequence[int]) -> LayerPart:
        return ComponentIndex(slots, self, starts)


def _stored(layers: LayerSet, layout: Layout, shape: IndexShape) -> tuple[int, ...]:
    """The shape of one layer's index in bytes."""
    tiles = layout.longest // shape.tile
    return 2, -(-tiles // 2), layers.kv_heads, shape.tile_bytes


def _demand(geometry: Geometry, layers: LayerSet, layout: Layout, shape: IndexShape) -> Demand:
    return Demand.of_bytes(geometry, math.prod(_stored(layers, layout, shape)))


class FarEntries(Protocol):
    """Gives the entries of chosen tokens that have left the regions."""

    def some(self, layer: int, positions: Positions) -> tuple[Tensor, Tensor]:
        """Keys, rotated at their own positions, and values of any such positions: [Hkv, n, D] each, as regions would
        hold them. Raises RestorationFailed if they cannot be restored.
        """


def choose_tokens(
    lines: Numbers,
    record: TokenRead,
    selector: TokenSelector,
    queries: Positions,
    indexes: Sequence[int],
    generated: NDArray[np.bool_],
) -> None:
    """Make the queries of these lines [layers, n, FIELDS] read only the tokens that the selector chooses: the generated
    ones, and the others if it is for them, too.

    indexes: by layer, the number of its index, as the device's operation knows it.
    """
    choosing = generated | selector.appended
    chosen = lines[:, choosing]
    chosen[..., SINK] = selector.sink
    index, local = np.array(indexes, dtype=np.int64)[:, None], selector.local_starts(queries[choosing])
    record.fill(chosen, kept=selector.count, local=local, shape=selector.shape.number, index=index)
    lines[:, choosing] = chosen


class ComponentIndex(LayerPart):
    """The index of a set of layers. far: where tokens are that have left the regions; set once, by their owner."""

    far: FarEntries | None = None

    def __init__(self, slots: LayerSlots, selector: TokenSelector, starts: Sequence[int]) -> None:
        self._slots = slots
        self._selector = selector
        self._shape = selector.shape
        context, layers = slots.context, slots.layer_set.layers
        self._components = [context.components[layer] for layer in layers]
        stored = _stored(slots.layer_set, slots.layout, self._shape)
        demand = _demand(context.geometry, slots.layer_set, slots.layout, self._shape)
        runs = [context.pool.run(demand, start).view(torch.uint8) for start in starts]
        # By layer, even tiles and odd ones: [pairs of tiles, Hkv, tile_bytes].
        self._halves = [run[: math.prod(stored)].view(stored).unbind() for run in runs]
        # What the device's own operation needs, by layer; None where it has none.
        self._opened: list[OpenIndex | None] = [
            context.open_index(
                LayerIndex(
                    layer=layer,
                    rotary=slots.layer_set.rotary,
                    shape=self._shape,
                    components=components,
                    halves=halves,
                    capacity=slots.layout.longest,
                )
            )
            for layer, components, halves in zip(layers, self._components, self._halves, strict=True)
        ]
        self._numbers = [0 if opened is None else opened.number for opened in self._opened]
        # What writes tiles, where keys lie as the device's operation has them.
        self._write: TileWriter | None = None
        layout = slots.layout
        if all(self._numbers) and not layout.base:
            self._write = context.open_tiles(
                TiledLayers(
                    numbers=self._numbers,
                    starts=slots.starts.tolist(),
                    kv_heads=slots.kv_heads,
                    region=layout.region,
                    shape=self._shape,
                    sink=layout.sink,
                    ring=0 if layout.window is None else max(1, layout.capacity - layout.sink),
                )
            )
        self._restores = False
        self._found: Tensor | None = None
        self._is_opened = False  # does an index know an archive?

    # -- tokens that have left the regions --------------------------------------------------------------------------

    def restore_from(self, codes: Sequence[ArchivedCodes | None], caches: Sequence[RestoreCache | None]) -> None:
        """From now on the device's operation restores them by itself, by layer, if it can. Otherwise `far` does."""
        self._is_opened = True
        found = torch.zeros((len(self._opened), 2), device=self._slots.context.device)
        done = [
            opened is not None and opened.restore_from(own, cache, of_layer)
            for opened, own, cache, of_layer in zip(self._opened, codes, caches, found, strict=True)
        ]
        self._restores = all(done)
        self._found = found.T if any(opened is not None and opened.says_found for opened in self._opened) else None

    @property
    def restores(self) -> bool:
        """Does the device's operation restore them?"""
        return self._restores

    def restores_in(self, layer: int) -> int:
        """The number of a layer's index that has a restore cache; 0: it has none."""
        return self._numbers[self.layers.index(layer)] if self._restores and self._found is None else 0

    def add_restored(self, starts: Sequence[int]) -> None:
        """A further room of the restore caches, by layer. Only if the device's operation restores."""
        for opened, start in zip(self._opened, starts, strict=True):
            if opened is not None:
                opened.add_restored(start)

    def keep_restored(self, rooms: int) -> None:
        """Any thread: further rooms but for the first so many are about to be given back."""
        for opened in self._opened:
            if opened is not None:
                opened.keep_restored(rooms)

    def restore_no_more(self) -> None:
        """The restore caches are about to be given back."""
        if not self._is_opened:
            return
        self._restores, self._found, self._is_opened = False, None, False
        for opened in self._opened:
            if opened is not None:
                opened.restore_no_more()

    def forget_restored(self) -> None:
        """What the restore caches hold is about to be overwritten."""
        for opened in self._opened:
            if opened is not None:
                opened.forget_restored()

    @property
    def layers(self) -> tuple[int, ...]:
        return self._slots.layer_set.layers

    @property
    def found(self) -> Tensor | None:
        """float32 [2, layers] on the device: not finite where its operation restored keys, or values, that are not.

        None if the host knows it (`not_finite`).
        """
        return self._found

    def not_finite(self) -> int | None:
        """A layer for which the device's operation restored an entry that is not finite, if there is one."""
        layers = zip(self._slots.layer_set.layers, self._opened, strict=True)
        return next((layer for layer, opened in layers if opened is not None and not opened.restored_all_finite), None)

    # -- a step ----------------------------------------------------------------------------------------------------

    def _has_choosing(self, queries: StagedQueries) -> bool:
        """Does one of them choose what it reads?"""
        return queries.has_generated or self._selector.appended

    def has_numbers(self, queries: StagedQueries, step: StepReads) -> bool:
        return not self._has_choosing(queries) or self._is_known

    @property
    def _is_known(self) -> bool:
        """Does the device's operation know all that queries which choose read?"""
        return all(self._numbers) and (self.far is None or self._restores)

    def read(self, queries: StagedQueries, step: StepReads) -> int:
        """The window begins with whole tiles."""
        if not self._has_choosing(queries):
            return queries.first
        layers = self._slots.layer_index
        record = self._record
        lines = step.numbers.regions[layers, queries.real]
        choose_tokens(lines, record, self._selector, queries.staged, self._numbers, queries.generated)
        step.numbers.regions[layers, queries.real] = lines
        step.records.add(record, queries.real.stop if self._selector.appended else queries.generated_end)
        tile, window = self._shape.tile, self._selector.window
        return window + max(1, (queries.first - window) // tile + 1) * tile

    @property
    def _record(self) -> TokenRead:
        numbers = max((opened.restored_numbers for opened in self._opened if opened is not None), default=0)
        return TokenRead(shape=self._shape, restored=self._selector.count if numbers else 0, numbers=numbers)

    def stage(self, positions: Positions, generated: NDArray[np.bool_]) -> int:
        """A full tile is written."""
        return (int(positions[0]) // self._shape.tile + 1) * self._shape.tile

    def view(self, queries: StagedQueries, step: StepReads, inner: Callable[[], View]) -> View:
        if not self._has_choosing(queries):
            return inner()
        selector = self._selector
        if step.attends_together and step.attend_generated is not None and self._is_known and not selector.appended:
            return self._beside(queries, step.attend_generated, inner())
        choosing = queries.staged_queries if selector.appended else queries.generated_queries
        positions = queries.positions[choosing]
        local_starts = selector.local_starts(positions)
        width = selector.sink + selector.window + selector.shape.tile if step.is_fixed_shape else None
        always = always_read(positions, local_starts, sink=selector.sink, device=step.device, width=width)
        layout = self._slots.layout
        near = layout.slots(always.positions.clamp(min=0).cpu().numpy())
        return ComponentView(
            region=self._slots.region,
            selector=selector,
            layout=layout,
            choosing=torch.from_numpy(choosing).to(step.device),
            positions=positions,
            local_starts=local_starts,
            always=always,
            near=torch.from_numpy(near).to(step.device),
            far=self.far,
            one_by_one=step.is_fixed_shape,
            dense=inner() if queries.has_appended and not selector.appended else None,
            codes=self._codes,
            rows={
                layer: components.rows(self._shape)
                for layer, components in zip(self._slots.layer_set.layers, self._components, strict=True)
            },
            rotate=self._rotate,
        )

    def _beside(self, queries: StagedQueries, attend: RaggedAttention, others: View) -> BesideView:
        """The view of queries of which the generated ones choose, and the others read by `others`."""
        slots, own = self._slots, queries.staged[queries.generated]
        count = min(slots.layout.capacity + slots.layout.base, queries.end)
        lines = RegionLines(slots.layout).of(own, last=queries.end - 1, count=count)
        by_layer = lines[None].repeat(len(self.layers), axis=0)
        by_layer[..., START] = slots.starts[:, None]
        record = self._record
        choose_tokens(by_layer, record, self._selector, own, self._numbers, queries.generated[queries.generated])
        return BesideView(
            choosing=torch.from_numpy(queries.generated_queries),
            lines=dict(zip(self.layers, torch.from_numpy(by_layer), strict=True)),
            kv_heads=slots.kv_heads,
            attend=attend,
            reads=(StagedRead(record, upto=len(own), tokens=queries.end),),
            others=others,
        )

    def _rotate(self, vectors: Tensor, shifts: Tensor) -> Tensor:
        return self._slots.context.rotate(vectors, shifts, self._slots.layer_set.rotary)

    def _codes(self, layer: int, tiles: int) -> Tensor:
        """The codes of the first tiles of a layer: [Hkv, tiles · tile, r]."""
        halves = self._halves[self._slots.layer_set.layers.index(layer)]
        found = halves[0].new_empty(tiles, *halves[0].shape[1:])
        for half, stored in enumerate(halves):
            found[half::2] = stored[: len(found[half::2])]
        words = found.view(torch.int32).view(tiles, self._slots.kv_heads, self._shape.words, LANES)
        return unpack(words, self._shape).transpose(0, 1).flatten(1, 2)

    def commit(self, before: int, length: int, rejected: Positions) -> None:
        tile, slots = self._shape.tile, self._slots
        if self._write is not None:
            if length // tile > before // tile:
                self._write(slots.buffer.keys, before // tile, length // tile)
            return
        for index in range(before // tile, length // tile):
            positions = np.arange(index * tile, (index + 1) * tile, dtype=np.int64)
            keys = slots.gather(slots.buffer.keys, slots.layout.slots(positions))
            unrotated = slots.moved(keys, -positions).transpose(1, 2)  # [layers, Hkv, tile, D]
            for components, halves, states in zip(self._components, self._halves, unrotated, strict=True):
                words = pack(encode(states, components, self._shape), self._shape)
                halves[index % 2][index // 2].copy_(words.view(slots.kv_heads, -1).view(torch.uint8))

    # -- as a whole ------------------------------------------------------------------------------------------------

    def save(self, length: int) -> Saved:
        return {"component_index": self._saved(length)}

    def _saved(self, length: int) -> Iterator[tuple[Tensor, ...]]:
        """The bytes of all whole tiles, layer by layer."""
        yield from self._written(length)

    def load(self, length: int, saved: Saved) -> None:
        for own, given in zip(self._written(length), saved["component_index"], strict=True):
            for half, source in zip(own, given, strict=True):
                half.copy_(source)

    def can_rewind(self, at: int, length: int) -> bool:
        return True

    def forget(self, at: int, length: int) -> None:
        for written, kept in zip(self._written(length), self._written(at), strict=True):
            for half, first in zip(written, kept, strict=True):
                half[len(first) :].zero_()

    def report(self, held: Held, length: int, end: int) -> None:
        written = next(iter(self._written(length)))
        held.add(components=len(self._halves) * sum(half.numel() for half in written))

    def _written(self, length: int) -> Iterator[tuple[Tensor, ...]]:
        """By layer, the bytes of whole tiles, even ones and odd ones."""
        tiles = length // self._shape.tile
        for even, odd in self._halves:
            yield even[: -(-tiles // 2)], odd[: tiles // 2]


@dataclass(frozen=True, kw_only=True, slots=True)
class BesideView(View):
    """Reads some queries, each of which chooses, by the operation over regions, as it would alone; `others` the others.

    choosing: indexes of queries [G]. lines: by layer, [G, FIELDS]; reads: of these.
    """

    choosing: Tensor
    lines: Mapping[int, Tensor]
    kv_heads: int
    attend: RaggedAttention
    reads: tuple[StagedRead, ...]
    others: View

    def read(self, layer: int, queries: Tensor, buffer: KVBuffer, scoring: Scoring) -> Tensor:
        assert scoring.head_sinks is None, "the operation has none"
        out = self.others.read(layer, queries, buffer, scoring)
        out[self.choosing] = self.attend(
            AttentionCall(
                queries[self.choosing],
                buffer.keys,
                buffer.values,
                self.lines[layer],
                kv_heads=self.kv_heads,
                scaling=scoring.scaling,
                softcap=scoring.softcap,
                reads=self.reads,
            )
        )
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentView(View):
    """Reads the chosen tokens for the queries `choosing`, some at a time, and as `dense` for the others."""

    region: Region
    selector: TokenSelector
    layout: Layout
    choosing: Tensor  # indexes of queries [G]
    positions: Positions  # of these queries
    local_starts: Positions
    always: Always
    near: Tensor  # slots of `always.positions`, 0 for none
    far: FarEntries | None
    one_by_one: bool  # shapes that do not depend on which queries share a step
    dense: View | None  # None: every query chooses
    codes: Callable[[int, int], Tensor]
    rows: dict[int, Tensor]
    rotate: RotateBy

    def read(self, layer: int, queries: Tensor, buffer: KVBuffer, scoring: Scoring) -> Tensor:
        out = torch.zeros_like(queries) if self.dense is None else self.dense.read(layer, queries, buffer, scoring)
        # Scores of the whole history are made for each: how many are there at once does not grow with the step.
        at_once = 1 if self.one_by_one else QUERIES_AT_ONCE
        for first in range(0, len(self.choosing), at_once):
            some = slice(first, first + at_once)
            place = self.choosing[some]
            out[place] = self._gather(layer, queries[place], some, buffer, scoring).to(out.dtype)
        return out

    def _gather(self, layer: int, queries: Tensor, some: slice, buffer: KVBuffer, scoring: Scoring) -> Tensor:
        count = self.layout.capacity
        keys, values = (self.region.slots(states, layer, 0, count) for states in (buffer.keys, buffer.values))
        always = self.always.of(some)
        chosen = self._choose(layer, queries, some, always, keys, values, scoring)
        if self.far is None:
            attend = partial(gather_attend, queries, keys, values, scaling=scoring.scaling, softcap=scoring.softcap)
            return attend(chosen, always, block=1, head_sinks=scoring.head_sinks)[0]
        outs = [
            self._read_far(layer, queries[place, None], index, chosen[place], keys, values, scoring)
            for place, index in enumerate(range(len(self.choosing))[some])
        ]
        return torch.cat(outs)

    def _read_far(
        self, layer: int, query: Tensor, index: int, chosen: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
    ) -> Tensor:
        """One query over what it reads anyway and `chosen` [Hkv, K], some of which may have left the regions."""
        assert self.far is not None
        heads, positions = self.region.heads, chosen.cpu().numpy()
        seen = positions >= 0
        gone = seen & (positions < self.layout.horizon(int(self.positions[index])))
        slots = torch.from_numpy(self.layout.slots(np.where(seen & ~gone, positions, 0))).to(chosen.device)
        entries = [gather_vectors(states, slots[None]) for states in (keys, values)]
        if gone.any():
            # Entries are restored in batches of the same size where shapes decide bits.
            wanted = np.where(gone, positions, positions[gone].min()).reshape(-1)
            found, places = (
                (wanted, np.arange(wanted.size)) if self.one_by_one else np.unique(wanted, return_inverse=True)
            )
            at = torch.from_numpy(places.reshape(positions.shape)).to(chosen.device)
            head = torch.arange(heads, device=chosen.device)[:, None]
            is_gone = torch.from_numpy(gone).to(chosen.device)[None, ..., None]
            restored = self.far.some(layer, found)
            entries = [
                states[head, at][None].where(is_gone, own) for states, own in zip(restored, entries, strict=True)
            ]
        near = self.near[index].expand(1, heads, -1)
        is_near = (self.always.positions[index] >= 0).expand(1, heads, -1)
        all_keys, all_values = (
            torch.cat([gather_vectors(states, near), own], dim=2)
            for states, own in zip((keys, values), entries, strict=True)
        )
        is_read = torch.cat([is_near, torch.from_numpy(seen).to(chosen.device)[None]], dim=2)
        out, _ = attend_entries(
            query, all_keys, all_values, is_read, scoring.scaling, scoring.softcap, scoring.head_sinks
        )
        return out

    def _choose(
        self, layer: int, queries: Tensor, some: slice, always: Always, keys: Tensor, values: Tensor, scoring: Scoring
    ) -> Tensor:
        """The distant tokens that these queries read: [T, Hkv, K], -1 for none."""
        shape, heads = self.selector.shape, self.region.heads
        tiles = int(self.local_starts[some].max()) // shape.tile
        codes = self.codes(layer, tiles)
        scores = component_scores(queries, codes, self.rows[layer], shape, self.rotate, scoring.scaling)
        places = torch.arange(codes.shape[1], device=queries.device)
        candidates = (places >= always.sink) & (places < always.local_starts[:, None])
        seen = (always.positions >= 0)[:, None].expand(-1, heads, -1)
        near = self.near[some][:, None].expand(-1, heads, -1)
        _, lse = attend_entries(
            queries, gather_vectors(keys, near), gather_vectors(values, near), seen, scoring.scaling, scoring.softcap
        )
        weights = token_weights(scores, candidates, lse, heads, scoring.softcap)
        return select(weights, candidates, self.selector.count)
