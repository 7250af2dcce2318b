"""The numbers that a step's layers read: where each row's K and V go, and which region it attends to.

They travel to the device together, as one run of whole numbers. A step whose rows all attend to regions is nothing but
these numbers, so the same forward can be run again over others of the same shape (`backends/graphs.py`).

    writes [Ln, N, Hkv] for each number of KV heads, Ln its layers · regions [L, N, FIELDS]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.errors import BackendError
from inference_engine.kernels.ragged_attention import (
    BASE,
    BLOCK,
    BOUNDS,
    COUNT,
    FIELDS,
    FLOOR,
    HEAD_SLOTS,
    KEPT,
    LAST,
    LOCAL,
    RING,
    SINK,
    SINK_FLOOR,
    START,
    UPTO,
    RaggedAttention,
)
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import BlockSelector, Layout, Positions
from inference_engine.kv.memory.pool import KVBuffer, Pool
from inference_engine.kv.memory.scratch import Scratch

Numbers = NDArray[np.int64]
_MOST_BLOCKS = 4096
Array = TypeVar("Array", Numbers, Tensor)
Indexes = slice | Numbers


class StepNumbers:
    """The numbers on the host, all zero at first: rows go to row 0 of the buffer, and attend to nothing.

    writes: by number of KV heads, [Ln, N, Hkv]. regions: [L, N, FIELDS], or [L, 0, FIELDS] where no row has a region.
    """

    def __init__(self, geometry: Geometry, rows: int, *, has_regions: bool, scratch: Scratch | None = None) -> None:
        """scratch: where the memory comes from, and goes to when these numbers go; None: the system."""
        self.geometry = geometry
        self.rows = rows
        self.all = (scratch or Scratch()).zeros(_count(geometry, rows, has_regions), self)
        self.writes, self.regions = _split(self.all, geometry, rows)

    def write(self, kv_heads: int, places: Indexes, rows: slice, starts: Numbers, region_offsets: Numbers) -> None:
        """Say where K and V of `rows` go, in the layers with so many KV heads at `places`.

        starts: [places], of each layer's regions; region_rows: [rows · Hkv], from there on.
        """
        # All rows and heads as one axis: numpy is slow on short ones.
        writes = self.writes[kv_heads].reshape(len(self.writes[kv_heads]), -1)
        writes[places, rows.start * kv_heads : rows.stop * kv_heads] = starts[:, None] + region_offsets

    def attend(self, layers: Indexes, rows: slice, starts: Numbers, lines: Numbers) -> None:
        """Say what `rows` see in `layers`, alike in all of them but for the regions' `starts`.

        lines: [rows, FIELDS], see `region_lines`.
        """
        regions = self.regions.reshape(len(self.regions), -1)
        regions[layers, rows.start * FIELDS : rows.stop * FIELDS] = lines.reshape(-1)
        self.regions[layers, rows, START] = starts[:, None]

    def padded(self, rows: int, scratch: Scratch) -> StepNumbers:
        """The same with more rows, which do nothing."""
        if rows == self.rows:
            return self
        wider = StepNumbers(self.geometry, rows, has_regions=True, scratch=scratch)
        for heads, writes in self.writes.items():
            wider.writes[heads][:, : self.rows] = writes
        wider.regions[:, : self.rows] = self.regions
        return wider


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTables:
    """The numbers on the device, and what is done with them in each layer. Fulfils the seam's AttentionPlan."""

    geometry: Geometry
    pool: Pool
    attention: RaggedAttention
    blocks: int  # as RaggedAttention has it
    writes: tuple[Tensor, ...]  # by layer [N · Hkv]
    regions: Tensor

    @staticmethod
    def over(
        numbers: Tensor,
        geometry: Geometry,
        pool: Pool,
        attention: RaggedAttention,
        *,
        rows: int,
        selects: bool = False,
    ) -> StepTables:
        """Views of `numbers`, which lie on the device as StepNumbers has them. selects: does a row read a keep-set?"""
        writes, regions = _split(numbers, geometry, rows)
        by_layer = {
            layer: writes[heads][place].reshape(-1)
            for heads, layers in _by_heads(geometry).items()
            for place, layer in enumerate(layers)
        }
        ordered = tuple(by_layer[layer] for layer in range(len(geometry.layers)))
        return StepTables(
            geometry=geometry,
            pool=pool,
            attention=attention,
            blocks=most_blocks(geometry) if selects else 0,
            writes=ordered,
            regions=regions,
        )

    def buffer(self, layer: int) -> KVBuffer:
        return self.pool.buffers[self.geometry.layers[layer].head_dim]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put the rows' K and V, [1, Hkv, N, D] each, where they belong."""
        buffer = self.buffer(layer)
        buffer.keys.index_copy_(0, self.writes[layer], by_row(keys))
        buffer.values.index_copy_(0, self.writes[layer], by_row(values))

    def read(
        self, layer: int, queries: Tensor, *, scaling: float, softcap: float | None, head_sinks: Tensor | None
    ) -> Tensor:
        """[N, Hq, D]: what each row gets from its region, and zeros for rows that have none. queries: [1, Hq, N, D]."""
        if head_sinks is not None:
            raise BackendError("the model's attention has a sink of its own in each head; start with kernels=plain")
        buffer = self.buffer(layer)
        return self.attention(
            queries[0].transpose(0, 1),
            buffer.keys,
            buffer.values,
            self.regions[layer],
            kv_heads=self.geometry.layers[layer].kv_heads,
            scaling=scaling,
            softcap=softcap,
            blocks=self.blocks,
        )

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
        head_sinks: Tensor | None = None,
    ) -> Tensor:
        """Write the rows of `layer` and attend; as `StepPlan.attend`, for steps whose rows all attend to regions."""
        self.write(layer, keys, values)
        return self.read(layer, queries, scaling=scaling, softcap=softcap, head_sinks=head_sinks)[None]


