"""Records are joined as they are, and the winners at each number of bytes follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from inference_engine.errors import InvalidArgument
from laboratory.evaluation.pareto import FACTS, KL, SINGLE, add_arguments, front, main
from laboratory.evaluation.record import VALUE_KEYS, exact, write_record
from laboratory.evaluation.tasks import TOOL_CALL
from tests.laboratory.typed import typed_for

INT4, INT8 = "full:codec=int4,exact_window=64", "full:codec=int8,exact_window=64"
LATENT = "restored:sink=4,window=64,source=latent,bytes_per_token=20"
GATHER, WINDOW = "gather:budget=800,block=16,sink=16,window=256,scorer=bounds", "sink_window:sink=4,window=64"
TIERED = "tiered:budget=800,block=16,sink=16,window=64,resident_tokens=64"
BYTES = {"full": 400, INT4: 60, INT8: 110, LATENT: 20, GATHER: 412, WINDOW: 0}
ENTRIES = {INT4: (0.02, 1.01), INT8: (0.001, 1.001), LATENT: (0.1, 1.2), "full": (0.0, 1.0), WINDOW: (1.0, 2.0)}
CONFIG = {
    "model": "tiny",
    "weights_sha256": "ab",
    "dtype": "float32",
    "segment_tokens": 64,
    "texts_sha256": {"prose": "cd"},
    "latent": {"tensors_sha256": "ab"},
}


def fidelity(folder: Path, *, lengths: Mapping[str, tuple[int, ...]] | None = None, **config: Any) -> Path:
    lines = [
        {"strategy": name, "kind": "prose", "length": length, "kl": kl * length / 1000, "perplexity ÷ full": ratio}
        for name, (kl, ratio) in ENTRIES.items()
        for length in (lengths or {}).get(name, (1000, 2000))
    ]
    return written(
        folder, "fidelity", {"fidelity": lines}, {**CONFIG, "forced_tokens": 32, "texts": 1, "strategies": [], **config}
    )


def needle(folder: Path) -> Path:
    hits = {"full": 39, INT4: 30, INT8: 39, LATENT: 20}
    lines = [
        {"task": task, "kind": "prose", "length": 1000, "strategy": name, "hits": own, "trials": 40}
        | ({"valid calls": own + 1} if task == TOOL_CALL else {})
        for task in (SINGLE, TOOL_CALL)
        for name, own in hits.items()
    ]
    config = {**CONFIG, "tasks": [SINGLE, TOOL_CALL], "trials": 40, "prompt_form": "chat template"}
    return written(folder, "needle", {"recall": lines}, config)


def errors(folder: Path) -> Path:
    found = {f"{letter} error, int4, less own mean": exact(0.01, "share") for letter in "KV"}
    return written(folder, "codec_error", {}, {"model": "tiny", "texts": ["argparse"]}, found)


def sizes_of(name: str) -> dict[str, Any]:
    device, tier = (5, 400) if name == TIERED else (BYTES[name], 0)
    return {"strategy": name, "bytes per token": device, "tier bytes per token": tier}


def written(
    folder: Path, name: str, tables: dict[str, Any], config: dict[str, Any], found: dict[str, Any] | None = None
) -> Path:
    payload = {
        "command": f"kakeya evaluate {name}",
        "config": config,
        "seeds": [0],
        "values": found or {"n": exact(1, "n")},
        "baseline": "full",
        "tables": {**tables, "bytes": [sizes_of(one) for one in (*BYTES, TIERED)]},
    }
    return write_record(name, payload, results_dir=folder)


def joined(*typed: str | Path) -> dict[str, Any]:
    return main(typed_for(add_arguments, *map(str, typed)), None)


def test_all_measures_stand_beside_the_bytes_of_a_token(tmp_path: Path) -> None:
    payload = joined("--fidelity", fidelity(tmp_path), "--needle", needle(tmp_path), "--error", errors(tmp_path))
    table = {line["strategy"]: line for line in payload["tables"]["all"]}
    assert list(table) == [LATENT, INT4, INT8, "full"], "by bytes"
    assert table[INT4]["kl"] == pytest.approx(0.02 * 1.5)
    assert table[INT4]["perplexity"] == pytest.approx(1.01)
    assert (table[INT4]["facts"], table[INT4]["tool calls"], table[INT4]["valid calls"]) == (0.75, 0.75, 31 / 40)
    assert (table[INT4]["key error"], table[LATENT]["key error"]) == (0.01, None)
    assert (table["full"]["key error"], table["full"]["facts"]) == (0.0, 39 / 40)
    assert payload["config"]["cells"]["kl"] == ["prose at 1,000", "prose at 2,000"]
    assert [source.partition(",")[0] for source in payload["config"]["sources"]] == [
        "fidelity", "needle", "codec_error",
    ]  # fmt: skip
    assert all(set(VALUE_KEYS) <= value.keys() for value in payload["values"].values())
    assert set(payload["headlines"]) <= set(payload["values"])


def test_what_keeps_no_token_or_all_of_it_is_not_compared_and_reported(tmp_path: Path) -> None:
    payload = joined("--fidelity", fidelity(tmp_path))
    assert {line["strategy"]: line["reason"] for line in payload["tables"]["not compared"]} == {
        GATHER: "keeps a token in no fewer bytes than full",
        WINDOW: "keeps nothing of a token that left its window",
        TIERED: "keeps a token in no fewer bytes than full",
    }


def test_one_wins_from_its_bytes_on_if_nothing_smaller_is_as_good() -> None:
    sizes = {"a": 10, "b": 20, "c": 30, "d": 30}
    assert front(sizes, {"a": 0.5, "b": 0.5, "c": 0.2, "d": 0.1}, KL) == ["a", "d"]
    assert front(sizes, {"a": 0.5, "b": 0.6, "c": 0.6, "d": 0.9}, FACTS) == ["a", "b", "d"]
    assert front(sizes, {"a": 0.95, "b": 0.975, "c": 0.9}, FACTS) == ["a"], "one fact in forty is chance"


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "other"},
        {"weights_sha256": "xy"},
        {"forced_tokens": 64},
        {"texts_sha256": {"prose": "ef"}},
        {"latent": {"tensors_sha256": "xy"}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_records_of_different_things_are_not_joined(tmp_path: Path, changed: dict[str, Any]) -> None:
    first, second = fidelity(tmp_path / "a"), fidelity(tmp_path / "b", **changed)
    with pytest.raises(InvalidArgument, match="not comparable"):
        joined("--fidelity", first, second)
