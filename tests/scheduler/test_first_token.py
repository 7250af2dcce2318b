"""First tokens under load: what would wait too long is refused at once, the rest is in time, no place stays empty."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest

from inference_engine.config import EngineConfig
from inference_engine.scheduler.request import Prediction, Request
from inference_engine.scheduler.ttft_prediction import TTFTPredictor
from laboratory.load.samples import percentile
from tests.further import further
from tests.scheduler.simulated import Arrival, Seen, Simulation

PLACES, STEP_SECONDS = 4, 0.1
CAPACITY = PLACES / STEP_SECONDS  # tokens a second
TOKENS = (4, 12)  # 8 on average: a Generate lasts 0.8 s
OWNERS = tuple("abcd")
LIMIT = EngineConfig().max_first_token_seconds
SETTINGS: dict[str, Any] = {
    "page_tokens": 4,
    "segment_tokens": 32,
    "step_tokens": 256,
    "kv_bytes": 2**26,
    "tier_bytes": 2**24,
    "max_running": PLACES,
    "max_batch": PLACES,
    "max_queued": 1000,
    "max_sessions": 4000,
    "stall_seconds": 1e6,
}


def generates(
    load: float, seconds: float, *, seed: int = 0, owners: Sequence[str] = OWNERS, asks: int = 0
) -> list[Arrival]:
    """As chance has it, `load` times what there is capacity for. asks: tokens, and says no more than the others."""
    rng, at, found = random.Random(seed), 0.0, []
    whose = random.Random(seed)
    while (at := at + rng.expovariate(load * CAPACITY * 2 / sum(TOKENS))) < seconds:
        says = rng.randint(*TOKENS)
        found.append(
            Arrival(
                at=at,
                owner=whose.choice(owners),
                prompt_tokens=rng.randint(4, 30),
                max_tokens=asks or says,
                says_tokens=says if asks else 0,
            )
        )
    return found


def played(arrivals: list[Arrival], **settings: Any) -> Simulation:
    simulation = Simulation({**SETTINGS, **settings}, step_seconds=STEP_SECONDS)
    simulation.play(arrivals)
    return simulation


def first_tokens(simulation: Simulation, *, since: float, owners: Sequence[str] = OWNERS) -> list[float]:
    taken = [seen for seen in simulation.seen if not seen.is_refused]
    assert all(seen.first_token is not None and seen.tokens for seen in taken), "what was taken is never dropped"
    return [
        seen.first_token
        for seen in taken
        if seen.first_token is not None and seen.arrival.at >= since and seen.arrival.owner in owners
    ]


def refused(simulation: Simulation, owners: Sequence[str] = OWNERS) -> list[Seen]:
    return [seen for seen in simulation.seen if seen.is_refused and seen.arrival.owner in owners]


@pytest.mark.parametrize(
    ("load", "seconds", "asks"),
    [further(1, 25, 0), further(2, 20, 0), (10, 12, 0), (2, 20, 64)],
    ids=["1x", "2x", "10x", "2x, asks for more"],
)
def test_what_is_taken_is_in_time_and_every_place_is_filled_however_much_comes(
    load: float, seconds: float, asks: int
) -> None:
    simulation = played(generates(load, seconds, seed=1, asks=asks))
    since = 6.0
    # Owners that come later and have the earlier turn are not foreseen; what was seen of them lately is allowed for.
    assert percentile(first_tokens(simulation, since=since), 99) <= 1.25 * LIMIT
    assert simulation.tokens_per_second(since, seconds) >= 0.95 * CAPACITY
    assert all(0 < seen.retry_after <= 60 for seen in refused(simulation) if seen.retry_after is not None)
    assert len(refused(simulation)) > (load - 1) * len(simulation.seen) / (load + 1)


def test_a_wait_is_predicted_to_the_step() -> None:
    """Where lengths and durations are known, and none comes later that begins earlier."""
    answered, seen = TTFTPredictor.answered, list[float]()

    def noted(self: TTFTPredictor, request: Request, now: float) -> None:
        if (predicted := request.predicted) is not None and predicted.wait > 0:
            seen.append((predicted.wait + predicted.own - (now - request.accepted_at)) / STEP_SECONDS)
        answered(self, request, now)

    # The first two are for what steps take.
    arrivals = [Arrival(at=0.0, max_tokens=20), Arrival(at=3.0, max_tokens=20)]
    rng, at = random.Random(1), 10.0
    for _ in range(150):
        at += rng.expovariate(1.2 * CAPACITY * 2 / sum(TOKENS))
        arrivals.append(Arrival(at=at, prompt_tokens=4, max_tokens=rng.randint(*TOKENS)))
    with patch.object(TTFTPredictor, "answered", noted):
        played(arrivals, max_first_token_seconds=600.0)
    assert len(seen) >= 140
    # Of the step under way what is left; and prefills that run in one step with this one count as parts of a step.
    part = PLACES * 4 / SETTINGS["segment_tokens"]
    assert min(seen) >= -1e-6 and max(seen) <= 1 + part, (min(seen), max(seen))
    assert 0.4 <= statistics.mean(seen) <= 0.6


class Uneven(Simulation):
    """A busy machine: of two steps of one kind, one may take fifty times as long as the other."""

    rng = random.Random(3)

    def step(self, tokens: int) -> None:
        self.step_seconds = STEP_SECONDS * 50 ** self.rng.random()
        super().step(tokens)


@pytest.mark.parametrize(
    ("places", "beside"),
    [(PLACES, "alone"), (PLACES, "beside one that runs"), (128, "alone"), (128, "beside some that wait")],
)
@pytest.mark.parametrize(
    "machine",
    [
        lambda settings: Simulation(settings, step_seconds=STEP_SECONDS),
        lambda settings: Simulation(settings, step_seconds=5.0),
        lambda settings: Simulation(settings, step_seconds=STEP_SECONDS, token_seconds=0.2),
        Uneven,
    ],
    ids=["even", "slow", "slow prefill", "uneven"],
)
def test_no_generate_of_one_owner_is_lost_or_overtaken_by_its_own_whatever_a_step_takes(
    machine: Callable[[dict[str, object]], Simulation], places: int, beside: str
) -> None:
    """The limit is between owners. All are alike, so their first tokens come as they came."""
    simulation = machine({**SETTINGS, "max_running": places, "max_batch": min(places, 64)})
    tasks = [Arrival(at=at, owner="a", max_tokens=12) for at in (0.0, 1000.0)]  # it is known what steps take
    tasks += [Arrival(at=2000.0 + 0.01 * number, owner="a", prompt_tokens=30, max_tokens=12) for number in range(24)]
    if beside == "beside one that runs":
        tasks.append(Arrival(at=1900.0, owner="b", max_tokens=400))
    if beside == "beside some that wait":
        tasks += [Arrival(at=2000.05 + 0.05 * number, owner="b", max_tokens=2) for number in range(2)]
    seen = [one for one in simulation.play(tasks) if one.arrival.owner == "a"]
    assert [one.tokens for one in seen] == [12] * 26
    served = [one.arrival.at + one.first_token for one in seen if one.first_token is not None]
    assert served == sorted(served)


def test_an_owner_that_floods_fills_the_queue_and_owners_that_ask_for_little_are_never_refused() -> None:
    seconds, quiet = 20, [f"quiet {number}" for number in range(4)]
    arrivals = generates(5, seconds, seed=1, owners=["flood"])
    for number, owner in enumerate(quiet):
        # Two at a time, one after another, as a session's turns are.
        arrivals += [
            Arrival(at=0.3 * number + 2.5 * turn + 0.01 * one, owner=owner, max_tokens=6)
            for turn in range(8)
            for one in range(2)
        ]
    simulation = played(arrivals, max_queued=60)
    assert len(refused(simulation, ["flood"])) > len(arrivals) / 2
    assert not refused(simulation, quiet)
    assert max(first_tokens(simulation, since=0, owners=quiet)) <= 1.25 * LIMIT
    assert simulation.tokens_per_second(6, seconds) >= 0.95 * CAPACITY


def test_a_few_generates_that_ask_for_much_and_end_early_make_no_other_late() -> None:
    seconds = 25.0
    honest, rng = generates(1.9, seconds, seed=1), random.Random(2)
    at, others = 0.0, []
    while (at := at + rng.expovariate(0.5)) < seconds:
        others.append(Arrival(at=at, owner="a", max_tokens=1900, says_tokens=8))
    simulation = played([*honest, *others])
    late = first_tokens(simulation, since=6.0)
    assert percentile(late, 99) <= 1.25 * LIMIT
    assert simulation.tokens_per_second(6.0, seconds) >= 0.95 * CAPACITY


@pytest.mark.parametrize("asks", [200, 1], ids=["that stopped early", "that asked for no more"])
def test_a_single_short_generate_is_no_promise_that_an_owners_next_are_short(asks: int) -> None:
    """Each of the next takes 20 s, and as many as there are places for begin before the fifth and the sixth come."""
    first = [Arrival(at=0.0, max_tokens=asks, says_tokens=1)]
    # Of another owner, so that it is known what steps take.
    paced = [Arrival(at=1.0, owner="another", max_tokens=60)]
    full = [Arrival(at=25.0 + 0.2 * number, max_tokens=200) for number in range(PLACES)]
    predict, predicted = TTFTPredictor.predict, list[Prediction]()

    def noted(self: TTFTPredictor, *queue: Any, changes: int) -> Prediction | None:
        if (found := predict(self, *queue, changes=changes)) is not None:
            predicted.append(found)
        return found

    with patch.object(TTFTPredictor, "predict", noted):
        played([*first, *paced, *full, Arrival(at=27.0, max_tokens=200), Arrival(at=27.5, max_tokens=200)])
    assert max(each.wait for each in predicted[:-2]) <= LIMIT < min(each.wait for each in predicted[-2:])
