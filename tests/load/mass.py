"""The cheap runs in any amount: a share of one is an amount and a seed, and comes to a tally that adds up with others.

`python scripts/soak.py` divides amounts into shares, one a process. A share that meets something that must not be says
so and stops; an unexpected error ends it; one in which nothing happens for HANG_SECONDS shows where every
thread is and ends with status 1.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import get_state_machine_test

from inference_engine.errors import KakeyaError
from inference_engine.session.journal import MemoryJournal
from laboratory.scripted import Script
from tests.load.calls import Calls
from tests.load.cancels import Cancels
from tests.load.fuzzing import Fuzzing, fuzzed_engine
from tests.load.population import Population
from tests.load.scripted import scripted_engine

HANG_SECONDS = 300
AT_ONCE = 8_000  # messages between two looks at the clock
SEQUENCES, STEPS = 50, 50  # of calls, between two looks at how many there were


@dataclass
class Tally:
    """Counts by name; faults: what must not be, with the seed that leads there."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps({"counts": self.counts, "faults": self.faults})

    @classmethod
    def from_json(cls, text: str) -> Tally:
        read = json.loads(text)
        return cls(Counter(read["counts"]), read["faults"])

    def add(self, other: Tally) -> None:
        self.counts.update(other.counts)
        self.faults += other.faults


def _watched(part: Callable[[int, int], Tally]) -> Callable[[int, int], Tally]:
    """No sign of life is expected after the end: the process may go on with something else."""

    @wraps(part)
    def share(amount: int, seed: int) -> Tally:
        try:
            return part(amount, seed)
        finally:
            faulthandler.cancel_dump_traceback_later()

    return share


@_watched
def interleavings(amount: int, seed: int) -> Tally:
    """Random operations of many owners on a standing pool, as in `tests/load/test_isolation.py`."""
    tally, journal, rng = Tally(), MemoryJournal(), np.random.default_rng(seed)
    with Population.engine(journal) as engine, scripted_engine() as alone:
        population = Population(engine, journal, alone, replay_every=8)
        population.fill(rng)
        try:
            for _ in range(amount):
                _alive()
                population.interleave(rng)
        except (AssertionError, KakeyaError) as error:
            tally.faults.append(_fault(f"seed {seed}, interleaving {population.counts.interleavings}", error))
        tally.counts["prefix tokens shared"] = int(engine.metrics.shared_prefix_tokens._value.get())
    counts = population.counts
    for name in (
        "interleavings",
        "operations",
        "streams",
        "tokens",
        "replayed",
        "cancelled",
        "evicted",
        "alike",
        "rewound",
    ):
        tally.counts[name] = getattr(counts, name)
    tally.counts.update({f"refused {name}": count for name, count in counts.refused.items()})
    return tally


@_watched
def cancels(amount: int, seed: int) -> Tally:
    """At random instants, as in `tests/load/test_cancels.py`."""
    tally, script, rng = Tally(), Script(), np.random.default_rng(seed)
    with scripted_engine(script=script) as engine:
        run = Cancels(engine, script)
        try:
            while run.count < amount:
                _alive()
                run.round(rng)
        except (AssertionError, KakeyaError) as error:
            tally.faults.append(_fault(f"seed {seed}, after {run.count} cancels", error))
    tally.counts.update({"cancels": run.count, "before the first token": run.before_the_first, "tokens": run.tokens})
    return tally


class _WatchedCalls(Calls):
    """Every sequence is a sign of life: where others have the processors, many of them take longer than a hang may."""

    def __init__(self) -> None:
        _alive()
        super().__init__()


@_watched
def calls(amount: int, seed: int) -> Tally:
    """Sequences of calls against a model of the histories, as in `tests/load/test_call_sequences.py`."""
    tally, number = Tally(), 0
    Calls.seen.clear()
    while (missing := amount - Calls.seen.total()) > 0 and not tally.faults:
        budget = hypothesis.settings(
            max_examples=min(SEQUENCES, missing // STEPS + 1),
            stateful_step_count=STEPS,
            phases=[Phase.generate],
            deadline=None,
            database=None,
            derandomize=False,
            suppress_health_check=list(HealthCheck),
        )
        run = hypothesis.seed(seed * 1_000_000 + number)(get_state_machine_test(_WatchedCalls, settings=budget))
        try:
            run()
        except (AssertionError, KakeyaError, FlakyFailure) as error:
            tally.faults.append(_fault(f"seed {seed}, sequences {number}", error))
        number += 1
    tally.counts["calls"] = Calls.seen.total()
    tally.counts.update({f"{method} {reason}": count for (method, reason), count in Calls.seen.items()})
    return tally


@_watched
def messages(amount: int, seed: int) -> Tally:
    """Random bytes against the servicer, as in `tests/load/test_fuzz.py`."""
    return asyncio.run(_messages(amount, seed))


async def _messages(amount: int, seed: int) -> Tally:
    tally = Tally()
    with fuzzed_engine() as engine:
        fuzzing = Fuzzing(engine, random.Random(seed))
        try:
            while fuzzing.count < amount:
                _alive()
                await fuzzing.send(min(AT_ONCE, amount - fuzzing.count))
            await fuzzing.check()
        except (AssertionError, KakeyaError) as error:
            tally.faults.append(_fault(f"seed {seed}, after {fuzzing.count} messages", error))
    tally.counts["messages"] = fuzzing.count
    tally.counts.update({f"{method} {reason}": count for (method, reason), count in fuzzing.seen.items()})
    return tally


PARTS: dict[str, Callable[[int, int], Tally]] = {
    "interleavings": interleavings,
    "cancels": cancels,
    "calls": calls,
    "messages": messages,
}


def _alive() -> None:
    """Something happened."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=sys.stderr)


def _fault(where: str, error: Exception) -> str:
    """One line of it; all of it on standard error."""
    traceback.print_exception(error)
    while isinstance(error, FlakyFailure):  # threads do not fail twice alike: what was seen is inside
        error = error.exceptions[0]
    return f"{where}: {type(error).__name__}: {error}"
