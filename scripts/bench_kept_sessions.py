"""More sessions than a server has room for, each kept in turn: what is prefilled when it goes on.

    make bench-kept-sessions          writes results/kept_sessions_<model>/<date>-<machine>/

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
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from inference_engine.cli.child import child_server
from inference_engine.compose import open_parts
from inference_engine.config import EngineConfig, ModelConfig, resolve
from inference_engine.session.sqlite_journal import COPIES
from kakeya import Client, GenerateResult, Session
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="More sessions than memory, kept in turn.")
    parser.add_argument("--model", default=None)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--strategy", default="full")
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--room", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--own", type=int, default=0, help="tokens of each that no other has (default: all)")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between sessions, for fast models")
    parser.add_argument("--restart", action="store_true", help="stop and start the server before sessions go on")
    parser.add_argument("--folder", type=Path, help="for the state folder (default: the system's for temporary files)")
    parser.add_argument("--commit", help="that runs, where there is no repository")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    args = parser.parse_args(arguments)
    commit, began = record.running_commit(args.commit), time.monotonic()
    model = resolve(ModelConfig, {"model": args.model, "threads": args.threads})
    limit = args.tokens + 2 * GENERATED + APPENDED
    with TemporaryDirectory(dir=args.folder) as folder:
        state = Path(folder) / "state"
        bench = Bench(args.sessions, args.room, args.tokens, args.own, args.pause, state / COPIES)
        settings: dict[str, Any] = {"strategy": args.strategy, "share_forks": False}
        settings |= {"history_tokens_per_owner": 0, "session_evictable_seconds": 0.0}
        each = session_bytes(model, EngineConfig(**settings), limit)
        settings |= {"state_dir": str(state), "durability": "process"}
        settings |= {"hibernate": "always", "hibernate_after_seconds": 0.0}
        engine = EngineConfig(**settings, kv_bytes=args.room * each + each // 2)
        with child_server(model, engine) as child, Client(child.wait_ready()) as client:
            capacity = client.server_info().kv_capacity_bytes
            assert capacity < (args.room + 1) * each, f"{capacity} bytes have room for more than {args.room} sessions"
            bench.begin(client, limit)
            if not args.restart:
                bench.go_on(client)
        if args.restart:
            with child_server(model, engine) as child, Client(child.wait_ready()) as client:
                bench.go_on(client)
        nbytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    delta = APPENDED + 1  # the last generated token has no K/V yet
    others = {number: one for number, one in enumerate(bench.computed) if one != delta}
    print(f"more than the delta was computed for {others}" if others else "only deltas were computed")
    only_delta = sum(one == delta for one in bench.computed)
    what = f"a prefill of {args.own or args.tokens} tokens"
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
    for name, value in values.items():
        print(f"{name}: {value['median']:,.3f} ({value['low']:,.3f} to {value['high']:,.3f}) {value['unit']}")
    path = record.write_record(
        f"kept_sessions_{Path(model.model).name}",
        {
            "commit": commit,
            "command": record.command_line(without=("--results", "--commit", "--folder", "--model")),
            "config": {
                "model": Path(model.model).name,
                "strategy": args.strategy,
                "tokens": args.tokens,
                "own_tokens": args.own or args.tokens,
                "appended_tokens": APPENDED,
                "is_restarted": args.restart,
                "pause_seconds": args.pause,
                "device": model.device,
                "dtype": model.dtype,
                "threads": args.threads,
            },
            "seeds": [0, args.sessions - 1],
            "values": values,
            "baseline": f"the same session's first turn, {what}",
        },
        results_dir=args.results,
    )
    print(path.parent.name, path.name)
    return 0 if only_delta == args.sessions else 1


if __name__ == "__main__":
    sys.exit(main())
