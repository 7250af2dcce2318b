"""Many streams at once, and more load than there is room for: what the machinery around a model does with them.

A server on the scripted model, whose steps take as long as a model's would, in a process of its own; clients in this
one. First `--streams` Generates at the same time, each as fast as the steps are, in rounds with two baselines: one
stream alone, and as many bare streams of grpc.aio, a frame for each in every step. Then agents, open loop, at 0.8, 1,
2, 5 and 10 times a load that the steps could just carry if nothing but the model took time. They are of `--owners`
owners, each with a key: the first has half of the agents, and the others share the rest. No owner is starved if each
receives its fair part of the tokens: what it asked for, or as much as any other (`least_received_over_fair_part`).

Goodput is the tokens that came in a second of a phase, of turns that were finished then or later; capacity is a token
of each Generate that may run in every step, at the measured median of steps. A first token counts from the call
(`first_token_asked`), and from when its turn was due (`first_token`), though its session may have been at the turn
before until then (`behind`). The first quarter of a phase is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from inference_engine.config import EngineConfig, ServerConfig
from inference_engine.server.auth import Key
from kakeya import AsyncClient
from laboratory.bench.experiments import Save
from laboratory.evaluation import record
from laboratory.load import report
from laboratory.load.bare_streams import bare_arrivals, bare_child
from laboratory.load.driver import NO_RETRIES
from laboratory.load.phases import Plan, Played, play
from laboratory.load.samples import percentile
from laboratory.load.schedule import Shape
from laboratory.load.scripted_server import VOCABULARY, scripted_child

STREAM_STEP_SECONDS = 1 / 100  # what is left until the next token of 30 a second is for the machinery
WANTED_PER_SECOND = 30  # tokens of each stream
ROUNDS = 3
STEP_SECONDS = 1 / 30  # under overload
SHAPE = Shape(turns=20, prompt_tokens=60, append_tokens=30, generate_tokens=24, interval_seconds=2.0)
BATCH = 16  # under overload
MAX_FIRST_TOKEN_SECONDS = 2.0  # for other owners
MEAN_OVER_MEDIAN = 1.2  # of the tokens that are drawn
LIMIT_TOKENS = 4096


@dataclass
class Streams:
    """What was seen of streams side by side, over all rounds."""

    gaps: list[float] = field(default_factory=list)  # seconds
    rates: list[float] = field(default_factory=list)  # tokens a second, of each stream
    server_cpu: list[float] = field(default_factory=list)  # seconds for a token, of each round
    client_cpu: list[float] = field(default_factory=list)

    def saw(self, arrivals: Sequence[Sequence[float]]) -> None:
        """When the tokens of each stream of a round came. The first second is for all of them to begin."""
        began = min(times[0] for times in arrivals) + 1.0
        for times in arrivals:
            gaps = [after - before for before, after in pairwise(times) if before > began]
            self.gaps += gaps
            self.rates.append(len(gaps) / sum(gaps))

    @contextmanager
    def timed(self, server: int, tokens: int) -> Iterator[None]:
        """Processor time of the process `server` and of this one, for `tokens`."""
        watched = psutil.Process(server)
        before, ours = watched.cpu_times(), time.process_time()
        yield
        after = watched.cpu_times()
        self.client_cpu.append((time.process_time() - ours) / tokens)
        self.server_cpu.append((after.user + after.system - before.user - before.system) / tokens)

    def values(self, name: str) -> dict[str, dict[str, Any]]:
        return {
            **{f"gap_p{at}_{name}": record.exact(1e3 * percentile(self.gaps, at), "ms") for at in (50, 99)},
            f"rate_{name}": record.summarize(self.rates, "tokens/s"),
            f"rate_slowest_{name}": record.exact(min(self.rates), "tokens/s"),
            f"server_cpu_{name}": record.summarize([1e6 * each for each in self.server_cpu], "µs/token"),
            f"client_cpu_{name}": record.summarize([1e6 * each for each in self.client_cpu], "µs/token"),
        }


async def arrivals(target: str, streams: int, tokens: int, timed: AbstractContextManager[None]) -> list[list[float]]:
    """When each token of `streams` Generates came, `timed` around all; their histories are of different lengths."""
    async with AsyncClient(target, retry=NO_RETRIES, generate_timeout=None) as client:
        sessions = [await client.create_session(limit_tokens=LIMIT_TOKENS, eos_token_ids=()) for _ in range(streams)]
        for number, session in enumerate(sessions):
            await session.append([(number + index) % VOCABULARY for index in range(4 + number % 64)])

        async def read(number: int) -> list[float]:
            return [time.perf_counter() async for _ in sessions[number].generate(tokens)]

        with timed:
            found = await asyncio.gather(*(read(number) for number in range(streams)))
        for session in sessions:
            await session.close()
        return list(found)


def side_by_side(count: int, seconds: float, server: ServerConfig) -> dict[str, dict[str, Any]]:
    """Values of `count` streams, of one alone and of bare ones: rounds of each in turn, `seconds` in all."""
    names = ("1_stream", f"{count}_streams", f"{count}_bare_streams")
    alone, together, bare = every = (Streams(), Streams(), Streams())
    tokens = round((seconds / ROUNDS + 1) * WANTED_PER_SECOND)
    # All begin at once, and none is to be refused.
    wide = EngineConfig(
        max_batch=count, max_sessions=2 * count, kv_bytes=2**30, max_first_token_seconds=0.0, share_prefixes="off"
    )
    with (
        scripted_child(wide, server, step_seconds=STREAM_STEP_SECONDS) as child,
        bare_child(step_seconds=1 / WANTED_PER_SECOND) as bare_server,
    ):
        target = child.wait_ready()
        for _ in range(ROUNDS):
            for streams, seen in ((1, alone), (count, together)):
                timed = seen.timed(child.pid, streams * tokens)
                seen.saw(asyncio.run(arrivals(target, streams, tokens, timed)))
            with bare.timed(bare_server.pid, count * tokens):
                found = asyncio.run(bare_arrivals(bare_server.target, count, tokens))
            bare.saw(found)
    return {key: value for name, seen in zip(names, every, strict=True) for key, value in seen.values(name).items()}


async def overload(
    target: str, keys: Sequence[str], loads: Sequence[float], seconds: float, seed: int
) -> Sequence[Played]:
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
    async with AsyncExitStack() as stack:
        clients = [AsyncClient(target, api_key=key, retry=NO_RETRIES, generate_timeout=120.0) for key in keys]
        for client in clients:
            await stack.enter_async_context(client)
        return (await play(plan, *clients))[1]


def over_capacity(played: Sequence[Played]) -> dict[str, dict[str, Any]]:
    found = {}
    for phase in played:
        goodput = sum(phase.samples.goodput(phase.seconds)) / int(phase.seconds)
        capacity = BATCH / percentile(phase.samples.gap, 50)
        found[f"goodput_over_capacity_{phase.load:g}x"] = record.exact(goodput / capacity, "ratio")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=128, metavar="N")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="of each part (default: %(default)g)")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8, 1.0, 2.0, 5.0, 10.0], metavar="X")
    parser.add_argument("--owners", type=int, default=5, metavar="N", help="of the agents (default: %(default)d)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    # One client stands for all agents of an owner, on one connection.
    server = ServerConfig(bind="127.0.0.1:0", drain_seconds=5.0, max_connection_calls=1024)
    load_before = os.getloadavg()[0]
    values = side_by_side(arguments.streams, arguments.seconds, server)
    narrow = EngineConfig(
        max_batch=BATCH,
        max_running=BATCH,
        max_queued=2 * BATCH,
        max_first_token_seconds=MAX_FIRST_TOKEN_SECONDS,
        max_sessions=2048,
        share_prefixes="off",
        kv_bytes=2**31,
    )
    keys = [secrets.token_urlsafe(24) for _ in range(arguments.owners)]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "keys"
        file.write_text("".join(f"{Key.of(key, f'owner-{number}').line}\n" for number, key in enumerate(keys)))
        guarded = replace(server, api_key_file=str(file))
        with scripted_child(narrow, guarded, step_seconds=STEP_SECONDS) as child:
            played = asyncio.run(overload(child.wait_ready(), keys, arguments.loads, arguments.seconds, arguments.seed))
    values |= report.values(played)
    values |= over_capacity(played)
    return {
        "experiment": "server_load",
        "config": {
            "model": "scripted",
            "streams": arguments.streams,
            "step_seconds_of_streams": STREAM_STEP_SECONDS,
            "steps_per_second_of_bare_streams": WANTED_PER_SECOND,
            "rounds_of_streams": ROUNDS,
            "step_seconds_under_overload": STEP_SECONDS,
            "vocabulary": VOCABULARY,
            "runnable_processes_before": load_before,  # of others: the machine's load average over a minute
            "seconds": arguments.seconds,
            "batch_under_overload": BATCH,
            "max_first_token_seconds": narrow.max_first_token_seconds,
            "turns": SHAPE.turns,
            "prompt_tokens": SHAPE.prompt_tokens,
            "append_tokens": SHAPE.append_tokens,
            "generate_tokens": SHAPE.generate_tokens,
            "owners_under_overload": arguments.owners,
            "transport": "loopback, no TLS; all streams of one client on one channel; keys under overload alone",
        },
        "seeds": [arguments.seed],
        "values": values,
        "baseline": "one stream alone, as many bare streams of grpc.aio, and the load of 1, in the same run",
        "tables": report.tables(played),
        "wrong": "turns failed" if any(phase.samples.failed for phase in played) else "",
    }
