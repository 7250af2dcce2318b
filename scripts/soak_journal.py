"""Long runs of what the journal promises: kills, losses of power, failing disks, flipped bits.

    python scripts/soak_journal.py kill --count 1000      kills, half with each durability that keeps sessions
    python scripts/soak_journal.py power --count 100000   states of the disk that a loss of power could leave
    python scripts/soak_journal.py faults --count 1000    flipped bits, and errors of the first calls of the disk

Kills have three forms: of an engine that acknowledges through a pipe, and of a server under agents of each SDK. Each of
`--processes` does parts of its own. Writes results/soak_<what>/<date>-<machine>/record.json with the sums, also of a
run that `--minutes` or SIGTERM ends. Exits with 1 if anything that was sent to a client is lost, doubled or wrong, or
if a control is not caught.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from laboratory.evaluation import record
from tests.load.kills import Agents, NodeAgents, has_node_agents, kill_often
from tests.load.piped import kill_engines
from tests.session.talks import cut_power, fail_calls, flip_bits

STATES_AT_ONCE, FLIPS_AT_ONCE, KILLS_AT_ONCE = 500, 100, 100
CONTROL_KILLS, CONTROL_STATES, CONTROL_FLIPS, AGENTS = 20, 150, 100, 6
FAILED_CALLS = 150  # of each kind, one after another
# Of a kill: what is killed, its share of all kills where every form runs, and what does it.
FORMS: dict[str, tuple[str, int, Callable[..., tuple[Counter[str], list[str]]]]] = {
    "pipe": ("an engine that acknowledges through a pipe", 6, kill_engines),
    "python": ("a server under agents of the Python SDK", 1, kill_often),
    "typescript": ("a server under agents of the TypeScript SDK", 1, kill_often),
}
Call = tuple[str, int, int, Mapping[str, Any]]  # of `part`
OF: dict[str, Any] = {"python": Agents, "typescript": NodeAgents}
CAUGHT = "kills until the control is caught"
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
    "kill": "the scripted model's law, token for token; one that answers before it records has to be caught",
    "power": "what was sent to clients by then; a log whose syncs are left out has to be caught",
    "faults": "what was sent to clients by then; flips where nothing is checked have to be caught",
}


@dataclass
class Soak:
    """What was done, and what was wrong. values: of the record."""

    processes: int
    deadline: float
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    stop: Any = field(default_factory=lambda: multiprocessing.get_context("spawn").Event())

    def has_time(self) -> bool:
        return time.monotonic() < self.deadline and not self.stop.is_set()

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

    def in_parts(self, calls: Iterator[Call], unit: str) -> list[tuple[str, Counter[str]]]:
        """Run parts, calls of `part`, in processes of their own. The name and the counts of each; wrong ones are kept.

        The next part is chosen when a process is free, so that one that is stopped has begun little.
        """
        found: list[tuple[str, Counter[str]]] = []
        began, context = time.monotonic(), multiprocessing.get_context("spawn")
        until = None if self.deadline == float("inf") else self.deadline
        with ProcessPoolExecutor(
            self.processes, mp_context=context, initializer=_begin, initargs=(self.stop, until)
        ) as pool:
            waiting = set[Future[tuple[str, Counter[str], list[str]]]]()
            while True:
                while len(waiting) < self.processes and (call := next(calls, None)) is not None:
                    waiting.add(pool.submit(part, *call))
                if not waiting:
                    return found
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for one in done:
                    name, counts, wrong = one.result()
                    found.append((name, counts))
                    self.wrong += wrong
                total = sum(counts[unit] if unit in counts else counts.total() for _, counts in found)
                print(f"{total:,} {unit} after {time.monotonic() - began:.0f} s, {len(self.wrong)} wrong", flush=True)


_stop: Any = None
_until: float | None = None


def _begin(stop: Any, until: float | None) -> None:
    """In each process that does parts."""
    global _stop, _until
    _stop, _until = stop, until
    logging.disable()  # failing disks are what is asked for
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # their parent gets it, too, and lets them end


def is_over() -> bool:
    return _stop.is_set() or (_until is not None and time.monotonic() > _until)


def part(name: str, seed: int, size: int, options: Mapping[str, Any]) -> tuple[str, Counter[str], list[str]]:
    """What one part counts, and what is wrong; an assertion that fails is one that is wrong, and ends no soak."""
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        try:
            if name in FORMS:
                return kill_part(name, state, seed, size, **options)
            state.mkdir()
            if name == "states":
                return name, cut_power(state, seed=seed, states=size, **options), []
            if name == "flips":
                return name, flip_bits(state, seed=seed, count=size, **options), []
            return name, fail_calls(state, name, range(1, 1 + size)), []
        except AssertionError as error:
            return name, Counter(wrong=1), [f"{name}, seed {seed}: {error}"]


def kill_part(
    form: str, state: Path, seed: int, size: int, *, durability: str, is_early: bool = False
) -> tuple[str, Counter[str], list[str]]:
    """is_early: the control; it counts the kills until it was caught, -1: it was not."""
    kill = FORMS[form][2]
    given: dict[str, Any] = {"kills": size, "agents": AGENTS, "seed": seed, "is_early": is_early, "is_over": is_over}
    if form in OF:
        given["of"] = OF[form]
    if is_early:  # a control runs also where a soak is stopped
        given["is_over"] = lambda: False
    counts, wrong = kill(state, durability, **given)
    if is_early:
        return form, Counter(kills=counts["kills"] if wrong else -1), []
    return f"{form}, {durability}", counts, [f"{form}, {durability}, seed {seed}: {one}" for one in wrong]


def summed(found: Sequence[tuple[str, Counter[str]]]) -> dict[str, Counter[str]]:
    totals: dict[str, Counter[str]] = {}
    for name, counts in found:
        totals.setdefault(name, Counter()).update(counts)
    return totals


def kills(count: int, seed: int, soak: Soak, forms: Sequence[str]) -> None:
    shares = sum(FORMS[form][1] for form in forms)
    durabilities = ("process", "power")
    for form in forms:
        early = iter([(form, seed, CONTROL_KILLS, {"durability": "process", "is_early": True})])
        caught = soak.in_parts(early, "kills")[0][1]["kills"]
        soak.count(f"{CAUGHT}, {FORMS[form][0]}", caught, "kills")
        if caught < 0:
            soak.wrong.append(f"{FORMS[form][0]}: the control was not caught")
    for form in forms:
        what, share, _ = FORMS[form]
        parts: Iterator[Call] = (
            (form, number, size, {"durability": durabilities[index % 2]})
            for index, (number, size) in enumerate(
                soak.batches(-(-count * share // shares), KILLS_AT_ONCE, seed + 1_000_000 * list(FORMS).index(form))
            )
        )
        totals = summed(soak.in_parts(parts, "kills"))
        for durability in durabilities:
            counts = totals.get(f"{form}, {durability}", Counter())
            for name in ("kills", "tokens", "sessions", *(["from a file"] if form == "pipe" else [])):
                unit = "Generates" if name == "from a file" else name
                soak.count(f"{name}, {durability}, {what}", counts[name], unit)
    soak.count(
        "kills, in all",
        sum(int(value["median"]) for name, value in soak.values.items() if name.startswith("kills, p")),
        "kills",
    )


def power(count: int, seed: int, soak: Soak) -> None:
    control = soak.in_parts(iter([("states", seed, CONTROL_STATES, {"without_syncs_of": "-wal"})]), "states")[0][1]
    said(control, "states, control", soak, "states")
    parts: Iterator[Call] = (("states", number, size, {}) for number, size in soak.batches(count, STATES_AT_ONCE, seed))
    outcomes = summed(soak.in_parts(parts, "states")).get("states", Counter())
    said(outcomes, "states", soak, "states")
    soak.wrong += [f"{outcomes[name]} states: {OUTCOMES[name]}" for name in outcomes.keys() - {"whole", "wrong"}]
    if not control.keys() - {"whole"}:
        soak.wrong.append("the control was not caught")


def faults(count: int, seed: int, soak: Soak) -> None:
    control = soak.in_parts(iter([("flips", seed, CONTROL_FLIPS, {"is_checked": False})]), "flips")[0][1]
    said(control, "flips, control", soak, "flips")
    if not control["wrong"]:
        soak.wrong.append("the control was not caught")
    parts: Iterator[Call] = (("flips", number, size, {}) for number, size in soak.batches(count, FLIPS_AT_ONCE, seed))
    flips = summed(soak.in_parts(parts, "flips")).get("flips", Counter())
    said(flips, "flips", soak, "flips")
    if flips["shorter"]:
        soak.wrong.append(f"{flips['shorter']} of {flips.total()} flips made a history shorter")
    kinds = ("write", "sync")
    calls: Iterator[Call] = ((kind, 0, min(count, FAILED_CALLS), {}) for kind in kinds)
    for kind, failed in soak.in_parts(calls, "errors"):
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
    parser.add_argument("--processes", type=int, default=1, help="that do parts at the same time (default: 1)")
    parser.add_argument(
        "--forms", nargs="+", choices=tuple(FORMS), help="of kills (default: all, the last if its SDK is built)"
    )
    parser.add_argument("--commit", help="that runs, where there is no repository")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    args = parser.parse_args(arguments)
    logging.disable()
    began = time.monotonic()
    commit = record.running_commit(args.commit)
    soak = Soak(args.processes, began + 60 * args.minutes)
    forms = args.forms or [form for form in FORMS if form != "typescript" or has_node_agents()]
    before = signal.signal(signal.SIGTERM, lambda *_: soak.stop.set())
    try:
        if args.what == "kill":
            kills(args.count, args.seed, soak, forms)
        else:
            {"power": power, "faults": faults}[args.what](args.count, args.seed, soak)
    finally:
        signal.signal(signal.SIGTERM, before)
    soak.count("wrong", len(soak.wrong), "faults")
    soak.count("seconds", round(time.monotonic() - began), "s")
    config = {"asked_for": args.count, "parts": len(soak.seeds), "seed": args.seed, "processes": args.processes}
    if args.what == "kill":
        config |= {"forms": [FORMS[form][0] for form in forms]}
    path = record.write_record(
        f"soak_{args.what}",
        {
            "commit": commit,
            "command": record.command_line(without=("--results", "--commit")),
            "config": config,
            "seeds": [min(soak.seeds), max(soak.seeds)] if soak.seeds else [args.seed],
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
