"""What is said of a long session follows from its turns; the bench drives one from end to end."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from laboratory.evaluation.long_session import TurnSample, buckets, perplexity, slope, split, values
from scripts.bench_agentic.bench_session_long_run import main
from tests.tiny_folder import save_tiny_chat_model

SAMPLE = TurnSample(
    history_tokens=0,
    seconds=1.0,
    first_token_seconds=0.25,
    kv_bytes=100,
    process_bytes=None,
    attended_positions=10,
    evicted_positions=0,
    violations=0,
    logprob=-1.0,
)


def medians(samples: list[TurnSample]) -> dict[str, float]:
    return {name: value["median"] for name, value in values(samples).items()}


def test_parts_hold_every_turn_once_in_order() -> None:
    for count in (1, 9, 10, 11, 205):
        samples = [replace(SAMPLE, history_tokens=number) for number in range(count)]
        parts = split(samples)
        assert [sample for part in parts for sample in part] == samples
        assert len(parts) == len(buckets(samples)) == min(10, count)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_last_tenth_is_compared_with_the_first() -> None:
    samples = [replace(SAMPLE, seconds=seconds) for seconds in [2.0] * 10 + [9.0] * 80 + [3.0] * 10]
    found = medians(samples)
    assert (found["turn_first_tenth"], found["turn_last_tenth"], found["turn_last_over_first"]) == (2.0, 3.0, 1.5)


def test_a_slower_machine_does_not_look_like_a_slower_session() -> None:
    early = replace(SAMPLE, seconds=1.1, fresh_seconds=1.0)
    late = replace(SAMPLE, seconds=2.2, fresh_seconds=2.0)
    found = medians([*[early] * 50, *[late] * 50])
    assert found["turn_last_over_first"] == pytest.approx(2.0)
    assert found["turn_last_over_first_paired"] == pytest.approx(1.0)


def test_turns_that_have_no_pair_say_nothing_about_pairs() -> None:
    assert not [name for name in values([SAMPLE] * 20) if "fresh" in name or "paired" in name]


def test_a_session_that_holds_the_same_has_a_slope_of_exactly_zero() -> None:
    full = replace(SAMPLE, evicted_positions=1, history_tokens=10, kv_bytes=123_456_789)
    filling = replace(full, history_tokens=9, kv_bytes=100_000_000)
    assert medians([SAMPLE] * 5 + [filling] * 5 + [full] * 90)["kv_slope_once_full"] == 0.0
    growing = [replace(full, kv_bytes=1000 + 8 * number) for number in range(50)]
    assert medians(growing)["kv_slope_once_full"] == pytest.approx(8.0)


def test_every_violation_is_reported() -> None:
    assert medians([SAMPLE] * 30 + [replace(SAMPLE, violations=2)] * 3)["invariant_violations"] == 2


def test_the_slope_of_too_little_is_zero_and_perplexity_is_the_mean_loss_as_a_count_of_choices() -> None:
    assert (slope([]), slope([5.0])) == (0.0, 0.0)
    assert perplexity([math.log(0.5), math.log(0.125)]) == pytest.approx(4.0)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny"))


def bench(tiny_folder: str, results: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    common = ("--model", tiny_folder, "--kv-bytes=64MiB", "--append-tokens=40", "--generate-tokens=8")
    status = main((*common, "--passage-tokens=8", *arguments), results_dir=results)
    (path,) = results.glob("long_session/*/record.json")
    assert path.with_name("turns.png").stat().st_size > 0
    return status, json.loads(path.read_text())


def test_the_bench_records_a_session_that_outgrows_its_window(tiny_folder: str, tmp_path: Path) -> None:
    status, record = bench(tiny_folder, tmp_path, "--turns=20", "--pair-every=2", "--strategy=sink_window:window=32")
    assert status == 0
    found = {name: value["median"] for name, value in record["values"].items()}
    assert found["history"] == 20 * 48 + 2 * (64 + 8)  # twice a passage with its context
    assert found["errors"] == found["invariant_violations"] == found["kv_slope_once_full"] == 0
    assert found["process_last"] > 0
    assert found["passage_perplexity_first"] > 1
    assert found["passage_perplexity_last"] > 1
    assert len([turn for turn in record["turns"] if turn["fresh_seconds"] is not None]) == 10
    assert record["config"]["strategy"] == "sink_window:sink=4,window=32"


def test_the_bench_records_what_it_has_when_a_session_cannot_go_on(
    tiny_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, record = bench(tiny_folder, tmp_path, "--turns=20", "--pair-every=100", "--strategy=full")
    assert status == 1
    assert len(record["turns"]) == 10  # 48 tokens each; 512 is the model's limit
    assert record["values"]["errors"]["median"] == 1
    assert "would exceed the session's limit of 512" in capsys.readouterr().err
