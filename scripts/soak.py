"""What only shows after a long time: leaks, drifts, and faults that are one in a hundred thousand.

    python scripts/soak.py --minutes 60
    python scripts/soak.py --interleavings 100000 --cancels 10000 --calls 2000000 --messages 10000000 --processes 40
    python scripts/soak.py --guided-seconds 600 --processes 2

Each part that is asked for writes results/soak_<part>/<date>-<machine>/ and ends the run with status 1 if it finds
anything. All run on the scripted model, whose tokens are known in closed form:

    turns           a server in this process and clients in another talk over gRPC for so many minutes; every token is
                    compared, and this process's memory, threads, tasks and descriptors are read all the time. On
                    a machine that others use, give a `--pace` that it can always keep: its second half is compared
                    with itself at one rate (then the record is soak_turns_paced)
    interleavings   random operations of many owners on a standing pool, as in `tests/load/test_isolation.py`
    cancels         at random instants, as in `tests/load/test_cancels.py`
    calls           sequences of them against a model of the histories, as in `tests/load/test_call_sequences.py`
    messages        random bytes against the servicer, as in `tests/load/test_fuzz.py`
    guided          bytes that coverage leads to code which none before them reached: `scripts/guided_fuzz.py`, which
                    needs atheris

All but the turns are divided among processes, each with a seed of its own, and added up into one record.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from inference_engine.config import child_environment, configure_threads_environment, forbid_model_hub

configure_threads_environment()
forbid_model_hub()

from laboratory.evaluation import pictures, record
from laboratory.evaluation.pictures import Course
from tests.load.mass import PARTS, Tally

TALKERS = 24
SHORTEST_MINUTES = 0.5
GUIDED = "guided"
BASELINES = {
    "turns": "the first third of the same run's second half",
    "turns_paced": "the first third of the same run's second half",
    "interleavings": "each history alone, in closed form or run again",
    "cancels": "each history alone, in closed form",
    "calls": "each history alone, in closed form",
    "messages": "none: nothing may be found",
    GUIDED: "none: nothing may be found",
}
NOT_SHOWN = ("--results", "--commit", "--items")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.0, metavar="M", help="of turns")
    parser.add_argument("--talkers", type=int, default=TALKERS, metavar="N", help=f"at a time (default: {TALKERS})")
    parser.add_argument("--pace", type=float, default=0.0, metavar="X", help="turns a second at most (default: any)")
    for part in PARTS:
        parser.add_argument(f"--{part}", type=int, default=0, metavar="N")
    parser.add_argument("--guided-seconds", type=int, default=0, metavar="S", help="of every process")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="that share each part but turns")
    parser.add_argument("--seed", type=int, default=100, metavar="N", help="of the first process (default: 100)")
    parser.add_argument("--commit", metavar="HASH", help="what runs, where there is no repository to ask")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    record.add_items(parser)
    parser.add_argument("--share", nargs=3, metavar=("PART", "AMOUNT", "SEED"), help=argparse.SUPPRESS)
    parser.add_argument("--talk-to", metavar="HOST:PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.share:
        return _share(*args.share)
    if args.talk_to:
        from tests.load.turns import talk_to

        asyncio.run(talk_to(args.talk_to, minutes=args.minutes, talkers=args.talkers, seed=args.seed, pace=args.pace))
        return 0
    if args.processes < 1:
        parser.error(f"--processes must be at least 1, got {args.processes}")
    if 0 < args.minutes < SHORTEST_MINUTES:
        parser.error(f"--minutes must be at least {SHORTEST_MINUTES}, for samples to compare, got {args.minutes:g}")
    amounts = {part: getattr(args, part) for part in PARTS} | {GUIDED: args.guided_seconds * args.processes}
    asked = {part: amount for part, amount in amounts.items() if amount}
    if not asked and not args.minutes:
        parser.error(f"say what to do: --minutes, {', '.join(f'--{part}' for part in PARTS)}, --guided-seconds")
    commit = record.running_commit(args.commit)
    has_faults = [_mass(part, amount, args, commit) for part, amount in asked.items()]
    if args.minutes:
        has_faults.append(_turns(args, commit))
    return 1 if any(has_faults) else 0


# -- parts that are divided -------------------------------------------------------------------------------------------


def _mass(part: str, amount: int, args: argparse.Namespace, commit: str) -> bool:
    """One share of the amount in each process, all at once; True if any met a fault."""
    seeds = range(args.seed, args.seed + min(args.processes, amount))
    began = time.monotonic()
    with ThreadPoolExecutor(len(seeds)) as pool:
        shares = (amount // len(seeds) + (number < amount % len(seeds)) for number in range(len(seeds)))
        tallies = list(pool.map(_in_a_process, [part] * len(seeds), shares, seeds))
    seconds = time.monotonic() - began
    sum_of_all = Tally()
    for tally in tallies:
        sum_of_all.add(tally)
    # A name of several words is a part of another count.
    values = {name: record.exact(count, name) for name, count in sum_of_all.counts.items() if " " not in name}
    values["processes"] = record.exact(len(seeds), "processes")
    values["seconds"] = record.exact(seconds, "s")
    details = [{"name": name, "count": count} for name, count in sorted(sum_of_all.counts.items()) if " " in name]
    config = {"amount": amount, "processes": len(seeds)}
    return _write(part, args, commit, list(seeds), config, values, sum_of_all.faults, {"counts": details})


def _in_a_process(part: str, amount: int, seed: int) -> Tally:
    """A process that crashes or hangs is a fault, and what it counted is lost."""
    command = [sys.executable, __file__, "--share", part, str(amount), str(seed)]
    if part == GUIDED:
        command = [sys.executable, str(ROOT / "scripts/guided_fuzz.py"), "--seconds", str(amount), "--seed", str(seed)]
    done = subprocess.run(
        command, env=child_environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, check=False
    )
    sys.stderr.write(done.stderr)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return Tally(faults=[f"seed {seed}: ended with status {done.returncode}: {last}"])
    return Tally.from_json(done.stdout.splitlines()[-1])


def _share(part: str, amount: str, seed: str) -> int:
    print(PARTS[part](int(amount), int(seed)).to_json(), flush=True)
    return 0


# -- turns ------------------------------------------------------------------------------------------------------------


def _turns(args: argparse.Namespace, commit: str) -> bool:
    from tests.load.turns import KV_BYTES, SEGMENT, hold

    command = [sys.executable, __file__, "--minutes", str(args.minutes), "--talkers", str(args.talkers)]
    command += ["--seed", str(args.seed), "--pace", str(args.pace), "--talk-to"]
    held = asyncio.run(hold(args.minutes, args.talkers, command))
    config = {"minutes": args.minutes, "talkers": args.talkers, "turns_per_second_at_most": args.pace or None}
    config |= {"segment_tokens": SEGMENT, "kv_bytes": KV_BYTES}
    part = "turns_paced" if args.pace else "turns"
    return _write(part, args, commit, [args.seed], config, held.values, held.faults, {}, held.samples)


def _write(
    part: str,
    args: argparse.Namespace,
    commit: str,
    seeds: list[int],
    config: dict[str, Any],
    values: dict[str, dict[str, Any]],
    faults: list[str],
    tables: dict[str, Any],
    samples: Sequence[dict[str, Any]] = (),
) -> bool:
    """Print and record what a part came to; True if there are faults."""
    for name, value in values.items():
        print(f"{name:40} {value['median']:>16,.3f} {value['unit']}")
    for fault in faults:
        print(fault, file=sys.stderr)
    payload = {
        "commit": commit,
        "command": record.command_line(without=NOT_SHOWN),
        "config": {"model": "scripted", **config},
        "seeds": seeds,
        "values": {**values, "faults": record.exact(len(faults), "faults")},
        "baseline": BASELINES[part],
        "tables": {"faults": [{"fault": fault} for fault in faults], **tables},
        "items": {"samples": samples},
    }
    path = record.write_record(f"soak_{part}", payload, results_dir=args.results, items=args.items)
    if samples:
        at = [sample["seconds"] / 60 for sample in samples]
        megabytes = [sample["private_bytes"] / 1e6 for sample in samples]
        pictures.lines(
            path.with_name("footprint.svg"),
            title=f"{args.talkers} clients for {args.minutes:g} minutes",
            x_label="minutes",
            y_label="MB",
            courses=[Course("private memory", at, megabytes)],
        )
    print(f"{part}: {len(faults)} faults; {path.parent.name} {path.name}", flush=True)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
