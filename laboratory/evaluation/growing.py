"""What saturates first when servers share one database, by discrete events, with costs that were measured.

    a server     steps every so often, and records a token for each stream; one commit is in flight, and what comes
                 meanwhile goes with the next (`session/writer.py`)
    a database   has so many cores; a commit takes one of them, then waits for the next sync of the log
    late         how long after its step a token is safe, and so may be sent
    a death      the streams of one server go to the others at random; each restores and prefills them one by one

A commit's cost is measured on the database that `--database` names, which must be on this machine; a server's cost of a
token and of a session that comes back is read from the newest record of `kakeya bench journal --database`. What is
given instead is in the record's config: trips in a network, a device's steps and its prefill.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from inference_engine.errors import ConfigError
from inference_engine.types import Durability
from laboratory.evaluation import record

COST = "journal_database_cost"
ROWS, COMMITS = (1, 128), 300  # of a commit that is measured, and how many of each
GROWN = ((1, 8, 1), (10, 8, 1), (100, 8, 1), (300, 16, 1), (600, 16, 1), (1000, 16, 1), (1000, 32, 1), (1000, 16, 4))
GROUPS = (2, 3, 10, 100)
SECONDS, SEED = 6.0, 1
MEASURED = ("commit", "row", "sync", "token", "restore")
_STEP, _COMMITTED = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """In seconds. commit, row: of a core of the database. token: of a server's processor."""

    commit: float
    row: float
    sync: float
    trip: float
    step: float
    streams: int
    token: float
    restore: float
    prefill: float  # of a token
    history: int  # tokens of a stream's session


@dataclass(frozen=True, slots=True)
class Found:
    """database: part of its cores that is busy. late: seconds, of each step's tokens in the later half of the time."""

    tokens_per_second: float
    database: float
    late: Sequence[float]


def simulated(costs: Costs, servers: int, cores: int, *, seconds: float = SECONDS, seed: int = SEED) -> Found:
    """So many servers over one database."""
    rng, order = random.Random(seed), itertools.count()
    events: list[tuple[float, int, int, int, list[float]]] = []  # when, a number, what, of which server, its steps
    waiting: list[list[float]] = [[] for _ in range(servers)]
    is_flying = [False] * servers
    free = [0.0] * cores  # when each core is
    busy, late, steps = 0.0, list[float](), 0

    def push(at: float, what: int, server: int, of: list[float]) -> None:
        heapq.heappush(events, (at, next(order), what, server, of))

    def commit(server: int, now: float) -> float:
        of, waiting[server], is_flying[server] = waiting[server], [], True
        work = costs.commit + costs.row * costs.streams * len(of)
        done = max(heapq.heappop(free), now + costs.trip / 2) + work
        heapq.heappush(free, done)
        synced = (math.floor(done / costs.sync) + 2) * costs.sync if costs.sync else done  # by a sync that begins later
        push(synced + costs.trip / 2, _COMMITTED, server, of)
        return work

    for server in range(servers):
        push(rng.random() * costs.step, _STEP, server, [])
    while events and events[0][0] <= seconds:
        now, _, what, server, of = heapq.heappop(events)
        if what == _STEP:
            steps += 1
            waiting[server].append(now)
            push(now + costs.step * rng.uniform(0.95, 1.05), _STEP, server, [])
        else:
            is_flying[server] = False
            late += [now - began for began in of if now > seconds / 2]
        if waiting[server] and not is_flying[server]:
            busy += commit(server, now)
    return Found(steps * costs.streams / seconds, busy / seconds / cores, late)


def after_a_death(costs: Costs, servers: int, *, seed: int = SEED) -> list[float]:
    """When each stream of one of the servers has its K/V again at another one, without copies of it."""
    rng = random.Random(seed)
    free = [0.0] * (servers - 1)
    there = []
    for _ in range(costs.streams):
        server = rng.randrange(servers - 1)
        free[server] += costs.restore + costs.prefill * costs.history
        there.append(free[server])
    return sorted(there)


