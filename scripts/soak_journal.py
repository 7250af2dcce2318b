"""Long runs of what the journal promises: kills of a server, losses of power, failing disks, flipped bits.

    python scripts/soak_journal.py kill --count 1000      kills, half with each durability that keeps sessions
    python scripts/soak_journal.py power --count 100000   states of the disk that a loss of power could leave
    python scripts/soak_journal.py faults --count 1000    flipped bits, and errors of the first calls of the disk

Writes results/soak_<what>/<date>-<machine>/record.json with the counts, also of a run that `--minutes` ends. Exits
with 1 if anything that was sent to a client is lost, doubled or wrong, or if the control is not caught.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from laboratory.evaluation import record
from tests.load.kills import kill_often
from tests.session.talks import cut_power, fail_calls, flip_bits

STATES_AT_ONCE, FLIPS_AT_ONCE, KILLS_AT_ONCE = 150, 100, 100
CONTROL_KILLS, AGENTS = 20, 6
FAILED_CALLS = 150  # of each kind, one after another
# What an outcome of `tests/session/talks.py` is called in a record.
OUTCOMES = {
    "whole": "all that was sent to a client is there",
    "last": "only the last commit of the log is missing",
    "shorter": "history is shorter",
    "corrupt": "session is refused",
    "refused": "start is refused",
    "wrong": "history is wrong",
}
BASELINE = {
    "kill": "the scripted model's law, token for token; a server that answers before it records has to be caught",
    "power": "what was sent to clients by then; a log whose syncs are left out has to be caught",
    "faults": "what was sent to clients by then",
}


@dataclass
class Soak:
    """What was done, and what was wrong. values: of the record."""

    deadline: float
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    def has_time(self) -> bool:
        return time.monotonic() < self.deadline

    def count(self, name: str, value: float, unit: str) -> None:
        self.values[name] = record.exact(value, unit)
        print(f"{name}: {value:,} {unit}", flush=True)

    def batches(self, count: int, most: int, seed: int) -> Iterator[tuple[int, int]]:
        """Seeds and sizes of parts that make `count` together, as far as there is time."""
        done = 0
        while done < count and self.has_time():
            seed, size = seed + 1, min(most, count - done)
            self.seeds.append(seed)
            yield seed, size
            done += size
            if len(self.seeds) % 50 == 0:
                print(f"{done:,} of {count:,}", flush=True)


@contextmanager
def state_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "state"


def checked(run: Callable[[], Counter[str]], soak: Soak, where: str) -> Counter[str]:
    """What `run` counts; an assertion that fails is one that is wrong, and does not end the soak."""
    try:
        return run()
    except AssertionError as error:
        soak.wrong.append(f"{where}: {error}")
        return Counter(wrong=1)


def kills(count: int, seed: int, soak: Soak) -> None:
    totals = {durability: Counter[str]() for durability in ("process", "power")}
    for part, size in soak.batches(count, KILLS_AT_ONCE, seed):
        durability = min(totals, key=lambda name: totals[name]["kills"])
        with state_folder() as state:
            counts, wrong = kill_often(state, durability, kills=size, agents=AGENTS, seed=part)
        totals[durability] += counts
        soak.wrong += [f"{durability}, seed {part}: {one}" for one in wrong]
        print(f"{durability}: {dict(counts)}, wrong: {wrong}", flush=True)
    for durability, counts in totals.items():
        for name in ("kills", "tokens", "sessions"):
            soak.count(f"{name}, {durability}", counts[name], name)
    with state_folder() as state:
        counts, wrong = kill_often(state, "process", kills=CONTROL_KILLS, agents=AGENTS, seed=seed, is_early=True)
    soak.count("kills until the control is caught", counts["kills"] if wrong else -1, "kills")
    if not wrong:
        soak.wrong.append("the control was not caught")


def power(count: int, seed: int, soak: Soak) -> None:
    outcomes = Counter[str]()
    for part, size in soak.batches(count, STATES_AT_ONCE, seed):
        with state_folder() as state:
            state.mkdir()
            outcomes += checked(lambda: cut_power(state, seed=part, states=size), soak, f"seed {part}")  # noqa: B023
    said(outcomes, "states", soak, "states")
    with state_folder() as state:
        state.mkdir()
        control = cut_power(state, seed=seed, states=STATES_AT_ONCE, without_syncs_of="-wal")
    said(control, "states, control", soak, "states")
    soak.wrong += [f"{outcomes[name]} states: {OUTCOMES[name]}" for name in outcomes.keys() - {"whole", "wrong"}]
    if not control.keys() - {"whole"}:
        soak.wrong.append("the control was not caught")


def faults(count: int, seed: int, soak: Soak) -> None:
    flips = Counter[str]()
    for part, size in soak.batches(count, FLIPS_AT_ONCE, seed):
        with state_folder() as state:
            state.mkdir()
            flips += checked(lambda: flip_bits(state, seed=part, count=size), soak, f"seed {part}")  # noqa: B023
    said(flips, "flips", soak, "flips")
    if flips["shorter"]:
        soak.wrong.append(f"{flips['shorter']} of {flips.total()} flips made a history shorter")
    for kind in ("write", "sync"):
        with state_folder() as state:
            state.mkdir()
            failed = checked(lambda: fail_calls(state, kind, range(1, 1 + min(count, FAILED_CALLS))), soak, kind)  # noqa: B023
        said(failed, f"errors of a {kind}", soak, "errors")
        soak.wrong += [f"{failed[name]} errors of a {kind}: {OUTCOMES[name]}" for name in failed.keys() - {"whole"}]


def said(outcomes: Mapping[str, int], what: str, soak: Soak, unit: str) -> None:
    for name, text in OUTCOMES.items():
        if outcomes.get(name) or name == "whole":
            soak.count(f"{what}: {text}", outcomes.get(name, 0), unit)
    soak.count(f"{what}, in all", sum(outcomes.values()), unit)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kill", "power", "faults"))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no new part is begun after so long")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    args = parser.parse_args(arguments)
    logging.disable()  # failing disks are what is asked for
    began = time.monotonic()
    commit = record.commit()
    soak = Soak(began + 60 * args.minutes)
    {"kill": kills, "power": power, "faults": faults}[args.what](args.count, args.seed, soak)
    soak.count("wrong", len(soak.wrong), "faults")
    soak.count("seconds", round(time.monotonic() - began), "s")
    config = {"asked_for": args.count, "parts": len(soak.seeds), "seed": args.seed}
    path = record.write_record(
        f"soak_{args.what}",
        {
            "commit": commit,
            "command": record.command_line(without=("--results",)),
            "config": config,
            "seeds": [soak.seeds[0], soak.seeds[-1]] if soak.seeds else [args.seed],
            "values": soak.values,
            "baseline": BASELINE[args.what],
            "tables": {"wrong": [{"wrong": one} for one in soak.wrong]},
        },
        results_dir=args.results,
    )
    for one in soak.wrong:
        print(one, file=sys.stderr)
    print(f"{'WRONG' if soak.wrong else 'right'}; {path.parent.name} {path.name}")
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
