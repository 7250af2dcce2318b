"""Where a position's row lies in a layer's slab, and which rows a query may see.

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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_engine.kv.geometry import Geometry

Positions = NDArray[np.int64]
Array = Any  # a numpy array or a torch tensor: `visible` is written in operators that both have


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRule:
    """What a strategy asks of one layer: the first `sink` rows and the last `window` (None: every row)."""

    sink: int = 0
    window: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A rule laid out for one layer: slots, capacity, visibility. Positions and slots are host integers."""

    sink: int
    window: int | None
    native_window: int | None
    segment: int
    capacity: int  # slots per KV head that can hold a position

    @staticmethod
    def of(rule: LayerRule, geometry: Geometry, native_window: int | None, limit_tokens: int | None) -> Layout:
        """Lay `rule` out for histories of up to `limit_tokens` (None: endless), within the layer's own window."""
        sink, window = rule.sink, rule.window
        if native_window is not None and (window is None or window >= native_window):
            # The model itself never looks further back than this, sinks included.
            sink, window = 0, native_window
        segment = geometry.segment_tokens
        if window is None:
            assert limit_tokens is not None, "a layer that keeps every row needs a length limit"
            rows = limit_tokens
        else:
            rows = sink + window + segment
            rows = rows if limit_tokens is None else min(rows, limit_tokens)
        return Layout(
            sink=sink,
            window=window,
            native_window=native_window,
            segment=segment,
            capacity=geometry.round_up(rows),
        )

    @property
    def spare(self) -> int:
        """Slots beyond the capacity that keep the sink's keys where they were, so that they can be moved anew."""
        return 0 if self.window is None else self.sink

    @property
    def lane(self) -> int:
        """Slots per KV head in all."""
        return self.capacity + self.spare

    def slots(self, positions: Positions) -> Positions:
        """The slot of each position."""
        if self.window is None:
            return positions
        ring = self.capacity - self.sink
        return np.where(positions < self.sink, positions, self.sink + (positions - self.sink) % ring)

    def segment_start(self, position: int) -> int:
        return position - position % self.segment

    def horizon(self, position: int) -> int:
        """First position outside the sink that a query at `position` may see under the strategy."""
        if self.window is None:
            return 0
        return max(0, self.segment_start(position) - self.window)

    def sink_shift(self, position: int) -> int:
        """How far the sink's keys are moved forward for queries in the segment of `position`.

        0 as long as nothing was evicted, so that a short session equals full attention.
        """
        return max(0, self.horizon(position) - self.sink) if self.sink else 0

    def visible(self, queries: Array, held: Array) -> Array:
        """[T, S]: may the query at queries[t] see the row that holds position held[s]? (-1: an empty slot)

        Both are arrays of whole numbers of one kind, numpy's or torch's; the answer is of the same kind.
        """
        seen = (held >= 0) & (held <= queries[:, None])
        if self.window is not None:
            horizons = queries - queries % self.segment - self.window
            seen &= (held < self.sink) | (held >= horizons[:, None])
        if self.native_window is not None:
            seen &= held > queries[:, None] - self.native_window
        return seen
