"""Long runs of what the journal promises: kills, losses of power, failing disks, flipped bits.

    python scripts/soak_journal.py kill --count 1000      kills, half with each durability that keeps sessions
    python scripts/soak_journal.py power --count 100000   states of the disk that a loss of power could leave
    python scripts/soak_journal.py faults --count 1000    flipped bits, errors of the first calls of the disk, disks
                                                          that fill up, folders that cannot be written
    python scripts/soak_journal.py replicas --front envoy tcp --how kill freeze --count 300
                                                          servers that share a database behind each of these fronts,
                                                          disturbed in each of these ways (`tests/replicas/replicas.py`)

Kills have three forms: of an engine that acknowledges through a pipe, and of a server under agents of each SDK. What
happens in the lives that they end:

    all kills         sessions are made, appended to, generated from, forked and closed; a fork and the session that it
                      was made from go on by turns, and they leave memory and come back; but with the TypeScript SDK,
                      they are rewound
    with a pipe       each owner has more sessions than may be in memory, K/V comes from files, and in the next life
                      some answered calls are made again with their request ids: their answers are the same
    under an SDK      sessions leave memory when they rest, in the lives that are long; others are made again by the SDK
    power and faults  a journal alone: replies to calls of every kind, Generates with request ids and without, forks,
                      rewinds, closes, rows of copies of K/V, sessions that leave memory and come back

After each, the sessions are those that their owners know, with the histories and the answers that they were sent; one
that was closed is gone; and what was not confirmed is there until some moment, and nothing later. Each of
`--processes` does parts of its own. Writes results/soak_<what>/<date>-<machine>/record.json with the sums, also of a
run that `--minutes` or SIGTERM ends. Exits with 1 if anything that was sent to a client is lost, doubled or wrong, or
if a control is not caught. A machine that is too busy for a server to answer anything before it is killed lets agents
run out of patience: they are counted as such, what they received by then counts, and the status is 2.

With `--parts FILE`, each part that is done is a line of that file, and a run goes on from what the file has: the record
sums all of it. More files may be named, of runs with other seeds on other machines. All of them must be of one journal:
the record has the digest of its source, and says which machine did what at which commit.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import multiprocessing
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from inference_engine.errors import ConfigError
from laboratory.evaluation import record
from tests.session.postgres_server import postgres_server, programs
from tests.session.talks import cut_power, fail_calls, fill_disk, flip_bits, start_read_only

STATES_AT_ONCE, FLIPS_AT_ONCE, KILLS_AT_ONCE, FAILED_AT_ONCE = 200, 100, 100, 10
CONTROL_KILLS, CONTROL_STATES, CONTROL_FLIPS, AGENTS = 20, 150, 500, 6
SAY_SECONDS = 5.0
FAILED_CALLS = 150  # of each kind, one after another
FULL_DISKS, READ_ONLY_FOLDERS = "full disks", "folders that cannot be written"
# Of a kill: what is killed, and its share of all kills where every form runs.
FORMS = {
    "pipe": ("an engine that acknowledges through a pipe", 6),
    "python": ("a server under agents of the Python SDK", 1),
    "typescript": ("a server under agents of the TypeScript SDK", 1),
    "postgres": ("a server on PostgreSQL under agents of the Python SDK", 1),
}
# Counts of kills that a record has beside those of kills and tokens: what they are called, and their units.
BY_AGENTS = {
    "sessions": ("sessions", "sessions"),
    "fork": ("forks", "forks"),
    "close": ("closes", "closes"),
    "came back": ("came back into memory", "times"),
}
REWINDS = {"rewind": ("rewinds", "rewinds")}
COUNTED = {
    "pipe": {
        **BY_AGENTS,
        **REWINDS,
        "asked again": ("answered calls made again", "calls"),
        "from a file": ("from a file", "Generates"),
    },
    "python": BY_AGENTS | REWINDS,
    "postgres": BY_AGENTS | REWINDS,
    "typescript": BY_AGENTS,
}
Call = tuple[str, int, int, Mapping[str, Any]]  # of `part`
Found = tuple[str, Counter[str], list[str], list[str]]  # a part's name, its counts, what is wrong, agents that gave up
# Of the journal, below inference_engine/session/.
SOURCES = ("*journal*.py", "postgres*.py", "sqlite_tables.py", "wal_scan.py", "writer.py")
# Disturbances of one part; how servers are disturbed, and how one with a bug is, which has to be caught.
DISTURBED_AT_ONCE = {"kill": 100, "freeze": 10, "roll": 20, "database": 6, "promote": 5}
DISTURBED_CONTROLS = ("kill", "freeze")
DISTURBED_LEASE_SECONDS = 5.0
GAP = "ms of waiting: "  # in a part's counts, with a number behind it, how often
CAUGHT = "kills until the control is caught"
# What an outcome of `tests/session/talks.py` is called in a record.
OUTCOMES = {
    "whole": "all that was sent to a client is there",
    "last": "only the last commit of the log is missing",
    "uncopied": "only a file with K/V is forgotten",
    "forgotten": "answer is forgotten",
    "shorter": "history is shorter, or a closed session is back",
    "torn": "what is there is of no one moment",
    "corrupt": "session is refused",
    "refused": "start is refused",
    "failed": "journal fails, and the process ends",
    "wrong": "history or answer is wrong",
}
BASELINE = {
    "kill": "the scripted model's law, token for token; one that answers before it records has to be caught",
    "replicas": "the scripted model's law, token for token, and what is true when a server wakes; one that answers "
    "before it records, and one that does not ask for its lease, have to be caught",
    "power": "what was sent to clients by then; a log whose syncs are left out has to be caught",
    "faults": "what was sent to clients by then; flips where nothing is checked have to be caught",
}


@dataclass(frozen=True)
class Part:
    """What was done with one seed. name: what it is; unit: of what it counts; seconds: that it took.

    gave_up: agents that had no answer for longer than their patience lasts; all else was right.
    """

    name: str
    unit: str
    seed: int
    counts: Mapping[str, int]
    wrong: Sequence[str]
    seconds: float
    where: Mapping[str, Any]  # commit, digest of the journal's source, machine
    gave_up: Sequence[str] = ()

    @property
    def size(self) -> int:
        """How much was done: kills have tokens and sessions beside them, what others count is of one unit."""
        is_one_of_several = self.unit in ("kills", "disturbances")
        return self.counts.get(self.unit, 0) if is_one_of_several else sum(self.counts.values())


def read_parts(files: Sequence[Path], where: Mapping[str, Any]) -> list[Part]:
    """Raises ConfigError for parts of another journal, and for a seed that comes twice."""
    found = [Part(**json.loads(line)) for file in files if file.exists() for line in file.read_text().splitlines()]
    for part in found:
        if part.where["journal"] != where["journal"]:
            raise ConfigError(f"parts at {part.where['commit']} are of another journal than this one: name a new file")
    seen = Counter((part.name, part.seed) for part in found)
    if twice := [one for one, count in seen.items() if count > 1]:
        raise ConfigError(f"{twice[0]} is there twice: give each machine's run a --seed of its own")
    return found


def journal_digest() -> str:
    digest = hashlib.sha256()
    folder = ROOT / "inference_engine" / "session"
    for file in sorted(file for pattern in SOURCES for file in folder.glob(pattern)):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


@dataclass
class Soak:
    """What was done, and what was wrong. values: of the record."""

    processes: int
    deadline: float
    where: Mapping[str, Any]
    done: list[Part]
    file: Path | None
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)  # of the soak as a whole

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.stop = context.Event()
        until = None if self.deadline == float("inf") else self.deadline
        self.pool = ProcessPoolExecutor(
            self.processes, mp_context=context, initializer=_begin, initargs=(self.stop, until)
        )

    @property
    def wrong(self) -> list[str]:
        return self.faults + [one for part in self.done for one in part.wrong]

    @property
    def gave_up(self) -> list[str]:
        return [one for part in self.done for one in part.gave_up]

    def has_time(self) -> bool:
        return time.monotonic() < self.deadline and not self.stop.is_set()

    def count(self, name: str, value: float, unit: str) -> None:
        self.values[name] = record.exact(value, unit)
        print(f"{name}: {value:,} {unit}", flush=True)

    def of(self, name: str) -> list[Part]:
        """The parts that are done, of a name and of those that it begins with a comma behind."""
        return [part for part in self.done if part.name == name or part.name.startswith(f"{name}, ")]

    def summed(self, name: str) -> Counter[str]:
        total = Counter[str]()
        for part in self.of(name):
            total.update(part.counts)
        return total

    def batches(self, name: str, count: int, most: int, seed: int) -> Iterator[tuple[int, int]]:
        """Seeds and sizes of parts that make `count` together with those that are done, as far as there is time."""
        used = {part.seed for part in self.of(name)}
        done = sum(part.size for part in self.of(name))
        while done < count and self.has_time():
            seed += 1
            if seed not in used:
                size = min(most, count - done)
                yield seed, size
                done += size

    def in_parts(self, calls: Iterator[Call], unit: str) -> None:
        """Run parts, calls of `part`, in processes of their own, and keep what each did.

        The next part is chosen when a process is free, so that one that is stopped has begun little.
        """
        began = say_at = time.monotonic()
        total = 0
        waiting: dict[Future[tuple[Found, float]], int] = {}
        while True:
            while len(waiting) < self.processes and (call := next(calls, None)) is not None:
                waiting[self.pool.submit(part, *call)] = call[1]
            if not waiting:
                return
            for one in wait(waiting, return_when=FIRST_COMPLETED).done:
                (name, counts, wrong, gave_up), seconds = one.result()
                seed = waiting.pop(one)
                self._keep(Part(name, unit, seed, dict(counts), wrong, round(seconds, 1), self.where, gave_up))
                total += self.done[-1].size
            now = time.monotonic()
            if not waiting or now >= say_at:
                say_at = now + SAY_SECONDS
                without = f", {len(self.gave_up)} agents gave up" if self.gave_up else ""
                print(f"{total:,} {unit} after {now - began:.0f} s, {len(self.wrong)} wrong{without}", flush=True)

    def _keep(self, part: Part) -> None:
        self.done.append(part)
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(json.dumps(asdict(part)) + "\n")

    def machines(self) -> list[dict[str, Any]]:
        """Which machine did how much, at which commit."""
        rows: dict[tuple[Any, ...], Counter[str]] = {}
        for part in self.done:
            where = (part.where["commit"], part.where["machine"], part.unit)
            rows.setdefault(where, Counter()).update(parts=1, amount=part.size, ms=round(1000 * part.seconds))
        return [
            {
                "commit": commit,
                "machine": machine,
                "parts": sums["parts"],
                "amount": sums["amount"],
                "unit": unit,
                "process seconds": round(sums["ms"] / 1000),
            }
            for (commit, machine, unit), sums in sorted(rows.items())
        ]


_stop: Any = None
_until: float | None = None


def _begin(stop: Any, until: float | None) -> None:
    """In each process that does parts."""
    global _stop, _until
    _stop, _until = stop, until
    logging.disable()  # failing disks are what is asked for
    gc.freeze()  # looking through all that was imported, again and again, takes a tenth of the time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # their parent gets it, too, and lets them end


def is_over() -> bool:
    return _stop.is_set() or (_until is not None and time.monotonic() > _until)


def part(name: str, seed: int, size: int, options: Mapping[str, Any]) -> tuple[Found, float]:
    """What was found, and how long it took."""
    began = time.monotonic()
    return _part(name, seed, size, options), time.monotonic() - began


def _part(name: str, seed: int, size: int, options: Mapping[str, Any]) -> Found:
    """An assertion that fails is one that is wrong, and ends no soak."""
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        try:
            if name in FORMS:
                return kill_part(name, state, seed, size, **options)
            if name == "replicas":
                return disturb_part(seed, size, **options)
            state.mkdir()
            if name in ("states", "states control"):
                return name, cut_power(state, seed=seed, states=size, **options), [], []
            if name in ("flips", "flips control"):
                return name, flip_bits(state, seed=seed, count=size, **options), [], []
            if name == FULL_DISKS:
                return name, fill_disk(state, range(seed, seed + size)), [], []
            if name == READ_ONLY_FOLDERS:
                return name, start_read_only(range(seed, seed + size)), [], []
            return name, fail_calls(state, name.rsplit(maxsplit=1)[-1], range(seed, seed + size)), [], []
        except AssertionError as error:
            return name, Counter(wrong=1), [f"{name}, seed {seed}: {error}"], []


def killer(form: str) -> Callable[..., tuple[Counter[str], list[str], list[str]]]:
    """Imported where it is needed: an engine with a pipe needs no SDK, and states and flips need neither."""
    if form == "pipe":
        from tests.load.piped import kill_engines

        return kill_engines
    from tests.load.kills import Agents, NodeAgents, kill_often

    return partial(kill_often, of=NodeAgents if form == "typescript" else Agents)


def forms_here() -> list[str]:
    from tests.load.kills import has_node_agents

    left_out = {"typescript": not has_node_agents(), "postgres": programs() is None}
    return [form for form in FORMS if not left_out.get(form)]


def kill_part(form: str, state: Path, seed: int, size: int, *, durability: str, is_early: bool = False) -> Found:
    """is_early: the control; it counts the kills until it was caught, -1: it was not."""
    kill = killer(form)
    given: dict[str, Any] = {"kills": size, "agents": AGENTS, "seed": seed, "is_early": is_early, "is_over": is_over}
    if is_early:  # a control runs also where a soak is stopped
        given["is_over"] = lambda: False
    with ExitStack() as stack:
        place: Path | str = state
        if form == "postgres":
            is_synced = durability == "power"
            place = stack.enter_context(postgres_server(is_synced=is_synced)).database()
        counts, wrong, gave_up = kill(place, durability, **given)
    if is_early:
        return f"{form} control", Counter(kills=counts["kills"] if wrong else -1), [], []
    name = f"{form}, {durability}"
    wrong, gave_up = ([f"{name}, seed {seed}: {one}" for one in found] for found in (wrong, gave_up))
    return name, counts, wrong, gave_up


def disturb_part(seed: int, size: int, *, how: str, front: str, is_control: bool = False) -> Found:
    """A control counts the disturbances until it was caught, -1: it was not."""
    from tests.replicas.replicas import EARLY, UNPROVED, disturb

    bug = (EARLY if how == "kill" else UNPROVED) if is_control else ""
    durability = "power" if how in ("database", "promote") else ("process", "power")[seed % 2]
    counts, wrong, gave_up, gaps = disturb(
        how,
        front,
        count=size,
        seed=seed,
        durability=durability,
        control=bug,
        lease_seconds=DISTURBED_LEASE_SECONDS,
        is_over=(lambda: False) if is_control else is_over,
    )
    if is_control:
        return f"{how} control", Counter(disturbances=counts["disturbances"] + 1 if wrong else -1), [], []
    counts.update(f"{GAP}{round(1000 * gap)}" for gap in gaps)
    name = f"{how}, {front}, {durability}"
    wrong, gave_up = ([f"{name}, seed {seed}: {one}" for one in found] for found in (wrong, gave_up))
    return name, counts, wrong, gave_up


def disturbances(count: int, seed: int, soak: Soak, fronts: Sequence[str], hows: Sequence[str]) -> None:
    for how in set(hows) & set(DISTURBED_CONTROLS):
        if not soak.of(f"{how} control"):
            options = {"how": how, "front": "tcp", "is_control": True}
            soak.in_parts(iter([("replicas", seed, CONTROL_KILLS, options)]), "disturbances")
    for how, front in ((how, front) for how in hows for front in fronts):
        options = {"how": how, "front": front}
        batches = soak.batches(f"{how}, {front}", count, DISTURBED_AT_ONCE[how], seed)
        parts: Iterator[Call] = (("replicas", number, size, options) for number, size in batches)
        soak.in_parts(parts, "disturbances")
    for how in DISTURBED_AT_ONCE:
        for part in soak.of(f"{how} control"):
            soak.count(f"{how}, until the control is caught", part.counts["disturbances"], "disturbances")
            if part.counts["disturbances"] < 0:
                soak.faults.append(f"{how}: the control was not caught")
        for front in sorted({part.name.split(", ")[1] for part in soak.of(how)}):
            found = soak.summed(f"{how}, {front}")
            for name in ("disturbances", "tokens", "sessions", "fork", "rewind", "close", "came back"):
                called, unit = ({name: (name, name) for name in ("disturbances", "tokens")} | BY_AGENTS | REWINDS)[name]
                soak.count(f"{how}, {front}, {called}", found[name], unit)
            gaps = sorted(
                Counter({int(name[len(GAP) :]): found[name] for name in found if name.startswith(GAP)}).elements()
            )
            soak.count(f"{how}, {front}, waits over one", len(gaps), "waits")
            for called, share in (("median wait", 0.5), ("p99 of waits", 0.99), ("longest wait", 1.0)):
                if gaps:
                    soak.count(f"{how}, {front}, {called}", gaps[min(len(gaps) - 1, int(share * len(gaps)))], "ms")
    soak.count("agents that gave up without an answer", len(soak.gave_up), "agents")


def kills(count: int, seed: int, soak: Soak, forms: Sequence[str]) -> None:
    shares = sum(FORMS[form][1] for form in forms)
    durabilities = ("process", "power")
    for form in forms:
        if not soak.of(f"{form} control"):
            soak.in_parts(iter([(form, seed, CONTROL_KILLS, {"durability": "process", "is_early": True})]), "kills")
    for form in forms:
        parts: Iterator[Call] = (
            (form, number, size, {"durability": durabilities[number % 2]})
            for number, size in soak.batches(
                form, -(-count * FORMS[form][1] // shares), KILLS_AT_ONCE, seed + 1_000_000 * list(FORMS).index(form)
            )
        )
        soak.in_parts(parts, "kills")
    total = 0
    for form, (what, _) in FORMS.items():
        for part in soak.of(f"{form} control"):
            soak.count(f"{CAUGHT}, {what}", part.counts["kills"], "kills")
            if part.counts["kills"] < 0:
                soak.faults.append(f"{what}: the control was not caught")
        for durability in durabilities:
            counts = soak.summed(f"{form}, {durability}")
            total += counts["kills"]
            both = {name: (name, name) for name in ("kills", "tokens")}
            for name, (called, unit) in (both | COUNTED[form]).items():
                if counts:
                    soak.count(f"{called}, {durability}, {what}", counts[name], unit)
    soak.count("kills, in all", total, "kills")
    soak.count("agents that gave up without an answer", len(soak.gave_up), "agents")


def power(count: int, seed: int, soak: Soak) -> None:
    if not soak.of("states control"):
        soak.in_parts(iter([("states control", seed, CONTROL_STATES, {"without_syncs_of": "-wal"})]), "states")
    parts: Iterator[Call] = (
        ("states", number, size, {}) for number, size in soak.batches("states", count, STATES_AT_ONCE, seed)
    )
    soak.in_parts(parts, "states")
    control, outcomes = soak.summed("states control"), soak.summed("states")
    said(control, "states, control", soak, "states")
    said(outcomes, "states", soak, "states")
    soak.faults += [f"{outcomes[name]} states: {OUTCOMES[name]}" for name in outcomes.keys() - {"whole", "wrong"}]
    if not control.keys() - {"whole"}:
        soak.faults.append("the control was not caught")


def faults(count: int, seed: int, soak: Soak) -> None:
    if not soak.of("flips control"):
        of_both = [(seed + number, {"is_checked": False, "is_at_rest": bool(number)}) for number in range(2)]
        soak.in_parts(iter([("flips control", one, CONTROL_FLIPS // 2, options) for one, options in of_both]), "flips")
    parts: Iterator[Call] = (
        ("flips", number, size, {"is_at_rest": bool(number % 2)})
        for number, size in soak.batches("flips", count, FLIPS_AT_ONCE, seed)
    )
    soak.in_parts(parts, "flips")
    kinds = ("errors of a write", "errors of a sync", FULL_DISKS, READ_ONLY_FOLDERS)
    done = {(part.name, part.seed) for part in soak.done}
    calls: Iterator[Call] = (
        (name, first, min(FAILED_AT_ONCE, most + 1 - first), {})
        for most in (min(count, FAILED_CALLS),)
        for first in range(1, most + 1, FAILED_AT_ONCE)
        for name in kinds
        if (name, first) not in done and soak.has_time()
    )
    soak.in_parts(calls, "looks")
    control, flips = soak.summed("flips control"), soak.summed("flips")
    said(control, "flips, control", soak, "flips")
    if not all(control[name] for name in ("wrong", "shorter", "forgotten")):
        soak.faults.append("the control was not caught")
    said(flips, "flips", soak, "flips")
    soak.faults += [
        f"{flips[name]} of {flips.total()} flips: {OUTCOMES[name]}"
        for name in ("shorter", "torn", "forgotten")
        if flips[name]
    ]
    for kind in kinds:
        failed = soak.summed(kind)
        said(failed, kind, soak, "looks")
        soak.faults += [f"{failed[name]} {kind}: {OUTCOMES[name]}" for name in failed.keys() - {"whole"}]


def said(outcomes: Mapping[str, int], what: str, soak: Soak, unit: str) -> None:
    for name, text in OUTCOMES.items():
        if outcomes.get(name) or name == "whole":
            soak.count(f"{what}: {text}", outcomes.get(name, 0), unit)
    soak.count(f"{what}, in all", sum(outcomes.values()), unit)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kill", "power", "faults", "replicas"))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no new part is begun after so long")
    parser.add_argument("--processes", type=int, default=1, help="that do parts at the same time (default: 1)")
    parser.add_argument(
        "--forms", nargs="+", choices=tuple(FORMS), help="of kills (default: all, the last if its SDK is built)"
    )
    parser.add_argument("--front", nargs="+", choices=("envoy", "haproxy", "nginx", "tcp"), default=["envoy"])
    parser.add_argument("--how", nargs="+", choices=tuple(DISTURBED_AT_ONCE), default=["kill"])
    parser.add_argument(
        "--parts", type=Path, action="append", default=[], help="a file of parts; new ones go into the first"
    )
    parser.add_argument("--commit", help="that runs, where there is no repository")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    args = parser.parse_args(arguments)
    logging.disable()
    began = time.monotonic()
    commit = record.running_commit(args.commit)
    machine = record.describe_machine()
    where = {
        "commit": commit,
        "journal": journal_digest(),
        "machine": f"{machine['cpu']}, {machine['threads']} threads, Python {machine['python']}",
    }
    done = read_parts(args.parts, where)
    soak = Soak(args.processes, began + 60 * args.minutes, where, done, args.parts[0] if args.parts else None)
    before = signal.signal(signal.SIGTERM, lambda *_: soak.stop.set())
    try:
        if args.what == "kill":
            kills(args.count, args.seed, soak, args.forms or forms_here())
        elif args.what == "replicas":
            disturbances(args.count, args.seed, soak, args.front, args.how)
        else:
            {"power": power, "faults": faults}[args.what](args.count, args.seed, soak)
    finally:
        signal.signal(signal.SIGTERM, before)
        soak.pool.shutdown()
        logging.disable(logging.NOTSET)
    soak.count("wrong", len(soak.wrong), "faults")
    soak.count("seconds of all processes", round(sum(part.seconds for part in soak.done)), "s")
    seeds = [part.seed for part in soak.done] or [args.seed]
    config: dict[str, Any] = {"asked_for": args.count, "parts": len(soak.done), "journal_source": where["journal"]}
    if args.what == "kill":
        config |= {"forms": [what for form, (what, _) in FORMS.items() if soak.of(form)]}
    path = record.write_record(
        f"soak_{args.what}",
        {
            "commit": commit,
            "command": record.command_line(without=("--results", "--commit", "--parts")),
            "config": config,
            "seeds": [min(seeds), max(seeds)],
            "values": soak.values,
            "baseline": BASELINE[args.what],
            "tables": {
                "machines": soak.machines(),
                "wrong": [{"wrong": one} for one in soak.wrong],
                **({"gave up": [{"gave up": one} for one in soak.gave_up]} if soak.gave_up else {}),
            },
        },
        results_dir=args.results,
    )
    for one in (*soak.wrong, *soak.gave_up):
        print(one, file=sys.stderr)
    said = "WRONG" if soak.wrong else f"right, but {len(soak.gave_up)} agents gave up" if soak.gave_up else "right"
    print(f"{said}; {path.parent.name} {path.name}")
    return 1 if soak.wrong else 2 if soak.gave_up else 0


if __name__ == "__main__":
    sys.exit(main())
