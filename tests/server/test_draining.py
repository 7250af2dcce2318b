"""SIGTERM, as an operator sends it, to a server process of its own."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from kakeya.v1 import runtime_pb2 as pb
from tests.further import further_test
from tests.processes import ROOT, Process, ending, started
from tests.server.wire import TIMEOUT_SECONDS, Client, Details, read_rest, refused

PROGRAM = Path(__file__).with_name("serve_scripted.py")
FOREVER = 30_000

Server = tuple[Process, str]


@pytest.fixture
def start() -> Iterator[Callable[[float], Server]]:
    """Starts a server process that gives running Generates so many seconds. Ends it after the test."""
    with ExitStack() as stack:

        def start(drain_seconds: float) -> Server:
            arguments = (str(PROGRAM), "127.0.0.1:0", str(drain_seconds))
            child = stack.enter_context(ending(started(*arguments)))
            assert child.stdout is not None
            return child, child.stdout.readline().strip()

        yield start


async def running(client: Client, session_id: str, max_tokens: int) -> Any:
    stream = client.stream(pb.GenerateRequest(session_id=session_id, max_tokens=max_tokens))
    await stream.read()
    return stream


async def until_draining(channel: Any) -> None:
    """By Watch: NOT_SERVING must be shown before any call is refused."""
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
    while True:
        status = health_pb2.HealthCheckResponse.FromString(await watch.read()).status
        if status == health_pb2.HealthCheckResponse.NOT_SERVING:
            return


async def first_refusal(call: Callable[[], Any]) -> Details:
    """What a call is refused with. Health says NOT_SERVING first, so that some calls after it may still be answered."""
    for _ in range(100):
        try:
            await call()
        except grpc.aio.AioRpcError as error:
            return Details(error)
    raise AssertionError("100 calls were answered after NOT_SERVING")


async def ended(child: Process) -> int:
    return await asyncio.to_thread(child.wait, TIMEOUT_SECONDS)


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[str], Client]]:
    channels: list[grpc.aio.Channel] = []

    def connect(target: str) -> Client:
        channels.append(grpc.aio.insecure_channel(target))
        return Client(channels[-1])

    yield connect
    for channel in channels:
        await channel.close()


async def test_a_running_generate_finishes_while_new_work_is_refused(
    start: Callable[[float], Server], connect: Callable[[str], Client]
) -> None:
    child, target = await asyncio.to_thread(start, 60.0)
    client = connect(target)
    session_id, other = await client.open_endless(), await client.open()
    stream = await running(client, session_id, 600)
    child.send_signal(signal.SIGTERM)
    await until_draining(client.channel)
    details = [await first_refusal(lambda: client.open(())), await refused(client.generate(other))]
    for each in details:
        assert each.reason == "UNAVAILABLE DRAINING"
        assert each.retry_info is not None
    frames = await read_rest(stream)
    assert len(frames) == 600  # one was read before, and `done` is last
    assert frames[-1].done.stop_reason == pb.GenerateDone.STOP_REASON_MAX_TOKENS
    assert await ended(child) == 0


async def test_a_generate_that_outlives_the_grace_ends_with_draining(
    start: Callable[[float], Server], connect: Callable[[str], Client]
) -> None:
    child, target = await asyncio.to_thread(start, 0.2)
    client = connect(target)
    stream = await running(client, await client.open_endless(), FOREVER)
    child.send_signal(signal.SIGINT)
    details = await refused(read_rest(stream))
    assert details.reason == "UNAVAILABLE DRAINING"
    assert details.retry_info is not None
    assert await ended(child) == 0


async def test_a_second_signal_ends_a_draining_server_at_once(
    start: Callable[[float], Server], connect: Callable[[str], Client]
) -> None:
    child, target = await asyncio.to_thread(start, 600.0)
    client = connect(target)
    await running(client, await client.open_endless(), FOREVER)
    child.send_signal(signal.SIGTERM)
    await until_draining(client.channel)
    child.send_signal(signal.SIGTERM)
    assert await ended(child) == -signal.SIGTERM


@pytest.fixture
def first_of_a_container() -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """What started it, its process id, where it listens."""
    own = ("unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child")
    if shutil.which(own[0]) is None or subprocess.run([*own, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no process may be the first of a namespace here")
    command = [*own, sys.executable, "-m", "tests.server.serve_scripted", "127.0.0.1:0", "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as around:
        assert around.stdout is not None
        target = around.stdout.readline().strip()
        yield around, int(Path(f"/proc/{around.pid}/task/{around.pid}/children").read_text()), target
        around.kill()


@further_test
async def test_a_second_signal_ends_the_first_process_of_a_container(
    first_of_a_container: tuple[subprocess.Popen[str], int, str], connect: Callable[[str], Client]
) -> None:
    """The system's default, which ends any other one, does nothing to it."""
    around, process_id, target = first_of_a_container
    client = connect(target)
    await running(client, await client.open_endless(), FOREVER)
    os.kill(process_id, signal.SIGTERM)
    await until_draining(client.channel)
    os.kill(process_id, signal.SIGTERM)
    assert await asyncio.to_thread(around.wait, TIMEOUT_SECONDS) == 128 + signal.SIGTERM
