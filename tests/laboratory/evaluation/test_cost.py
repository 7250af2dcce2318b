"""Times and bytes come from the engine the server uses; a cell that cannot be had says why."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference_engine.config import EngineConfig
from inference_engine.errors import InvalidArgument, NoCapacity
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from laboratory.evaluation.arguments import geometry_of
from laboratory.evaluation.cost import add_arguments, draw, main, measure
from laboratory.evaluation.models import Target, open_target
from laboratory.evaluation.record import write_record
from laboratory.evaluation.timing import run
from laboratory.evaluation.traffic import weight_bytes
from tests.laboratory.typed import typed_for
from tests.tiny import NATIVE_WINDOW, SMALL, TRAINED_POSITIONS, VOCABULARY, tiny_engine

TEXT = [(7 * place) % VOCABULARY for place in range(301)]
WINDOW = SinkWindow(sink=2, window=16)


def test_a_run_reports_what_a_session_holds_and_reads() -> None:
    with tiny_engine() as engine:
        full = run(engine, Full(), [TEXT[:100]], 5)
        window = run(engine, WINDOW, [TEXT[:100]], 5)
        assert engine.info().kv_reserved_bytes == 0
    for one in (full, window):
        assert all(
            seconds > 0
            for seconds in (one.prefill_seconds, one.first_token_seconds, one.resume_seconds, one.token_seconds)
        )
        assert 0 < one.kv_bytes <= one.bound.sustained_bytes
        assert one.kv_bytes <= one.kv_peak_bytes <= one.bound.peak_bytes
        assert one.transient_bytes is None
    assert window.kv_bytes < full.kv_bytes
    assert window.attended_positions < full.attended_positions
    assert window.evicted_positions > full.evicted_positions == 0


def test_sessions_that_do_not_fit_leave_nothing_open() -> None:
    with tiny_engine(kv_bytes=300_000) as engine:
        with pytest.raises(NoCapacity):
            run(engine, Full(), [TEXT[:100]] * 9, 4)
        with pytest.raises(InvalidArgument):
            run(engine, Full(), [TEXT[: TRAINED_POSITIONS - 2]], TRAINED_POSITIONS)
        assert engine.info().kv_reserved_bytes == 0


def test_every_strategy_is_measured_beside_full_in_every_round() -> None:
    with tiny_engine() as engine:
        found, left_out = measure(
            engine, [WINDOW], TEXT, lengths=(40, TRAINED_POSITIONS), batches=(1, 2), rounds=3, tokens=4
        )
    assert {str(cell) for cell in found} == {
        f"{name}, at {place}"
        for name in ("full", str(WINDOW))
        for place in ("40", "40, batch 2", "512", "512, batch 2")
    } - set(left_out)
    assert set(left_out) == {"full, at 512", "full, at 512, batch 2"}
    assert all("limit_tokens" in reason for reason in left_out.values())
    assert all(len(runs) == 3 for runs in found.values())


def arguments(*typed: str) -> argparse.Namespace:
    return typed_for(add_arguments, *typed)


def test_a_run_leaves_a_record_that_a_regime_map_can_be_made_of(tiny_target: Target, tmp_path: Path) -> None:
    typed = ("--strategies", str(WINDOW), "--lengths", "40", "200", "--rounds=1", "--tokens=5", "--kind=looped")
    payload = main(arguments(*typed), tiny_target)
    path = write_record("cost", {"command": "kakeya evaluate cost", **payload}, results_dir=tmp_path)
    draw(payload, path.parent)
    assert {image.name for image in path.parent.glob("*.svg")} == {"decode.svg", "kv_bytes.svg"}
    lines = {(line["strategy"], line["length"]): line for line in payload["tables"]["cost"]}
    # Of 200 and one tokens, four more were timed; the layer that slides by itself reads its window.
    entry_bytes = geometry_of(tiny_target).layers[0].entry_bytes(geometry_of(tiny_target).itemsize)
    assert lines["full", 200]["bytes_read"] == (2 * (202 + 205) / 2 + NATIVE_WINDOW) * entry_bytes
    assert lines[str(WINDOW), 200]["bytes_read"] < lines["full", 200]["bytes_read"]
    assert not lines["full", 200]["finds"]
    assert payload["config"]["weight_bytes"] == weight_bytes(tiny_target) > 0


def test_packed_weights_are_counted_as_they_are_read(tiny_torch_target: Target) -> None:
    model = replace(tiny_torch_target.model, backend="native", weights="int8")
    settings: dict[str, Any] = SMALL
    with open_target(model, EngineConfig(**settings)) as packed:
        assert 0.25 < weight_bytes(packed) / weight_bytes(tiny_torch_target) < 0.5
