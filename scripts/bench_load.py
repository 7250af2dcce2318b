"""Many streams at once, and more load than there is room for: what the machinery around a model does with them.

    python scripts/bench_load.py            writes results/server_load/<date>-<machine>/

A server on the scripted model, whose steps take as long as a model's would, in a process of its own; clients in this
one. First `--streams` Generates at the same time, each as fast as the steps are; one alone is the baseline. Then
agents, open loop, at 1, 2, 5 and 10 times a load that the steps can just carry.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference_engine.cli.load import report
from inference_engine.cli.load.driver import NO_RETRIES
from inference_engine.cli.load.phases import Plan, Played, play
from inference_engine.cli.load.samples import percentile
from inference_engine.cli.load.schedule import Shape
from inference_engine.cli.scripted_server import VOCABULARY, scripted_child
from inference_engine.config import EngineConfig, ServerConfig
from inference_engine.evaluation import record
from kakeya import AsyncClient

STEP_SECONDS = 1 / 30
SHAPE = Shape(turns=20, prompt_tokens=60, append_tokens=30, generate_tokens=24, interval_seconds=2.0)
BATCH = 16  # under overload
MEAN_OVER_MEDIAN = 1.2  # of the tokens that are drawn
LIMIT_TOKENS = 4096


async def streams(target: str, count: int, seconds: float) -> list[list[float]]:
    """`count` Generates at once; the gaps between their tokens, by stream, the first second left out."""
    async with AsyncClient(target, retry=NO_RETRIES, generate_timeout=None) as client:
        sessions = [await client.create_session(limit_tokens=LIMIT_TOKENS) for _ in range(count)]
        for number, session in enumerate(sessions):
            await session.append([number % VOCABULARY, 1, 2, 3])
        began = time.perf_counter()

        async def gaps(number: int) -> list[float]:
            found, last = [], None
            async for _ in sessions[number].generate(round((seconds + 1) / STEP_SECONDS)):
                now = time.perf_counter()
                if last is not None and last - began > 1.0:
                    found.append(now - last)
                last = now
            return found

        seen = await asyncio.gather(*(gaps(number) for number in range(count)))
        for session in sessions:
            await session.close()
        return list(seen)


async def overload(target: str, loads: Sequence[float], seconds: float, seed: int) -> Sequence[Played]:
    turns_per_second = BATCH / STEP_SECONDS / (SHAPE.generate_tokens * MEAN_OVER_MEDIAN)
    plan = Plan(
        shape=SHAPE,
        agents=round(turns_per_second * SHAPE.interval_seconds),
        loads=tuple(loads),
        seconds=seconds,
        warm_seconds=seconds / 4,
        seed=seed,
        limit_tokens=LIMIT_TOKENS,
    )
    async with AsyncClient(target, retry=NO_RETRIES, generate_timeout=120.0) as client:
        return (await play(plan, client))[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128, metavar="N")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="of each part (default: 30)")
    parser.add_argument("--loads", type=float, nargs="+", default=[1.0, 2.0, 5.0, 10.0], metavar="X")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    server = ServerConfig(bind="127.0.0.1:0", drain_seconds=5.0)
    wide = EngineConfig(max_batch=args.streams, max_sessions=2 * args.streams, kv_bytes=2**30)
    with scripted_child(wide, server, step_seconds=STEP_SECONDS) as child:
        target = child.wait_ready()
        alone = asyncio.run(streams(target, 1, args.seconds))
        together = asyncio.run(streams(target, args.streams, args.seconds))
    narrow = EngineConfig(max_batch=BATCH, max_running=BATCH, max_queued=2 * BATCH, max_sessions=2048, kv_bytes=2**31)
    with scripted_child(narrow, server, step_seconds=STEP_SECONDS) as child:
        played = asyncio.run(overload(child.wait_ready(), args.loads, args.seconds, args.seed))
    values: dict[str, dict[str, Any]] = {}
    for name, found in (("1_stream", alone), (f"{args.streams}_streams", together)):
        every = [gap for each in found for gap in each]
        rates = [len(each) / sum(each) for each in found]
        values |= {f"gap_p{at}_{name}": record.exact(1e3 * percentile(every, at), "ms") for at in (50, 99)}
        values[f"rate_{name}"] = record.summarize(rates, "tokens/s")
    values |= report.values(played)
    for name, value in values.items():
        print(f"{name:36} {value['median']:>12,.2f} {value['unit']}")
    payload = {
        "command": record.command_line(without=("--results",)),
        "config": {
            "model": "scripted",
            "step_seconds": STEP_SECONDS,
            "streams": args.streams,
            "seconds": args.seconds,
            "batch_under_overload": BATCH,
            "turns": SHAPE.turns,
            "prompt_tokens": SHAPE.prompt_tokens,
            "append_tokens": SHAPE.append_tokens,
            "generate_tokens": SHAPE.generate_tokens,
            "transport": "loopback, no TLS, no keys; all streams of one client on one channel",
        },
        "seeds": [args.seed],
        "values": values,
        "baseline": "one stream alone, and the load of 1, in the same run",
        "tables": report.tables(played),
    }
    path = record.write_record("server_load", payload, results_dir=args.results)
    report.draw(path.parent, played, "scripted")
    print(path.parent.name, path.name)
    return 1 if any(phase.samples.failed for phase in played) else 0


if __name__ == "__main__":
    sys.exit(main())
