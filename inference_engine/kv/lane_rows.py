"""What `kernels/lane_attention.py` is told of the rows of one session in one group of layers, as whole numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inference_engine.kernels.lane_attention import BASE, COUNT, FIELDS
from inference_engine.kv.layout import BlockSelector, Layout, Positions

Numbers = NDArray[np.int64]


def lane_numbers(
    layout: Layout, queries: Positions, *, last: int, count: int, selector: BlockSelector | None = None
) -> Numbers:
    """[n, 14], for each of `queries`: COUNT to BASE; TRUNK_START and TRUNK_LANE, which differ by layer, are left 0.

    last: the last position that has a row. count: slots to look at, those of a trunk among them. Says of each slot what
    `layout.visible` says of the position that it holds. selector: which of these rows the queries read, as the layout
    has it; None: all.
    """
    window, native = layout.window, layout.native_window
    numbers = np.zeros((len(queries), FIELDS - COUNT), dtype=np.int64)
    nearest = np.zeros_like(queries) if native is None else np.maximum(0, queries - native + 1)
    horizons = np.zeros_like(queries) if window is None else queries - queries % layout.segment - window
    numbers[:, 0] = count
    numbers[:, 1] = layout.sink
    numbers[:, 2] = 0 if window is None else max(1, layout.capacity - layout.sink)
    numbers[:, 3] = last
    numbers[:, 4] = queries
    numbers[:, 5] = np.maximum(nearest, horizons)
    numbers[:, 6] = nearest
    numbers[:, BASE - COUNT] = layout.base
    if selector is not None:
        numbers[:, 1] = selector.sink_rows
        numbers[:, 7] = selector.block
        numbers[:, 8] = selector.count
        numbers[:, 9] = selector.local_starts(queries)
        numbers[:, 10] = layout.summaries_from
    return numbers
