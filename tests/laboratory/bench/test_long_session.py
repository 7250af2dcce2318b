"""What is said of a long session follows from its turns; the bench drives one from end to end."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from inference_engine.cli.main import main
from kakeya.tokenization import load_tokenizer
from laboratory.bench.long_session import Bench, Long
from laboratory.evaluation.long_session import (
    HOUR_SECONDS,
    TurnSample,
    slope_by_place,
    values,
)
from laboratory.evaluation.record import load
from laboratory.evaluation.tasks import TASKS, Grade, Question
from tests.tiny_folder import save_tiny_chat_model

pytestmark = pytest.mark.usefixtures("warm_servers")

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


def test_the_last_tenth_is_compared_with_the_first() -> None:
    samples = [replace(SAMPLE, seconds=seconds) for seconds in [2.0] * 10 + [9.0] * 80 + [3.0] * 10]
    found = medians(samples)
    assert (found["turn_first_tenth"], found["turn_last_tenth"], found["turn_last_over_first"]) == (2.0, 3.0, 1.5)


def test_a_session_that_holds_the_same_has_a_slope_of_exactly_zero() -> None:
    full = replace(SAMPLE, evicted_positions=1, history_tokens=10, kv_bytes=123_456_789)
    filling = replace(full, history_tokens=9, kv_bytes=100_000_000)
    assert medians([SAMPLE] * 5 + [filling] * 5 + [full] * 90)["kv_slope_once_full"] == 0.0
    growing = [replace(full, kv_bytes=1000 + 8 * number) for number in range(50)]
    assert medians(growing)["kv_slope_once_full"] == pytest.approx(8.0)


TURNS = 20  # of a conversation


def talk(count: int, **of_place: Callable[[int], Any]) -> list[TurnSample]:
    """As many conversations, a minute a turn. A turn deep in one takes and holds more than an early one."""
    fields: dict[str, Callable[[int], Any]] = {"seconds": lambda n: 1.0 + n % TURNS, "kv_bytes": lambda n: n % TURNS}
    return [
        replace(
            SAMPLE,
            conversation=number // TURNS,
            place=number % TURNS,
            at_seconds=60.0 * number,
            **{name: field(number) for name, field in (fields | of_place).items()},
        )
        for number in range(count * TURNS)
    ]


def test_memory_that_follows_the_place_in_a_conversation_has_no_slope_and_a_leak_has_its_own() -> None:
    # Cut in the middle of one, so that a line through all turns would see the last ones missing.
    steady = talk(5, process_bytes=lambda n: 10**9 + 10**6 * (n % TURNS))[:-7]
    found = medians(steady)
    assert found["process_slope_same_place"] == found["kv_slope_same_place"] == found["kv_spread_same_place"] == 0.0
    assert found["process_growth_first_to_last_full"] == 0.0
    leaky = talk(5, process_bytes=lambda n: 10**9 + 10**6 * (n % TURNS) + 50 * n, kv_bytes=lambda n: n)[:-7]
    found = medians(leaky)
    assert found["process_slope_same_place"] == pytest.approx(50 * HOUR_SECONDS / 60)
    assert found["process_slope_same_place_second_half"] == pytest.approx(50 * HOUR_SECONDS / 60)
    assert found["process_growth_first_to_last_full"] == 50 * 3 * TURNS
    assert found["kv_spread_same_place"] == 4 * TURNS
    assert slope_by_place(leaky[:TURNS], lambda sample: sample.kv_bytes) is None


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny"))


def bench(tiny_folder: str, results: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    common = ("--model", tiny_folder, "--kv-bytes=64MiB", "--append-tokens=40", "--generate-tokens=8")
    items = results / "turns.jsonl"
    more = ("--passage-tokens=8", "--results", str(results), "--items", str(items))
    status = main(["bench", "long-session", *common, *more, *arguments])
    (path,) = results.glob("long_session/*/record.json")
    assert path.with_name("turns.svg").stat().st_size > 0
    return status, load(path) | {"turns": [json.loads(line) for line in items.read_text().splitlines()]}


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


def test_when_a_session_is_full_the_next_conversation_begins(tiny_folder: str, tmp_path: Path) -> None:
    status, record = bench(tiny_folder, tmp_path, "--turns=30", "--pair-every=7", "--strategy=full")
    assert status == 0
    # 512 is the model's limit: nine turns of 48 tokens, and a passage of 8 with its context.
    places = [(turn["conversation"], turn["place"]) for turn in record["turns"]]
    assert places == [(number // 9, number % 9) for number in range(30)]
    found = {name: value["median"] for name, value in record["values"].items()}
    assert (found["conversations"], found["conversations_full"], found["turns_of_a_conversation"]) == (4, 3, 9)
    assert found["history"] == 30 * 48 + 3 * (64 + 8)
    assert found["kv_spread_same_place"] == found["kv_slope_same_place"] == 0
    assert found["errors"] == found["invariant_violations"] == 0
    # A fresh session repeats the conversation, and reads the passage as the long one did.
    assert found["last_full_conversation_repeated"] == 9
    assert found["passage_perplexity_last_over_fresh"] == pytest.approx(1.0, rel=1e-3)
    assert found["in_one_piece"] == pytest.approx(record["turns"][-1]["at_seconds"], rel=1e-5)
    assert found["turn_last_over_first_same_place"] > 0
    assert found["turn_over_fresh"] > 0
    assert {"process_slope_same_place", "process_growth_first_to_last_full"} <= found.keys()
    assert [row["turns"] for row in record["course"]] == [9, 9, 9, 3]


def at_turn(number: int, event: Callable[[psutil.Process], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `event` happen before that turn."""
    sample = Bench._sample

    def sample_or_not(self: Bench, long: Long, process: psutil.Process, count: int) -> TurnSample:
        if count == number:
            event(process)
        return sample(self, long, process, count)

    monkeypatch.setattr(Bench, "_sample", sample_or_not)


