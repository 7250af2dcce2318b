"""Only what was measured, and shown to serve, is recommended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from laboratory.evaluation.recommendation import (
    FACTS,
    FLUENT,
    MEMORIES,
    NO_STRATEGY,
    Candidate,
    candidates,
    recommend,
)

ROWS = [
    {
        "strategy": name,
        "length": length,
        "batch": batch,
        "token_seconds": 0.01,
        "resume_seconds": 0.01,
        "kv_bytes": 1000,
    }
    for length in (100, 1000, 5000)
    for batch in (1, 4)
    for name in ("full", "sink_window", "gather")
]
FULL = Candidate(strategy="full", length=1000, tokens_per_second=100.0, kv_bytes=1000)
WINDOW = replace(FULL, strategy="sink_window", tokens_per_second=150.0, kv_bytes=90, perplexity=1.01)
LAYERS = replace(FULL, strategy="layer_window", tokens_per_second=120.0, kv_bytes=400, perplexity=1.005)
GATHER = replace(FULL, strategy="gather", tokens_per_second=140.0, perplexity=1.001)


def table(*candidates: Candidate) -> dict[tuple[str, str], str]:
    return {(row["memory"], row["task"]): row["strategy"] for row in recommend(candidates)}


def test_the_fastest_that_serves_the_task_within_the_memory_is_recommended() -> None:
    reported = table(
        FULL,
        replace(WINDOW, differing=38, trials=40),
        replace(LAYERS, differing=1, trials=40),
        replace(GATHER, differing=1, trials=40),
    )
    (all_words, _), (half_words, _), (tenth_words, _) = MEMORIES
    assert reported[all_words, FACTS] == "gather"
    assert reported[all_words, FLUENT] == "sink_window"
    assert reported[half_words, FACTS] == "layer_window"
    assert reported[tenth_words, FLUENT] == "sink_window"
    assert reported[tenth_words, FACTS] == NO_STRATEGY


def test_what_was_not_measured_is_not_recommended() -> None:
    reported = table(FULL, WINDOW, replace(GATHER, perplexity=None, differing=0, trials=40))
    assert reported[MEMORIES[0][0], FACTS] == "full"
    assert reported[MEMORIES[0][0], FLUENT] == "sink_window"
    said = {(row["memory"], row["task"]): row["because"] for row in recommend([FULL, WINDOW])}
    assert said[MEMORIES[0][0], FACTS] == "what was faster was not shown to serve the task"
    assert said[MEMORIES[1][0], FACTS] == "what is that small was not shown to serve the task"


@pytest.mark.parametrize(
    ("differing", "trials", "serves"), [(1, 40, True), (2, 40, False), (3, 100, True), (1, 10, False)]
)
def test_recall_holds_with_one_answer_in_forty_or_three_in_a_hundred_other_than_fulls(
    differing: int, trials: int, serves: bool
) -> None:
    assert replace(GATHER, differing=differing, trials=trials).serves(FACTS) is serves


def test_the_worst_cell_of_a_strategy_speaks_for_it() -> None:
    def pairs(kind: str, length: int, discordant: int) -> dict[str, Any]:
        both = {"both": 40 - discordant, "only full": discordant, "only it": 0, "neither": 0}
        return {"strategy": "gather", "kind": kind, "length": length, "discordant": discordant, **both}

    needle = {"tables": {"against full": [pairs("prose", 1000, 0), pairs("code", 1000, 7), pairs("prose", 5000, 1)]}}
    ratios = [("gather", 1000, 1.004), ("gather", 1000, 1.003), ("full", 1000, 1.0)]
    fidelity = {
        "tables": {
            "fidelity": [
                {"strategy": name, "length": length, "perplexity ÷ full": ratio} for name, length, ratio in ratios
            ]
        }
    }
    found = {(one.strategy, one.length, one.batch): one for one in candidates(ROWS, [needle], [fidelity])}
    assert (found["gather", 1000, 4].differing, found["gather", 1000, 4].trials) == (7, 40)
    assert found["gather", 1000, 1].perplexity == 1.004
    assert (found["gather", 5000, 1].differing, found["gather", 5000, 1].perplexity) == (1, None)
    assert (found["gather", 100, 1].differing, found["sink_window", 1000, 1].perplexity) == (None, None)
