"""Where a position's row lies in a layer's allocation, and which rows a query may see.

    sink = 4, window = 8, segment = 8            a query at 21, in the segment that starts at 16
    position   0 1 2 3 | 4 … 7 | 8 … 15 | 16 … 21
    sees       ■ ■ ■ ■ |       | ■ ■ ■ ■ | ■ ■ ■ ■

The first `sink` positions stay where they are. The others go round a ring that holds the window and one segment. A
query at i sees sink ∪ [b(i) − window, i], b(i) being the start of its segment: a function of positions alone, so that
it does not matter in how many calls the tokens came. Rows leave when the history reaches a segment boundary, never in
between.

The distance to the sink is capped (Xiao et al., StreamingLLM, arXiv 2309.17453, section 3.2): sink keys are read as if
they stood right before the oldest row of the window. All queries of a segment see them at the same place, so their
keys are rotated once per segment.

Where there is a second tier, rows that leave the ring go there and are still seen; nothing is moved, and they leave in
whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from inference_engine.kv.geometry import Geometry

Positions = NDArray[np.int64]
# Rows that are elsewhere are read a chunk at a time: few operations for many rows, and little of a layer at once.
SEGMENTS_IN_A_CHUNK = 4
Array = Any  # a numpy array or a torch tensor: `visible` is written in operators that both have
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSet:
    """Layers of one shape."""

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    rotary: str


def alike(geometry: Geometry, keys: Mapping[int, Key]) -> tuple[tuple[LayerSet, Key], ...]:
    """The layers of `keys` in sets of equal shape and equal key."""
    members: dict[tuple[Key, int, int, str], list[int]] = {}
    for index, key in keys.items():
        layer = geometry.layers[index]
        members.setdefault((key, layer.kv_heads, layer.head_dim, layer.rotary), []).append(index)
    return tuple(
        (LayerSet(layers=tuple(layers), kv_heads=kv_heads, head_dim=head_dim, rotary=rotary), key)
        for (key, kv_heads, head_dim, rotary), layers in members.items()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSelector:
    """What a generated token reads of a layer that keeps every row: sink, window, and the blocks that matter most.

    sink and the start of the window are taken in whole blocks. count: distant blocks per KV head.
    scorer: `bounds` (smallest and largest of each key channel), or `mean`, the ablation that fails.
    """

    block: int
    sink: int
    window: int
    count: int
    scorer: str = "bounds"

    @property
    def sink_tokens(self) -> int:
        return -(-self.sink // self.block) * self.block

    def local_starts(self, positions: Positions) -> Positions:
        """The first row of each query's window."""
        return np.maximum(0, (positions - self.window) // self.block * self.block)

    @property
    def most_entries(self) -> int:
        """Rows that a query reads at most, its own included."""
        return self.sink_tokens + self.window + self.block + self.count * self.block


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryMatcher:
    """How a generated token takes over what an earlier one saw; see `kernels/mac.py`, which says what each number does.

    chain_limit: None for no limit.
    """

    ring: int
    band: int
    threshold: float
    chain_limit: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRule:
    """What a strategy asks of one layer: the first `sink` rows and the last `window` (None: every row) can be read.

    exact: how many of the last rows stay as they are; the readable rows before them are read as the session's restorer
    gives them back. None: every readable row stays as it is.
    selector: which of the readable rows a generated token reads; appended ones read all. None: all.
    matcher: whose attention to the readable rows a generated token may take over; appended ones do not. None: nobody's.
    resident: with a selector, how many of the last rows stay on the device; those before them, the selector's sink
    excepted, go to the second tier and are fetched to be read. None: every readable row stays on the device.
    """

    sink: int = 0
    window: int | None = None
    exact: int | None = None
    selector: BlockSelector | None = None
    matcher: QueryMatcher | None = None
    resident: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TierLayout:
    """What a layer has beside its resident rows.

    blocks: of `block` rows, in the whole history; what is known of each stays on the device.
    rows: at most so many are in the second tier, the first of them the one after the sink, in chunks of `chunk`.
    fetched: blocks of those that the region of a KV head has room for.
    """

    block: int
    blocks: int
    entries: int
    chunk: int
    fetched: int

    @property
    def chunks(self) -> int:
        return -(-self.entries // self.chunk)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A rule laid out for one layer: slots, capacity, visibility. Positions and slots are host integers."""

    sink: int
    window: int | None
    native_window: int | None
    segment: int
    capacity: int  # slots per KV head that can hold a position
    spare: int  # slots beyond the capacity that keep the sink's keys where they were, so that they can be moved anew
    selector: BlockSelector | None = None
    matcher: QueryMatcher | None = None
    tier: TierLayout | None = None
    base: int = 0  # the first position that has a slot; those before it lie elsewhere

    @staticmethod
    def of(
        rule: LayerRule,
        geometry: Geometry,
        native_window: int | None,
        limit_tokens: int | None,
        *,
        moves_sink: bool = True,
    ) -> Layout:
        """Lay `rule` out for histories of up to `limit_tokens` (None: endless), within the layer's own window.

        moves_sink: False for rows that are only stored, so that no second copy of the sink's keys is needed.
        """
        sink, window = rule.sink, rule.window
        if native_window is not None and (window is None or window >= native_window):
            # The model itself never looks further back than this, sinks included.
            sink, window = 0, native_window
        segment = geometry.segment_tokens
        if window is None and rule.resident is not None:
            assert rule.selector is not None and limit_tokens is not None
            return _tiered(rule.selector, rule.resident, geometry, limit_tokens)
        if window is None:
            assert limit_tokens is not None, "a layer that keeps every row needs a length limit"
            entries = limit_tokens
        else:
            entries = sink + window + segment
            entries = entries if limit_tokens is None else min(entries, limit_tokens)
        return Layout(
            sink=sink,
            window=window,
            native_window=native_window,
            segment=segment,
            capacity=geometry.round_up(entries),
            spare=0 if window is None or not moves_sink else sink,
            selector=rule.selector if window is None else None,
            matcher=rule.matcher if window is None else None,
        )

    @property
    def keeps_every_entry(self) -> bool:
        """Does each row stay in the slot it was put in, and is it read there by every query?"""
        return self.window is None and self.selector is None and self.matcher is None

    def behind(self, base: int, geometry: Geometry, limit_tokens: int) -> Layout:
        """The same layout for a session whose first `base` rows lie elsewhere."""
        assert self.keeps_every_entry
        return replace(self, base=base, capacity=geometry.round_up(limit_tokens - base))

    @property
    def blocks(self) -> int:
        """Slots that hold what is known of each block of rows."""
        if self.tier is not None:
            return self.tier.blocks
        return 0 if self.selector is None else -(-self.capacity // self.selector.block)

    @property
    def region(self) -> int:
        """Slots per KV head in all."""
        return self.fetched_from + (0 if self.tier is None else self.tier.fetched * self.tier.block)

    @property
    def summaries_from(self) -> int:
        """The first slot of what is known of blocks."""
        return self.capacity + self.spare

    @property
    def fetched_from(self) -> int:
        """The first slot of fetched blocks."""
        return self.summaries_from + self.blocks

    def slots(self, positions: Positions) -> Positions:
        """The slot of each position."""
        if self.window is None:
            return positions - self.base
        ring = max(1, self.capacity - self.sink)  # a limit shorter than the sink leaves none, and needs none
        return np.where(positions < self.sink, positions, self.sink + (positions - self.sink) % ring)

    def segment_start(self, position: int) -> int:
        return position - position % self.segment

    def horizon(self, position: int) -> int:
        """First position outside the sink whose row is there for queries in the segment of `position`.

        Those before it cannot be seen, or, where there is a second tier, are there.
        """
        if self.window is None:
            return 0
        first = self.segment_start(position) - self.window
        if self.tier is not None:
            first -= first % self.tier.block
        return max(0, first)

    def sink_shift(self, position: int) -> int:
        """How far the sink's keys are moved forward for queries in the segment of `position`.

        0 as long as nothing was evicted, so that a short session equals full attention, and where sinks do not move.
        """
        return max(0, self.horizon(position) - self.sink) if self.spare else 0

    def visible(self, queries: Array, held: Array) -> Array:
        """[T, S]: may the query at queries[t] see the row that holds position held[s]? (-1: an empty slot)

        Both are arrays of whole numbers of one kind, numpy's or torch's; the answer is of the same kind.
        """
        seen = (held >= 0) & (held <= queries[:, None])
        if self.window is not None and self.tier is None:
            horizons = queries - queries % self.segment - self.window
            seen &= (held < self.sink) | (held >= horizons[:, None])
        if self.native_window is not None:
            seen &= held > queries[:, None] - self.native_window
        return seen


def _tiered(selector: BlockSelector, resident: int, geometry: Geometry, limit_tokens: int) -> Layout:
    """Rows leave in whole blocks, so that a block is in one place, and in one piece wherever the ring begins anew."""
    block, segment = selector.block, geometry.segment_tokens
    resident = _round_up(resident, block)
    # A segment may begin within a block, whose first rows then stay as long as its last.
    ring = _round_up(resident + segment + block - math.gcd(block, segment), block)
    before_end = limit_tokens - limit_tokens % segment - resident
    entries = max(0, before_end // block * block - selector.sink_tokens)
    return Layout(
        sink=selector.sink_tokens,
        window=resident,
        native_window=None,
        segment=segment,
        capacity=min(geometry.round_up(limit_tokens), selector.sink_tokens + ring),
        spare=0,
        selector=selector,
        tier=TierLayout(
            block=block,
            blocks=-(-limit_tokens // block),
            entries=entries,
            chunk=_round_up(SEGMENTS_IN_A_CHUNK * segment, block),
            fetched=min(selector.count, entries // block),
        ),
    )


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
