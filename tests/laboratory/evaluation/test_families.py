"""Families of models: what is admitted stays so at other sizes, and what a family cannot have is reported."""

from __future__ import annotations

import re

import pytest

from inference_engine.kv.strategies import strategy_names
from laboratory.evaluation.families import add_arguments, families, main
from tests.laboratory.typed import typed_for


def run(*options: str) -> dict[str, list[dict[str, object]]]:
    arguments = typed_for(add_arguments, *options)
    arguments.quick = False
    payload = main(arguments, None)
    tables: dict[str, list[dict[str, object]]] = payload["tables"]
    return tables


def test_a_family_is_listed_with_the_strategies_it_can_have() -> None:
    tables = run("--only", "HunYuanDense", "SmolLM3", "GPTJ", "--sizes", "1")
    rows = {row["family"]: row for row in tables["admitted"]}
    assert rows["SmolLM3ForCausalLM"]["strategies"] == ", ".join(strategy_names())
    assert rows["SmolLM3ForCausalLM"]["unrotated_layers"] == 9
    assert rows["HunYuanDenseV1ForCausalLM"]["not_had"] == "sink_window, layer_window"
    assert [row["family"] for row in tables["refused"]] == ["GPTJForCausalLM"]
    assert tables["faults"] == [] == tables["left out"]


@pytest.mark.long
def test_every_decoder_that_is_admitted_is_served_rightly_at_random_sizes() -> None:
    tables = run()
    assert tables["faults"] == []
    assert len(tables["admitted"]) > 60
    for row in tables["refused"]:
        # In words: no exception of a library, and no value that only a program can read.
        assert not re.search(r"Error|Exception|tensor\(|<[a-z_]+\.|object at 0x", str(row["refusal"])), row
    rows = [row["family"] for name in ("admitted", "refused", "left out") for row in tables[name]]
    assert sorted(map(str, rows)) == sorted({kind.__name__ for _, kind in families()})
    assert len(tables["left out"]) < 5
