"""Long sessions: does a turn cost at the end what it cost at the beginning, in time and in bytes?

Samples in, values of a record out. `laboratory/bench/long_session.py` takes the samples.

Turns are compared twice: the last tenth with the first, and some turns with the same turn on a fresh session that holds
as much. The second comparison is the fair one: what the machine does meanwhile happens to both halves of a pair.

A session that keeps every position is full one day. Then the next conversation begins, in a new session on the same
server. Turns of different places in a conversation cost and hold different amounts, so those of several conversations
are compared place by place: the n-th turn of one with the n-th turn of another.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from laboratory.evaluation.record import exact, summarize

BUCKETS = 10
HOUR_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnSample:
    """One turn as its client saw it: an append, then a Generate to its end.

    history_tokens: before the turn. process_bytes: resident memory of the server, None if it is not ours to look at.
    logprob: mean over the generated tokens. fresh_seconds: of the same turn on a fresh session at equal fill, if run.
    conversation, place: which one, and which turn of it, from 0. at_seconds: its end, since the run began. cpu_seconds:
    processor time of the server during the turn, with the same exception.
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
    conversation: int = 0
    place: int = 0
    at_seconds: float = 0.0
    cpu_seconds: float | None = None


def split(samples: Sequence[TurnSample]) -> list[Sequence[TurnSample]]:
    """The samples in order, in BUCKETS parts of about equal size; fewer samples make fewer parts."""
    parts = min(BUCKETS, len(samples))
    cuts = [len(samples) * part // parts for part in range(parts + 1)]
    return [samples[start:end] for start, end in itertools.pairwise(cuts)]


def conversations(samples: Sequence[TurnSample]) -> list[Sequence[TurnSample]]:
    """The samples of each conversation. All but the last were talked to their end."""
    return [list(group) for _, group in itertools.groupby(samples, key=lambda sample: sample.conversation)]


def values(samples: Sequence[TurnSample]) -> dict[str, dict[str, Any]]:
    """What a record says of a long session. Values that cannot be had from these samples are left out."""
    assert samples, "a long session has at least one turn"
    talks = conversations(samples)
    violations = sum(max(sample.violations for sample in talk) for talk in talks)
    found = {
        "turn": summarize([sample.seconds for sample in samples], "s"),
        "invariant_violations": exact(violations, "violations"),
        "in_one_piece": exact(samples[-1].at_seconds, "s"),
    }
    found |= _of_one(samples) if len(talks) == 1 else _of_several(samples, talks)
    if (last := samples[-1].process_bytes) is not None:
        found["process_last"] = exact(last, "bytes")
    return found


def _of_one(samples: Sequence[TurnSample]) -> dict[str, dict[str, Any]]:
    first, *_, last = parts if len(parts := split(samples)) > 1 else parts * 2
    found = {
        "turn_first_tenth": summarize([sample.seconds for sample in first], "s"),
        "turn_last_tenth": summarize([sample.seconds for sample in last], "s"),
        "turn_last_over_first": exact(_median_seconds(last) / _median_seconds(first), "ratio"),
        "first_token_first_tenth": summarize([sample.first_token_seconds for sample in first], "s"),
        "first_token_last_tenth": summarize([sample.first_token_seconds for sample in last], "s"),
        "generated_logprob_first_tenth": summarize([sample.logprob for sample in first], "nats/token"),
        "generated_logprob_last_tenth": summarize([sample.logprob for sample in last], "nats/token"),
        "kv_last": exact(samples[-1].kv_bytes, "bytes"),
    }
    found |= _over_fresh(first, last, suffix="_tenth")
    most = max(sample.attended_positions for sample in samples)
    # Eviction begins before the last page is taken: a session is full when it has had as much as it can ever read.
    full = [sample for sample in samples if sample.evicted_positions and sample.history_tokens >= most]
    if len(full) > 1:
        found["kv_slope_once_full"] = exact(slope([sample.kv_bytes for sample in full]), "bytes/turn")
    if len(process := [sample.process_bytes for sample in samples if sample.process_bytes is not None]) > 1:
        # The first half touches weights and buffers for the first time.
        late = process[len(process) // 2 :]
        found["process_slope_second_half"] = exact(slope(late), "bytes/turn")
        found["process_growth_second_half"] = exact(late[-1] - late[0], "bytes")
    return found


def _of_several(samples: Sequence[TurnSample], talks: Sequence[Sequence[TurnSample]]) -> dict[str, dict[str, Any]]:
    """Place by place. First and last turns: a tenth of all, or as many as a conversation has where that is more."""
    count = max(len(samples) // BUCKETS, *map(len, talks))
    first, last = samples[:count], samples[max(count, len(samples) - count) :]
    found = {
        "conversations": exact(len(talks), "conversations"),
        "turns_of_a_conversation": summarize([len(talk) for talk in talks[:-1]], "turns"),
        "kv_most": exact(max(sample.kv_bytes for sample in samples), "bytes"),
        "kv_spread_same_place": exact(_widest([(sample.place, sample.kv_bytes) for sample in samples]), "bytes"),
    }
    if ratios := _ratios(first, last, lambda sample: sample.seconds):
        found["turn_last_over_first_same_place"] = summarize(ratios, "ratio")
    if ratios := _ratios(first, last, lambda sample: sample.cpu_seconds):
        found["turn_cpu_last_over_first_same_place"] = summarize(ratios, "ratio")
    found |= _over_fresh(first, last)
    if pairs := [sample.seconds / sample.fresh_seconds for sample in samples if sample.fresh_seconds is not None]:
        found["turn_over_fresh"] = summarize(pairs, "ratio")
    slopes = {
        "kv_slope_same_place": slope_by_place(samples, lambda sample: sample.kv_bytes),
        # The first conversation touches weights and buffers for the first time.
        "process_slope_same_place": slope_by_place(
            [sample for talk in talks[1:] for sample in talk], lambda sample: sample.process_bytes
        ),
        "process_slope_same_place_second_half": slope_by_place(
            samples[len(samples) // 2 :], lambda sample: sample.process_bytes
        ),
    }
    found |= {name: exact(per_hour, "bytes/hour") for name, per_hour in slopes.items() if per_hour is not None}
    if len(talks) > 2:
        growths = [
            late.process_bytes - early.process_bytes
            for early, late in zip(talks[0], talks[-2], strict=False)
            if early.process_bytes is not None and late.process_bytes is not None
        ]
        if growths:
            found["process_growth_first_to_last_full"] = summarize(growths, "bytes")
    return found


def _over_fresh(
    first: Sequence[TurnSample], last: Sequence[TurnSample], *, suffix: str = ""
) -> dict[str, dict[str, Any]]:
    """Turns over the same turns on fresh sessions, in the first and in the last part, and how that changed."""
    found = {}
    for name, part in (("first", first), ("last", last)):
        if ratios := [sample.seconds / sample.fresh_seconds for sample in part if sample.fresh_seconds is not None]:
            found[f"turn_over_fresh_{name}{suffix}"] = summarize(ratios, "ratio")
    if len(found) == 2:
        early, late = (value["median"] for value in found.values())
        found["turn_last_over_first_paired"] = exact(late / early, "ratio")
    return found


def _ratios(
    first: Sequence[TurnSample], last: Sequence[TurnSample], of: Callable[[TurnSample], float | None]
) -> list[float]:
    """Each of the last turns over the first ones of the same place (their median)."""
    early: dict[int, list[float]] = defaultdict(list)
    for sample in first:
        if (number := of(sample)) is not None:
            early[sample.place].append(number)
    bases = {place: statistics.median(numbers) for place, numbers in early.items()}
    late = [(bases.get(sample.place), of(sample)) for sample in last]
    return [number / base for base, number in late if base and number is not None]


def slope_by_place(samples: Sequence[TurnSample], of: Callable[[TurnSample], float | None]) -> float | None:
    """The least-squares change an hour, from turns of the same place alone; None if no place occurs twice.

    Each place has a level of its own, and all have one slope: a sum over the deviations from each place's means.
    """
    places: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        if (number := of(sample)) is not None:
            places[sample.place].append((sample.at_seconds / HOUR_SECONDS, number))
    square = product = 0.0
    for points in places.values():
        mean_at, mean = (statistics.fmean(column) for column in zip(*points, strict=True))
        square += sum((at - mean_at) ** 2 for at, _ in points)
        product += sum((at - mean_at) * (number - mean) for at, number in points)
    return product / square if square else None


def _widest(numbers: Sequence[tuple[int, float]]) -> float:
    """The largest difference within one place, of (place, number)."""
    places: dict[int, list[float]] = defaultdict(list)
    for place, number in numbers:
        places[place].append(number)
    return max(max(found) - min(found) for found in places.values())


def buckets(samples: Sequence[TurnSample]) -> list[dict[str, Any]]:
    """The course of the session, a line for each part of it; of several conversations, a line for each."""
    parts = talks if len(talks := conversations(samples)) > 1 else split(samples)
    return [
        {
            "turns": len(part),
            "history_tokens": part[0].history_tokens,
            "turn_seconds": summarize([sample.seconds for sample in part], "s"),
            "first_token_seconds": summarize([sample.first_token_seconds for sample in part], "s"),
            **({"fresh_seconds": summarize(fresh, "s")} if (fresh := _fresh(part)) else {}),
            "kv_bytes": summarize([sample.kv_bytes for sample in part], "bytes"),
            "attended_positions": part[-1].attended_positions,
            "evicted_positions": part[-1].evicted_positions,
        }
        for part in parts
    ]


def _fresh(part: Sequence[TurnSample]) -> list[float]:
    """Seconds of those turns that were done on a fresh session, too."""
    return [sample.fresh_seconds for sample in part if sample.fresh_seconds is not None]


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