def region_lines(layout: Layout, queries: Positions, *, last: int, count: int) -> Numbers:
    """[n, FIELDS], for each of `queries`, which read every slot that they see; what differs by layer is left 0.

    last: the last position that has an entry. count: slots to look at, those before the layout's base among them. Says
    of each slot what `layout.visible` says of the position that it holds.
    """
    window, native = layout.window, layout.native_window
    nearest = np.zeros_like(queries) if native is None else np.maximum(0, queries - native + 1)
    horizons = np.zeros_like(queries) if window is None else queries - queries % layout.segment - window
    lines = np.zeros((len(queries), FIELDS), dtype=np.int64)
    lines[:, HEAD_SLOTS] = layout.region
    lines[:, COUNT] = count
    lines[:, SINK] = layout.sink
    lines[:, RING] = 0 if window is None else max(1, layout.capacity - layout.sink)
    lines[:, LAST] = last
    lines[:, UPTO] = queries
    lines[:, FLOOR] = np.maximum(nearest, horizons)
    lines[:, SINK_FLOOR] = nearest
    lines[:, BASE] = layout.base
    return lines


def choose_blocks(lines: Numbers, layout: Layout, selector: BlockSelector, queries: Positions) -> None:
    """Let the queries of these lines [..., n, FIELDS] read the blocks that the selector chooses, not every slot."""
    lines[..., SINK] = selector.sink_tokens
    lines[..., BLOCK] = selector.block
    lines[..., KEPT] = selector.count
    lines[..., LOCAL] = selector.local_starts(queries)
    lines[..., BOUNDS] = layout.summaries_from


def most_blocks(geometry: Geometry) -> int:
    """Among how many blocks a row of a region can choose: those of the smallest size in the longest history, to a
    limit.

    A number that does not follow from who is there, so that what was recorded fits all.
    """
    return min(_MOST_BLOCKS, -(-geometry.trained_positions // geometry.page_tokens))


def places_of(geometry: Geometry) -> Numbers:
    """Each layer's place among those with as many KV heads."""
    places = np.zeros(len(geometry.layers), dtype=np.int64)
    for layers in _by_heads(geometry).values():
        places[layers] = np.arange(len(layers))
    return places


def as_slice(indexes: Numbers) -> Indexes:
    """What looks up the same, sooner where they ascend evenly."""
    first, last = int(indexes[0]), int(indexes[-1])
    step = int(indexes[1]) - first if len(indexes) > 1 else 1
    is_even = step > 0 and bool((np.diff(indexes) == step).all())
    return slice(first, last + 1, step) if is_even else indexes


def by_row(states: Tensor) -> Tensor:
    """[1, H, N, D] -> [N · H, D], a view when the states came from one projection."""
    return states[0].transpose(0, 1).reshape(-1, states.shape[-1])


def _by_heads(geometry: Geometry) -> dict[int, list[int]]:
    """The layers by their number of KV heads."""
    found: dict[int, list[int]] = {}
    for index, layer in enumerate(geometry.layers):
        found.setdefault(layer.kv_heads, []).append(index)
    return found


def _count(geometry: Geometry, rows: int, has_regions: bool) -> int:
    return rows * sum(layer.kv_heads + FIELDS * has_regions for layer in geometry.layers)


def _split(numbers: Array, geometry: Geometry, rows: int) -> tuple[dict[int, Array], Array]:
    """Views of one run of numbers: the writes by number of KV heads, and the regions of all layers."""
    writes: dict[int, Array] = {}
    first = 0
    for heads, layers in _by_heads(geometry).items():
        count = len(layers) * rows * heads
        writes[heads] = numbers[first : first + count].reshape(len(layers), rows, heads)
        first += count
    return writes, numbers[first:].reshape(len(geometry.layers), -1, FIELDS)
