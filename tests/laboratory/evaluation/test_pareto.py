"""Records are joined as they are, and the winners at each number of bytes follow from them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from inference_engine.errors import InvalidArgument
from inference_engine.kv.strategies import parse_strategy
from inference_engine.types import Mode
from laboratory.evaluation.arguments import bytes_per_token, tier_bytes_per_token
from laboratory.evaluation.pareto import FACTS, KL, SINGLE, add_arguments, draw, front, main
from laboratory.evaluation.record import VALUE_KEYS, exact, load, record_text, write_record
from laboratory.evaluation.tasks import TOOL_CALL
from tests.tiny import PAGES, tiny_forward

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
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args([str(word) for word in typed]), None)


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


def test_a_record_without_bytes_off_the_device_is_refused_only_where_there_are_some(tmp_path: Path) -> None:
    path = fidelity(tmp_path)
    content = load(path)
    for row in content["tables"]["bytes"]:
        del row["tier bytes per token"]
    path.write_text(record_text(content), encoding="utf-8")
    with pytest.raises(InvalidArgument, match="make it again"):
        joined("--fidelity", path)
    del content["tables"]["bytes"][-1]
    path.write_text(record_text(content), encoding="utf-8")
    assert joined("--fidelity", path)["tables"]["all"][0]["of them off the device"] == 0


def test_all_are_compared_on_the_cells_that_each_has(tmp_path: Path) -> None:
    payload = joined("--fidelity", fidelity(tmp_path, lengths={LATENT: (1000,)}))
    assert payload["config"]["cells"]["kl"] == ["prose at 1,000"]
    assert {line["strategy"]: line["kl"] for line in payload["tables"]["all"]}[INT8] == pytest.approx(0.001)


def test_one_wins_from_its_bytes_on_if_nothing_smaller_is_as_good() -> None:
    sizes = {"a": 10, "b": 20, "c": 30, "d": 30}
    assert front(sizes, {"a": 0.5, "b": 0.5, "c": 0.2, "d": 0.1}, KL) == ["a", "d"]
    assert front(sizes, {"a": 0.5, "b": 0.6, "c": 0.6, "d": 0.9}, FACTS) == ["a", "b", "d"]
    assert front(sizes, {"a": 0.95, "b": 0.975, "c": 0.9}, FACTS) == ["a"], "one fact in forty is chance"


def test_the_table_of_winners_says_from_where_and_until_where(tmp_path: Path) -> None:
    payload = joined("--fidelity", fidelity(tmp_path), "--needle", needle(tmp_path))
    facts = [line for line in payload["tables"]["winners"] if line["measure"] == "share of planted facts found"]
    assert [(line["from bytes a token"], line["wins"], line["until"]) for line in facts] == [
        (20, LATENT, "60 bytes a token"),
        (60, INT4, "110 bytes a token"),
        (110, INT8, "nothing larger was better"),
    ]
    assert {line["full"] for line in facts} == {39 / 40}


def test_an_image_is_drawn_for_each_measure_there_is(tmp_path: Path) -> None:
    payload = joined("--fidelity", fidelity(tmp_path), "--error", errors(tmp_path))
    draw(payload, tmp_path)
    assert {image.stem for image in tmp_path.glob("*.png")} == {"kl", "perplexity", "key_error", "value_error"}


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


def test_records_that_give_nothing_to_compare_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="nothing to compare"):
        joined()
    path = fidelity(tmp_path)
    content = load(path)
    del content["tables"]["bytes"]
    path.write_text(record_text(content), encoding="utf-8")
    with pytest.raises(InvalidArgument, match="make it again: kakeya evaluate fidelity"):
        joined("--fidelity", path)
    with pytest.raises(InvalidArgument, match="no table 'recall'"):
        joined("--needle", path)


FURTHER: list[tuple[str, int, int]] = [
    # Two of three layers look at everything: 2 KV heads of 16 numbers, K and V, in float32.
    ("full", 2 * 2 * 2 * 16 * 4, 0),
    ("full:codec=int8", 2 * 2 * 2 * (16 + 4), 0),
    ("sink_window:window=64", 0, 0),
    ("restored:window=64", 0, 0),
    ("restored:window=64,source=latent,bytes_per_token=40", 40, 0),
    ("restored:window=64,source=latent,bytes_per_token=40,resident_latent_bytes=4000", 0, 40),
    ("layer_window:window=64,full_layers=1", 2 * 2 * 16 * 4, 0),
    # The bounds of its blocks stay: a lowest and a highest key of 16 entries.
    (TIERED, 2 * 2 * 2 * 16 * 4 // 16, 2 * 2 * 2 * 16 * 4),
]


def test_a_further_token_takes_what_the_strategy_accounts_for_it(subtests: pytest.Subtests) -> None:
    for strategy, expected, tier in FURTHER:
        with subtests.test(str(strategy)):
            geometry = tiny_forward().geometry(mode=Mode.BATCHED, **PAGES)
            assert bytes_per_token(parse_strategy(strategy), geometry) == expected
            assert tier_bytes_per_token(parse_strategy(strategy), geometry) == tier
