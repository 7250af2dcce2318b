"""What the server itself costs: our RPCs over an engine that does nothing, against a bare grpc.aio echo.

    python scripts/bench_server.py            writes results/server_overhead/<date>-<machine>/

Both servers are processes of their own; their CPU time is read from outside, and the client's is not in it. The echo
moves the same number of bytes without parsing them. Rounds alternate between the two, ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TypeAlias

import grpc
import psutil

from inference_engine.answers import EngineInfo, HistoryLength, SessionInfo, SessionOpened
from inference_engine.config import EngineConfig, ServerConfig
from inference_engine.engine import Engine
from inference_engine.evaluation import record
from inference_engine.generation import Generation
from inference_engine.kv.strategies import make_strategy, strategy_names
from inference_engine.kv.strategy import KVStrategy
from inference_engine.metrics import EngineMetrics
from inference_engine.scheduler.request import Listener
from inference_engine.server.run import serve
from inference_engine.tracing import Tracing
from inference_engine.types import (
    Bound,
    Event,
    Finished,
    GenerateParams,
    Mode,
    ModelFacts,
    StopReason,
    TokenCommitted,
)
from kakeya.v1 import runtime_pb2 as pb

SERVICE = "/kakeya.v1.RuntimeService/"
ECHO = "/bench.Echo/Unary"
ECHO_STREAM = "/bench.Echo/Stream"
APPEND_TOKENS = 256
VOCAB_SIZE = 50_000

Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"
UnaryCall: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"
StreamCall: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[bytes, bytes]"


class NullGeneration(Generation):
    """Says what it was told to say, from a thread; nobody can stop it."""

    def __init__(self) -> None:
        self._said: SimpleQueue[Event] = SimpleQueue()
        self._on_news: Callable[[], None] = lambda: None
        self._wake: Callable[[], None] | None = None

    @property
    def position(self) -> int:
        return 0

    def say(self, event: Event) -> None:
        self._said.put(event)
        self._tell()

    def read(self) -> list[Event]:
        return [self._said.get() for _ in range(self._said.qsize())]

    def when_news(self, callback: Callable[[], None], wake: Callable[[], None] | None = None) -> None:
        self._on_news, self._wake = callback, wake
        self._tell()

    def _tell(self) -> None:
        self._on_news()
        if self._wake is not None:
            self._wake()

    def cancel(self) -> None:
        pass

    def expire(self) -> None:
        pass


class NullEngine(Engine):
    """Sessions without a model: counts what is appended, and generates at once whatever it is asked for."""

    def __init__(self) -> None:
        self.metrics = EngineMetrics()
        self.tracing = Tracing()
        self._lengths: dict[str, int] = {}
        self._ids = itertools.count()
        self._strategy = make_strategy("full")
        self._bound = Bound(sustained_bytes=1, peak_bytes=1)
        self._work: SimpleQueue[tuple[GenerateParams, NullGeneration]] = SimpleQueue()
        threading.Thread(target=self._generate, daemon=True).start()

    def info(self) -> EngineInfo:
        return EngineInfo(
            facts=ModelFacts(model_id="null", vocab_size=VOCAB_SIZE, trained_positions=1, device="none", dtype="none"),
            mode=Mode.BATCHED,
            strategies=strategy_names(),
            default_strategy=self._strategy,
            limit_tokens=None,
            kv_capacity_bytes=1,
            kv_reserved_bytes=0,
            tier_capacity_bytes=0,
            tier_reserved_bytes=0,
            drafter="",
            config=EngineConfig(),
        )

    def create_session(
        self,
        *,
        strategy: KVStrategy | None = None,
        eos_token_ids: Sequence[int] = (),
        limit_tokens: int | None = None,
        label: str = "",
        owner: str = "",
        request_id: bytes = b"",
    ) -> SessionOpened:
        session_id = f"{next(self._ids):032x}"
        self._lengths[session_id] = 0
        return SessionOpened(
            session_id=session_id, strategy=self._strategy, bound=self._bound, limit_tokens=limit_tokens
        )

    def append_once(
        self,
        session_id: str,
        token_ids: Sequence[int],
        *,
        request_id: bytes = b"",
        expected_history_length: int | None = None,
        owner: str = "",
        wait_seconds: float = 0.0,
    ) -> HistoryLength:
        self._lengths[session_id] += len(token_ids)
        return HistoryLength(tokens=self._lengths[session_id])

    def generate(
        self,
        session_id: str,
        params: GenerateParams,
        *,
        request_id: bytes = b"",
        resume_from: int | None = None,
        listener: Listener | None = None,
        owner: str = "",
        wait_seconds: float = 0.0,
    ) -> Generation:
        generation = NullGeneration()
        self._work.put((params, generation))
        return generation

    def session_info(self, session_id: str, *, owner: str = "") -> SessionInfo:
        return SessionInfo(
            history_length=self._lengths[session_id],
            cached_tokens=0,
            evicted_tokens=0,
            kv_live_bytes=0,
            tier_live_bytes=0,
            bound=self._bound,
            strategy=self._strategy,
            limit_tokens=None,
            inv1_violations=0,
            inv2_violations=0,
            inv3_violations=0,
            drafted_tokens=0,
            accepted_tokens=0,
            idle_seconds=0.0,
            failure_reason="",
            is_generating=False,
            label="",
        )

    def drain(self, grace_seconds: float) -> None:
        pass

    def close(self) -> None:
        pass

    def is_stalled(self) -> bool:
        return False

    def is_alive(self) -> bool:
        return True

    def _generate(self) -> None:
        while True:
            params, generation = self._work.get()
            count = params.max_tokens
            events: list[Event] = [TokenCommitted(index % VOCAB_SIZE, index) for index in range(count)]
            for event in events:
                generation.say(event)
            generation.say(
                Finished(
                    stop_reason=StopReason.MAX_TOKENS,
                    generated_tokens=count,
                    history_length=count,
                    prefill_seconds=0.0,
                    total_seconds=0.0,
                    seed=0,
                    prefilled_tokens=0,
                    cached_tokens=0,
                    attended_positions=count,
                    evicted_positions=0,
                )
            )


def serve_runtime() -> None:
    config = ServerConfig(bind="127.0.0.1:0")
    serve(NullEngine(), config, on_ready=lambda handle: print(handle.target, flush=True))


async def serve_echo() -> None:
    """The least grpc.aio can do: bytes in, the same bytes out; or as many small frames as asked for."""

    async def unary(request: bytes, _: object) -> bytes:
        return request

    async def stream(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        frame = pb.GenerateResponse(token_id=VOCAB_SIZE - 1).SerializeToString()
        for _ in range(int(request)):
            await context.write(frame)

    server = grpc.aio.server()
    handlers: dict[str, Handler] = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gc.collect()
    gc.freeze()  # as the runtime does
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.Event().wait()


@dataclass
class Samples:
    """One operation on one server, a sample a round."""

    cpu_seconds: list[float] = field(default_factory=list)
    latency_seconds: list[float] = field(default_factory=list)
    per_second: list[float] = field(default_factory=list)


class Target:
    """A server process and a channel to it."""

    def __init__(self, kind: str) -> None:
        command = (sys.executable, str(Path(__file__).resolve()), "--serve", kind)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--serve", choices=("runtime", "echo"), help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--unary-calls", type=int, default=2000, help="in a round, for each operation")
    parser.add_argument("--frames", type=int, default=20_000, help="in a round, for each stream shape")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    options = parser.parse_args()
    if options.serve:
        serve_runtime() if options.serve == "runtime" else asyncio.run(serve_echo())
        return
    samples = asyncio.run(bench(options.rounds, options.unary_calls, options.frames))
    report(samples, options)


def report(samples: dict[str, dict[str, Samples]], options: argparse.Namespace) -> None:
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
    for name, value in values.items():
        print(f"{name:48} {value['median']:10.2f} {value['unit']:9} ({value['low']:.2f} to {value['high']:.2f})")
    config = {
        "rounds": options.rounds,
        "unary_calls": options.unary_calls,
        "frames": options.frames,
        "append_tokens": APPEND_TOKENS,
        "engine": "null: no model, every token at once",
        "transport": "loopback, no TLS, no keys; one call at a time, streams x1 and x8 on one channel",
    }
    payload = {
        "command": record.command_line(),
        "config": config,
        "seeds": [],
        "values": values,
        "baseline": "grpc.aio echo of the same bytes, unparsed, no interceptor, in the same run",
    }
    path = record.write_record("server_overhead", payload, results_dir=options.results)
    bars = {name.partition(":")[0]: value for name, value in values.items() if value["unit"] == "ratio"}
    record.plot_bars(path.with_name("ratios.png"), title="Server CPU, runtime ÷ echo", y_label="ratio", bars=bars)
    print(path.relative_to(record.ROOT) if path.is_relative_to(record.ROOT) else path.name)


if __name__ == "__main__":
    main()