def measured_commits(database: str) -> dict[str, float]:
    """Seconds of the database's processor for a commit and for a row, and of a sync. Raises ConfigError."""
    from inference_engine.session.postgres_database import open_database
    from inference_engine.session.postgres_tables import PostgresTail

    cpu, took = {}, {}
    for durability in (Durability.PROCESS, Durability.POWER):
        with closing(open_database(f"dbname={database}", durability, None, "growing")) as db:
            ((pid, epoch),) = db.execute("select pg_backend_pid(), register('growing', 60)")
            try:
                if not psutil.pid_exists(pid) or "postgres" not in psutil.Process(pid).name():
                    raise ConfigError(f"{database} is on another machine: its processor cannot be seen from this one")
                backend, tail, numbers = psutil.Process(pid), PostgresTail(db), itertools.count(1)
                for rows in ROWS:
                    before, waits = sum(backend.cpu_times()[:2]), []
                    for position in range(COMMITS):
                        began = time.perf_counter()
                        db.begin("growing", epoch, next(numbers))
                        for session in range(-rows, 0):
                            tail.add(session, position, bytes(24))
                        db.send_all(tail.taken())
                        db.commit()
                        waits.append(time.perf_counter() - began)
                    cpu[rows] = (sum(backend.cpu_times()[:2]) - before) / COMMITS
                    took[durability, rows] = median(waits)
            finally:
                db.execute("delete from tail where session < 0")
                db.release("growing", epoch, is_for_good=True)
    few, many = ROWS
    row = (cpu[many] - cpu[few]) / (many - few)
    sync = took[Durability.POWER, few] - took[Durability.PROCESS, few]
    return {"commit": cpu[few] - row * few, "row": row, "sync": max(0.0, sync)}


def of_servers(results: Path) -> dict[str, float]:
    """What the newest record says of a server's costs. Raises ConfigError."""
    records = sorted((results / COST).glob("*/record.json"))
    if not records:
        raise ConfigError(f"there is no record {COST}: run `kakeya bench journal --database NAME` first")
    values = record.load(records[-1])["values"]
    return {
        "token": values["server CPU, database, 32 streams, paced"]["median"] / 1e6,
        "restore": values["first call of a kept session"]["median"] / 1e3,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--database", required=True, metavar="NAME", help="of a server's journal; see `kakeya bench`")
    parser.add_argument("--trip-ms", type=float, default=0.75, help="of a commit's messages (default: %(default)g)")
    parser.add_argument("--step-ms", type=float, default=33.0, help="(default: %(default)g)")
    parser.add_argument("--streams", type=int, default=32, help="of a server (default: %(default)s)")
    parser.add_argument("--prefill", type=float, default=40_000.0, help="tokens a second (default: %(default)g)")
    parser.add_argument("--history", type=int, default=8192, help="tokens of a session (default: %(default)s)")


def main(arguments: argparse.Namespace, _target: None) -> dict[str, Any]:
    costs = Costs(
        **measured_commits(arguments.database),
        **of_servers(arguments.results or record.RESULTS),
        trip=arguments.trip_ms / 1e3,
        step=arguments.step_ms / 1e3,
        streams=arguments.streams,
        prefill=1 / arguments.prefill,
        history=arguments.history,
    )
    values = {f"measured, {name}": record.exact(1e6 * getattr(costs, name), "µs") for name in MEASURED}
    values["part of one core that a server's streams take"] = record.exact(
        costs.token * costs.streams / costs.step, "cores"
    )
    for servers, cores, shards in GROWN:
        found = simulated(costs, math.ceil(servers / shards), cores)
        where = f"{servers:,} servers, {shards} of {cores} cores"
        values[f"tokens, {where}"] = record.exact(found.tokens_per_second * shards, "tokens/s")
        values[f"database busy, {where}"] = record.exact(found.database, "share")
        for share in (50, 99):
            values[f"a token is late by, p{share}, {where}"] = record.exact(
                1e3 * float(np.percentile(found.late, share)), "ms"
            )
    for servers in GROUPS:
        there = after_a_death(costs, servers)
        for name, at in (("half", there[len(there) // 2]), ("all", there[-1])):
            values[f"one dies, {name} of its streams have K/V again, of {servers} servers"] = record.exact(at, "s")
    return {
        "config": {"costs": asdict(costs), "seconds": SECONDS},
        "seeds": [SEED],
        "values": values,
        "baseline": "one server over the same database",
    }
