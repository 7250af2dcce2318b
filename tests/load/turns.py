"""A server and its clients for as long as one likes: every token compared, the server's footprint read all the time.

The server is in this process, the clients are in another, so that what grows here is the server's. The second half of
the time is compared with itself: the first half may fill what is kept on purpose.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from inference_engine.config import EngineConfig, ServerConfig
from inference_engine.engine import Engine
from inference_engine.server.run import start_server
from laboratory.evaluation import record
from laboratory.scripted import ScriptedForward, ScriptedModel
from tests.load.talkers import Counts, talk

SEGMENT = 64
SAMPLE_SECONDS = 5.0
KV_BYTES = 256 * 2**20
DRIFT_PERCENT = 1.0
LAST_TURN_SECONDS = 120.0

Sample = dict[str, float]


@dataclass(frozen=True, slots=True)
class Held:
    """What was counted and measured, what of it must not be; samples: before, while and after clients talked."""

    values: dict[str, dict[str, Any]]
    faults: list[str]
    samples: list[Sample]


async def hold(minutes: float, talkers: int, command: Sequence[str]) -> Held:
    """Serve until `command`, to which the server's address is added, has talked for so long (`talk_to`)."""
    config = EngineConfig(
        segment_tokens=SEGMENT, kv_bytes=KV_BYTES, max_sessions=4 * talkers, max_batch=64, share_prefixes="off"
    )
    process, samples = psutil.Process(), []
    with Engine(ScriptedForward(ScriptedModel()), config) as engine:
        handle = await start_server(engine, ServerConfig(bind="127.0.0.1:0", drain_seconds=5.0))
        await asyncio.to_thread(lambda: None)  # the loop's own worker is there from its first use on
        before = _sample(process, 0.0)
        began = time.monotonic()
        client = await asyncio.create_subprocess_exec(*command, handle.target, stdout=subprocess.PIPE)
        ending = asyncio.ensure_future(client.communicate())
        while not (await asyncio.wait((ending,), timeout=SAMPLE_SECONDS))[0]:
            samples.append(_sample(process, time.monotonic() - began))
        output, _ = ending.result()
        await asyncio.sleep(SAMPLE_SECONDS)  # what belongs to connections goes with them
        gc.collect()
        after = _sample(process, time.monotonic() - began)
        reserved = engine.info().kv_reserved_bytes
        await handle.drain_and_stop()
    if client.returncode:
        raise RuntimeError(f"the clients ended with status {client.returncode}")
    return judged(minutes, json.loads(output), [before, *samples, after], reserved)


async def talk_to(target: str, *, minutes: float, talkers: int, seed: int, pace: float) -> None:
    """The other process: talk for so long, then print what was counted. pace: turns a second, at most; 0: any."""
    counts, seconds = Counts(), 60 * minutes
    async with asyncio.timeout(seconds + LAST_TURN_SECONDS):
        await talk(
            target,
            counts,
            seconds=seconds,
            model=ScriptedModel(),
            segment=SEGMENT,
            talkers=talkers,
            seed=seed,
            turn_seconds=talkers / pace if pace else 0.0,
        )
    print(json.dumps(asdict(counts)), flush=True)


def judged(minutes: float, counts: dict[str, int], samples: list[Sample], reserved: int) -> Held:
    """samples: before the first client came, while they talked, after the last one left."""
    before, *middle, after = samples
    half = middle[len(middle) // 2 :]
    third = max(1, len(half) // 3)
    early, late = half[:third], half[-third:]

    def median(part: list[Sample], name: str) -> float:
        return statistics.median(sample[name] for sample in part)

    drift = 100 * (median(late, "private_bytes") / median(early, "private_bytes") - 1)
    values = {name: record.exact(count, name) for name, count in counts.items()}
    values |= {
        "turns_per_second": record.exact(counts["turns"] / (60 * minutes), "turns/s"),
        "private_memory": record.summarize([sample["private_bytes"] / 1e6 for sample in half], "MB"),
        "private_memory_drift_in_second_half": record.exact(drift, "%"),
    }
    faults = [f"{counts[name]} {name}" for name in ("wrong",) if counts[name]]
    if reserved:
        faults.append(f"{reserved} bytes of K/V are reserved though every session is closed")
    if abs(drift) > DRIFT_PERCENT:
        faults.append(f"private memory went by {drift:.2f} % in the second half")
    for name in ("threads", "descriptors", "tasks"):
        # How many tasks there are at an instant depends on the calls under way: it may vary as much as it does anyway.
        spread = record.summarize([sample[name] for sample in half], name)
        grown = median(late, name) - median(early, name)
        values[f"{name}_in_second_half"] = spread
        values[f"{name}_growth_in_second_half"] = record.exact(grown, name)
        values[f"{name}_left"] = record.exact(after[name] - before[name], name)
        if grown > spread["high"] - spread["low"]:
            faults.append(f"{grown:g} {name} more at the end of the second half than at its beginning")
        if after[name] > before[name]:
            faults.append(f"{after[name] - before[name]:g} {name} are left over of clients that are gone")
    return Held(values, faults, samples)


def _sample(process: psutil.Process, seconds: float) -> Sample:
    return {
        "seconds": round(seconds, 1),
        "private_bytes": process.memory_full_info().uss,
        "threads": threading.active_count(),
        "descriptors": process.num_fds(),
        "tasks": len(asyncio.all_tasks()),
    }
