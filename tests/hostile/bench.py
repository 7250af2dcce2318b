"""What an owner notices of attacks by others, and what those take of the server's memory.

A server on the scripted model with keys, its victim and the attacker are processes of their own on one machine. The
victim asks GetSessionInfo, one call after another. In each round, for each attack of `tests/hostile/attacks.py`, it
does so for a while in calm and for as long beside the attack, once that has gone on for a second; ratios are taken
within a pair, and the longest call is that of the first second, too. Each attacker has a loopback address of its own,
never seen before. Attacks that repeat themselves on new connections come from the victim's address as well. The
attacker takes processor time that the victim would have: what that alone costs is shown by one that only spins. How far
two measurements in calm differ is shown as well: on a machine with other work, that is the least that a ratio means.

The attacks on the HTTP port are those of `tests/hostile/http_attacks.py`. There the server has both ports, and each
pair is taken twice: the victim asks GetSessionInfo over gRPC, and GET /v1/models over HTTP.

Beside constraints that take work, a second victim reads a stream of its own: a call of it is the next token.

On the gRPC port, first in a round comes a burst: on as many connections as one address may have, as many calls as a
connection may have, all at once, of a peer without a key. It shows what is held of a connection and of a call, and what
the victim notices until the last of them is refused.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil

from inference_engine.config import EngineConfig, ServerConfig
from inference_engine.server.auth import Key
from kakeya.v1 import runtime_pb2 as pb
from kakeya.v1 import runtime_pb2_grpc
from laboratory.bench.experiments import Save
from laboratory.evaluation import record
from laboratory.load.scripted_server import scripted_child
from tests.hostile import attacks, http_attacks
from tests.hostile.attacks import ATTACKS, INFO
from tests.hostile.http2 import END_HEADERS, HEADERS, Connection, call_headers, frame
from tests.tiny_folder import tiny_tokenizer

KEY = "victim-" + "v" * 32
NOTHING, SPIN = "none: calm", "none: a process that only spins"
BURST = "a burst of calls that are headers alone"
# As many as one address may have, and on each as many calls as a connection may.
FIRST_CONNECTIONS, CONNECTIONS, CALLS_OF_CONNECTION = 20, 100, 256
BURST_SECONDS = 4.0
ONSET_SECONDS = 1.0
VICTIMS_ADDRESS = "127.0.0.1"
BESIDE = ", from the victim's address"
WAYS = ("gRPC", "HTTP")  # of the victim's calls, where the HTTP port is attacked
STREAM, DEAR = "stream", "constraints that are dear"
BETWEEN_TOKENS = "; between tokens of a stream"
# Of these an address that is barred takes no more part; the others harm no more from one address than from another.
REPEATED = (
    "calls that are headers alone",
    "calls with a wrong key",
    "2,000 headers a call",
    "2,000 indexed headers a call",
    "HPACK bomb",
    "rapid reset",
    "idle connections",
)
CALL = call_headers(INFO)


def victim(target: str) -> None:
    metadata = (("authorization", f"Bearer {KEY}"),)
    with grpc.insecure_channel(target) as channel:
        stub = runtime_pb2_grpc.RuntimeServiceStub(channel)
        session_id = stub.CreateSession(pb.CreateSessionRequest(limit_tokens=100), metadata=metadata).session_id
        request = pb.GetSessionInfoRequest(session_id=session_id)
        asking(lambda: stub.GetSessionInfo(request, metadata=metadata, timeout=30.0), grpc.RpcError)


def stream_victim(target: str) -> None:
    metadata = (("authorization", f"Bearer {KEY}"),)
    with grpc.insecure_channel(target) as channel:
        stub = runtime_pb2_grpc.RuntimeServiceStub(channel)
        strategy = pb.Strategy(sink_window=pb.SinkWindowStrategy(sink=4, window=32))
        session = stub.CreateSession(pb.CreateSessionRequest(strategy=strategy), metadata=metadata).session_id
        stub.AppendTokens(pb.AppendTokensRequest(session_id=session, token_ids=[1, 2, 3]), metadata=metadata)
        request = pb.GenerateRequest(session_id=session, max_tokens=32_768)
        streams: list[Any] = []

        def begin() -> None:
            for each in streams:  # of tokens that were not read meanwhile
                each.cancel()
            streams[:] = [stub.Generate(request, metadata=metadata, timeout=60.0)]
            call()

        def call() -> None:
            while next(streams[0]).WhichOneof("payload") != "token_id":
                pass

        asking(call, grpc.RpcError, before=begin)


def http_victim(target: str) -> None:
    connection = http.client.HTTPConnection(target, timeout=30.0)

    def call() -> None:
        try:
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {KEY}"})
            answer = connection.getresponse()
            answer.read()
        except OSError:
            connection.close()  # the next call makes another
            raise
        if answer.status != http.client.OK:
            raise ConnectionError(answer.status)

    def again() -> None:
        connection.close()  # the server closes one that was silent for seconds
        call()

    call()
    asking(call, OSError, before=again)


def asking(call: Callable[[], Any], failure: type[Exception], *, before: Callable[[], Any] = lambda: None) -> None:
    """For each line, a number of seconds: calls for as long; prints their number, failures and latencies."""
    print("ready", flush=True)
    for line in sys.stdin:
        before()
        latencies, failed, ends = [], 0, time.perf_counter() + float(line)
        while (began := time.perf_counter()) < ends:
            try:
                call()
            except failure:
                failed += 1
            latencies.append(time.perf_counter() - began)
        latencies.sort()
        p50, p99 = (latencies[int(len(latencies) * part)] for part in (0.5, 0.99))
        seen = {"calls": len(latencies), "failed": failed, "p50": p50, "p99": p99, "longest": latencies[-1]}
        print(json.dumps(seen), flush=True)


@contextlib.contextmanager
def child(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        (sys.executable, "-m", "tests.hostile.bench", *arguments),
        cwd=record.ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def addresses() -> Iterator[str]:
    """Loopback addresses that have attacked nothing yet."""
    return (f"127.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}" for number in itertools.count(0x010101))


@contextlib.contextmanager
def attacking(name: str, target: str, seconds: float, source: str) -> Iterator[None]:
    """An attack that has begun, and is ended."""
    others = {
        NOTHING: ("-c", f"import time\nprint(flush=True)\ntime.sleep({seconds})"),
        SPIN: ("-c", f"import time\nprint(flush=True)\nends = time.time() + {seconds}\nwhile time.time() < ends: pass"),
    }
    known = name.removesuffix(BESIDE)
    module = http_attacks if known in http_attacks.ATTACKS else attacks
    attack = ("-m", module.__name__, target, known, str(seconds), source)
    process = subprocess.Popen(
        (sys.executable, *others.get(name, attack)), cwd=record.ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


class Watched:
    """The server's memory, and the victim's answers. target: of the attacks."""

    def __init__(self, target: str, pid: int, asking: subprocess.Popen[str]) -> None:
        self.target = target
        self._process = psutil.Process(pid)
        self._asking = asking

    @property
    def resident_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def ask(self, seconds: float) -> Any:
        self.begin_to_ask(seconds)
        return self.asked()

    def begin_to_ask(self, seconds: float) -> None:
        assert self._asking.stdin is not None
        self._asking.stdin.write(f"{seconds}\n")
        self._asking.stdin.flush()

    def asked(self) -> Any:
        """What the victim saw, once it is done."""
        assert self._asking.stdout is not None
        return json.loads(self._asking.stdout.readline())


def pair(watched: Watched, name: str, seconds: float, source: str) -> dict[str, float]:
    """One measurement in calm and one beside the attack."""
    calm = watched.ask(seconds)
    before = watched.resident_bytes
    with attacking(name, watched.target, ONSET_SECONDS + seconds + 1.0, source):
        first = watched.ask(ONSET_SECONDS)
        attacked = watched.ask(seconds)
        after = watched.resident_bytes
    attacked["failed"] += first["failed"]
    attacked["longest"] = max(attacked["longest"], first["longest"])
    return compared(calm, attacked, after - before)


def compared(calm: Any, attacked: Any, more_bytes: int) -> dict[str, float]:
    return {
        "p50_ratio": attacked["p50"] / calm["p50"],
        "p99_ratio": attacked["p99"] / calm["p99"],
        "p99_calm_ms": 1e3 * calm["p99"],
        "p99_ms": 1e3 * attacked["p99"],
        "longest_ms": 1e3 * attacked["longest"],
        "calls_ratio": attacked["calls"] / calm["calls"],
        "failed": attacked["failed"] + calm["failed"],
        "mib": more_bytes / 2**20,
    }


def burst(watched: Watched, source: str) -> tuple[dict[str, float], dict[str, float]]:
    """What the victim notices of it, and what is held of a peer without a key: of a connection, and of a call."""
    calm = watched.ask(BURST_SECONDS)
    Connection.source = source
    with contextlib.ExitStack() as stack:

        def connect(count: int) -> list[Connection]:
            return [stack.enter_context(Connection(watched.target)) for _ in range(count)]

        connect(FIRST_CONNECTIONS)
        time.sleep(1.0)
        before = watched.resident_bytes
        connections = connect(CONNECTIONS)
        time.sleep(1.0)
        held = watched.resident_bytes
        most, ends = held, time.monotonic() + BURST_SECONDS
        begin = b"".join(frame(HEADERS, END_HEADERS, stream, CALL) for stream in range(1, 2 * CALLS_OF_CONNECTION, 2))
        watched.begin_to_ask(BURST_SECONDS)
        for each in connections:
            each.try_send(begin)
            most = max(most, watched.resident_bytes)
        while time.monotonic() < ends:
            most = max(most, watched.resident_bytes)
            time.sleep(0.02)
        attacked = watched.asked()
    time.sleep(BURST_SECONDS)  # what was still under way is over
    held_of = {"connection": (held - before) / CONNECTIONS, "call": (most - held) / (CONNECTIONS * CALLS_OF_CONNECTION)}
    return compared(calm, attacked, most - held), held_of


def measure(
    rounds: int, seconds: float, chosen: Sequence[str]
) -> tuple[dict[str, list[dict[str, float]]], list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {BURST: []}
    names = (NOTHING, SPIN, *chosen, *(f"{name}{BESIDE}" for name in REPEATED if name in chosen))
    paired: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    streamed: dict[str, list[dict[str, float]]] = {name: [] for name in (NOTHING, SPIN, DEAR) if DEAR in chosen}
    attackers = addresses()
    each: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        lines = (Key.of(KEY, "victim").line, Key.of(attacks.KEY, "attacker").line)
        keys.write_text("\n".join((*lines, "")), encoding="utf-8")
        server = ServerConfig(bind="127.0.0.1:0", api_key_file=str(keys))
        for number in range(rounds):
            # A server for each round: what one attack leaves is not held against those of the next round.
            with scripted_child(EngineConfig(kv_bytes=2**26), server, step_seconds=0.001) as process:
                target = process.wait_ready()
                with child(WAYS[0], target) as asking:
                    assert asking.stdout is not None and asking.stdout.readline() == "ready\n"
                    watched = Watched(target, process.pid, asking)
                    watched.ask(1.0)
                    noticed, held = burst(watched, next(attackers))
                    found[BURST].append(noticed)
                    each.append(held)
                    for name, pairs in paired.items():
                        source = VICTIMS_ADDRESS if name.endswith(BESIDE) else next(attackers)
                        pairs.append(pair(watched, name, seconds, source))
                with child(STREAM, target) as asking:
                    assert asking.stdout is not None and asking.stdout.readline() == "ready\n"
                    watched = Watched(target, process.pid, asking)
                    for name, pairs in streamed.items():
                        pairs.append(pair(watched, name, seconds, next(attackers)))
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return found | paired | {f"{name}{BETWEEN_TOKENS}": pairs for name, pairs in streamed.items()}, each


def measure_http(rounds: int, seconds: float) -> dict[str, list[dict[str, float]]]:
    names = (NOTHING, SPIN, *http_attacks.ATTACKS, *(f"{name}{BESIDE}" for name in http_attacks.ATTACKS))
    found: dict[str, list[dict[str, float]]] = {f"{name}; calls over {way}": [] for name in names for way in WAYS}
    attackers = addresses()
    with tempfile.TemporaryDirectory() as folder:
        keys, tokenizer = Path(folder) / "keys", Path(folder) / "tiny"
        keys.write_text(f"{Key.of(KEY, 'victim').line}\n", encoding="utf-8")
        tiny_tokenizer().save_pretrained(tokenizer)
        for number in range(rounds):
            http_target = f"{VICTIMS_ADDRESS}:{free_port()}"
            server = ServerConfig(bind="127.0.0.1:0", http_bind=http_target, api_key_file=str(keys))
            engine = EngineConfig(kv_bytes=2**26)
            with scripted_child(engine, server, step_seconds=0.001, tokenizer=tokenizer) as process:
                target = process.wait_ready()
                with child(WAYS[0], target) as over_grpc, child(WAYS[1], http_target) as over_http:
                    victims = {}
                    for way, asking in zip(WAYS, (over_grpc, over_http), strict=True):
                        assert asking.stdout is not None and asking.stdout.readline() == "ready\n"
                        victims[way] = Watched(http_target, process.pid, asking)
                        victims[way].ask(1.0)
                    for name in names:
                        for way, watched in victims.items():
                            source = VICTIMS_ADDRESS if name.endswith(BESIDE) else next(attackers)
                            found[f"{name}; calls over {way}"].append(pair(watched, name, seconds, source))
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return found


def free_port() -> int:
    with socket.socket() as one:
        one.bind((VICTIMS_ADDRESS, 0))
        port: int = one.getsockname()[1]
        return port


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", choices=("grpc", "http"), default="grpc", help="which one is attacked")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, metavar="NAME", help="on gRPC (default: all)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument(
        "--seconds", type=float, default=1.0, metavar="S", help="in calm, and as many beside the attack"
    )


def main(options: argparse.Namespace, _save: Save) -> dict[str, Any]:
    values: dict[str, dict[str, Any]] = {}
    connections: dict[str, int] = {}
    if options.port == "http":
        found = measure_http(options.rounds, options.seconds)
    else:
        found, each = measure(options.rounds, options.seconds, options.attacks or tuple(ATTACKS))
        connections = {"connections": CONNECTIONS, "calls_of_connection": CALLS_OF_CONNECTION}
        held, call = "bytes of a connection without a call", "bytes of a call that is headers alone, at most"
        values[held] = record.summarize([one["connection"] / 1024 for one in each], "KiB")
        values[call] = record.summarize([one["call"] / 1024 for one in each], "KiB")
    for name, pairs in found.items():
        values[f"{name}: p99, attacked / calm"] = record.summarize([one["p99_ratio"] for one in pairs], "ratio")
        values[f"{name}: p50, attacked / calm"] = record.summarize([one["p50_ratio"] for one in pairs], "ratio")
        values[f"{name}: p99, attacked"] = record.summarize([one["p99_ms"] for one in pairs], "ms")
        values[f"{name}: longest, attacked"] = record.summarize([one["longest_ms"] for one in pairs], "ms")
        values[f"{name}: p99, calm"] = record.summarize([one["p99_calm_ms"] for one in pairs], "ms")
        values[f"{name}: calls, attacked / calm"] = record.summarize([one["calls_ratio"] for one in pairs], "ratio")
        values[f"{name}: memory"] = record.summarize([one["mib"] for one in pairs], "MiB")
        values[f"{name}: calls that failed"] = record.exact(sum(one["failed"] for one in pairs), "calls")
    beside, control = (found.get(f"{name}{BETWEEN_TOKENS}", ()) for name in (DEAR, SPIN))
    if beside:
        more = [own["p99_ms"] - other["p99_ms"] for own, other in zip(beside, control, strict=True)]
        values[f"{DEAR}{BETWEEN_TOKENS}: p99, more than beside one that spins"] = record.summarize(more, "ms")
    return {
        "experiment": "hostile" if options.port == "grpc" else "hostile_http",
        "config": {
            "rounds": options.rounds,
            "seconds": options.seconds,
            **connections,
            "port": options.port,
            "engine": "the scripted model, steps of a millisecond",
            "transport": "loopback, no TLS, keys; victim, attacker and server share the machine",
            "addresses": "the victim's is 127.0.0.1; each attacker has one of its own, but where it says otherwise",
        },
        "seeds": [],
        "values": values,
        "baseline": "the same victim in calm, before each attack; and beside a process that only spins",
    }


if __name__ == "__main__":
    dict(zip((*WAYS, STREAM), (victim, http_victim, stream_victim), strict=True))[sys.argv[1]](sys.argv[2])
