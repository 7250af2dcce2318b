"""A token is said to read the bytes of the entries that its strategy lets it see."""

from __future__ import annotations

import pytest

from inference_engine.kv.geometry import Geometry, LayerGeometry
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.gather import Gather
from inference_engine.kv.strategies.layer_window import LayerWindow
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from laboratory.evaluation.bytes_read import bytes_read

ENTRY_BYTES = 2 * 3 * 64 * 4
GEOMETRY = Geometry(
    layers=(
        LayerGeometry(query_heads=9, kv_heads=3, head_dim=64),
        LayerGeometry(query_heads=9, kv_heads=3, head_dim=64, native_window=24),
        LayerGeometry(query_heads=9, kv_heads=3, head_dim=64),
    ),
    itemsize=4,
    trained_positions=4096,
    page_tokens=4,
    segment_tokens=16,
)


@pytest.mark.parametrize(
    ("strategy", "entries"),
    [
        # A query at 99, in the segment that starts at 96; a native window counts the query's own entry.
        (Full(), 100 + 24 + 100),
        (SinkWindow(sink=4, window=8), 2 * (4 + 8 + 4) + 12),
        (SinkWindow(sink=4, window=40), 2 * (4 + 40 + 4) + 24),
        (LayerWindow(sink=4, window=8, full_layers=(2,)), (4 + 8 + 4) + 24 + 100),
    ],
    ids=str,
)
def test_a_token_reads_the_entries_its_strategy_lets_it_see(strategy: KVStrategy, entries: int) -> None:
    assert bytes_read(strategy, GEOMETRY, 100) == entries * ENTRY_BYTES


def test_gather_reads_its_selected_blocks_and_the_bounds_of_whole_blocks() -> None:
    gather = Gather(budget=40, block=8, sink=8, window=16)
    # At 99: the sink's block, the window from 80 on, one distant block, and the bounds of twelve whole blocks.
    layer = 8 + 20 + 8 + 12
    assert bytes_read(gather, GEOMETRY, 100) == (2 * layer + 24) * ENTRY_BYTES
