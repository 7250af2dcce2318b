"""What `kernels/lane_attention.py` is told of the rows of one session in one group of layers, as whole numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inference_engine.kv.layout import Layout, Positions

Numbers = NDArray[np.int64]


def lane_numbers(layout: Layout, queries: Positions, *, last: int, count: int) -> Numbers:
    """[n, 7], for each of `queries`: COUNT, SINK, RING, LAST, UPTO, FLOOR, SINK_FLOOR.

    last: the last position that has a row. count: slots to look at. Says of each slot what `layout.visible` says of the
    position that it holds.
    """
    window, native = layout.window, layout.native_window
    numbers = np.zeros((len(queries), 7), dtype=np.int64)
    nearest = np.zeros_like(queries) if native is None else np.maximum(0, queries - native + 1)
    horizons = np.zeros_like(queries) if window is None else queries - queries % layout.segment - window
    numbers[:, 0] = count
    numbers[:, 1] = layout.sink
    numbers[:, 2] = 0 if window is None else max(1, layout.capacity - layout.sink)
    numbers[:, 3] = last
    numbers[:, 4] = queries
    numbers[:, 5] = np.maximum(nearest, horizons)
    numbers[:, 6] = nearest
    return numbers
