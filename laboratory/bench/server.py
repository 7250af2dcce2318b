"""What the server itself costs: our RPCs over an engine that does nothing, against a bare grpc.aio echo.

Both servers are processes of their own; their CPU time is read from outside, and the client's is not in it. The echo
moves the same number of bytes without parsing them. Rounds alternate between the two, ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import psutil

from kakeya.v1 import runtime_pb2 as pb
from laboratory.bench.experiments import Save
from laboratory.evaluation import record

SERVICE = "/kakeya.v1.RuntimeService/"
ECHO = "/bench.Echo/Unary"
ECHO_STREAM = "/bench.Echo/Stream"
APPEND_TOKENS = 256

Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"
UnaryCall: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"
StreamCall: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[bytes, bytes]"


@dataclass
class Samples:
    """One operation on one server, a sample a round."""

    cpu_seconds: list[float] = field(default_factory=list)
    latency_seconds: list[float] = field(default_factory=list)
    per_second: list[float] = field(default_factory=list)


class Target:
    """A server process and a channel to it."""

    def __init__(self, kind: str) -> None:
        command = (sys.executable, "-m", "laboratory.bench.null_engine", kind)
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._watched = psutil.Process(self._process.pid)
        self.channel = grpc.aio.insecure_channel(self._process.stdout.readline().strip())

    def cpu_seconds(self) -> float:
        times = self._watched.cpu_times()
        return times.user + times.system

    async def close(self) -> None:
        await self.channel.close()
        self._process.terminate()
        self._process.wait(timeout=10)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def measured(target: Target, operations: int, into: Samples) -> Iterator[None]:
    cpu, began = target.cpu_seconds(), time.perf_counter()
    yield
    into.per_second.append(operations / (time.perf_counter() - began))
    into.cpu_seconds.append((target.cpu_seconds() - cpu) / operations)


async def run_unary(
    target: Target, path: str, request: bytes | Callable[[], bytes], operations: int, into: Samples
) -> None:
    call: UnaryCall = target.channel.unary_unary(path)
    latencies = []
    with measured(target, operations, into):
        for _ in range(operations):
            began = time.perf_counter()
            await call(request if isinstance(request, bytes) else request())
            latencies.append(time.perf_counter() - began)
    into.latency_seconds.append(statistics.median(latencies))


async def run_streams(target: Target, path: str, request: bytes, streams: int, frames: int, into: Samples) -> None:
    call: StreamCall = target.channel.unary_stream(path)

    async def drain() -> int:
        return sum([1 async for _ in call(request)])

    with measured(target, streams * frames, into):
        counts = await asyncio.gather(*(drain() for _ in range(streams)))
    assert min(counts) >= frames, counts


async def bench(rounds: int, unary_calls: int, frames: int) -> dict[str, dict[str, Samples]]:
    """Samples by operation, then by server (`runtime`, `echo`)."""
    runtime, echo = Target("runtime"), Target("echo")
    try:
        create: UnaryCall = runtime.channel.unary_unary(SERVICE + "CreateSession")
        opened = pb.CreateSessionResponse.FromString(await create(b""))
        session_id = opened.session_id
        append = pb.AppendTokensRequest(session_id=session_id, token_ids=range(20_000, 20_000 + APPEND_TOKENS))
        info = pb.GetSessionInfoRequest(session_id=session_id)
        unaries = {
            "CreateSession": b"",
            f"AppendTokens({APPEND_TOKENS})": append.SerializeToString(),
            "GetSessionInfo": info.SerializeToString(),
        }
        samples: dict[str, dict[str, Samples]] = {}

        def into(operation: str, server: str) -> Samples:
            return samples.setdefault(operation, {}).setdefault(server, Samples())

        async def one_round() -> None:
            work: list[Awaitable[None]] = []
            for name, request in unaries.items():
                path = SERVICE + name.partition("(")[0]
                work.append(run_unary(echo, ECHO, request, unary_calls, into(name, "echo")))
                work.append(run_unary(runtime, path, request, unary_calls, into(name, "runtime")))
            for streams in (1, 8):
                name, each = f"stream x{streams}", frames // streams
                plain = str(each).encode()
                ours = pb.GenerateRequest(session_id=session_id, max_tokens=each).SerializeToString()
                work.append(run_streams(echo, ECHO_STREAM, plain, streams, each, into(name, "echo")))
                work.append(run_streams(runtime, SERVICE + "Generate", ours, streams, each, into(name, "runtime")))
            for step in work:
                await step

        await one_round()  # warms both up
        samples.clear()
        for number in range(rounds):
            await one_round()
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
        return samples
    finally:
        await runtime.close()
        await echo.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    parser.add_argument("--unary-calls", type=int, default=2000, metavar="N", help="in a round, for each operation")
    parser.add_argument("--frames", type=int, default=20_000, metavar="N", help="in a round, for each stream shape")


def main(options: argparse.Namespace, _save: Save) -> dict[str, Any]:
    samples = asyncio.run(bench(options.rounds, options.unary_calls, options.frames))
    values: dict[str, dict[str, object]] = {}
    for operation, servers in samples.items():
        ours, echo = servers["runtime"], servers["echo"]
        ratios = [a / b for a, b in zip(ours.cpu_seconds, echo.cpu_seconds, strict=True)]
        values[f"{operation}: server CPU, runtime / echo"] = record.summarize(ratios, "ratio")
        for name, server in servers.items():
            per = "frame" if operation.startswith("stream") else "call"
            micros = [1e6 * each for each in server.cpu_seconds]
            values[f"{operation}: server CPU, {name}"] = record.summarize(micros, f"µs/{per}")
            if server.latency_seconds:
                millis = [1e3 * each for each in server.latency_seconds]
                values[f"{operation}: latency p50, {name}"] = record.summarize(millis, "ms")
            else:
                values[f"{operation}: rate, {name}"] = record.summarize(server.per_second, "frames/s")
    return {
        "experiment": "server_overhead",
        "config": {
            "rounds": options.rounds,
            "unary_calls": options.unary_calls,
            "frames": options.frames,
            "append_tokens": APPEND_TOKENS,
            "engine": "null: no model, every token at once",
            "transport": "loopback, no TLS, no keys; one call at a time, streams x1 and x8 on one channel",
        },
        "seeds": [],
        "values": values,
        "baseline": "grpc.aio echo of the same bytes, unparsed, no interceptor, in the same run",
    }
