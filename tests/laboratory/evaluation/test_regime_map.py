"""The map is fitted on what a cost record says; what cannot be fitted is recommended all the same."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from laboratory.evaluation.recommendation import FACTS, NO_STRATEGY
from laboratory.evaluation.record import VALUE_KEYS, exact, write_record
from laboratory.evaluation.regime_map import add_arguments, draw, main, steps_of, values
from tests.laboratory.typed import typed_for

WEIGHT_BYTES = 1_000_000


def cost_row(strategy: str, length: int, batch: int, read: int, *, finds: bool = False) -> dict[str, Any]:
    seconds = (WEIGHT_BYTES + batch * read) / 1e9 + 0.002 + (0.001 * batch if finds else 0.0)
    return {
        "strategy": strategy,
        "length": length,
        "batch": batch,
        "bytes_read": read,
        "finds": finds,
        "token_seconds": seconds,
        "resume_seconds": seconds,
        "kv_bytes": 1000 if strategy == "sink_window" else 500 * length,
    }


ROWS = [
    cost_row(name, length, batch, read, finds=name == "gather")
    for length in (100, 1000, 5000)
    for batch in (1, 4)
    for name, read in (("full", 500 * length), ("sink_window", 40_000), ("gather", 60_000 + 4 * length))
]


def test_a_record_of_the_map_holds_the_terms_and_the_held_out_error() -> None:
    dense, others = steps_of(ROWS)
    bill, reported = values(dense, others, WEIGHT_BYTES)
    assert all(set(VALUE_KEYS) <= value.keys() for value in reported.values())
    assert reported["effective bandwidth"]["median"] == pytest.approx(1e9)
    assert reported["fixed cost of a step"]["median"] == pytest.approx(0.002)
    assert reported["price of finding, gather"]["median"] == pytest.approx(0.001)
    assert reported["R² on dense rows, in sample"]["median"] == pytest.approx(1.0)
    assert reported["R² on speed ÷ full of rows never fitted"]["median"] == pytest.approx(1.0)
    for name in ("sink_window", "gather"):
        assert reported[f"error on rows never fitted, {name}, largest"]["median"] < 1e-9
    assert reported["error on rows never fitted, gather"]["count"] == 5
    assert bill.finding_seconds.keys() == {"gather"}


def write_cost(folder: Path, **changes: Any) -> Path:
    config = {"model": "tiny", "dtype": "float32", "device": "cpu", "weight_bytes": WEIGHT_BYTES}
    payload = {
        "command": "kakeya evaluate cost",
        "config": config,
        "seeds": [0],
        "values": {"decode": exact(1.0, "tokens/s")},
        "baseline": "full",
        "tables": {"cost": ROWS},
        **changes,
    }
    return write_record("cost_tiny", payload, results_dir=folder)


def parse(*typed: str) -> argparse.Namespace:
    return typed_for(add_arguments, *typed)


def test_a_map_is_made_from_a_cost_record_alone(tmp_path: Path) -> None:
    payload = main(parse("--cost", str(write_cost(tmp_path))), None)
    path = write_record("regime_map", {"command": "kakeya evaluate regime-map", **payload}, results_dir=tmp_path)
    draw(payload, path.parent)
    assert (path.parent / "regime_map.svg").exists()
    assert {row["strategy"] for row in payload["tables"]["recommendation"] if row["task"] == FACTS} == {
        "full",
        NO_STRATEGY,
    }
    assert len(payload["tables"]["steps"]) == len(ROWS)
    assert set(payload["headlines"]) == set(payload["values"])


def test_what_was_measured_is_recommended_where_no_model_fits_it(tmp_path: Path) -> None:
    flat = [{**row, "token_seconds": 0.01 - 1e-6 * row["length"]} for row in ROWS]
    one_cell = [row for row in ROWS if row["length"] == 100 and row["batch"] == 1]
    for rows, reason in ((one_cell, "two lengths or batches"), (flat, "do not get slower")):
        payload = main(parse("--cost", str(write_cost(tmp_path, tables={"cost": rows}))), None)
        (reported,) = payload["tables"]["not fitted"]
        assert reason in reported["reason"]
        assert payload["tables"]["recommendation"]
        assert payload["values"] == {"cells measured": exact(len(rows), "cells")}
        draw(payload, tmp_path)
        assert not list(tmp_path.glob("*.svg"))
