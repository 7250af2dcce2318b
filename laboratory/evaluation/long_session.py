"""Long sessions: does a turn cost at the end what it cost at the beginning, in time and in bytes?

Samples in, values of a record out. The driver of the session (scripts/bench_agentic) takes the samples.

Turns are compared twice: the last tenth with the first, and some turns with the same turn on a fresh session that holds
as much. The second comparison is the fair one: what the machine does meanwhile happens to both halves of a pair.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from laboratory.evaluation.record import exact, summarize

BUCKETS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnSample:
    """One turn as its client saw it: an append, then a Generate to its end.

    history_tokens: before the turn. process_bytes: resident memory of the server, None if it is not ours to look at.
    logprob: mean over the generated tokens. fresh_seconds: of the same turn on a fresh session at equal fill, if run.
    """

    history_tokens: int
    seconds: float
    first_token_seconds: float
    kv_bytes: int
    process_bytes: int | None
    attended_positions: int
    evicted_positions: int
    violations: int
    logprob: float
    fresh_seconds: float | None = None


def split(samples: Sequence[TurnSample]) -> list[Sequence[TurnSample]]:
    """The samples in order, in BUCKETS parts of about equal size; fewer samples make fewer parts."""
    parts = min(BUCKETS, len(samples))
    cuts = [len(samples) * part // parts for part in range(parts + 1)]
    return [samples[start:end] for start, end in itertools.pairwise(cuts)]


def values(samples: Sequence[TurnSample]) -> dict[str, dict[str, Any]]:
    """What a record says of a long session. Values that cannot be had from these samples are left out."""
    assert samples, "a long session has at least one turn"
    first, *_, last = parts if len(parts := split(samples)) > 1 else parts * 2
    found = {
        "turn": summarize([sample.seconds for sample in samples], "s"),
        "turn_first_tenth": summarize([sample.seconds for sample in first], "s"),
        "turn_last_tenth": summarize([sample.seconds for sample in last], "s"),
        "turn_last_over_first": exact(_median_seconds(last) / _median_seconds(first), "ratio"),
        "first_token_first_tenth": summarize([sample.first_token_seconds for sample in first], "s"),
        "first_token_last_tenth": summarize([sample.first_token_seconds for sample in last], "s"),
        "generated_logprob_first_tenth": summarize([sample.logprob for sample in first], "nats/token"),
        "generated_logprob_last_tenth": summarize([sample.logprob for sample in last], "nats/token"),
        "kv_last": exact(samples[-1].kv_bytes, "bytes"),
        "invariant_violations": exact(max(sample.violations for sample in samples), "violations"),
    }
    for name, part in (("first", first), ("last", last)):
        if ratios := [sample.seconds / sample.fresh_seconds for sample in part if sample.fresh_seconds is not None]:
            found[f"turn_over_fresh_{name}_tenth"] = summarize(ratios, "ratio")
    if {"turn_over_fresh_first_tenth", "turn_over_fresh_last_tenth"} <= found.keys():
        ratio = found["turn_over_fresh_last_tenth"]["median"] / found["turn_over_fresh_first_tenth"]["median"]
        found["turn_last_over_first_paired"] = exact(ratio, "ratio")
    most = max(sample.attended_positions for sample in samples)
    # Eviction begins before the last page is taken: a session is full when it has had as much as it can ever read.
    full = [sample for sample in samples if sample.evicted_positions and sample.history_tokens >= most]
    if len(full) > 1:
        found["kv_slope_once_full"] = exact(slope([sample.kv_bytes for sample in full]), "bytes/turn")
    if len(process := [sample.process_bytes for sample in samples if sample.process_bytes is not None]) > 1:
        # The first half touches weights and buffers for the first time.
        late = process[len(process) // 2 :]
        found["process_last"] = exact(process[-1], "bytes")
        found["process_slope_second_half"] = exact(slope(late), "bytes/turn")
        found["process_growth_second_half"] = exact(late[-1] - late[0], "bytes")
    return found


def buckets(samples: Sequence[TurnSample]) -> list[dict[str, Any]]:
    """The course of the session, a line for each part of it."""
    return [
        {
            "turns": len(part),
            "history_tokens": part[0].history_tokens,
            "turn_seconds": summarize([sample.seconds for sample in part], "s"),
            "first_token_seconds": summarize([sample.first_token_seconds for sample in part], "s"),
            "kv_bytes": summarize([sample.kv_bytes for sample in part], "bytes"),
            "attended_positions": part[-1].attended_positions,
            "evicted_positions": part[-1].evicted_positions,
        }
        for part in split(samples)
    ]


def perplexity(logprobs: Sequence[float]) -> float:
    """exp of the mean loss, of natural log-probabilities."""
    return math.exp(-statistics.fmean(logprobs))


def slope(series: Sequence[float]) -> float:
    """The least-squares change from one sample to the next; exactly 0 for a constant series."""
    if len(series) < 2:
        return 0.0
    return statistics.linear_regression(range(len(series)), series).slope


def _median_seconds(samples: Sequence[TurnSample]) -> float:
    return statistics.median(sample.seconds for sample in samples)
