"""Where the KV entry of a position lies in a layer's regions, and which entries a query may see.

    sink = 4, window = 8, segment = 8            a query at 21, in the segment that starts at 16
    position   0 1 2 3 | 4 … 7 | 8 … 15 | 16 … 21
    sees       ■ ■ ■ ■ |       | ■ ■ ■ ■ | ■ ■ ■ ■

The first `sink` positions keep their slots. The others use a ring buffer that holds the window and a step of one
segment or several. A query at i sees sink ∪ [b(i) − window, i], where b(i) is the start of its segment. That is a
function of positions alone, so it does not matter in how many calls the tokens came. Entries are evicted when the
history reaches a segment boundary, never in between.

The distance to the sink is capped (Xiao et al., StreamingLLM, arXiv 2309.17453, section 3.2): sink keys are
rotated to the positions right before the oldest entry of the window. All queries of a segment see them there, so the
keys are rotated once per segment.

With a second tier, entries that leave the ring buffer go there in whole blocks and are still seen; sinks do not move.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from inference_engine.kv.geometry import EntryShape, Geometry

Positions = NDArray[np.int64]
Array = Any  # a numpy array or a torch tensor: `visible` is written in operators that both have
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSet:
    """Layers of one shape."""

    layers: tuple[int, ...]
    kv_heads: int
    entry: EntryShape
    rotary: str

    @property
    def head_dim(self) -> int:
        """Of a key, and mostly of a value."""
        return self.entry.key


def alike(geometry: Geometry, keys: Mapping[int, Key]) -> tuple[tuple[LayerSet, Key], ...]:
    """The layers of `keys` in sets of equal shape and equal key."""
    members: dict[tuple[Key, int, EntryShape, str], list[int]] = {}
    for index, key in keys.items():
        layer = geometry.layers[index]
        members.setdefault((key, layer.kv_heads, layer.entry, layer.rotary), []).append(index)
    return tuple(
        (LayerSet(layers=tuple(layers), kv_heads=kv_heads, entry=entry, rotary=rotary), key)
        for (key, kv_heads, entry, rotary), layers in members.items()
    )


class Mechanism:
    """How generated tokens read a layer, as a rule says it: a frozen dataclass.

    A new one is a file with it, a `LayerMechanism`, and its part (`kv/parts/layer_part.py`); and, if queries read by
    numbers, their record (`kernels/reads.py`).
    """

    # Does it take every entry to be in its place? Then layers with a window go without it.
    needs_every_entry: ClassVar[bool] = True
    # Does it read keys at other positions than their own, or before rotation?
    moves_keys: ClassVar[bool] = False
    # Is the last token of a segment a step of its own?
    ends_alone: ClassVar[bool] = False
    # Do generated tokens read less than all?
    is_selective: ClassVar[bool] = True
    # Do queries read by a view, as far as no device has an operation for them?
    by_view: ClassVar[bool] = False
    # Do appended tokens read as generated ones do?
    appended: bool = False

    @property
    def kept_longer(self) -> int:
        """How many more entries than the strategy's window stay exact."""
        return 0

    def laid_out(self, layout: Layout, geometry: Geometry, limit_tokens: int | None) -> Layout:
        """The layout of a layer with it. layout: without it."""
        return layout

    def restored(self, archived: int) -> int:
        """How many of so many archived entries a generated token has restored."""
        return archived


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRule:
    """What a strategy asks of one layer: the first `sink` and the last `window` entries (None: all) can be read.

    exact: how many of the last entries stay as they are; readable entries before them are archived, and read as the
    session's restorer gives them back. None: every readable entry stays as it is.
    mechanisms: how generated tokens read the readable entries, archived ones, too; () if they read all.
    """

    sink: int = 0
    window: int | None = None
    exact: int | None = None
    mechanisms: tuple[Mechanism, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TierLayout:
    """What a layer has beside its resident entries, and how long its steps are. By default nothing: no entry of it lies
    in the second tier, and a step ends with its segment.

    blocks: blocks of `block` entries in the longest history; their summaries stay on the device.
    step: a step of appended tokens ends at a multiple of it at the latest.
    entries: the most that lie in the second tier, in chunks of `chunk`. The first is the one after the sink.
    fetched: how many fetched blocks the region of a KV head has room for.
    """

    block: int = 1
    blocks: int = 0
    entries: int = 0
    chunk: int = 1
    fetched: int = 0
    step: int = 0

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
    spare: int  # slots beyond the capacity for the sink's keys as they were rotated first, from which they are moved
    mechanisms: tuple[Mechanism, ...] = ()
    blocks: int = 0  # of which there are summaries
    summary_slots: int = 1  # that the summary of a block takes
    tier: TierLayout = TierLayout()
    base: int = 0  # the first position that has a slot; earlier ones lie in a shared prefix
    longest: int = 0  # positions of the longest history, rounded up; 0: it is endless

    @staticmethod
    def of(
        rule: LayerRule,
        geometry: Geometry,
        native_window: int | None,
        limit_tokens: int | None,
        *,
        moves_sink: bool = True,
        entry: EntryShape | None = None,
    ) -> Layout:
        """Lay `rule` out for histories of up to `limit_tokens` (None: endless), within the layer's native window.

        moves_sink: False for entries that are only stored, which need no second copy of the sink's keys. entry: of the
        layer; None: a key, and a value of its size beside it.
        """
        sink, window, mechanisms = rule.sink, rule.window, rule.mechanisms
        if native_window is not None and (window is None or window >= native_window):
            # The model itself never looks further back than its native window, sinks included.
            sink, window, mechanisms = 0, native_window, ()
        segment = geometry.segment_tokens
        if window is not None:
            mechanisms = tuple(each for each in mechanisms if not each.needs_every_entry)
        if window is None:
            assert limit_tokens is not None, "a layer that keeps every entry needs a length limit"
            entries = limit_tokens
        else:
            entries = sink + window + segment
            entries = entries if limit_tokens is None else min(entries, limit_tokens)
        layout = Layout(
            sink=sink,
            window=window,
            native_window=native_window,
            segment=segment,
            capacity=geometry.round_up(entries),
            spare=0 if window is None or not moves_sink else sink,
            mechanisms=mechanisms,
            summary_slots=2 if entry is not None and entry.shared else 1,  # keys and values of a slot are not apart
            longest=0 if limit_tokens is None else geometry.round_up(limit_tokens),
        )
        for mechanism in mechanisms:
            layout = mechanism.laid_out(layout, geometry, limit_tokens)
        return layout

    @property
    def keeps_every_entry(self) -> bool:
        """Does each entry stay in its slot, and does every query read it there?"""
        return self.window is None and not self.is_selective

    @property
    def step(self) -> int | None:
        """Tokens on both sides of a multiple of it do not share a step; None: any may."""
        if self.window is None:
            return None
        return self.tier.step or self.segment

    @property
    def is_selective(self) -> bool:
        """Do generated tokens read less than all?"""
        return any(mechanism.is_selective for mechanism in self.mechanisms)

    @property
    def moves_keys(self) -> bool:
        """Are keys read at other positions than their own, or before rotation?"""
        return self.spare > 0 or any(mechanism.moves_keys for mechanism in self.mechanisms)

    @property
    def is_as_the_model_sees(self) -> bool:
        """Does the model itself look no further back, and does nothing lie in the second tier?"""
        return self.window in (None, self.native_window) and not self.tier.step

    def in_long_steps(self, segments: int, geometry: Geometry, limit_tokens: int | None) -> Layout:
        """The same with room for steps of several segments."""
        if self.window is None:
            return self
        step = segments * self.segment
        entries = self.sink + self.window + step
        entries = entries if limit_tokens is None else min(entries, limit_tokens)
        return replace(self, capacity=geometry.round_up(entries), tier=replace(self.tier, step=step))

    def behind(self, base: int, geometry: Geometry, limit_tokens: int) -> Layout:
        """The same layout for a session whose first `base` entries lie in a shared prefix."""
        assert self.keeps_every_entry
        return replace(self, base=base, capacity=geometry.round_up(limit_tokens - base))

    @property
    def region(self) -> int:
        """All slots of a KV head."""
        return self.fetched_from + self.tier.fetched * self.tier.block

    @property
    def summaries_from(self) -> int:
        """The first slot of the block summaries: of their lower ends, one a block."""
        return self.capacity + self.spare

    @property
    def highs_from(self) -> int:
        """The first slot of their upper ends, which lie in the values of the same slots, or in slots of their own."""
        return self.summaries_from + self.blocks * (self.summary_slots - 1)

    @property
    def fetched_from(self) -> int:
        """The first slot of fetched blocks."""
        return self.highs_from + self.blocks

    def slots(self, positions: Positions) -> Positions:
        """The slot of each position."""
        if self.window is None:
            return positions - self.base
        ring = max(1, self.capacity - self.sink)  # a limit shorter than the sink leaves none, and needs none
        if not self.sink:
            return positions % ring
        return np.where(positions < self.sink, positions, self.sink + (positions - self.sink) % ring)

    def slot(self, position: int) -> int:
        """As `slots`, of one position: numpy takes ten times as long for it."""
        if self.window is None:
            return position - self.base
        ring = max(1, self.capacity - self.sink)
        return position if position < self.sink else self.sink + (position - self.sink) % ring

    def segment_start(self, position: int) -> int:
        return position - position % self.segment

    def segment_end(self, position: int) -> int:
        """Entries leave when the history gets there."""
        return self.segment_start(position) + self.segment

    def horizon(self, position: int) -> int:
        """First position outside the sink that is resident for queries in the segment of `position`.

        Earlier ones cannot be seen, or lie in the second tier.
        """
        if self.window is None:
            return 0
        first = self.segment_start(position) - self.window
        return max(0, first - first % self.tier.block)

    def sink_shift(self, position: int) -> int:
        """How many positions the sink's keys are moved forward for queries in the segment of `position`.

        0 until something was evicted, so a short session equals full attention. Always 0 where sinks do not move.
        """
        return max(0, self.horizon(position) - self.sink) if self.spare else 0

    def visible(self, queries: Array, held: Array) -> Array:
        """[T, S]: may the query at queries[t] see the slot that holds position held[s]? (-1: an empty slot)

        Both are integer arrays of numpy, or both of torch; so is the result.
        """
        seen = (held >= 0) & (held <= queries[:, None])
        if self.window is not None and not self.tier.blocks:
            horizons = queries - queries % self.segment - self.window
            seen &= (held < self.sink) | (held >= horizons[:, None])
        if self.native_window is not None:
            seen &= held > queries[:, None] - self.native_window
        return seen