def test_what_was_measured_before_sigterm_is_recorded(
    tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    at_turn(12, lambda _: signal.raise_signal(signal.SIGTERM), monkeypatch)
    status, record = bench(tiny_folder, tmp_path, "--seconds=600", "--pair-every=100", "--strategy=full")
    assert signal.getsignal(signal.SIGTERM) is before
    assert (status, record["errors"]) == (1, ["interrupted"])
    assert [turn["conversation"] for turn in record["turns"]] == [0] * 9 + [1] * 3
    assert record["values"]["passage_perplexity_first"]["median"] > 1


def test_facts_of_the_first_turns_are_asked_for_at_the_end(
    tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    append = Long.append
    characters = load_tokenizer(tiny_folder)

    def append_and_note(session: Long, token_ids: Sequence[int]) -> None:
        said.append(characters.decode(token_ids))
        append(session, token_ids)

    monkeypatch.setattr(Long, "append", append_and_note)
    # A model that has learned nothing: whatever it says counts as the first fact's key.
    task, right = TASKS["multi"], (Grade.EXACT, Grade.WRONG)

    def make(trial: int, seed: int) -> Question:
        return replace(task.make(trial, seed), grade=lambda _text: right[trial])

    monkeypatch.setitem(TASKS, "multi", replace(task, make=make))
    status, record = bench(
        tiny_folder, tmp_path, "--turns=3", "--facts=2", "--pair-every=9", "--append-tokens=80", "--strategy=full"
    )
    assert status == 1  # the fresh session read no fact, and yet
    found = {name: value["median"] for name, value in record["values"].items()}
    assert (found["facts_found"], found["facts_found_on_fresh"]) == (1, 1)
    turns = [text for text in said if text.startswith("\n\nThe pass key of ")]
    asked = [text for text in said if text.startswith("\n\nWhat is the pass key of ")]
    assert len(set(turns)) == len(set(asked)) == 2  # the conversation is full, so a fresh session repeats it
    assert 0 < found["facts_said"] < found["in_one_piece"]
