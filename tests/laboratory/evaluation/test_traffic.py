"""The traffic model recovers the terms that made its measurements, and predicts measurements it never saw."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inference_engine.kv.geometry import Geometry, LayerGeometry
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.gather import Gather
from inference_engine.kv.strategies.layer_window import LayerWindow
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from laboratory.evaluation.traffic import (
    Bill,
    Step,
    bytes_read,
    finds,
    fit,
    fit_finding,
    leave_one_out,
    relative_errors,
)

WEIGHT_BYTES = 270_000_000
TRUTH = Bill(
    weight_bytes=WEIGHT_BYTES,
    bytes_per_second=23e9,
    step_seconds=0.0031,
    finding_seconds={"finds": 0.0017},
)
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


def step(strategy: str, length: int, batch: int, read: float, *, finds: bool = False, truth: Bill = TRUTH) -> Step:
    bare = Step(
        strategy=strategy,
        length=length,
        batch=batch,
        bytes_read=read,
        seconds=0.0,
        finds=finds,
    )
    return replace(bare, seconds=truth.predict(bare))


DENSE = [step("full", length, batch, 46_080.0 * length) for length in (500, 1000, 4000, 8191) for batch in (1, 3)]
SPARSE = [
    step("finds", length, batch, 5e6 + 360 * length, finds=True) for length in (500, 4000, 8191) for batch in (1, 3)
]
WINDOWED = [step("windowed", length, 1, 4e6) for length in (500, 4000)]


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
    assert finds(gather, GEOMETRY, 100)
    assert not finds(Full(), GEOMETRY, 100)


def test_bandwidth_and_fixed_cost_are_recovered_from_measurements_of_full() -> None:
    bill = fit(DENSE, WEIGHT_BYTES)
    assert bill.bytes_per_second == pytest.approx(TRUTH.bytes_per_second)
    assert bill.step_seconds == pytest.approx(TRUTH.step_seconds)


def test_the_cost_of_selection_is_fitted_on_one_measurement_and_predicts_the_others() -> None:
    bill, unseen = fit_finding(fit(DENSE, WEIGHT_BYTES), [*SPARSE, *WINDOWED])
    assert bill.finding_seconds == pytest.approx(TRUTH.finding_seconds)
    assert len(unseen) == len(SPARSE) + len(WINDOWED) - 1
    assert max(relative_errors(bill, unseen)) < 1e-9


def test_what_a_session_costs_by_itself_is_recovered_where_batches_differ() -> None:
    truth = replace(TRUTH, session_seconds=0.0009)
    places = [(length, batch) for length in (500, 1000, 4000) for batch in (1, 2, 4)]
    dense = [step("full", length, batch, 46_080.0 * length, truth=truth) for length, batch in places]
    sparse = [step("finds", length, batch, 5e6, finds=True, truth=truth) for length, batch in places]
    bill, unseen = fit_finding(fit(dense, WEIGHT_BYTES, with_sessions=True), sparse)
    assert bill.session_seconds == pytest.approx(truth.session_seconds)
    assert bill.bytes_per_second == pytest.approx(truth.bytes_per_second)
    assert bill.finding_seconds == pytest.approx(truth.finding_seconds)
    assert max(relative_errors(bill, unseen)) < 1e-9
    assert max(leave_one_out(dense, WEIGHT_BYTES, with_sessions=True)) < 1e-9
    without, unseen = fit_finding(fit(dense, WEIGHT_BYTES), sparse)
    assert max(relative_errors(without, unseen)) > 0.05
