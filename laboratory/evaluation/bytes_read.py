"""Bytes of K and V that a generated token reads, as its strategy says it."""

from __future__ import annotations

import numpy as np

from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import Layout
from inference_engine.kv.parts.block_index import BlockSelector
from inference_engine.kv.parts.component_index import TokenSelector
from inference_engine.kv.strategy import KVStrategy


def bytes_read(strategy: KVStrategy, geometry: Geometry, length: int) -> int:
    """Bytes that a generated token, the last of `length`, reads of K and V in all layers, its own entry included.

    Where blocks are selected these are the selected blocks and the bounds of every whole block. Where a token may take
    over what another saw, they are what it reads when it finds none. Compressed entries count as the exact entries they
    are when they are read.
    """
    layouts = _layouts(strategy, geometry, length)
    read = {layout: _entries_read(layout, length) for layout in set(layouts)}
    return sum(
        read[layout] * layer.entry_bytes(geometry.itemsize) + layer.kv_heads * _index_bytes(layout, length)
        for layout, layer in zip(layouts, geometry.layers, strict=True)
    )


def _layouts(strategy: KVStrategy, geometry: Geometry, length: int) -> list[Layout]:
    return [
        Layout.of(strategy.rule(index, geometry), geometry, layer.native_window, length)
        for index, layer in enumerate(geometry.layers)
    ]


def _index_bytes(layout: Layout, length: int) -> int:
    """Bytes of a KV head's index that the query of the last token reads."""
    query = np.array([length - 1])
    choosers = [each for each in layout.mechanisms if isinstance(each, TokenSelector)]
    return sum(int(each.local_starts(query)[0]) // each.shape.tile * each.shape.tile_bytes for each in choosers)


def _entries_read(layout: Layout, length: int) -> int:
    query, held = np.array([length - 1]), np.arange(length)
    visible = layout.visible(query, held)[0]
    for each in layout.mechanisms:
        if isinstance(each, TokenSelector):
            first = int(each.local_starts(query)[0])
            local = np.count_nonzero(visible[(held < each.sink) | (held >= first)])
            return int(local) + min(each.count, max(0, first - each.sink))
        if isinstance(each, BlockSelector):
            first = int(each.local_starts(query)[0])
            distant = max(0, first - each.sink_tokens)
            local = np.count_nonzero(visible[(held < each.sink_tokens) | (held >= first)])
            # What is known of a block, two vectors per KV head, is as large as a KV entry.
            return int(local) + min(each.count * each.block, distant) + length // each.block
    return int(np.count_nonzero(visible))
