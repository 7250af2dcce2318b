"""The least that grpc.aio does for many streams: a server that writes every stream a frame a step, and nothing else.

    python -m laboratory.load.bare_streams --step-seconds 0.033    prints its address, serves until its input ends

A step is a timer; frames are those of a token, made once and never parsed. What `kakeya bench load` measures of our own
streams cannot be better than this.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from kakeya.v1 import runtime_pb2 as pb

_METHOD = "/bench.Bare/Stream"


class BareServer:
    """Such a server as a child process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        assert process.stdout is not None
        self.target = process.stdout.readline().strip()


@contextmanager
def bare_child(*, step_seconds: float) -> Iterator[BareServer]:
    """Gone at the end."""
    command = (sys.executable, "-m", "laboratory.load.bare_streams", f"--step-seconds={step_seconds}")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield BareServer(process)
    finally:
        process.terminate()
        process.wait(timeout=10)


async def bare_arrivals(target: str, streams: int, frames: int) -> list[list[float]]:
    """When the frames of `streams` streams came, by `time.perf_counter`."""
    async with grpc.aio.insecure_channel(target) as channel:
        method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(_METHOD)

        async def read() -> list[float]:
            call, found = method(str(frames).encode()), []
            while await call.read() is not grpc.aio.EOF:
                found.append(time.perf_counter())
            return found

        return list(await asyncio.gather(*(read() for _ in range(streams))))


async def _serve(step_seconds: float) -> None:
    frame = pb.GenerateResponse(token_id=200).SerializeToString()
    waiting: list[asyncio.Future[None]] = []

    async def stream(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(int(request)):
            step = loop.create_future()
            waiting.append(step)
            await step
            await context.write(frame)

    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"Stream": grpc.unary_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bare", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gc.collect()
    gc.freeze()  # as the runtime does
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    until_eof = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    due = time.monotonic()
    while not until_eof.done():
        # Late steps are not made up for: a device's are not, either.
        due = max(due + step_seconds, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        ready, waiting[:] = waiting[:], []
        for step in ready:
            if not step.done():
                step.set_result(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--step-seconds", type=float, required=True, metavar="S")
    asyncio.run(_serve(parser.parse_args().step_seconds))


if __name__ == "__main__":
    main()
