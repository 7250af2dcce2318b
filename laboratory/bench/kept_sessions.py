"""More sessions than a server has room for, each kept in turn: what is prefilled when it goes on.

A server has room for the K/V of `--room` sessions. `--sessions` of them talk one after another, so that each has to
make room for later ones, and its K/V goes into a file before. Then each goes on, again in that order: the one whose
turn it is has been out of memory for longest. A client that knows nothing but the id appends some ids and generates;
the server says how many tokens had K/V then (`cached_token_count`), and how many it computed. With `--restart` the
server is stopped and started between. Exits with 1 if more than a delta was computed for any session.

Most of the time is the prefill of each session's first turn. With `--own N` there is one such prefill: sessions are
forks of one, each with a copy of its K/V (`share_forks` false) and with the last N of its tokens its own.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from inference_engine.cli.child import child_server
from inference_engine.compose import open_parts
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.session.sqlite_journal import COPIES
from kakeya import Client, GenerateResult, Session
from laboratory.bench.experiments import Save
from laboratory.bench.shared import add_model, model_config
from laboratory.evaluation import record

GENERATED, APPENDED = 8, 16
COPIED_SECONDS = 600.0  # for copies of K/V to be written, however slow the disk is


def ids(count: int, *, seed: int) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(20, 120, count)]


def session_bytes(model: ModelConfig, engine: EngineConfig, limit: int) -> int:
    """What a session of so many tokens reserves."""
    with open_parts(model).engine(engine) as made:
        return made.create_session(limit_tokens=limit).bound.sustained_bytes


def talk(client: Client, session_id: str, appended: list[int]) -> tuple[float, GenerateResult]:
    """Seconds from the append to the first token, and what the server says of the Generate."""
    began = time.perf_counter()
    session = client.session(session_id)
    session.append(appended)
    stream = session.generate(GENERATED)
    arrivals = [time.perf_counter() for _ in stream]
    return arrivals[0] - began, stream.result()


class Bench:
    """own: tokens of each session that are its own; 0: all. copies: the folder with copies of K/V."""

    def __init__(self, sessions: int, room: int, tokens: int, own: int, pause_seconds: float, copies: Path) -> None:
        self.prefills: list[float] = []
        self.wakes: list[float] = []
        self.computed: list[int] = []
        self.cached: list[int] = []
        self.ids: list[str] = []
        self._sessions, self._room, self._tokens, self._own = sessions, room, tokens, own
        self._pause_seconds, self._copies = pause_seconds, copies

    def begin(self, client: Client, limit: int) -> None:
        first = self._begin_first(client, limit) if self._own else None
        for number in range(self._sessions):
            session = client.create_session(limit_tokens=limit, eos_token_ids=()) if first is None else first.fork()
            self.ids.append(session.id)
            seconds, done = talk(client, session.id, ids(self._own or self._tokens, seed=number))
            assert done.cached_tokens == (self._tokens - self._own - 1 if first else 0)
            self.prefills.append(seconds)
            self._report("begun", number)
            time.sleep(self._pause_seconds)
            # One that has none when it is evicted would be computed again; what is forked takes a place, too.
            self._wait_for_copies(number + 1 - max(0, self._room // 2 - 1 - bool(self._own)))
        if first is not None:
            first.close()
        self._wait_for_copies(self._sessions)

    def _begin_first(self, client: Client, limit: int) -> Session:
        first = client.create_session(limit_tokens=limit, eos_token_ids=())
        first.append(ids(self._tokens - self._own - 1, seed=self._sessions))
        first.generate(1).result()
        return first

    def _wait_for_copies(self, count: int) -> None:
        until = time.monotonic() + COPIED_SECONDS
        while len(list(self._copies.glob("*.kv"))) < count:
            assert time.monotonic() < until, f"there are fewer than {count} copies of K/V after {COPIED_SECONDS:.0f} s"
            time.sleep(0.02)

    def go_on(self, client: Client) -> None:
        for number, session_id in enumerate(self.ids):
            seconds, done = talk(client, session_id, ids(APPENDED, seed=-1 - number % 7 + 10**6))
            self.wakes.append(seconds)
            self.computed.append(done.prefilled_tokens)
            self.cached.append(done.cached_tokens)
            self._report("gone on", number)

    def _report(self, what: str, number: int) -> None:
        if number % 20 == 19:
            print(f"{number + 1} sessions have {what}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "model", "threads")
    parser.add_argument("--strategy", default="full", metavar="SPEC")
    parser.add_argument("--sessions", type=int, default=200, metavar="N")
    parser.add_argument("--room", type=int, default=20, metavar="N", help="for the K/V of so many of them")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="of each session")
    parser.add_argument("--own", type=int, default=0, metavar="N", help="of them that no other has (default: all)")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="between sessions, for fast models")
    parser.add_argument("--restart", action="store_true", help="stop and start the server before sessions go on")
    parser.add_argument("--folder", type=Path, help="for the state folder (default: the system's for temporary files)")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    began, model = time.monotonic(), model_config(arguments)
    limit = arguments.tokens + 2 * GENERATED + APPENDED
    with TemporaryDirectory(dir=arguments.folder) as folder:
        state = Path(folder) / "state"
        bench = Bench(
            arguments.sessions, arguments.room, arguments.tokens, arguments.own, arguments.pause, state / COPIES
        )
        settings: dict[str, Any] = {"strategy": arguments.strategy, "share_forks": False, "share_prefixes": "off"}
        settings |= {"history_tokens_per_owner": 0, "session_evictable_seconds": 0.0}
        each = session_bytes(model, EngineConfig(**settings), limit)
        settings |= {"state_dir": str(state), "durability": "process"}
        settings |= {"hibernate": "always", "hibernate_after_seconds": 0.0}
        engine = EngineConfig(**settings, kv_bytes=arguments.room * each + each // 2)
        with child_server(model, engine) as child, Client(child.wait_ready()) as client:
            capacity = client.server_info().kv_capacity_bytes
            assert capacity < (arguments.room + 1) * each, (
                f"{capacity} bytes have room for more than {arguments.room} sessions"
            )
            bench.begin(client, limit)
            if not arguments.restart:
                bench.go_on(client)
        if arguments.restart:
            with child_server(model, engine) as child, Client(child.wait_ready()) as client:
                bench.go_on(client)
        nbytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    delta = APPENDED + 1  # the last generated token has no K/V yet
    others = {number: one for number, one in enumerate(bench.computed) if one != delta}
    if others:
        print(f"more than the delta was computed for {others}")
    only_delta = sum(one == delta for one in bench.computed)
    what = f"a prefill of {arguments.own or arguments.tokens} tokens"
    ratios = [wake / prefill for wake, prefill in zip(bench.wakes, bench.prefills, strict=True)]
    values = {
        "sessions that go on": record.exact(len(bench.wakes), "sessions"),
        "sessions for which only the delta was computed": record.exact(only_delta, "sessions"),
        "tokens computed for one": record.summarize([float(one) for one in bench.computed], "tokens"),
        "tokens that had K/V": record.summarize([float(one) for one in bench.cached], "tokens"),
        "first token of a session that goes on": record.summarize(bench.wakes, "seconds"),
        f"first token of its first turn, {what}": record.summarize(bench.prefills, "seconds"),
        "first token, going on ÷ first turn": record.summarize(ratios, "ratio"),
        "memory for K/V": record.exact(capacity, "bytes"),
        "sessions that it has room for": record.exact(capacity // each, "sessions"),
        "state folder": record.exact(nbytes, "bytes"),
        "seconds": record.exact(round(time.monotonic() - began), "s"),
    }
    return {
        "experiment": f"kept_sessions_{Path(model.model).name}",
        "config": {
            "model": Path(model.model).name,
            "strategy": arguments.strategy,
            "tokens": arguments.tokens,
            "own_tokens": arguments.own or arguments.tokens,
            "appended_tokens": APPENDED,
            "is_restarted": arguments.restart,
            "pause_seconds": arguments.pause,
            "device": model.device,
            "dtype": model.dtype,
            "threads": model.threads,
        },
        "seeds": [0, arguments.sessions - 1],
        "values": values,
        "baseline": f"the same session's first turn, {what}",
        "wrong": "more than a delta was computed" if others else "",
    }
