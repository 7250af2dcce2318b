"""What only shows after a long time: leaks, drifts, and faults that are one in a hundred thousand.

    python scripts/soak.py --minutes 60 --interleavings 100000 --cancels 10000 --messages 10000000

Each part that is asked for writes results/soak_<part>/<date>-<machine>/ and ends the run with status 1 if it finds
anything. All run on the scripted model, whose tokens are known in closed form:

    turns           a server in this process and clients in another talk over gRPC for so many minutes; every token is
                    compared, and this process's memory, threads, tasks and descriptors are read all the time
    interleavings   random operations of many owners on a standing pool, as in `tests/load/test_isolation.py`
    cancels         at random instants, as in `tests/load/test_cancels.py`
    messages        random bytes against the servicer, as in `tests/load/test_fuzz.py`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from inference_engine.config import EngineConfig, ServerConfig, configure_threads_environment, forbid_model_hub

configure_threads_environment()
forbid_model_hub()

import numpy as np
import psutil

from inference_engine.backends.scripted import Script, ScriptedForward, ScriptedModel
from inference_engine.engine import Engine
from inference_engine.errors import KakeyaError
from inference_engine.evaluation import record
from inference_engine.server.run import start_server
from inference_engine.session.journal import MemoryJournal
from tests.load.cancels import Cancels
from tests.load.fuzzing import Fuzzing, fuzzed_engine
from tests.load.population import Population
from tests.load.scripted import scripted_engine
from tests.load.talkers import Counts, talk

SEGMENT = 64
TALKERS = 24
SAMPLE_SECONDS = 5.0
KV_BYTES = 256 * 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.0, metavar="M", help="of turns")
    parser.add_argument("--talkers", type=int, default=TALKERS, metavar="N", help=f"at a time (default: {TALKERS})")
    parser.add_argument("--interleavings", type=int, default=0, metavar="N")
    parser.add_argument("--cancels", type=int, default=0, metavar="N")
    parser.add_argument("--messages", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    parser.add_argument("--talk-to", metavar="HOST:PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.talk_to:
        return asyncio.run(_talk_to(args))
    parts: list[tuple[str, float, Callable[[argparse.Namespace], Found]]] = [
        ("turns", args.minutes, lambda args: asyncio.run(turns(args))),
        ("interleavings", args.interleavings, interleavings),
        ("cancels", args.cancels, cancels),
        ("messages", args.messages, lambda args: asyncio.run(messages(args))),
    ]
    asked = [(name, part) for name, amount, part in parts if amount]
    if not asked:
        parser.error("say what to do: --minutes, --interleavings, --cancels, --messages")
    status = 0
    for name, part in asked:
        found = part(args)
        status |= found.write(name, args)
    return status


@dataclass
class Found:
    """What a part came to. faults: what must not be; a part with one fails."""

    values: dict[str, dict[str, Any]]
    config: dict[str, Any]
    baseline: str
    faults: list[str]
    samples: list[dict[str, float]]

    def write(self, name: str, args: argparse.Namespace) -> int:
        payload = {
            "command": record.command_line(without=("--results",)),
            "config": {"model": "scripted", **self.config},
            "seeds": [args.seed],
            "values": {**self.values, "faults": record.exact(len(self.faults), "faults")},
            "baseline": self.baseline,
            "tables": {"faults": self.faults, "samples": self.samples},
        }
        path = record.write_record(f"soak_{name}", payload, results_dir=args.results)
        for key, value in self.values.items():
            print(f"{key:40} {value['median']:>16,.3f} {value['unit']}")
        if self.samples:
            at = [sample["seconds"] / 60 for sample in self.samples]
            record.plot_lines(
                path.with_name("footprint.png"),
                title=f"{args.talkers} clients for {args.minutes:g} minutes",
                x_label="minutes",
                y_label="MB",
                lines={"private memory": (at, [sample["private_bytes"] / 1e6 for sample in self.samples])},
            )
        for fault in self.faults:
            print(fault, file=sys.stderr)
        print(path.parent.name, path.name)
        return 1 if self.faults else 0


# -- turns ------------------------------------------------------------------------------------------------------------


async def turns(args: argparse.Namespace) -> Found:
    """Serve in this process and talk from another. The second half of the time is compared with itself."""
    config = EngineConfig(segment_tokens=SEGMENT, kv_bytes=KV_BYTES, max_sessions=4 * args.talkers, max_batch=64)
    process, samples = psutil.Process(), []
    with Engine(ScriptedForward(ScriptedModel()), config) as engine:
        handle = await start_server(engine, ServerConfig(bind="127.0.0.1:0", drain_seconds=5.0))
        command = [sys.executable, __file__, "--talk-to", handle.target, "--minutes", str(args.minutes)]
        command += ["--talkers", str(args.talkers), "--seed", str(args.seed)]
        began = time.monotonic()
        client = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        ending = asyncio.ensure_future(client.communicate())
        while not (await asyncio.wait((ending,), timeout=SAMPLE_SECONDS))[0]:
            samples.append(_sample(process, time.monotonic() - began))
        output, _ = ending.result()
        await asyncio.sleep(SAMPLE_SECONDS)  # what belongs to connections goes with them
        gc.collect()
        after = _sample(process, time.monotonic() - began)
        reserved = engine.info().kv_reserved_bytes
        await handle.drain_and_stop()
    return _judged(args, json.loads(output), samples, after, reserved, client.returncode or 0)


def _judged(
    args: argparse.Namespace,
    counts: dict[str, int],
    samples: list[dict[str, float]],
    after: dict[str, float],
    reserved: int,
    status: int,
) -> Found:
    half = samples[len(samples) // 2 :]
    third = max(1, len(half) // 3)
    early, late = half[:third], half[-third:]

    def median(part: list[dict[str, float]], name: str) -> float:
        return statistics.median(sample[name] for sample in part)

    faults = [f"{name}: {counts[name]}" for name in ("wrong",) if counts[name]]
    if status:
        faults.append(f"the clients ended with status {status}")
    if reserved:
        faults.append(f"{reserved} bytes of K/V are reserved though every session is closed")
    growth = {}
    for name in ("threads", "descriptors", "tasks"):
        growth[name] = median(late, name) - median(early, name)
    values = {name: record.exact(count, name) for name, count in counts.items()}
    values |= {
        "turns_per_second": record.exact(counts["turns"] / (60 * args.minutes), "turns/s"),
        "private_memory": record.summarize([sample["private_bytes"] / 1e6 for sample in half], "MB"),
        "private_memory_drift_in_second_half": record.exact(
            100 * (median(late, "private_bytes") / median(early, "private_bytes") - 1), "%"
        ),
        **{f"{name}_growth_in_second_half": record.exact(grown, name) for name, grown in growth.items()},
        "threads_after": record.exact(after["threads"], "threads"),
        "descriptors_after": record.exact(after["descriptors"], "descriptors"),
        "tasks_after": record.exact(after["tasks"], "tasks"),
    }
    config = {"minutes": args.minutes, "talkers": args.talkers, "segment_tokens": SEGMENT, "kv_bytes": KV_BYTES}
    return Found(values, config, "the first third of the same run's second half", faults, samples)


def _sample(process: psutil.Process, seconds: float) -> dict[str, float]:
    return {
        "seconds": round(seconds, 1),
        "private_bytes": process.memory_full_info().uss,
        "threads": threading.active_count(),
        "descriptors": process.num_fds(),
        "tasks": len(asyncio.all_tasks()),
    }


async def _talk_to(args: argparse.Namespace) -> int:
    counts = Counts()
    talking = talk(args.talk_to, counts, model=ScriptedModel(), segment=SEGMENT, talkers=args.talkers, seed=args.seed)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(talking, 60 * args.minutes)
    print(json.dumps(asdict(counts)), flush=True)
    return 0


# -- the others -------------------------------------------------------------------------------------------------------


def interleavings(args: argparse.Namespace) -> Found:
    journal, rng = MemoryJournal(), np.random.default_rng(args.seed)
    began, faults = time.monotonic(), []
    with Population.engine(journal) as engine, scripted_engine() as alone:
        population = Population(engine, journal, alone, replay_every=8)
        population.fill(rng)
        for number in range(args.interleavings):
            try:
                population.interleave(rng)
            except (AssertionError, KakeyaError) as error:
                faults.append(f"interleaving {number}: {type(error).__name__}: {error}")
                break
    counts = population.counts
    named = ("interleavings", "operations", "streams", "tokens", "replayed", "cancelled", "evicted")
    values = {name: record.exact(getattr(counts, name), name) for name in named}
    values |= {f"refused_{name}": record.exact(count, "calls") for name, count in sorted(counts.refused.items())}
    values["seconds"] = record.exact(time.monotonic() - began, "s")
    return Found(values, {"interleavings": args.interleavings}, "each history alone, in closed form", faults, [])


def cancels(args: argparse.Namespace) -> Found:
    script, rng, faults = Script(), np.random.default_rng(args.seed), []
    began = time.monotonic()
    with scripted_engine(script=script) as engine:
        run = Cancels(engine, script)
        try:
            while run.count < args.cancels:
                run.round(rng)
        except (AssertionError, KakeyaError) as error:
            faults.append(f"after {run.count} cancels: {type(error).__name__}: {error}")
    values = {
        "cancels": record.exact(run.count, "cancels"),
        "before_the_first_token": record.exact(run.before_the_first, "Generates"),
        "tokens": record.exact(run.tokens, "tokens"),
        "seconds": record.exact(time.monotonic() - began, "s"),
    }
    return Found(values, {"cancels": args.cancels}, "each history alone, in closed form", faults, [])


async def messages(args: argparse.Namespace) -> Found:
    rng, faults = np.random.default_rng(args.seed), []
    began = time.monotonic()
    with fuzzed_engine() as engine:
        fuzzing = Fuzzing(engine, rng)
        try:
            await fuzzing.send(args.messages)
            await fuzzing.check()
        except (AssertionError, KakeyaError) as error:
            faults.append(f"after {fuzzing.count} messages: {type(error).__name__}: {error}")
    values = {"messages": record.exact(fuzzing.count, "messages")}
    values |= {
        f"{method}_{reason}": record.exact(count, "messages")
        for (method, reason), count in sorted(fuzzing.seen.items())
    }
    values["seconds"] = record.exact(time.monotonic() - began, "s")
    return Found(values, {"messages": args.messages}, "none: nothing may be found", faults, [])


if __name__ == "__main__":
    sys.exit(main())
